"""Queries or keys of attention rounded to their integers: quantized and multiplied by their scales again, in one pass.

Formula: ``q s`` with the integers ``q`` and scales ``s`` of :mod:`~qframework.kernels.attention.quantize_qk` for
``(x - mean) * factor``, times ``back``. A row of queries that holds NaN or infinity is NaN. The mean may be given as
sums of blocks of tokens, which every program adds: that takes no launch of its own.
Layout: ``x (B, H, N, D)``, the result like it, (B, N, H, D) in memory, or ``out``. Reference: ``round_tokens_ref``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qframework.kernels.attention.operands import check_offsets, last_contiguous, query_memory_order
from qframework.kernels.attention.quantize_qk import (
    finite_rows,
    group_scale,
    is_marked,
    quantize_tokens_ref,
    row_amax,
    saturated,
)
from qframework.kernels.attention.triton import Heads
from qframework.kernels.attention.variants import QUERY_BLOCK, token_groups
from qframework.kernels.runtime.launch import cdiv, launch, power_of_2
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.rounding import round_half_even
from qframework.kernels.runtime.triton import tl, triton
from qframework.numerics import MIN_SCALE

LEAST_SCALE = tl.constexpr(MIN_SCALE)


class BlockSums(NamedTuple):
    """Sums of tokens from which the mean that is subtracted is computed."""

    sums: Tensor  # (B, H, M, D) fp32
    tokens: int  # that were added
    mean: Tensor  # (B, H, 1, D) fp32, contiguous, is overwritten with the mean


def round_tokens_ref(
    x: Tensor, mean: Tensor | BlockSums | None, factor: float, back: float, role: str, out: Tensor | None = None
) -> Tensor:
    """The formula in plain torch, rounded once to ``x``'s dtype; ``mean (B, H, 1, D)`` is float32."""
    if isinstance(mean, BlockSums):
        mean = mean.mean.copy_(mean.sums.sum(2, keepdim=True) / mean.tokens)
    q, scale = quantize_tokens_ref(x, mean, factor, "per_block", role)
    rows = scale[:, :, token_groups("per_block", role).index(x.shape[2], x.device), None]
    rounded = (q.float() * (rows * back)).masked_fill(is_marked(q, 8)[..., None], torch.nan).to(x.dtype)
    return rounded if out is None else out.copy_(rounded)


@triton.jit
def _round_tokens_kernel(
    X,  # Heads of (B, H, N, D) float
    OUT,  # Heads of (B, H, N, D), X's dtype
    mean_ptr,  # (B, H, D) fp32, or None
    sums_ptr,  # (B, H, M, D) fp32, or None; the mean is then written
    count,  # of tokens in the sums
    M,
    factor,
    back,
    H,
    N,
    D: tl.constexpr,
    QUERIES: tl.constexpr,  # rows that hold NaN or infinity do not affect scales
    TOKENS_FIRST: tl.constexpr,  # heads lie beside each other in memory: their programs follow each other
    GROUPS: tl.constexpr,  # TokenGroups
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Grid (cdiv(N, TILE) * H * B,); a program rounds TILE tokens of one head."""
    wait_for_previous_kernel(OVERLAP)
    tiles = tl.cdiv(N, TILE)
    pid = tl.program_id(0).to(tl.int64)
    if TOKENS_FIRST:
        tile, head = (pid // H % tiles).to(tl.int32), pid // (H * tiles) * H + pid % H
    else:
        tile, head = (pid % tiles).to(tl.int32), pid // tiles
    n, d = tile * TILE + tl.arange(0, TILE), tl.arange(0, BLOCK_D)
    mask = (n < N)[:, None] & (d < D)[None, :]
    x_ptrs = X.data + head // H * X.batch + head % H * X.head + n[:, None] * X.token + d[None, :]
    y = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    if mean_ptr is not None:
        if sums_ptr is not None:
            m = tl.arange(0, BLOCK_M)
            sums_ptrs = sums_ptr + (head * M + m)[:, None] * D + d[None, :]
            sums = tl.load(sums_ptrs, mask=(m < M)[:, None] & (d < D)[None, :], other=0.0)
            mean = tl.math.div_rn(tl.sum(sums, 0), count)
            if tile == 0:
                tl.store(mean_ptr + head * D + d, mean, mask=d < D)
        else:
            mean = tl.load(mean_ptr + head * D + d, mask=d < D, other=0.0)
        y = tl.where(mask, y - mean[None, :], 0.0)
    y = y * factor
    amax = row_amax(y)
    counted = finite_rows(amax) if QUERIES else amax
    _, scale = group_scale(counted, 127, LEAST_SCALE, GROUPS.span, GROUPS.groups, GROUPS.modulo, GROUPS.divisor, TILE)
    q = round_half_even(saturated(y, tl.math.div_rn(1.0, scale)[:, None], 127))  # as integers they would be converted
    if QUERIES:
        q = tl.where((finite_rows(amax) == amax)[:, None], q, float("nan"))
    out = q * (scale * back)[:, None]
    out_ptrs = OUT.data + head // H * OUT.batch + head % H * OUT.head + n[:, None] * OUT.token + d[None, :]
    tl.store(out_ptrs, out.to(OUT.data.dtype.element_ty), mask=mask)


def round_tokens_triton(
    x: Tensor, mean: Tensor | BlockSums | None, factor: float, back: float, role: str, out: Tensor | None = None
) -> Tensor:
    """``round_tokens_ref`` on a GPU."""
    x = last_contiguous(x)
    check_offsets("attention", x=x)
    batch, heads, tokens, channels = x.shape
    out = query_memory_order(batch, heads, tokens, channels, x, x.dtype) if out is None else out
    block_d = max(power_of_2(channels), 16)
    blocks = mean if isinstance(mean, BlockSums) else None
    mean = mean.mean if isinstance(mean, BlockSums) else mean
    launch(_round_tokens_kernel, (cdiv(tokens, QUERY_BLOCK) * heads * batch,))(
        Heads(x, *x.stride()[:3]),
        Heads(out, *out.stride()[:3]),
        None if mean is None else mean.contiguous(),
        None if blocks is None else blocks.sums,
        1.0 if blocks is None else float(blocks.tokens),
        1 if blocks is None else blocks.sums.shape[2],
        factor,
        back,
        heads,
        tokens,
        D=channels,
        QUERIES=role == "query",
        TOKENS_FIRST=x.stride(1) < x.stride(2),
        GROUPS=token_groups("per_block", role),
        TILE=QUERY_BLOCK,
        BLOCK_D=block_d,
        BLOCK_M=1 if blocks is None else power_of_2(blocks.sums.shape[2]),
        num_warps=8 if block_d <= 64 else 16,  # half as many are a fifth slower
    )
    return out
