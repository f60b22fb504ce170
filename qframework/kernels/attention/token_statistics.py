"""Sums, minima and maxima over blocks of tokens, for smoothing and for scales per channel.

Formula: ``sum``, ``low = min`` and ``high = max`` of ``x[n]`` over the tokens ``n`` of a block, per channel. NaN and
infinity count as 0 in sums, whose means cancel in attention; NaN counts as -inf in ``low`` and as inf in ``high``.
Layout: ``x (B, H, N, D)`` any strides, results ``(B, H, ceil(N / QUERY_BLOCK), D)`` float32. Internal to the attention
operators. There are no atomics, so results repeat bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qframework.kernels.attention.operands import AttentionShape, sequence_of
from qframework.kernels.attention.quantize_qk import finite_or_zero
from qframework.kernels.attention.variants import QUERY_BLOCK
from qframework.kernels.runtime.launch import cdiv, launch, power_of_2
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import tl, triton


class BlockStatistics(NamedTuple):
    """Per block of QUERY_BLOCK tokens and per channel, ``(B, H, M, D)`` float32."""

    sum: Tensor
    low: Tensor
    high: Tensor


def block_statistics_ref(x: Tensor) -> BlockStatistics:
    """Reference: dense ``x (B, H, N, D)``."""
    tail = -x.shape[2] % QUERY_BLOCK

    def blocks(fill: float) -> Tensor:
        return F.pad(x.float(), (0, 0, 0, tail), value=fill).unflatten(2, (-1, QUERY_BLOCK))

    return BlockStatistics(
        blocks(0.0).nan_to_num(0.0, 0.0, 0.0).sum(3), blocks(torch.inf).amin(3), blocks(-torch.inf).amax(3)
    )


@triton.jit(do_not_specialize=["N", "TOTAL"])
def _block_statistics_kernel(
    x_ptr,  # (B, H, N, D) float, or (total, H, D) with starts_ptr
    starts_ptr,  # (B + 1,) int32, where each sequence starts, for VARLEN
    sum_ptr,  # (B, H, M, D) fp32
    low_ptr,
    high_ptr,
    H,
    N,
    TOTAL,
    M,
    D,
    stride_xb,
    stride_xh,
    stride_xn,
    EXTREMES: tl.constexpr,
    VARLEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Grid (M * H * B,); a program reads one block of tokens of one head."""
    wait_for_previous_kernel(OVERLAP)
    pid = tl.program_id(0).to(tl.int64)
    block, h, b = pid % M, (pid // M) % H, pid // (M * H)
    base = x_ptr + b * stride_xb + h * stride_xh
    tokens = N
    if VARLEN:
        start, tokens = sequence_of(starts_ptr, b, TOTAL, N)
        base = x_ptr + start * stride_xn + h * stride_xh
    n = block * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    mask = (n < tokens)[:, None] & (d < D)[None, :]
    x = tl.load(base + n[:, None] * stride_xn + d[None, :], mask=mask, other=0.0).to(tl.float32)
    out = ((b * H + h) * M + block) * D + d
    tl.store(sum_ptr + out, tl.sum(finite_or_zero(x), 0), mask=d < D)
    if EXTREMES:
        # min and max ignore NaN; as an infinity it reaches the scale and the output
        bad = x != x
        low = tl.where(mask, tl.where(bad, float("-inf"), x), float("inf"))
        high = tl.where(mask, tl.where(bad, float("inf"), x), float("-inf"))
        tl.store(low_ptr + out, tl.min(low, 0), mask=d < D)
        tl.store(high_ptr + out, tl.max(high, 0), mask=d < D)


def _block_statistics_triton(x: Tensor, shape: AttentionShape, extremes: bool) -> BlockStatistics:
    """``x`` is dense (B, H, N, D), or packed (total, H, D) when ``shape`` has starts."""
    blocks = max(cdiv(shape.tokens, QUERY_BLOCK), 1)
    size = (shape.batch, shape.heads, blocks, shape.channels)
    sums = torch.empty(size, dtype=torch.float32, device=x.device)
    low, high = (torch.empty_like(sums), torch.empty_like(sums)) if extremes else (sums, sums)
    block_d = max(power_of_2(shape.channels), 16)
    launch(_block_statistics_kernel, (blocks * shape.heads * shape.batch,))(
        x,
        shape.starts if shape.starts is not None else x,
        sums,
        low,
        high,
        shape.heads,
        shape.tokens,
        shape.total,
        blocks,
        shape.channels,
        *shape.strides(x),
        EXTREMES=extremes,
        VARLEN=shape.starts is not None,
        BLOCK=QUERY_BLOCK,
        BLOCK_D=block_d,
        num_warps=4 if block_d <= 64 else 8,
    )
    return BlockStatistics(sums, low, high)
