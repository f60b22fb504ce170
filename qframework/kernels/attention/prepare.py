"""What Hopper's kernel with the integer exponential reads, in one pass: Q and K in INT8, K's norm, V in bfloat16.

Formula: :mod:`~qframework.kernels.attention.quantize_qk`, for groups within blocks of QUERY_BLOCK tokens. The norm is
the largest ``|k|`` of a head's quantized keys, infinite where a key held NaN or infinity.

Keys that no query attends to do not affect the mean and the scales; they and their values are 0.

Layout: ``q (B, H, N, D)``, ``k (B, Hkv, Nk, D)``, ``v (B, Hkv, Nk, Dv)`` with contiguous channels. Two launches: sums
of parts of the keys, where K is smoothed, and one program for each tile of any of the three.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qframework.kernels.attention.operands import LOG2_E, QuantizedQK, check_offsets, last_contiguous
from qframework.kernels.attention.quantize_qk import (
    finite_or_zero,
    finite_rows,
    group_scale,
    mark_rows,
    row_amax,
    to_integers,
)
from qframework.kernels.attention.triton import LEAST_SCALE, Heads
from qframework.kernels.attention.variants import QUERY_BLOCK, AttentionVariant, token_groups
from qframework.kernels.runtime.chip import check_device
from qframework.kernels.runtime.launch import cdiv, launch, power_of_2
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import tl, triton

PARTS = 16  # sums of a head's keys: enough programs to fill a chip, few enough for every tile to add them
TILE = QUERY_BLOCK


@triton.jit(do_not_specialize=["NK", "STEPS"])
def _key_sums_kernel(
    k,  # Heads
    seen,  # Seen, or None: all keys
    sums_ptr,  # (B, Hkv, PARTS, D) fp32
    counts_ptr,  # (B, Hkv, PARTS) int32, the number of keys in each sum
    norm_ptr,  # (B, Hkv) fp32, zeroed
    HKV,
    NK,
    D,
    STEPS,  # tiles of a part
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Grid (PARTS * Hkv * B,); the sum of the finite values of a part of a head's keys."""
    wait_for_previous_kernel(OVERLAP)
    pid = tl.program_id(0).to(tl.int64)
    part, head = (pid % PARTS).to(tl.int32), pid // PARTS
    base = k.data + head // HKV * k.batch + head % HKV * k.head
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), tl.float32)
    count = 0
    for step in range(part * STEPS, part * STEPS + STEPS):
        n = step * TILE + tl.arange(0, TILE)
        used = _seen(seen, head // HKV, head % HKV, n, NK)
        x = tl.load(base + n[:, None] * k.token + d[None, :], mask=used[:, None] & (d < D)[None, :], other=0.0)
        count += tl.sum(used.to(tl.int32), 0)
        total += tl.sum(finite_or_zero(x.to(tl.float32)), 0)
    tl.store(sums_ptr + pid * D + d, total, mask=d < D)
    tl.store(counts_ptr + pid, count)
    if part == 0:
        tl.store(norm_ptr + head, 0.0)


@triton.jit
def _seen(seen, batch, head, n, N):
    """Which tokens exist and are seen."""
    used = n < N
    if seen is not None:
        at = (batch % seen.batches * seen.heads + head % seen.heads) * N + n
        used = tl.load(seen.data + at, mask=used, other=0) != 0
    return used


@triton.jit
def _quantized_tile(
    x, q, seen, scale_ptr, mean, factor, tile, head, HEADS, N, D, SPAN: tl.constexpr, QUERIES: tl.constexpr,
    TILE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Quantize one tile of a head of ``x`` and store it; ``(integers, scale of each row)``."""
    n = tile * TILE + tl.arange(0, TILE)
    d = tl.arange(0, BLOCK_D)
    mask = (n < N)[:, None] & (d < D)[None, :]
    x_ptrs = x.data + head // HEADS * x.batch + head % HEADS * x.head + n[:, None] * x.token + d[None, :]
    used = mask & _seen(seen, head // HEADS, head % HEADS, n, N)[:, None]
    y = tl.load(x_ptrs, mask=used, other=0.0).to(tl.float32)
    y = tl.where(used, (y - mean[None, :]) * factor, 0.0)
    amax = row_amax(y)
    scale, row_scale = group_scale(finite_rows(amax) if QUERIES else amax, 127, LEAST_SCALE, SPAN, 1, 1, 1, TILE)
    g = tile * (TILE // SPAN) + tl.arange(0, TILE // SPAN)
    groups = tl.cdiv(N, SPAN)
    tl.store(scale_ptr + head * groups + g, scale, mask=g < groups)
    values = to_integers(y, tl.math.div_rn(1.0, row_scale)[:, None], 127)
    if QUERIES:
        values = mark_rows(values, amax, d < D, 127)
    q_ptrs = q.data + head // HEADS * q.batch + head % HEADS * q.head + n[:, None] * q.token + d[None, :]
    tl.store(q_ptrs, values, mask=mask)
    return values, row_scale


@triton.jit(do_not_specialize=["N", "NK", "Q_PROGRAMS", "K_PROGRAMS"])
def _prepare_kernel(
    q,  # Heads
    k,  # Heads
    v,  # Heads, or None where V is in bfloat16 already
    q8,  # Heads, int8
    k8,  # Heads, int8
    v16,  # Heads, bfloat16, or None
    seen,  # Seen, or None: all keys
    q_scale_ptr,  # (B, H, cdiv(N, Q_SPAN)) fp32
    k_scale_ptr,  # (B, Hkv, cdiv(Nk, K_SPAN)) fp32
    sums_ptr,  # (B, Hkv, PARTS, D) fp32, or None: K is not smoothed
    counts_ptr,  # (B, Hkv, PARTS) int32
    norm_ptr,  # (B, Hkv) fp32
    factor,
    H,
    HKV,
    N,
    NK,
    D,
    DV,
    Q_PROGRAMS,
    K_PROGRAMS,
    Q_SPAN: tl.constexpr,
    K_SPAN: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Grid (tiles of Q, then of K, then of V of all heads,)."""
    wait_for_previous_kernel(OVERLAP)
    pid = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)
    k_tiles = tl.cdiv(NK, TILE)
    if pid < Q_PROGRAMS:
        tiles = tl.cdiv(N, TILE)
        no_mean = tl.zeros((BLOCK_D,), tl.float32)
        head = (pid // tiles).to(tl.int64)
        _quantized_tile(
            q, q8, None, q_scale_ptr, no_mean, factor, pid % tiles, head, H, N, D, Q_SPAN, True, TILE, BLOCK_D
        )
    elif pid < Q_PROGRAMS + K_PROGRAMS:
        item = pid - Q_PROGRAMS
        head = (item // k_tiles).to(tl.int64)
        mean = tl.zeros((BLOCK_D,), tl.float32)
        if sums_ptr is not None:
            sums_ptrs = sums_ptr + (head * PARTS + tl.arange(0, PARTS))[:, None] * D + d[None, :]
            count = tl.maximum(tl.sum(tl.load(counts_ptr + head * PARTS + tl.arange(0, PARTS)), 0), 1)
            total = tl.sum(tl.load(sums_ptrs, mask=(d < D)[None, :], other=0.0), 0)
            mean = tl.math.div_rn(total, count.to(tl.float32))
        values, scale = _quantized_tile(
            k, k8, seen, k_scale_ptr, mean, 1.0, item % k_tiles, head, HKV, NK, D, K_SPAN, False, TILE, BLOCK_D
        )
        values = values.to(tl.float32)
        norm = tl.sqrt(tl.sum(values * values, 1)) * scale
        norm = tl.max(tl.where(norm == norm, norm, float("inf")), 0)
        tl.atomic_max(norm_ptr + head, norm, sem="relaxed")  # in any order the same
    elif v is not None:
        item = pid - Q_PROGRAMS - K_PROGRAMS
        head = (item // k_tiles).to(tl.int64)
        n = item % k_tiles * TILE + tl.arange(0, TILE)
        mask = (n < NK)[:, None] & (d < DV)[None, :]
        used = mask & _seen(seen, head // HKV, head % HKV, n, NK)[:, None]
        v_ptrs = v.data + head // HKV * v.batch + head % HKV * v.head + n[:, None] * v.token + d[None, :]
        x = tl.load(v_ptrs, mask=used, other=0.0)
        out = v16.data + head // HKV * v16.batch + head % HKV * v16.head + n[:, None] * v16.token + d[None, :]
        tl.store(out, x.to(tl.bfloat16), mask=mask)


class Seen(NamedTuple):
    """Keys that some query attends to."""

    data: Tensor  # (batches, heads, Nk) int32
    batches: int
    heads: int


def can_prepare(variant: AttentionVariant) -> bool:
    """Whether the groups of the variant lie within tiles."""
    groups = [token_groups(variant.granularity, role) for role in ("query", "key")]
    return all(group.groups == 1 and group.span <= TILE for group in groups)


def prepare_triton(
    q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, scale: float, smooth_k: bool, seen: Tensor | None = None
) -> tuple[QuantizedQK, Tensor]:
    """Quantized Q and K with the norm of keys, and V in bfloat16, for a variant that :func:`can_prepare` accepts.

    ``seen (M, Hkv or 1, Nk)`` int32 is 0 for keys that no query attends to; batch b uses b % M.
    """
    check_device(q.device)
    q, k, v = last_contiguous(q), last_contiguous(k), last_contiguous(v)
    check_offsets("attention", query=q, key=k, value=v)
    (batch, heads, tokens, channels), (key_heads, keys), values = q.shape, k.shape[1:3], v.shape[3]
    spans = [token_groups(variant.granularity, role).span for role in ("query", "key")]
    q8, k8 = (
        torch.empty(q.shape, dtype=torch.int8, device=q.device),
        torch.empty(k.shape, dtype=torch.int8, device=q.device),
    )
    q_scale = q.new_empty((batch, heads, cdiv(tokens, spans[0])), dtype=torch.float32)
    k_scale = q.new_empty((batch, key_heads, cdiv(keys, spans[1])), dtype=torch.float32)
    cast = v.dtype != torch.bfloat16 or seen is not None
    seen_keys = None if seen is None else Seen(seen, *seen.shape[:2])
    v16 = torch.empty(v.shape, dtype=torch.bfloat16, device=v.device) if cast else v
    block_d = max(power_of_2(max(channels, values)), 16)
    sums = counts = None
    if smooth_k:
        counts = q.new_empty((batch, key_heads, PARTS), dtype=torch.int32)
        sums = q.new_empty((batch, key_heads, PARTS, channels), dtype=torch.float32)
        norm = q.new_empty((batch, key_heads), dtype=torch.float32)
        steps = cdiv(cdiv(keys, TILE), PARTS)
        launch(_key_sums_kernel, (PARTS * key_heads * batch,))(
            _heads(k),
            seen_keys,
            sums,
            counts,
            norm,
            key_heads,
            keys,
            channels,
            steps,
            PARTS=PARTS,
            TILE=TILE,
            BLOCK_D=block_d,
            num_warps=4,
        )
    else:
        norm = q.new_zeros((batch, key_heads), dtype=torch.float32)
    q_programs, k_programs = cdiv(tokens, TILE) * heads * batch, cdiv(keys, TILE) * key_heads * batch
    launch(_prepare_kernel, (q_programs + k_programs * (2 if cast else 1),))(
        _heads(q),
        _heads(k),
        _heads(v) if cast else None,
        _heads(q8),
        _heads(k8),
        _heads(v16) if cast else None,
        seen_keys,
        q_scale,
        k_scale,
        sums,
        counts,
        norm,
        scale * LOG2_E,
        heads,
        key_heads,
        tokens,
        keys,
        channels,
        values,
        q_programs,
        k_programs,
        Q_SPAN=spans[0],
        K_SPAN=spans[1],
        PARTS=PARTS,
        TILE=TILE,
        BLOCK_D=block_d,
        num_warps=4 if block_d <= 64 else 8,
    )
    return QuantizedQK(q8, q_scale, k8, k_scale, channels, k_norm=norm), v16


def _heads(x: Tensor) -> Heads:
    return Heads(x, *x.stride()[:3])
