"""Quantize the values of attention per channel, to INT8 or FP8 (E4M3), transposed for the second product.

Formula (SageAttention 4.3, SageAttention2, SageAttention2++ eq. 2)::

    s[d] = max over tokens |v - mean| / v_range         v_range: 127 (INT8), 448 (FP8), 4.5 (FP8, FP16 accumulator)
    q    = round((v - mean) * (1 / s))                  mean only with smooth V

Layout: ``v (B, H, N, D)`` any strides; ``q (B, H, D, P)``, since tensor cores read 8-bit operands along the tokens; P
is N rounded up to a multiple of 64, padded with zeros. Scales and mean ``(B, H, D)`` float32.
Chips without FP8 (sm_80) store the same E4M3 numbers in float16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qframework.errors import UnsupportedError, either
from qframework.kernels.attention.operands import AttentionShape, check_offsets, last_contiguous, sequence_of
from qframework.kernels.attention.token_statistics import (
    BlockStatistics,
    _block_statistics_triton,
    block_statistics_ref,
)
from qframework.kernels.runtime.checks import check_dtype
from qframework.kernels.runtime.chip import capability_of, check_device
from qframework.kernels.runtime.launch import launch, power_of_2
from qframework.kernels.runtime.operator import declare
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.rounding import round_half_even
from qframework.kernels.runtime.triton import INTERPRET, tl, triton
from qframework.numerics import FLOAT_DTYPES, MIN_SCALE

TOKEN_PAD = 64
_STORED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def padded_tokens(tokens: int) -> int:
    """Tokens of the transposed layout: the next multiple of TOKEN_PAD."""
    return -(-tokens // TOKEN_PAD) * TOKEN_PAD


def has_fp8(device: torch.device) -> bool:
    """Whether Triton multiplies E4M3 on ``device``; elsewhere the same numbers are stored in float16."""
    capability = capability_of(device)
    return not INTERPRET and capability is not None and capability >= (8, 9)  # the interpreter's FP8 casts truncate


def value_scale(stats: BlockStatistics, tokens: Tensor | int, v_range: float, smooth: bool) -> tuple[Tensor, Tensor]:
    """``(scale, mean)`` of each channel, ``(B, H, D)`` float32, from the statistics of blocks of tokens."""
    mean = stats.sum.sum(2) / tokens if smooth else torch.zeros_like(stats.sum[:, :, 0])
    amax = torch.maximum(stats.high.amax(2) - mean, mean - stats.low.amin(2)).clamp(min=0)  # -inf without tokens
    scale = (amax / v_range).clamp(min=MIN_SCALE)
    return torch.where(amax.isfinite(), scale, torch.nan), mean


def values_in_fp16(v: Tensor, packed: bool = False) -> tuple[Tensor, Tensor]:
    """``(v / scale)`` in float16 and the scale of each channel, ``(B, H, D)`` float32 or, packed, ``(1, H, D)``.

    Scales are powers of two that bring a channel's largest magnitude to between 2**14 and 2**15. The 8 bits of bfloat16
    fit float16, so rounding errors are below 2**-38 of the largest.
    """
    top = torch.linalg.vector_norm(v, torch.inf, dim=0 if packed else 2, keepdim=True, dtype=torch.float32)
    power = (top.clamp(min=2.0**-100).view(torch.int32) & 0x7F800000).view(torch.float32)
    scale = torch.where(top.isfinite(), power * 2.0**-14, torch.nan)
    low = torch.empty(v.shape, dtype=torch.float16, device=v.device)
    torch.mul(v, (1.0 / scale).to(v.dtype), out=low)
    return low, scale if packed else scale.squeeze(2)


def quantize_values_ref(v: Tensor, kind: str, v_range: float, smooth: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Reference of ``qframework::value_quantize``."""
    batch, heads, tokens, channels = v.shape
    if tokens == 0:
        scale = v.new_full((batch, heads, channels), MIN_SCALE, dtype=torch.float32)
        return v.new_zeros((batch, heads, channels, 0), dtype=_STORED[kind]), scale, torch.zeros_like(scale)
    scale, mean = value_scale(block_statistics_ref(v), tokens, v_range, smooth)
    y = ((v.float() - mean[:, :, None]) * (1.0 / scale)[:, :, None]).clamp(-v_range, v_range)
    y = F.pad(y.transpose(2, 3), (0, padded_tokens(tokens) - tokens)).nan_to_num(0.0)
    q = (torch.round(y) if kind == "int8" else y).to(_STORED[kind])
    return q.contiguous(), scale, mean


@triton.jit
def round_to_e4m3(x):
    """Round float32, |x| <= 448, half to even to E4M3 with float32 arithmetic, for chips without FP8.

    Normal numbers keep 3 bits after the leading one; below 2**-6 the step is 2**-9. Adding and subtracting 1.5 * 2**23
    steps rounds to a multiple of the step.
    """
    exponent = (x.to(tl.int32, bitcast=True) >> 23) & 0xFF
    step_exponent = tl.maximum(exponent, 127 - 6) - 3
    magic = ((step_exponent + 23) << 23).to(tl.float32, bitcast=True) * 1.5
    return (x + magic) - magic


@triton.jit
def key_of_pair(place):
    """Which key is at ``place`` of values whose keys are :data:`~qframework.kernels.attention.variants.PAIRED`."""
    return place // 16 * 16 + (place // 2) % 2 * 8 + (place // 4) % 4 * 2 + place % 2


@triton.jit(do_not_specialize=["N", "TOTAL"])  # with N = 1 folded in, ptxas 13.0 packs wrong FP8 zeros on sm_90
def _value_quantize_kernel(
    v_ptr,  # (B, H, N, D) float, or (total, H, D) with starts_ptr
    starts_ptr,  # (B + 1,) int32, for VARLEN
    scale_ptr,  # (B, H, D) fp32
    mean_ptr,  # (B, H, D) fp32
    q_ptr,  # (B, H, D, P)
    H,
    P,
    N,
    TOTAL,
    D,
    stride_vb,
    stride_vh,
    stride_vn,
    V_RANGE: tl.constexpr,
    KIND: tl.constexpr,  # "int8" or "fp8"
    ROUND: tl.constexpr,  # to E4M3 by float32 arithmetic, where q_ptr is float16
    VARLEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Grid (P // BLOCK_N * H * B,); a program transposes and quantizes BLOCK_N tokens of one head."""
    wait_for_previous_kernel(OVERLAP)
    blocks = P // BLOCK_N
    pid = tl.program_id(0).to(tl.int64)
    block, h, b = (pid % blocks).to(tl.int32), (pid // blocks) % H, pid // (blocks * H)
    base = v_ptr + b * stride_vb + h * stride_vh
    tokens = N
    if VARLEN:
        start, tokens = sequence_of(starts_ptr, b, TOTAL, N)
        base = v_ptr + start * stride_vn + h * stride_vh
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    head = b * H + h
    mask = (n < tokens)[:, None] & (d < D)[None, :]
    v = tl.load(base + n[:, None] * stride_vn + d[None, :], mask=mask, other=0.0).to(tl.float32)
    inv_scale = tl.math.div_rn(1.0, tl.load(scale_ptr + head * D + d, mask=d < D, other=1.0))
    mean = tl.load(mean_ptr + head * D + d, mask=d < D, other=0.0)
    y = tl.where(mask, (v - mean[None, :]) * inv_scale[None, :], 0.0)
    y = tl.minimum(tl.maximum(y, -V_RANGE), V_RANGE)
    if KIND == "int8":
        y = round_half_even(y)
    elif ROUND:
        y = round_to_e4m3(y)
    out = tl.trans(y.to(q_ptr.dtype.element_ty))
    tl.store(q_ptr + (head * D + d)[:, None] * P + n[None, :], out, mask=(d < D)[:, None])


def quantize_values_triton(
    v: Tensor, kind: str, v_range: float, smooth: bool = False, starts: Tensor | None = None, longest: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """``quantize_values_ref`` on a GPU, also for packed sequences with offsets ``starts``."""
    check_device(v.device)
    v = last_contiguous(v)
    check_offsets("value_quantize", v=v)
    shape = AttentionShape.of(v, starts, longest)
    native = kind == "int8" or has_fp8(v.device)
    stored = _STORED[kind] if native else torch.float16
    padded = padded_tokens(shape.tokens)
    q = torch.empty((shape.batch, shape.heads, shape.channels, padded), dtype=stored, device=v.device)
    if q.numel() == 0:
        scale = v.new_full(q.shape[:3], MIN_SCALE, dtype=torch.float32)
        return q, scale, torch.zeros_like(scale)
    tokens = shape.tokens if starts is None else (starts[1:] - starts[:-1]).clamp(min=1).view(-1, 1, 1)
    scale, mean = value_scale(_block_statistics_triton(v, shape, extremes=True), tokens, v_range, smooth)
    block_d = max(power_of_2(shape.channels), 16)
    launch(_value_quantize_kernel, (padded // TOKEN_PAD * shape.heads * shape.batch,))(
        v,
        starts if starts is not None else v,
        scale,
        mean,
        q,
        shape.heads,
        padded,
        shape.tokens,
        shape.total,
        shape.channels,
        *shape.strides(v),
        V_RANGE=v_range,
        KIND=kind,
        ROUND=not native,
        VARLEN=starts is not None,
        BLOCK_N=TOKEN_PAD,
        BLOCK_D=block_d,
        num_warps=4,
    )
    return q, scale, mean


class ValueQuantizeArguments(NamedTuple):
    """The arguments of ``qframework::value_quantize``; see :func:`value_quantize`."""

    v: Tensor
    kind: str
    v_range: float
    smooth: bool = False

    def empty_result(self) -> tuple[Tensor, Tensor, Tensor]:
        """Uninitialized integers, scales and means."""
        batch, heads, tokens, channels = self.v.shape
        cpu = self.v.device.type == "cpu"  # torch has FP8 on every CPU
        native = self.kind == "int8" or cpu or has_fp8(self.v.device)
        dtype = _STORED[self.kind] if native else torch.float16
        q = self.v.new_empty((batch, heads, channels, padded_tokens(tokens)), dtype=dtype)
        scale, mean = (self.v.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2))
        return q, scale, mean

    def check(self) -> None:
        """Raise UnsupportedError for an invalid argument."""
        check_dtype("value_quantize", "v", self.v, FLOAT_DTYPES)
        if self.v.ndim != 4:
            raise UnsupportedError(f"value_quantize: v must have shape (B, H, N, D), got {tuple(self.v.shape)}")
        if self.kind not in _STORED:
            raise UnsupportedError(f"value_quantize: kind must be {either(_STORED)}, got {self.kind!r}")


VALUE_QUANTIZE = declare(
    "value_quantize(Tensor v, str kind, float v_range, bool smooth=False) -> (Tensor, Tensor, Tensor)",
    ValueQuantizeArguments,
    cpu=lambda x: quantize_values_ref(*x),
    cuda=lambda x: quantize_values_triton(*x),
    fake=ValueQuantizeArguments.empty_result,
)


def value_quantize(v: Tensor, kind: str, v_range: float, smooth: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize values per channel for :func:`~qframework.kernels.attention.quantized_attention.quantized_attention`.

    Args:
        v: ``(B, H, N, D)`` fp32, fp16 or bf16.
        kind: ``"int8"`` or ``"fp8"``.
        v_range: the quantized value of a channel's largest magnitude; 127 for INT8, at most 448 for FP8.
        smooth: subtract the mean over tokens first; attention adds it to its output.

    Returns:
        The quantized values, transposed and padded, ``(B, H, D, P)``; their scale and mean, ``(B, H, D)`` float32.

    Raises:
        UnsupportedError: an invalid dtype, shape or kind, or a GPU below sm_80.
    """
    return torch.ops.qframework.value_quantize(v, kind, v_range, smooth)
