"""Triton's interpreter, made faster where it is slowest; what a kernel computes stays the same to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction, InterpreterError, ReduceOps

REDUCE_OF_TRITON, CALL_OF_TRITON = ReduceOps.generic_reduce, InterpretedFunction.__call__


def make_faster() -> None:
    """Replace the two methods that took five sixths of the time of these tests."""
    ReduceOps.generic_reduce = reduce_by_slices
    InterpretedFunction.__call__ = call_device_function


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
