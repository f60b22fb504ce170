"""What ATen operators do with a BlockTensor: a few stay in INT8, all others compute in float and are counted.

In INT8: the operators of autograd and checkpointing (detach, alias, clone), views of leading dimensions, conversions of
dtype and device, sums and products of two BlockTensors, products with a positive number, and activations with their
gradients. Every other operator dequantizes its operands and returns a float tensor, or a FloatView for a view. A
third-party model therefore works, and ``fallbacks`` shows where its INT8 data flow ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qframework.compat.dispatch import current_graph_task
from qframework.compat.operators import TO_COPY, VIEWS, OpOverload
from qframework.compat.pytree import tree_any, tree_map_only
from qframework.errors import UnsupportedError
from qframework.fallbacks import Fallbacks
from qframework.graph.writes import written_arguments
from qframework.kernels.blocks.format import row_count
from qframework.numerics import FLOAT_DTYPES, MIN_SCALE
from qframework.training.block_tensor import (
    BlockTensor,
    Handler,
    as_blocks,
    blocks_of,
    defer_blocks,
    float_of,
    flush,
    overwrite,
    wrap_blocks,
)
from qframework.training.float_view import (
    REPLACES_MEMORY,
    refuse_memory,
    returns_operand,
    returns_views,
    view_of,
)

aten = torch.ops.aten
ops = torch.ops.qframework

_handlers: dict[OpOverload, Handler] = {}
fallbacks = Fallbacks()
"""How often each ATen operator fell back to float, by its name. Explicit calls of ``dequantize()`` do not count."""


def dispatch(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` in INT8 if its handler supports the call, otherwise in float."""
    for x in (*args, *kwargs.values()):
        if isinstance(x, BlockTensor):
            flush(x)
    handler = _handlers.get(func)
    result = NotImplemented if handler is None else handler(func, *args, **kwargs)
    return _in_float(func, args, kwargs) if result is NotImplemented else result


def implements(*operators: OpOverload) -> Callable[[Handler], Handler]:
    """Register a handler, called as ``handler(func, *args, **kwargs)``; it returns NotImplemented to fall back."""

    def register(handler: Handler) -> Handler:
        _handlers.update(dict.fromkeys(operators, handler))
        return handler

    return register


def _in_float(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func.name()
    fallbacks.note(name, f"{name} has no INT8 implementation: a BlockTensor is dequantized there")
    if returns_views(func) and isinstance(args[0], BlockTensor):
        return view_of(func, *args, **kwargs)
    written = _written(func, args, kwargs)
    floats: dict[int, Tensor] = {id(x): float_of(x) for x in written}

    def to_float(x: BlockTensor) -> Tensor:
        return floats[id(x)] if id(x) in floats else float_of(x)

    float_args, float_kwargs = tree_map_only(BlockTensor, to_float, (args, kwargs))
    result = func(*float_args, **float_kwargs)
    for x in written:
        _write_back(func, x, floats[id(x)])
    return written[0] if written and returns_operand(func) else result


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[BlockTensor]:
    """The BlockTensors that ``func`` writes to. Raises UnsupportedError for one in a list."""
    found = []
    for value in written_arguments(func, args, kwargs):
        if isinstance(value, BlockTensor):
            found.append(value)
        elif tree_any(lambda leaf: isinstance(leaf, BlockTensor), value):
            raise UnsupportedError(
                f"{func.name()}: it must not write to a list of BlockTensors. dequantize() them first"
            )
    return found


def _write_back(func: OpOverload, x: BlockTensor, value: Tensor) -> None:
    """Quantize the result of an in-place operator into the memory of ``x``."""
    if value.shape != x.shape:
        raise UnsupportedError(
            f"{func.name()}: a BlockTensor must keep its shape {tuple(x.shape)} in place, got {tuple(value.shape)}. "
            "dequantize() it first"
        )
    overwrite(x, blocks_of(value, x.block_size))


def _like(x: BlockTensor, convert: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> BlockTensor:
    """``convert`` applied to every tensor inside."""
    statistics = None if x.statistics is None else convert(x.statistics)
    return wrap_blocks(convert(x.q), convert(x.scale), x.block_size, dtype or x.dtype, statistics)


@implements(aten.detach.default, aten.alias.default)
def _alias(func: OpOverload, x: BlockTensor) -> BlockTensor:
    return _view_of(x, func(x.q))


implements(*REPLACES_MEMORY)(refuse_memory)


@implements(aten.clone.default)
def _clone(func: OpOverload, x: BlockTensor, *, memory_format: Any = None) -> BlockTensor:
    return _like(x, torch.clone)


@implements(TO_COPY)
def _to_copy(func: OpOverload, x: BlockTensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    """Another dtype outside changes nothing inside; another device moves the insides."""
    if dtype is not None and dtype not in FLOAT_DTYPES:
        return NotImplemented
    # In a backward pass autograd converts gradients, which nothing writes to; with autocast, a copy per residual.
    if kwargs.get("device") in (None, x.device) and current_graph_task() != -1:
        return _like(x, aten.alias.default, dtype)
    kwargs.pop("memory_format", None)
    return _like(x, lambda inside: func(inside, **kwargs), dtype)


@implements(aten.view.default, *VIEWS)
def _view(func: OpOverload, x: BlockTensor, size: list[int], *stride: Any) -> Any:
    """If the last dimension stays, rows keep their order and blocks stay the same."""
    if len(size) == 0 or x.ndim == 0 or x.numel() == 0:
        return NotImplemented
    columns = x.shape[-1]
    if size[-1] != columns and not (size[-1] == -1 and math.prod(size[:-1]) == row_count(x.shape)):
        return NotImplemented
    return _view_of(x, aten.view.default(x.q, size))


@implements(aten.as_strided.default)
def _as_strided(func: OpOverload, x: BlockTensor, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
    """FSDP2 asks for the shape that a gathered parameter has already."""
    same = tuple(size) == tuple(x.shape) and tuple(stride) == tuple(x.stride()) and not storage_offset
    return _view_of(x, aten.alias.default(x.q)) if same else NotImplemented


@implements(aten.unsqueeze.default, aten.squeeze.dim)
def _squeeze(func: OpOverload, x: BlockTensor, dim: int) -> Any:
    last = x.ndim if func is aten.unsqueeze.default else x.ndim - 1
    return NotImplemented if dim in (-1, last) else _view_of(x, func(x.q, dim))


def _view_of(x: BlockTensor, q: Tensor) -> BlockTensor:
    """A view of ``x`` whose insides are ``q``, a view of leading dimensions of ``x.q``."""
    return wrap_blocks(q, aten.alias.default(x.scale), x.block_size, x.dtype, memory=x.memory)


@implements(aten.zeros_like.default, aten.empty_like.default)
def _empty_like(func: OpOverload, x: BlockTensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    if (dtype or x.dtype) not in FLOAT_DTYPES or kwargs.get("device") not in (None, x.device):
        return NotImplemented
    zeros = func is aten.zeros_like.default
    scale = torch.full_like(x.scale, MIN_SCALE) if zeros else torch.empty_like(x.scale)
    return wrap_blocks(func(x.q), scale, x.block_size, dtype or x.dtype)


@implements(aten.new_empty_strided.default)
def _new_empty_strided(func: OpOverload, x: BlockTensor, size: Any, stride: Any, **kwargs: Any) -> Any:
    """Allocate a gradient that autograd copies into ``.grad``."""
    same = tuple(size) == tuple(x.shape) and tuple(stride) == tuple(x.stride())
    return _empty_like(aten.empty_like.default, x, **kwargs) if same else NotImplemented


@implements(aten.copy_.default)
def _copy(func: OpOverload, x: Tensor, y: Tensor, non_blocking: bool = False) -> Any:
    if not _alike(x, y):
        return NotImplemented
    return overwrite(x, y)  # type: ignore[arg-type]


@implements(aten.is_same_size.default)
def _is_same_size(func: OpOverload, x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape


def _alike(x: Any, y: Any) -> bool:
    """Whether both are BlockTensors of the same shape and blocks. Under autocast their dtypes may differ."""
    both = isinstance(x, BlockTensor) and isinstance(y, BlockTensor)
    return both and x.shape == y.shape and x.block_size == y.block_size


@implements(aten.add.Tensor)
def _add(func: OpOverload, x: Any, y: Any, *, alpha: float = 1) -> Any:
    """The sum, with row statistics if gradients are enabled, for the normalization that follows in a forward pass."""
    if alpha != 1 or not _alike(x, y):
        return NotImplemented
    dtype, wanted = torch.promote_types(x.dtype, y.dtype), torch.is_grad_enabled()
    for one, other in () if wanted else ((x, y), (y, x)):
        total = None if one.deferred is None else one.deferred.plus(other)
        if total is not None:
            return defer_blocks(total, x.shape, x.block_size, dtype)
    q, scale, statistics = ops.block_add(x.q, x.scale, y.q, y.scale, x.block_size, wanted)
    return wrap_blocks(q, scale, x.block_size, dtype, statistics if wanted else None)


@implements(aten.add_.Tensor)
def _add_in_place(func: OpOverload, x: Any, y: Any, *, alpha: float = 1) -> Any:
    total = _add(func, x, y, alpha=alpha)
    return total if total is NotImplemented else overwrite(x, total)


@implements(aten.mul.Tensor)
def _mul(func: OpOverload, x: Any, y: Any) -> Any:
    if isinstance(y, (int, float)):
        return _times(x, y)
    if not _alike(x, y):
        return NotImplemented
    q, scale = ops.block_mul(x.q, x.scale, y.q, y.scale, x.block_size)
    return wrap_blocks(q, scale, x.block_size, torch.promote_types(x.dtype, y.dtype))


@implements(aten.mul.Scalar)
def _mul_scalar(func: OpOverload, x: BlockTensor, y: float) -> Any:
    return _times(x, y)


@implements(aten.div.Tensor, aten.div.Scalar)
def _div(func: OpOverload, x: Any, y: Any) -> Any:
    return _times(x, 1 / y) if isinstance(y, (int, float)) and y > 0 else NotImplemented


def _times(x: BlockTensor, factor: float) -> Any:
    """Multiply the scales by a positive number, which rounds no value again."""
    if not 0 < factor < math.inf:
        return NotImplemented
    return wrap_blocks(x.q.clone(), x.scale * factor, x.block_size, x.dtype)


@implements(aten.gelu.default)
def _gelu(func: OpOverload, x: BlockTensor, *, approximate: str = "none") -> BlockTensor:
    return _activation(x, _GELU[approximate])


@implements(aten.gelu_backward.default)
def _gelu_backward(func: OpOverload, grad: Tensor, x: Tensor, *, approximate: str = "none") -> Any:
    return _activation_backward(grad, x, _GELU[approximate])


@implements(aten.silu.default, aten.relu.default)
def _silu_or_relu(func: OpOverload, x: BlockTensor) -> BlockTensor:
    return _activation(x, "silu" if func is aten.silu.default else "relu")


@implements(aten.silu_backward.default)
def _silu_backward(func: OpOverload, grad: Tensor, x: Tensor) -> Any:
    return _activation_backward(grad, x, "silu")


@implements(aten.threshold_backward.default)
def _threshold_backward(func: OpOverload, grad: Tensor, result: Tensor, threshold: float) -> Any:
    """ReLU's gradient from its result, which is positive where the operand is, also after quantization."""
    return _activation_backward(grad, result, "relu") if threshold == 0 else NotImplemented


_GELU = {"none": "gelu", "tanh": "gelu_tanh"}


def _activation(x: BlockTensor, kind: str) -> BlockTensor:
    q, scale = ops.block_activation(x.q, x.scale, kind, x.block_size)
    return wrap_blocks(q, scale, x.block_size, x.dtype)


def _activation_backward(grad: Tensor, x: Tensor, kind: str) -> Any:
    """The gradient in blocks. A float ``grad``, from after the end of the INT8 data flow, is quantized."""
    if not isinstance(x, BlockTensor) or (isinstance(grad, BlockTensor) and not _alike(grad, x)):
        return NotImplemented
    grad = as_blocks(grad, x.block_size)
    q, scale = ops.block_activation_backward(grad.q, grad.scale, x.q, x.scale, kind, x.block_size)
    return wrap_blocks(q, scale, x.block_size, x.dtype)


BlockTensor.dispatch = staticmethod(dispatch)
