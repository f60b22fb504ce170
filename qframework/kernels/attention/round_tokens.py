"""Queries or keys of attention rounded to their integers: quantized and multiplied by their scales again, in one pass.

Formula: ``q s`` with the integers ``q`` and scales ``s`` of :mod:`~qframework.kernels.attention.quantize_qk` for
``(x - mean) * factor``, times ``back``. A row of queries that holds NaN or infinity is NaN.
Layout: ``x (B, H, N, D)``, the result like it, (B, N, H, D) in memory, or ``out``. Reference: ``round_tokens_ref``.
"""

from __future__ import annotations

import math

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


def round_tokens_ref(
    x: Tensor, mean: Tensor | None, factor: float, back: float, role: str, out: Tensor | None = None
) -> Tensor:
    """The formula in plain torch, rounded once to ``x``'s dtype; ``mean (B, H, 1, D)`` is float32."""
    q, scale = quantize_tokens_ref(x, mean, factor, "per_block", role)
    rows = scale[:, :, token_groups("per_block", role).index(x.shape[2], x.device), None]
    rounded = (q.float() * (rows * back)).masked_fill(is_marked(q, 8)[..., None], torch.nan).to(x.dtype)
    return rounded if out is None else out.copy_(rounded)


@triton.jit
def _stride(stride, VECTOR: tl.constexpr):
    """``stride``, of which Triton then knows that ``VECTOR`` divides it. By itself it finds out for 16 only."""
    if VECTOR < 16:
        stride = stride // VECTOR * VECTOR
    return stride


@triton.jit
def _first(heads, head, H, VECTOR: tl.constexpr):
    """Where ``head`` of (B, H) starts."""
    return heads.data + head // H * _stride(heads.batch, VECTOR) + head % H * _stride(heads.head, VECTOR)


@triton.jit
def _round_tokens_kernel(
    X,  # Heads of (B, H, N, D) float
    OUT,  # Heads of (B, H, N, D), X's dtype
    mean_ptr,  # (B, H, D) fp32, or None
    factor,
    back,
    H,
    N,
    D: tl.constexpr,
    QUERIES: tl.constexpr,  # rows that hold NaN or infinity do not affect scales
    TOKENS_FIRST: tl.constexpr,  # heads lie beside each other in memory: their programs follow each other
    GROUPS: tl.constexpr,  # TokenGroups
    VECTOR: tl.constexpr,  # divides all strides, 16 at most
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
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
    x_ptrs = _first(X, head, H, VECTOR) + n[:, None] * _stride(X.token, VECTOR) + d[None, :]
    y = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    if mean_ptr is not None:
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
    out_ptrs = _first(OUT, head, H, VECTOR) + n[:, None] * _stride(OUT.token, VECTOR) + d[None, :]
    tl.store(out_ptrs, out.to(OUT.data.dtype.element_ty), mask=mask)


def _vector(x: Heads, out: Heads) -> int:
    """The power of two, 16 at most, that divides all strides, so that threads load and store as many values at once.

    Heads of 72 or 88 channels, one value at a time, would need an address for each and spill them.
    """
    return math.gcd(16, *x[1:], *out[1:])


def round_tokens_triton(
    x: Tensor, mean: Tensor | None, factor: float, back: float, role: str, out: Tensor | None = None
) -> Tensor:
    """``round_tokens_ref`` on a GPU."""
    x = last_contiguous(x)
    check_offsets("attention", x=x)
    batch, heads, tokens, channels = x.shape
    out = query_memory_order(batch, heads, tokens, channels, x, x.dtype) if out is None else out
    block_d = max(power_of_2(channels), 16)
    x_heads, out_heads = Heads(x, *x.stride()[:3]), Heads(out, *out.stride()[:3])
    launch(_round_tokens_kernel, (cdiv(tokens, QUERY_BLOCK) * heads * batch,))(
        x_heads,
        out_heads,
        None if mean is None else mean.contiguous(),
        factor,
        back,
        heads,
        tokens,
        D=channels,
        QUERIES=role == "query",
        TOKENS_FIRST=x.stride(1) < x.stride(2),
        GROUPS=token_groups("per_block", role),
        VECTOR=_vector(x_heads, out_heads),
        TILE=QUERY_BLOCK,
        BLOCK_D=block_d,
        num_warps=8 if block_d <= 64 else 16,  # half as many are a fifth slower on Hopper
    )
    return out
