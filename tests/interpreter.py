"""Triton's interpreter, made faster where it is slowest; what a kernel computes stays the same to the bit.

And repaired where masks hold conditions of scalars.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.interpreter import (
    InterpretedFunction,
    InterpreterBuilder,
    InterpreterError,
    ReduceOps,
    TensorHandle,
)

REDUCE_OF_TRITON, CALL_OF_TRITON = ReduceOps.generic_reduce, InterpretedFunction.__call__
CHECK_OF_TRITON, DTYPE_OF_TRITON = TritonSemantic.binary_op_sanitize_overflow_impl, triton_interpreter._get_np_dtype
TYPE_OF_TRITON, TENSOR_OF_TRITON = tl.block_type.__init__, tl.tensor.__init__
SPLAT_OF_TRITON = InterpreterBuilder.create_splat


def make_faster() -> None:
    """Replace what took most of the time of these tests."""
    ReduceOps.generic_reduce = reduce_by_slices
    InterpretedFunction.__call__ = call_device_function
    TritonSemantic.binary_op_sanitize_overflow_impl = check_of_overflow
    triton_interpreter._get_np_dtype = numpy_dtype
    tl.block_type.__init__ = init_block_type
    tl.tensor.__init__ = init_tensor


def repair() -> None:
    """Replace what makes kernels fail that compile."""
    InterpreterBuilder.create_splat = splat


def splat(builder: Any, block: Any, scalar: Any) -> Any:
    """A block of a scalar, bool for a condition.

    Triton has integers there, as those that the condition compares, and since 3.9 its loads refuse them as a mask.
    """
    if scalar.data.dtype == np.bool_:
        scalar = TensorHandle(scalar.data, tl.int1)
    return SPLAT_OF_TRITON(builder, block, scalar)


def reduce_by_slices(reduction: Any, inputs: tuple[Any, ...]) -> list[Any]:
    """Reduce with a combine function of our own, in the same order, a slice at a time.

    Triton's method calls the function for every element: a second for a tile of 128 x 128.
    """
    flattened, axis = reduction.unravel(inputs, reduction.axis)
    arrays = [tensor.handle.data for tensor in flattened]

    def tensors(slices: list[Any]) -> tuple[Any, ...]:
        pairs = zip(slices, flattened, strict=True)
        return tuple(reduction.to_tensor(data, tensor.dtype) for data, tensor in pairs)

    reduced = [array.take(0, axis) for array in arrays]
    for index in range(1, arrays[0].shape[axis]):
        combined = reduction.combine_fn.fn(*tensors(reduced), *tensors([array.take(index, axis) for array in arrays]))
        results = combined if isinstance(combined, tuple) else (combined,)
        reduced = [
            tensor.handle.data.reshape(before.shape).astype(before.dtype)
            for tensor, before in zip(results, reduced, strict=True)
        ]
    if reduction.keep_dims:
        axes = axis if reduction.axis is not None else tuple(range(inputs[0].handle.data.ndim))
        reduced = [np.expand_dims(data, axes) for data in reduced]
    return list(tensors(reduced))


def call_device_function(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a device function, without replacing Triton's whole language again that its kernel has replaced."""
    if any(tl.core.is_builtin(language.load) for language in (tl, tl.core)):
        return CALL_OF_TRITON(function, *args, **kwargs)
    try:
        return function.rewrite()(*args, **kwargs)
    except Exception as error:
        raise InterpreterError(repr(error)) from error


def check_of_overflow(semantic: Any, lhs: Any, rhs: Any, operation: Any) -> None:
    """Whether a sum, difference or product of integers overflows, unless nobody would be told.

    Without the option ``debug``, Triton computes in int64 and compares, and then drops the result.
    """
    if semantic.builder.options.debug:
        CHECK_OF_TRITON(semantic, lhs, rhs, operation)


_DTYPES: dict[str, np.dtype] = {}


def numpy_dtype(dtype: Any) -> np.dtype:
    """NumPy's dtype of a value or a block; Triton's function builds the whole table in each call."""
    scalar = dtype.scalar
    if scalar.is_ptr():
        return DTYPE_OF_TRITON(scalar)
    if scalar.name not in _DTYPES:
        _DTYPES[scalar.name] = DTYPE_OF_TRITON(scalar)
    return _DTYPES[scalar.name]


_TYPES: dict[tuple[Any, ...], dict[str, Any]] = {}
_SHAPES: dict[tuple[int, ...], tuple[Any, Any]] = {}


def init_block_type(block: Any, element: Any, shape: Any) -> None:
    """The type of a block, which each operation makes anew: what equal ones hold is computed once."""
    key = (element.name, *(size.value if isinstance(size, tl.constexpr) else size for size in shape))
    known = _TYPES.get(key)
    if known is None or element.is_ptr():
        TYPE_OF_TRITON(block, element, shape)
        _TYPES[key] = dict(vars(block))
    else:
        vars(block).update(known)


def init_tensor(tensor: Any, handle: Any, type: Any) -> None:
    """A tensor; what depends on its shape alone is computed once."""
    sizes = tuple(type.shape) if type.is_block() else ()
    known = _SHAPES.get(sizes)
    if known is None:
        TENSOR_OF_TRITON(tensor, handle, type)
        _SHAPES[sizes] = tensor.shape, tensor.numel
    else:
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.shape, tensor.numel = known
