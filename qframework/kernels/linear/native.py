"""``int8_linear`` on x86 processors in C++: the product and its epilogue in one pass, compiled at its first use.

The sources are in native/, beside the shared headers of runtime/native/. The tables of GELU are computed here.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

import torch
from torch import Tensor

from qframework.kernels.linear.arguments import Int8LinearArguments, flat_out_scale, is_per_channel
from qframework.kernels.runtime.checks import check_positive_scale, row_scale
from qframework.kernels.runtime.native import SETS, instructions_of, library

# As in native/epilogue.h and the shared floats.h.
_ACTIVATIONS = {"none": 0, "gelu": 1, "gelu_tanh": 1, "relu": 2, "silu": 3}
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3, torch.int32: 4}
_RANGE, _NODES = 5.6, 64


class _Numbers(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("period", ctypes.c_int64))


class _Epilogue(ctypes.Structure):
    _fields_ = (
        *((name, _Numbers) for name in ("a_scale", "b_scale", "bias")),
        ("residual", ctypes.c_void_p),
        *((name, _Numbers) for name in ("out_scale_rows", "out_scale_columns")),
        *((name, ctypes.c_void_p) for name in ("out", "gelu")),
        ("zero_point", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("activation", "residual_dtype", "dtype")),
    )


def native_linear(x: Int8LinearArguments, implementation: str) -> Tensor:
    """``int8_linear`` by one of ``NATIVE``; no operand may be empty.

    Raises QFrameworkError for scales that are not positive, NotImplementedError on processors without its instructions,
    and RuntimeError or OSError where C++ cannot be compiled.
    """
    compiled, lanes = _library(instructions_of(implementation))
    shape, n = x.shape, x.b.shape[0]
    out = torch.empty(shape, dtype=x.result_dtype, device="cpu")
    a_scale, b_scale = row_scale("int8_linear", "a_scale", x.a_scale, x.a.shape), x.b_scale.contiguous()
    rows = columns = _one()
    if x.out_scale is not None and is_per_channel(x.out_scale, n):
        columns = flat_out_scale(x.out_scale, shape)
    elif x.out_scale is not None:
        rows = flat_out_scale(x.out_scale, shape)
    residual = None if x.residual is None else x.residual.contiguous()
    bias = None if x.bias is None else x.bias.float().contiguous()
    epilogue = _Epilogue(
        _numbers(a_scale),
        _numbers(b_scale),
        _numbers(bias),
        residual.data_ptr() if residual is not None else None,
        _numbers(rows),
        _numbers(columns),
        out.data_ptr(),
        _tail_of_gelu(x.activation, lanes).data_ptr() if "gelu" in x.activation else None,
        0.0 if x.out_zero_point is None else float(x.out_zero_point),
        _ACTIVATIONS[x.activation],
        _DTYPES[residual.dtype] if residual is not None else 0,
        _DTYPES[out.dtype],
    )
    if _multiply(compiled, x.a, x.b, epilogue):
        check_positive_scale("int8_linear", "b_scale", b_scale)
        check_positive_scale("int8_linear", "out_scale", rows)
        check_positive_scale("int8_linear", "out_scale", columns, signed=True)
    return out


def native_product(a: Tensor, b: Tensor, implementation: str) -> Tensor:
    """``a @ b.T`` as int32, exact for every K up to 131,071; ``a (M, K)`` and ``b (N, K)`` int8, neither empty.

    Raises as ``native_linear`` does.
    """
    out = torch.empty((a.shape[0], b.shape[0]), dtype=torch.int32, device="cpu")
    epilogue = _Epilogue(out=out.data_ptr(), dtype=_DTYPES[out.dtype])
    _multiply(_library(instructions_of(implementation))[0], a, b, epilogue)
    return out


def _multiply(compiled: Any, a: Tensor, b: Tensor, epilogue: _Epilogue) -> bool:
    """Compute; whether instead a scale was found that is not positive."""
    a, b = a.contiguous(), b.contiguous()
    n, k = b.shape
    threads = torch.get_num_threads()
    found: int = compiled.int8_linear(a.data_ptr(), b.data_ptr(), a.numel() // k, n, k, ctypes.byref(epilogue), threads)
    return bool(found)


def _numbers(x: Tensor | None) -> _Numbers:
    return _Numbers() if x is None else _Numbers(x.data_ptr(), x.numel())


@functools.cache
def _one() -> Tensor:
    return torch.ones(1, device="cpu")


@functools.cache
def _library(instructions: str) -> tuple[Any, int]:
    """The library and the lanes of its vectors."""
    found = library(instructions, "linear", "epilogue.h", "int8_linear.cpp")
    found.int8_linear.argtypes = [*[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p, ctypes.c_int]
    return found, SETS[instructions].bits // 32


@functools.cache
def _tail_of_gelu(activation: str, intervals: int) -> Tensor:
    """``h`` of GELU, ``relu(x) - |x| h(|x|)``, or of its tanh form, as polynomials: ``[power][interval]``, float32.

    One for each of ``intervals`` equal parts of ``[0, 5.6)``, in ``t`` of ``[0, 1)``, with an error of about 1e-7.
    """
    degree = 4 if intervals == 16 else 6
    t = (1 - torch.cos(math.pi * (torch.arange(_NODES, dtype=torch.float64, device="cpu") + 0.5) / _NODES)) / 2
    z = (torch.arange(intervals, dtype=torch.float64, device="cpu")[:, None] + t) * (_RANGE / intervals)
    if activation == "gelu":
        h = torch.special.erfc(z / math.sqrt(2)) / 2
    else:
        h = torch.sigmoid(-math.sqrt(8 / math.pi) * (z + 0.044715 * z**3))
    powers = t[:, None] ** torch.arange(degree + 1, device="cpu")
    return torch.linalg.lstsq(powers, h.t()).solution.float().contiguous()
