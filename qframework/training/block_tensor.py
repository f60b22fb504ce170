"""BlockTensor: an INT8 tensor in blocks that autograd and third-party models treat as a float tensor.

Outside it has the shape and dtype of a float tensor; inside are ``q`` (int8) and ``scale`` (fp32, one value for each
block, qframework/kernels/blocks/format.py), so that what is saved for the backward pass costs a byte a value. Gradients
are BlockTensors too wherever the data flow is INT8. What an ATen operator does with one is in block_dispatch.py.

Functions of this package follow one pattern, which runs in eager mode, under ``torch.compile(fullgraph=True)`` and
under checkpointing alike::

    @torch.compiler.allow_in_graph                     # Dynamo keeps the call; AOTAutograd traces both passes
    class GELU(Int8Function):
        @staticmethod
        def forward(ctx, x, block_size):              # tensors, BlockTensors, None, numbers, strings, dtypes, tuples
            x = as_blocks(x, block_size)              # a float tensor may come in: quantize it
            ctx.save_for_backward(x)                  # a BlockTensor is saved as it is; never a float copy of it
            ctx.block_size = block_size
            q, scale = torch.ops.qframework.block_activation(x.q, x.scale, "gelu", block_size)
            return BlockTensor(q, scale, block_size, x.dtype)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            grad = as_blocks(grad, ctx.block_size)    # float where the INT8 data flow ends behind this layer
            q, scale = torch.ops.qframework.block_activation_backward(grad.q, grad.scale, x.q, x.scale, ...)
            return BlockTensor(q, scale, ctx.block_size, x.dtype), None

- The insides of a BlockTensor (``q``, ``scale``, ``statistics``, ``block_size``) are touched in Functions only. A
  module's ``forward`` does no more than ``isinstance(x, BlockTensor)``, ``x.dequantize()`` and ``Function.apply(x)``.
- Every tensor of the forward pass is an argument: weights are passed, never taken from a closure.
- The gradient of a float input is a float tensor of its dtype, that of a BlockTensor input a BlockTensor.
  ``as_grad_of(x, grad)`` does that where a Function accepts both.
- ``forward`` returns new tensors, never an argument; it reads no value on the host (``.item()``).
- The base class refuses second derivatives, transforms of ``torch.func`` and forward-mode derivatives.

Parameters stay float tensors, so optimizers, DDP and FSDP see nothing new. ``torch.save`` keeps a BlockTensor; reading
it with ``weights_only=True`` needs ``torch.serialization.safe_globals([BlockTensor])``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from qframework.compat.dispatch import disabled_torch_function, make_wrapper_subclass
from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.blocks.format import BlockSize, CanonicalSize, canonical_size, check_blocks
from qframework.kernels.runtime.checks import check_dtype, check_float_input
from qframework.numerics import FLOAT_DTYPES
from qframework.training.function import Int8Function

Handler = Callable[..., Any]
Context = tuple[CanonicalSize, torch.dtype, bool]
"""Of ``__tensor_flatten__``: block size, dtype outside, and whether there are statistics."""


class Memory:
    """What a BlockTensor, ``detach()`` of it and its views in blocks share besides ``q`` and ``scale``."""

    def __init__(self) -> None:
        self.statistics: Tensor | None = None
        self.writes = 0  # how often the blocks have been overwritten
        self.copy: Callable[[], Any] | None = None  # a weak reference to the FloatCopy of float_view.py
        self.traced: Any = None  # the TracedCopy, while a graph is traced

    def __deepcopy__(self, memo: Any) -> Memory:
        made = Memory()
        made.statistics = copy.deepcopy(self.statistics, memo)
        return made


class BlockTensor(Tensor):
    """INT8 values with one scale for each block of them (Jetfire, section 4).

    Args:
        q: ``(..., C)`` int8, contiguous.
        scale: ``(ceil(R / B), ceil(C / B))`` fp32, R = prod(leading), B a block's rows and columns.
        block_size: 32, 64 or 128, of square blocks, or rows and columns, (32, 128) or (1, 128). The attribute is a
            number where they are equal, else a tuple, however it was given.
        dtype: what it is outside: float32, float16 or bfloat16. ``dequantize`` gives it, gradients have it.
        statistics: None, or what an addition found out about its rows for the normalization behind it, ``(R, 2)`` fp32.

    Raises:
        UnsupportedError, QFrameworkError: dtypes, block size or the scale's shape.
    """

    q: Tensor
    scale: Tensor
    block_size: CanonicalSize
    dispatch: ClassVar[Handler]  # what ATen operators do with one; block_dispatch.py sets it
    _memory: Memory | None = None

    @staticmethod
    def __new__(
        cls,
        q: Tensor,
        scale: Tensor,
        block_size: BlockSize,
        dtype: torch.dtype,
        statistics: Tensor | None = None,
    ) -> BlockTensor:
        self = make_wrapper_subclass(cls, q.shape, dtype=dtype, device=q.device)
        self.q, self.scale, self.block_size, self.statistics = q, scale, canonical_size(block_size), statistics
        return self

    @property
    def memory(self) -> Memory:
        """What this has in common with all that lie in the same memory."""
        if self._memory is None:
            self._memory = Memory()
        return self._memory

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        refuse_data(self)

    @property
    def statistics(self) -> Tensor | None:
        return self.memory.statistics

    @statistics.setter
    def statistics(self, statistics: Tensor | None) -> None:
        self.memory.statistics = statistics

    def __init__(
        self, q: Tensor, scale: Tensor, block_size: BlockSize, dtype: torch.dtype, statistics: Tensor | None = None
    ) -> None:
        check_blocks("BlockTensor", "q", q, scale, block_size)
        check_dtype("BlockTensor", "the outside", self, FLOAT_DTYPES)

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return cls.dispatch(func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], Context]:
        flush(self)
        inside = ["q", "scale"] if self.statistics is None else ["q", "scale", "statistics"]
        return inside, (self.block_size, self.dtype, self.statistics is not None)

    @staticmethod
    def __tensor_unflatten__(inside: dict[str, Tensor], context: Context, size: Any, stride: Any) -> BlockTensor:
        block_size, dtype, _ = context
        return wrap_blocks(inside["q"], inside["scale"], block_size, dtype, inside.get("statistics"))

    def __coerce_tangent_metadata__(self) -> BlockTensor:
        """What a gradient of this looks like: AOTAutograd asks while it traces. Gradients carry no statistics."""
        return wrap_blocks(self.q, self.scale, self.block_size, self.dtype)

    def __coerce_same_metadata_as_tangent__(
        self, expected: Context | None, expected_type: type | None = None
    ) -> Tensor | None:
        """This gradient as the compiled backward pass expects it: a float tensor, or other blocks."""
        if expected_type is Tensor:
            return float_of(self)
        if expected is None or (expected_type or BlockTensor) is not BlockTensor or expected[2]:
            return None
        block_size, dtype, _ = expected
        if block_size == self.block_size:
            return wrap_blocks(self.q, self.scale, block_size, dtype)
        return blocks_of(float_of(self).to(dtype), block_size)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("q", "scale", "block_size", "statistics")}

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        gradient = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"BlockTensor(shape={tuple(self.shape)}, block_size={self.block_size}, dtype={self.dtype}, "
            f"device={self.device}{gradient})"
        )

    def dequantize(self, seed: Tensor | None = None) -> Tensor:
        """The float tensor this stands for, ``q * scale``; the gradient comes back in blocks of the same size.

        With a seed, see ``new_seed``, the gradient is rounded stochastically.
        """
        return DequantizeBlocks.apply(self, seed)


def refuse_data(x: Tensor) -> NoReturn:
    """``x.data = ...`` would exchange the outside alone."""
    raise UnsupportedError(
        f".data of a {type(x).__name__} of shape {tuple(x.shape)} is set; accepted: x.copy_(), which writes values"
    )


def wrap_blocks(
    q: Tensor,
    scale: Tensor,
    block_size: BlockSize,
    dtype: torch.dtype,
    statistics: Tensor | None = None,
    memory: Memory | None = None,
) -> BlockTensor:
    """A BlockTensor without checks: while tracing, its insides may be anything that traces."""
    made = BlockTensor.__new__(BlockTensor, q, scale, block_size, dtype, statistics)
    if memory is not None:
        made._memory = memory
    return made


def blocks_of(x: Tensor, block_size: BlockSize, seed: Tensor | None = None) -> BlockTensor:
    """``x`` (any float tensor) quantized, outside autograd: for Functions."""
    q, scale = torch.ops.qframework.block_quantize(x, block_size, seed)
    return wrap_blocks(q, scale, block_size, x.dtype)


def overwrite(x: BlockTensor, y: BlockTensor) -> BlockTensor:
    """Put the blocks of ``y`` into the memory of ``x``, where views of ``x`` see them.

    Statistics of what ``x`` was are replaced or dropped; new ones are not added, since a compiled graph may change what
    its operands hold, but not what they consist of.
    """
    x.q.copy_(y.q)
    x.scale.copy_(y.scale)
    x.memory.writes += 1
    if x.memory.traced is not None:
        x.memory.traced.read()
    if x.statistics is not None and y.statistics is not None:
        x.statistics.copy_(y.statistics)
    else:
        x.statistics = None
    return x


def flush(x: BlockTensor) -> None:
    """Bring into the blocks what a graph that is traced has written to a view."""
    if torch.compiler.is_dynamo_compiling():  # which reads Python and has no memory to write to
        return
    if x._memory is not None and x._memory.traced is not None:
        x._memory.traced.flush()


def float_of(x: BlockTensor) -> Tensor:
    """``x`` dequantized to its dtype, outside autograd: for Functions."""
    flush(x)
    return torch.ops.qframework.block_dequantize(x.q, x.scale, x.block_size, x.dtype)


def as_blocks(x: Tensor, block_size: BlockSize, seed: Tensor | None = None) -> BlockTensor:
    """``x`` if it is a BlockTensor, else ``x`` quantized; outside autograd: for Functions.

    Raises:
        QFrameworkError: a BlockTensor of another block size.
    """
    if not isinstance(x, BlockTensor):
        return blocks_of(x, block_size, seed)
    flush(x)
    if x.block_size != canonical_size(block_size):
        raise QFrameworkError(
            f"a tensor in blocks of {x.block_size} reached a layer with blocks of {canonical_size(block_size)}; "
            "give all layers of a model one block_size"
        )
    return x


def as_grad_of(x: Tensor, grad: Tensor) -> Tensor:
    """``grad`` as the gradient of ``x``: a BlockTensor exactly where ``x`` is one; outside autograd, for Functions."""
    if isinstance(x, BlockTensor):
        return as_blocks(grad, x.block_size)
    return float_of(grad) if isinstance(grad, BlockTensor) else grad


@torch.compiler.allow_in_graph
class QuantizeBlocks(Int8Function):
    """A float tensor into blocks; the gradient passes straight through, as a float tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block_size: BlockSize, seed: Tensor | None) -> BlockTensor:
        return blocks_of(x, block_size, seed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (float_of(grad) if isinstance(grad, BlockTensor) else grad), None, None


@torch.compiler.allow_in_graph
class DequantizeBlocks(Int8Function):
    """Blocks into the float tensor they stand for; the gradient passes straight through, in blocks of the same size."""

    @staticmethod
    def forward(ctx: Any, x: BlockTensor, seed: Tensor | None) -> Tensor:
        ctx.block_size = x.block_size
        ctx.save_for_backward(seed)
        return float_of(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[BlockTensor, None]:
        (seed,) = ctx.saved_tensors
        return as_blocks(grad, ctx.block_size, seed), None


def quantize_blocks(x: Tensor, block_size: BlockSize = 32, seed: Tensor | None = None) -> BlockTensor:
    """``x`` in the block format, differentiable: gradients pass straight through.

    Args:
        x: ``(..., C)`` fp32, fp16 or bf16, seen as rows; a BlockTensor is returned as it is.
        block_size: 32, 64, 128, (32, 128) or (1, 128).
        seed: one int64 on ``x``'s device, see ``new_seed``: round stochastically instead of half to even.

    Raises:
        UnsupportedError: a block size or dtype.
        QFrameworkError: a BlockTensor of another block size.
    """
    if isinstance(x, BlockTensor):
        return as_blocks(x, block_size)
    check_float_input("quantize_blocks", x)
    return QuantizeBlocks.apply(x, canonical_size(block_size), seed)


def put_into(x: Tensor, y: Tensor) -> Tensor:
    """``x`` after the blocks ``y`` have been written to it, as a module does that works in place; differentiable."""
    return x.copy_(y.dequantize() if isinstance(y, BlockTensor) and not isinstance(x, BlockTensor) else y)


def new_seed(device: torch.device | str) -> Tensor:
    """A seed for stochastic rounding or dropout: one int64 on ``device``, from torch's generator of that device.

    Drawn there, so that nothing waits for the GPU, a compiled graph draws anew in each call, and checkpointing, which
    puts the generator back, sees the same seed twice.
    """
    return torch.randint(0, 2**62, (1,), dtype=torch.int64, device=device)
