"""The product of INT8 matrices for x86 processors without VNNI: multiply_add.cpp, compiled at its first use."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from importlib import resources
from typing import cast

import torch
from torch import Tensor

from qframework.compat.cpp_compiler import load_cpp

_BITS = {"AVX2": 256, "AVX512": 512}


def multiply_add(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b.T`` as int32, exact for every K up to 131,071; ``a (M, K)`` and ``b (N, K)`` int8.

    Raises NotImplementedError on processors without AVX2, and RuntimeError or OSError where C++ cannot be compiled.
    """
    a, b = a.contiguous(), b.contiguous()
    out = a.new_empty((a.shape[0], b.shape[0]), dtype=torch.int32)
    product = _compiled(torch.backends.cpu.get_cpu_capability())
    product(a.data_ptr(), b.data_ptr(), out.data_ptr(), *a.shape[:1], *b.shape, torch.get_num_threads())
    return out


@functools.cache
def _compiled(capability: str) -> Callable[..., None]:
    if capability not in _BITS:
        raise NotImplementedError(f"the processor has neither AVX2 nor AVX-512: its capability is {capability}")
    source = resources.files("qframework.kernels.linear").joinpath("multiply_add.cpp").read_text("utf-8")
    product = load_cpp(f"#define QFRAMEWORK_BITS {_BITS[capability]}\n{source}").int8_product
    product.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 3 + [ctypes.c_int]
    product.restype = None
    return cast("Callable[..., None]", product)
