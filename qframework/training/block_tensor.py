"""BlockTensor: an INT8 tensor in blocks that autograd and third-party models treat as a float tensor.

It has the shape and dtype of a float tensor, but stores ``q`` (int8) and ``scale`` (fp32, one value per block, see
qframework/kernels/blocks/format.py), so that tensors saved for the backward pass take one byte per value. Gradients are
BlockTensors too where the data flow is INT8. block_dispatch.py defines what ATen operators do with one.

Functions of this package follow one pattern, which works in eager mode, under ``torch.compile(fullgraph=True)`` and
with checkpointing::

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
            grad = as_blocks(grad, ctx.block_size)    # float if the INT8 data flow ends after this layer
            q, scale = torch.ops.qframework.block_activation_backward(grad.q, grad.scale, x.q, x.scale, ...)
            return BlockTensor(q, scale, ctx.block_size, x.dtype), None

- Only Functions use the insides of a BlockTensor (``q``, ``scale``, ``statistics``, ``block_size``). A module's
  ``forward`` only uses ``isinstance(x, BlockTensor)``, ``x.dequantize()`` and ``Function.apply(x)``.
- Every tensor of the forward pass is an argument: weights are passed, never taken from a closure.
- The gradient of a float input is a float tensor of its dtype, that of a BlockTensor input a BlockTensor.
- ``forward`` returns new tensors, never an argument, and reads no value on the host (``.item()``).
- The base class refuses second derivatives, transforms of ``torch.func`` and forward-mode derivatives.

Parameters stay float tensors, so optimizers, DDP and FSDP need no changes. ``torch.save`` stores a BlockTensor; loading
it with ``weights_only=True`` needs ``torch.serialization.safe_globals([BlockTensor])``.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from qframework.compat.dispatch import disabled_torch_function, make_wrapper_subclass, without_memory
from qframework.compat.dynamo import is_exporting
from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.blocks.format import DEFAULT_BLOCK_SIZE, BlockSize, CanonicalSize, canonical_size, check_blocks
from qframework.kernels.runtime.checks import check_dtype, check_float_input
from qframework.numerics import FLOAT_DTYPES
from qframework.training.deferred import Deferred
from qframework.training.function import Int8Function

Handler = Callable[..., Any]
Context = tuple[CanonicalSize, torch.dtype, bool]
"""The context of ``__tensor_flatten__``: block size, dtype, and whether there are statistics."""


class Memory:
    """State that a BlockTensor, ``detach()`` of it and its views in blocks share besides ``q`` and ``scale``."""

    def __init__(self) -> None:
        self.statistics: Tensor | None = None
        self.writes = 0  # how often the blocks were overwritten
        self.copy: Callable[[], Any] | None = None  # a weak reference to the FloatCopy of float_view.py
        self.traced: Any = None  # the TracedCopy, while a graph is traced
        self.readers: list[TensorWeakRef] = []  # gradients that are not computed yet and read the blocks

    def read_later(self, gradient: BlockTensor) -> None:
        """Compute ``gradient`` before the blocks change."""
        self.readers = [*filter(_waits, self.readers), TensorWeakRef(gradient)]

    def before_write(self) -> None:
        """Compute the gradients that read the blocks."""
        for each in filter(_waits, self.readers):
            each().q  # noqa: B018
        self.readers.clear()

    def __deepcopy__(self, memo: Any) -> Memory:
        made = Memory()
        made.statistics = copy.deepcopy(self.statistics, memo)
        return made


def _waits(reader: TensorWeakRef) -> bool:
    gradient = reader()
    return gradient is not None and gradient.deferred is not None


class BlockTensor(Tensor):
    """INT8 values with one scale for each block of them (Jetfire, section 4).

    Args:
        q: ``(..., C)`` int8, contiguous.
        scale: ``(ceil(R / B), ceil(C / B))`` fp32, R = prod(leading), B a block's rows and columns.
        block_size: 32, 64 or 128 for square blocks, or (32, 128), (1, 128) or (1, 256) for (rows, columns). The
            attribute is a number for square blocks, otherwise a tuple.
        dtype: float32, float16 or bfloat16, the dtype that it stands for: of ``dequantize`` and of gradients.
        statistics: None, or ``(R, 2)`` fp32 row statistics from an addition, for the normalization after it.

    Raises:
        UnsupportedError: an unsupported dtype or block size.
        QFrameworkError: a scale of another shape or on another device.
    """

    _q: Tensor
    _scale: Tensor
    block_size: CanonicalSize
    dispatch: ClassVar[Handler]  # what ATen operators do with one; block_dispatch.py sets it
    deferred: Deferred | None = None
    """Of a gradient that is computed when ``q`` or ``scale`` is first read, see deferred.py; then None."""
    _memory: Memory | None = None
    _copying = False

    @staticmethod
    def __new__(
        cls,
        q: Tensor,
        scale: Tensor,
        block_size: BlockSize,
        dtype: torch.dtype,
        statistics: Tensor | None = None,
    ) -> BlockTensor:
        self = without_memory(make_wrapper_subclass(cls, q.shape, dtype=dtype, device=q.device))
        self.q, self.scale, self.block_size, self.statistics = q, scale, canonical_size(block_size), statistics
        return self

    @property
    def q(self) -> Tensor:
        self._compute()
        return self._q

    @q.setter
    def q(self, q: Tensor) -> None:
        self._q = q

    @property
    def scale(self) -> Tensor:
        self._compute()
        return self._scale

    @scale.setter
    def scale(self, scale: Tensor) -> None:
        self._scale = scale

    def _compute(self) -> None:
        """Compute a deferred gradient, once. Not in ``__getattr__``: Dynamo reads no attributes of a class with it."""
        deferred = self.deferred
        if deferred is not None:
            self._q, self._scale = deferred.compute(self.block_size)
            self.deferred = None  # last: another thread may read

    @property
    def memory(self) -> Memory:
        """The state shared with all BlockTensors in the same memory."""
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
        check_dtype("BlockTensor", "the tensor", self, FLOAT_DTYPES)

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return cls.dispatch(func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], Context]:
        flush(self)
        self.memory.before_write()  # a compiled graph may write to what it is given
        inside = ["q", "scale"] if self.statistics is None else ["q", "scale", "statistics"]
        return inside, (self.block_size, self.dtype, self.statistics is not None)

    @staticmethod
    def __tensor_unflatten__(inside: dict[str, Tensor], context: Context, size: Any, stride: Any) -> BlockTensor:
        block_size, dtype, _ = context
        return wrap_blocks(inside["q"], inside["scale"], block_size, dtype, inside.get("statistics"))

    def __coerce_tangent_metadata__(self) -> BlockTensor:
        """The format of this tensor's gradient, for AOTAutograd's tracing: without statistics."""
        return wrap_blocks(self.q, self.scale, self.block_size, self.dtype)

    def __coerce_same_metadata_as_tangent__(
        self, expected: Context | None, expected_type: type | None = None
    ) -> Tensor | None:
        """This gradient as the compiled backward pass expects it: a float tensor, or blocks of another size."""
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

    # PyTorch refuses the first two for subclasses, and the others would read the wrapper, which has no memory.

    def numpy(self, *, force: bool = False) -> Any:
        """The dequantized values, a copy."""
        return self.dequantize().numpy(force=force)

    def tolist(self) -> Any:
        return self.dequantize().tolist()

    def __dlpack__(self, **options: Any) -> Any:
        return self.dequantize().__dlpack__(**options)

    def share_memory_(self) -> BlockTensor:
        self.q.share_memory_(), self.scale.share_memory_()
        return self

    def data_ptr(self) -> int:
        if self._copying:
            return 0
        raise UnsupportedError(
            f"data_ptr(): a BlockTensor has no float memory, got one of shape {tuple(self.shape)} from an INT8 layer. "
            "Pass x.dequantize(), or name the module that calls the kernel in keep_float= of convert_to_int8_training"
        )

    def __deepcopy__(self, memo: Any) -> BlockTensor:
        with self._copied():
            made = super().__deepcopy__(memo)
        made.__dict__.pop("_copying", None)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        with self._copied():
            return super().__reduce_ex__(protocol)

    @contextlib.contextmanager
    def _copied(self) -> Iterator[None]:
        """PyTorch's copy and pickle recognize a wrapper by its null pointer."""
        self._copying = True
        try:
            yield
        finally:
            del self._copying

    def dequantize(self, seed: Tensor | None = None) -> Tensor:
        """The float tensor ``q * scale``. Its gradient is quantized to blocks of the same size.

        With a seed, see ``new_seed``, the gradient is rounded stochastically.
        """
        return DequantizeBlocks.apply(self, seed)


def refuse_data(x: Tensor) -> NoReturn:
    """Raise for ``x.data = ...``, which would replace the wrapper's storage only."""
    raise UnsupportedError(
        f".data of a {type(x).__name__} of shape {tuple(x.shape)} must not be set. Use x.copy_(), which writes values"
    )


def wrap_blocks(
    q: Tensor,
    scale: Tensor,
    block_size: BlockSize,
    dtype: torch.dtype,
    statistics: Tensor | None = None,
    memory: Memory | None = None,
) -> BlockTensor:
    """A BlockTensor without checks, since its insides may be tracing objects."""
    made = BlockTensor.__new__(BlockTensor, q, scale, block_size, dtype, statistics)
    if memory is not None:
        made._memory = memory
    return made


def defer_blocks(
    deferred: Deferred, shape: tuple[int, ...] | torch.Size, block_size: BlockSize, dtype: torch.dtype
) -> BlockTensor:
    """A gradient of ``shape`` that is computed when it is first read."""
    made = make_wrapper_subclass(BlockTensor, torch.Size(shape), dtype=dtype, device=deferred.device)
    without_memory(made)
    made.block_size, made.statistics, made.deferred = canonical_size(block_size), None, deferred
    for memory in deferred.reads:
        memory.read_later(made)
    return made


def blocks_of(x: Tensor, block_size: BlockSize, seed: Tensor | None = None) -> BlockTensor:
    """Quantize a float tensor outside autograd, for Functions."""
    q, scale = torch.ops.qframework.block_quantize(x, block_size, seed)
    return wrap_blocks(q, scale, block_size, x.dtype)


def overwrite(x: BlockTensor, y: BlockTensor) -> BlockTensor:
    """Copy the blocks of ``y`` into the memory of ``x``, which views of ``x`` share.

    Statistics of ``x`` are replaced or dropped. They are never added, since a compiled graph may change the values of
    its operands but not which tensors they consist of.
    """
    x.memory.before_write()
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
    """Write changes that a traced graph made to a view back to the blocks."""
    if torch.compiler.is_dynamo_compiling():  # nothing runs, so nothing was written
        return
    if x._memory is not None and x._memory.traced is not None:
        x._memory.traced.flush()


def float_of(x: BlockTensor) -> Tensor:
    """Dequantize ``x`` to its dtype outside autograd, for Functions."""
    flush(x)
    return torch.ops.qframework.block_dequantize(x.q, x.scale, x.block_size, x.dtype)


def as_blocks(x: Tensor, block_size: BlockSize, seed: Tensor | None = None) -> BlockTensor:
    """``x`` if it is a BlockTensor, otherwise ``x`` quantized; outside autograd, for Functions.

    Raises:
        QFrameworkError: a BlockTensor of another block size.
    """
    if not isinstance(x, BlockTensor):
        return blocks_of(x, block_size, seed)
    flush(x)
    if x.block_size != canonical_size(block_size):
        raise QFrameworkError(
            f"an INT8 layer's input must be in blocks of {canonical_size(block_size)}, got blocks of {x.block_size}. "
            "Use one block_size for all layers of a model"
        )
    return x


def as_float(grad: Tensor) -> Tensor:
    """``grad`` if it is a float tensor, otherwise ``grad`` dequantized; outside autograd, for Functions."""
    return float_of(grad) if isinstance(grad, BlockTensor) else grad


@torch.compiler.allow_in_graph
class QuantizeBlocks(Int8Function):
    """Quantize a float tensor to blocks; the gradient passes straight through, as a float tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block_size: BlockSize, seed: Tensor | None) -> BlockTensor:
        return blocks_of(x, block_size, seed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return as_float(grad), None, None


@torch.compiler.allow_in_graph
class DequantizeBlocks(Int8Function):
    """Dequantize blocks; the gradient passes straight through, in blocks of the same size."""

    @staticmethod
    def forward(ctx: Any, x: BlockTensor, seed: Tensor | None) -> Tensor:
        ctx.block_size = x.block_size
        ctx.save_for_backward(seed)
        return float_of(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[BlockTensor, None]:
        (seed,) = ctx.saved_tensors
        return as_blocks(grad, ctx.block_size, seed), None


def quantize_blocks(x: Tensor, block_size: BlockSize = DEFAULT_BLOCK_SIZE, seed: Tensor | None = None) -> BlockTensor:
    """``x`` in the block format; gradients pass straight through.

    Args:
        x: ``(..., C)`` fp32, fp16 or bf16, treated as rows; a BlockTensor is returned unchanged.
        block_size: 32, 64, 128, (32, 128), (1, 128) or (1, 256).
        seed: one int64 on ``x``'s device, see ``new_seed``; rounds stochastically instead of half to even.

    Raises:
        UnsupportedError: an unsupported block size or dtype, a nested tensor, or a call in ``torch.export`` or
            ``torch.jit.trace``.
        QFrameworkError: a BlockTensor of another block size.
    """
    if isinstance(x, BlockTensor):
        return as_blocks(x, block_size)
    if is_exporting() or (not torch.compiler.is_compiling() and torch.jit.is_tracing()):
        raise UnsupportedError(
            "torch.export and torch.jit.trace cannot capture a model of convert_to_int8_training. Call "
            "restore_float(model) first"
        )
    check_float_input("quantize_blocks", x)
    if x.is_nested:
        raise UnsupportedError(
            f"quantize_blocks: x must be dense, got a nested tensor of {x.size(0)} parts. Pass a padded tensor and a "
            "mask to blocks of convert_to_int8_training"
        )
    return QuantizeBlocks.apply(x, canonical_size(block_size), seed)


def put_into(x: Tensor, y: Tensor) -> Tensor:
    """Write ``y`` to ``x``, as an in-place module does, and return ``x``; differentiable."""
    return x.copy_(y.dequantize() if isinstance(y, BlockTensor) and not isinstance(x, BlockTensor) else y)


def new_seed(device: torch.device | str) -> Tensor:
    """A seed for stochastic rounding or dropout: one int64 on ``device``, from torch's generator for that device.

    Drawing it on the device avoids a synchronization, lets a compiled graph draw a new seed in each call, and gives
    checkpointing, which restores the generator, the same seed twice.
    """
    return torch.randint(0, 2**62, (1,), dtype=torch.int64, device=device)
