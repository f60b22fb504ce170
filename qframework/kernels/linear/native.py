"""``int8_linear`` on x86 processors in C++: the product and its epilogue in one pass, compiled at its first use.

The sources are in native/. Each instruction set is a library of its own, since compilers may use every instruction that
they are allowed. The tables of GELU are computed here.
"""

from __future__ import annotations

import ctypes
import functools
import math
from importlib import resources
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qframework.compat.cpp_compiler import load_cpp
from qframework.kernels.linear.arguments import Int8LinearArguments, flat_out_scale, is_per_channel
from qframework.kernels.runtime.checks import check_positive_scale, row_scale

_AVX2 = "avx2,fma,f16c"
_AVX512 = f"{_AVX2},avx512f,avx512bw,avx512vl,avx512dq"


class _Instructions(NamedTuple):
    """What a library is compiled for."""

    needs: tuple[str, ...]  # of ``torch.cpu.get_capabilities``
    bits: int  # of a vector
    group: int  # INT8 values in 32 bits of it: 4, or 2 which are widened to INT16
    tiles: int  # whether AMX multiplies
    target: str

    @property
    def source(self) -> str:
        """The text of the library."""
        folder = resources.files("qframework.kernels.linear").joinpath("native")
        files = [folder.joinpath(name).read_text("utf-8") for name in _FILES]
        named = {"BITS": self.bits, "GROUP": self.group, "AMX": self.tiles, "TARGET": f'"{self.target}"'}
        return "\n".join([*(f"#define QFRAMEWORK_{name} {value}" for name, value in named.items()), *files])


_FILES = ("vectors.h", "instructions.h", "tile.h", "epilogue.h", "int8_linear.cpp")
_VNNI = ("avx512_vnni", "avx512_bw", "avx512_vl", "avx512_dq")
_SETS = {
    "amx": _Instructions(("amx_int8", "amx_tile", *_VNNI), 512, 4, 1, f"{_AVX512},avx512vnni,amx-tile,amx-int8"),
    "vnni": _Instructions(_VNNI, 512, 4, 0, f"{_AVX512},avx512vnni"),
    "avx512": _Instructions((), 512, 2, 0, _AVX512),
    "avx2": _Instructions((), 256, 2, 0, _AVX2),
}
NATIVE = ("amx", "vnni", "multiply_add")
"""The implementations here: with AMX, with VNNI, or by 16-bit multiply-add for processors without INT8 instructions."""

# As in native/epilogue.h.
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
    library, lanes = _library(_instructions(implementation))
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
    if _multiply(library, x.a, x.b, epilogue):
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
    _multiply(_library(_instructions(implementation))[0], a, b, epilogue)
    return out


def _multiply(library: Any, a: Tensor, b: Tensor, epilogue: _Epilogue) -> bool:
    """Compute; whether instead a scale was found that is not positive."""
    a, b = a.contiguous(), b.contiguous()
    n, k = b.shape
    threads = torch.get_num_threads()
    found: int = library.int8_linear(a.data_ptr(), b.data_ptr(), a.numel() // k, n, k, ctypes.byref(epilogue), threads)
    return bool(found)


def _numbers(x: Tensor | None) -> _Numbers:
    return _Numbers() if x is None else _Numbers(x.data_ptr(), x.numel())


@functools.cache
def _one() -> Tensor:
    return torch.ones(1, device="cpu")


def _instructions(implementation: str) -> str:
    """The instruction set of an implementation on this processor. Raises NotImplementedError if it has none."""
    capability = torch.backends.cpu.get_cpu_capability()  # what PyTorch uses, at most what the processor has
    if implementation == "multiply_add":
        if capability not in ("AVX2", "AVX512"):
            raise NotImplementedError(f"the processor has neither AVX2 nor AVX-512: its capability is {capability}")
        return capability.lower()
    found = torch.cpu.get_capabilities()
    missing = [name for name in _SETS[implementation].needs if not found.get(name)]
    if capability != "AVX512" or missing:
        lacking = missing[0] if missing else "AVX-512"
        raise NotImplementedError(f"the processor has no {lacking}, or PyTorch may not use it")
    return implementation


@functools.cache
def _library(instructions: str) -> tuple[Any, int]:
    """The library and the lanes of its vectors."""
    chosen = _SETS[instructions]
    library = load_cpp(chosen.source)
    if not library.available():
        raise NotImplementedError("the operating system does not let this process use AMX")
    library.int8_linear.argtypes = [*[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p, ctypes.c_int]
    return library, chosen.bits // 32


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
