"""``mixed_attention`` on x86 processors in C++, compiled at its first use.

The sources are in native/, beside the shared headers of runtime/native/. S is exact in INT32, sums of P V are float32,
and V is exact. P is float32; with AMX it is the sum of two bfloat16 numbers, at most 2^-15 of P away, where float16
would be 2^-11 away. So results are within 2^-15 of ``sum_j p_j |v_j|``, and the last digits of float32 logits.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

import torch
from torch import Tensor

from qframework.kernels.attention.arguments import canonical, cast_mask, default_scale
from qframework.kernels.attention.mixed_arguments import MixedAttentionArguments
from qframework.kernels.attention.operands import last_contiguous
from qframework.kernels.runtime.native import instructions_of, library

# Values of a head's keys and values up to which each is faster than PyTorch's attention: without AMX, V in float32 is
# read once for a few queries. With AMX it was faster at 2**24 as well, twice.
_MOST_VALUES = {"vnni": 1 << 22, "multiply_add": 1 << 19}

_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}  # as in runtime/native/floats.h


class _Operand(ctypes.Structure):
    _fields_ = (
        ("at", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "head", "token")),
        ("scale", ctypes.c_void_p),
        ("per_head", ctypes.c_int64),
    )


class _Mask(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batches", "batch", "head", "token")))


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, _Operand) for name in ("q", "k", "v")),
        ("mask", _Mask),
        *((name, ctypes.c_void_p) for name in ("out", "out_scale")),
        ("out_scale_per_head", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "kv_heads", "queries", "keys", "channels", "width")),
        ("logit_scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("causal", "dtype")),
    )


def native_attention(x: MixedAttentionArguments, implementation: str) -> Tensor | None:
    """``mixed_attention`` by one of ``NATIVE``; no operand may be empty.

    None for calls that it does not compute: relative positions, which are the reference's, scales that are not positive
    numbers, and sequences that would be slower. Raises as ``runtime.native.library`` does.
    """
    if x.rel_h is not None:
        return None
    q, k, v, mask, *_ = canonical(x)
    q, k, v = (last_contiguous(t) for t in (q, k, v))
    if k.shape[2] * (k.shape[3] + v.shape[3]) > _MOST_VALUES.get(implementation, math.inf):
        return None
    scales = [scale if scale is None else scale.contiguous() for scale in (*x[3:6], x.out_scale)]
    result = x.empty_result()
    out_scale = scales[3]
    mask = None if mask is None else _added(mask, k.shape[2])
    operands = (_operand(t, scale) for t, scale in zip((q, k, v), scales, strict=False))
    call = _Attention(
        *operands,
        _mask(mask),
        result.data_ptr(),
        None if out_scale is None else out_scale.data_ptr(),
        0 if out_scale is None else out_scale.numel() > 1,
        *q.shape[:2],
        k.shape[1],
        q.shape[2],
        k.shape[2],
        q.shape[3],
        v.shape[3],
        default_scale(x.query, x.scale),
        x.is_causal,
        _DTYPES[result.dtype],
    )
    compiled = _library(instructions_of(implementation))
    return None if compiled.mixed_attention(ctypes.byref(call), torch.get_num_threads()) else result


def _operand(x: Tensor, scale: Tensor | None) -> _Operand:
    assert scale is not None
    return _Operand(x.data_ptr(), *x.stride()[:3], scale.data_ptr(), scale.numel() > 1)


def _added(mask: Tensor, keys: int) -> Tensor:
    """A mask as numbers that are added to logits, float32 with contiguous rows of all keys."""
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, device="cpu").masked_fill_(~mask, -torch.inf)
    elif mask.dtype != torch.float32:
        mask = cast_mask(mask, torch.float32)
    return last_contiguous(mask if mask.shape[3] == keys else mask.expand(-1, -1, -1, keys).contiguous())


def _mask(x: Tensor | None) -> _Mask:
    if x is None:
        return _Mask()
    strides = (stride if size > 1 else 0 for size, stride in zip(x.shape[:3], x.stride(), strict=False))
    return _Mask(x.data_ptr(), x.shape[0], *strides)


@functools.cache
def _library(instructions: str) -> Any:
    found = library(instructions, "attention", "values.h", "mixed_attention.cpp")
    found.mixed_attention.argtypes = [ctypes.c_void_p, ctypes.c_int]
    return found
