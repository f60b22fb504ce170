"""Quantize the keys and values of new tokens and append them to a cache in INT8, in place.

Formula, for each token and head, with a scale of its own for its key and for its value::

    k8 = round((k - k_mean) / k_scale)      k_scale = max |k - k_mean| / 127, rounded up to bf16
    v8 = round(v / v_scale)                 v_scale = max |v| / 127, rounded up to bf16

The scale is rounded before it divides, so that rounding adds no error; rounding up saturates nothing. ``k_mean`` is the
mean of the prompt's keys (SageAttention's smooth K) and must stay the same for all tokens of a cache: softmax ignores a
constant that all keys lack.

Layout: ``key (B, Hkv, N, D)``, ``value (B, Hkv, N, Dv)`` float; the cache ``(B, Hkv, capacity, D)`` and
``(B, Hkv, capacity, Dv)`` int8 with ``scales (B, Hkv, capacity, 2)`` bf16. Reference: ``cache_append_ref``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qframework import numerics
from qframework.errors import QFrameworkError
from qframework.kernels.attention.operands import last_contiguous
from qframework.kernels.runtime.checks import check_dtype, check_same_device, check_shape
from qframework.kernels.runtime.chip import check_device
from qframework.kernels.runtime.launch import cdiv, launch, power_of_2
from qframework.kernels.runtime.operator import declare, refuse_gradients
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.rounding import round_to_int8
from qframework.kernels.runtime.triton import tl, triton
from qframework.numerics import FLOAT_DTYPES, MIN_SCALE

_NAME = "cache_append"
_MIN_SCALE = tl.constexpr(MIN_SCALE)
_MAX_TILE = 32


class CacheAppendArguments(NamedTuple):
    """The arguments of ``qframework::cache_append``; see :func:`cache_append`."""

    key: Tensor
    value: Tensor
    k_mean: Tensor
    k_cache: Tensor
    v_cache: Tensor
    scales: Tensor
    length: Tensor

    def check(self) -> None:
        """Raise QFrameworkError for an invalid argument."""
        for name in ("key", "value"):
            check_dtype(_NAME, name, getattr(self, name), FLOAT_DTYPES)
            if getattr(self, name).ndim != 4:
                shape = tuple(getattr(self, name).shape)
                raise QFrameworkError(f"{_NAME}: {name} must have shape (B, heads, tokens, channels), got {shape}")
        check_same_device(_NAME, self.key, **{name: getattr(self, name) for name in self._fields[1:]})
        check_dtype(_NAME, "k_mean", self.k_mean, (torch.float32,))
        check_dtype(_NAME, "k_cache", self.k_cache, (torch.int8,))
        check_dtype(_NAME, "v_cache", self.v_cache, (torch.int8,))
        check_dtype(_NAME, "scales", self.scales, (torch.bfloat16,))
        check_dtype(_NAME, "length", self.length, (torch.int32,))
        batch, heads, tokens, channels = self.key.shape
        capacity, width = self.k_cache.shape[-2], self.value.shape[-1]
        check_shape(_NAME, "value", self.value, (batch, heads, tokens, width))
        check_shape(_NAME, "k_mean", self.k_mean, (batch, heads, channels))
        check_shape(_NAME, "k_cache", self.k_cache, (batch, heads, capacity, channels))
        check_shape(_NAME, "v_cache", self.v_cache, (batch, heads, capacity, width))
        check_shape(_NAME, "scales", self.scales, (batch, heads, capacity, 2))
        check_shape(_NAME, "length", self.length, (2,))
        for name in ("k_mean", "k_cache", "v_cache", "scales", "length"):
            x: Tensor = getattr(self, name)
            if not (_has_dense_rows(x) if name in ("k_cache", "v_cache") else x.is_contiguous()):
                rows = " but for padding of rows" if name in ("k_cache", "v_cache") else ""
                raise QFrameworkError(f"{_NAME}: {name} must be contiguous{rows}, got strides {x.stride()}")


def _has_dense_rows(x: Tensor) -> bool:
    """Whether ``x (B, Hkv, capacity, D)`` is the first channels of a contiguous tensor."""
    row = x.stride(2)
    expected = (x.shape[1] * x.shape[2] * row, x.shape[2] * row, row, 1)
    alike = all(n == 1 or s == t for n, s, t in zip(x.shape, x.stride(), expected, strict=True))
    return x.numel() == 0 or (alike and row >= x.shape[3])


def token_scale(x: Tensor) -> Tensor:
    """The scale of each token, ``x (..., D)`` float32 to ``(..., 1)`` float32: max|x| / 127, rounded up to bfloat16."""
    scale = numerics.dynamic_scale(x, "per_token")
    bits = (scale.view(torch.int32) + 0xFFFF) & -0x10000
    return torch.where(scale.isfinite(), bits.view(torch.float32), torch.nan)


def cache_append_ref(x: CacheAppendArguments) -> None:
    """Reference, and the CPU implementation."""
    start = int(x.length[0])
    count = min(x.key.shape[2], x.k_cache.shape[2] - start)
    key = x.key[:, :, :count].float() - x.k_mean.unsqueeze(2)
    value = x.value[:, :, :count].float()
    written = slice(start, start + count)
    for place, (new, cache) in enumerate(((key, x.k_cache), (value, x.v_cache))):
        scale = token_scale(new)
        cache[:, :, written] = numerics.quantize(new, scale).nan_to_num(0)
        x.scales[:, :, written, place] = scale[..., 0].to(torch.bfloat16)
    x.length[0] += count


@triton.jit
def _quantize_tokens(x, cache_ptrs, scale_ptrs, token_mask, channel_mask):
    """Store an fp32 tile (TILE, BLOCK_D) in INT8, and the scale of each token."""
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # as integers NaN is the largest
    amax = tl.max(magnitude, 1).to(tl.float32, bitcast=True)
    scale = tl.math.div_rn(amax, tl.full(amax.shape, 127.0, tl.float32))
    scale = tl.where(scale < _MIN_SCALE, _MIN_SCALE, scale)
    rounded = ((scale.to(tl.int32, bitcast=True) + 0xFFFF) & -65536).to(tl.float32, bitcast=True)
    scale = tl.where(scale < float("inf"), rounded, float("nan"))
    q = round_to_int8(x * tl.math.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None])
    tl.store(cache_ptrs, q, mask=token_mask[:, None] & channel_mask[None, :])
    tl.store(scale_ptrs, scale.to(tl.bfloat16), mask=token_mask)


@triton.jit
def _cache_append_kernel(
    key_ptr,  # (B, Hkv, N, D) float
    value_ptr,  # (B, Hkv, N, DV) float
    k_mean_ptr,  # (B, Hkv, D) fp32
    k_cache_ptr,  # (B, Hkv, capacity, D) int8
    v_cache_ptr,  # (B, Hkv, capacity, DV) int8
    scales_ptr,  # (B, Hkv, capacity, 2) bf16
    length_ptr,  # (2,) int32: tokens in the cache; programs that are done
    HKV,
    N,
    capacity,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_kc,  # of a row of the caches
    stride_vc,
    D: tl.constexpr,
    DV: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Grid (cdiv(N, TILE) * Hkv * B,); a program appends TILE tokens of a head. The last to finish sets the length."""
    wait_for_previous_kernel(OVERLAP)
    length = tl.load(length_ptr)
    tiles = tl.cdiv(N, TILE)
    pid = tl.program_id(0)
    head = (pid // tiles).to(tl.int64)
    b, h = head // HKV, head % HKV
    n = (pid % tiles) * TILE + tl.arange(0, TILE)
    at = length + n
    exists, fits = n < N, (n < N) & (at < capacity)
    rows = head * capacity + at
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    k_ptrs = key_ptr + b * stride_kb + h * stride_kh + n[:, None] * stride_kn + d[None, :]
    k = tl.load(k_ptrs, mask=exists[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    k = k - tl.load(k_mean_ptr + head * D + d, mask=d < D, other=0.0)[None, :]
    k = tl.where(exists[:, None], k, 0.0)
    _quantize_tokens(k, k_cache_ptr + rows[:, None] * stride_kc + d[None, :], scales_ptr + 2 * rows, fits, d < D)
    v_ptrs = value_ptr + b * stride_vb + h * stride_vh + n[:, None] * stride_vn + dv[None, :]
    v = tl.load(v_ptrs, mask=exists[:, None] & (dv < DV)[None, :], other=0.0).to(tl.float32)
    _quantize_tokens(v, v_cache_ptr + rows[:, None] * stride_vc + dv[None, :], scales_ptr + 2 * rows + 1, fits, dv < DV)
    tl.debug_barrier()  # all threads have read the length
    done = tl.atomic_add(length_ptr + 1, 1)
    if done == tl.num_programs(0) - 1:
        tl.store(length_ptr, tl.minimum(length + N, capacity))
        tl.store(length_ptr + 1, 0)


def cache_append_triton(x: CacheAppendArguments) -> None:
    """``cache_append`` on a GPU."""
    check_device(x.key.device)
    batch, heads, tokens, channels = x.key.shape
    if x.key.numel() == 0:
        return
    key, value = last_contiguous(x.key), last_contiguous(x.value)
    tile = min(_MAX_TILE, power_of_2(tokens))
    launch(_cache_append_kernel, (cdiv(tokens, tile) * heads * batch,))(
        key,
        value,
        x.k_mean,
        x.k_cache,
        x.v_cache,
        x.scales,
        x.length,
        heads,
        tokens,
        x.k_cache.shape[2],
        *key.stride()[:3],
        *value.stride()[:3],
        x.k_cache.stride(2),
        x.v_cache.stride(2),
        D=channels,
        DV=value.shape[-1],
        TILE=tile,
        BLOCK_D=power_of_2(channels),
        BLOCK_DV=power_of_2(value.shape[-1]),
        num_warps=1 if tile == 1 else 4,
    )


CACHE_APPEND = declare(
    "cache_append(Tensor key, Tensor value, Tensor k_mean, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) scales, "
    "Tensor(d!) length) -> ()",
    CacheAppendArguments,
    cpu=cache_append_ref,
    cuda=cache_append_triton,
    fake=lambda x: None,
)


def cache_append(
    key: Tensor, value: Tensor, k_mean: Tensor, k_cache: Tensor, v_cache: Tensor, scales: Tensor, length: Tensor
) -> None:
    """Quantize new tokens and append them to a cache in INT8, in place and in one launch.

    Args:
        key: ``(B, Hkv, N, D)`` fp16, bf16 or fp32, any strides.
        value: ``(B, Hkv, N, Dv)``, likewise.
        k_mean: ``(B, Hkv, D)`` fp32, subtracted from the keys; the same in all calls for a cache.
        k_cache: ``(B, Hkv, capacity, D)`` int8, contiguous or the first channels of a contiguous tensor, whose rows
            are padded; tokens ``length[0]`` to ``length[0] + N`` are written.
        v_cache: ``(B, Hkv, capacity, Dv)`` int8, likewise.
        scales: ``(B, Hkv, capacity, 2)`` bf16, likewise: of the key and of the value.
        length: ``(2,)`` int32: the tokens in the cache, which grow by N, and a number that is 0 between calls, with
            which the programs of a GPU agree on which of them is the last. Read on the device, for CUDA graphs.

    Tokens that do not fit into ``capacity`` are dropped. A token with NaN or infinity gets NaN as its scale.

    Raises:
        UnsupportedError: an unsupported dtype.
        QFrameworkError: shapes, strides or devices that do not match; operands that require a gradient.
    """
    refuse_gradients(_NAME, "a cache in floating point", key=key, value=value)
    torch.ops.qframework.cache_append(key, value, k_mean, k_cache, v_cache, scales, length)


def dequantized(cache: Tensor, scale: Tensor, mean: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``cache (B, Hkv, N, D)`` int8 times ``scale (B, Hkv, N)`` plus ``mean (B, Hkv, D)``, rounded to ``dtype``."""
    x = cache.float().mul_(scale.float().unsqueeze(-1))
    return (x if mean is None else x.add_(mean.unsqueeze(2))).to(dtype)
