"""What Hopper's kernel reads of packed sequences for the integer exponential: the pass of prepare.py for each of them.

Formulas and results are those of :mod:`~qframework.kernels.attention.hopper.prepare`, of every sequence by itself:
K's mean, which is that of a sample, scales of groups that start with the sequence, and the norm of its keys.

Layout: ``q (total, H, D)``, ``k (total_k, Hkv, D)``, ``v (total_k, Hkv, Dv)`` with contiguous channels; scales
``(B, H, G)`` with as many groups as the longest sequence has. Lengths are known to the device alone. The first launch
sums sampled keys and lists the tiles of all sequences, the second computes one tile of all three in each program.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qframework.kernels.attention.hopper.prepare import SAMPLE, SAMPLE_PARTS, TILE, quantized_tile, tile_mean, warps
from qframework.kernels.attention.operands import LOG2_E, Lengths, QuantizedQK, check_offsets, sequence_of
from qframework.kernels.attention.quantize_qk import finite_or_zero
from qframework.kernels.attention.triton import LEAST_SCALE, Heads
from qframework.kernels.attention.variants import AttentionVariant, TokenGroups, token_groups
from qframework.kernels.runtime.chip import check_device
from qframework.kernels.runtime.launch import cdiv, launch, power_of_2
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import tl, triton


@triton.jit
def _list_tiles(tiles_ptr, starts_ptr, b, BATCH, TOTAL, LONGEST, TILE: tl.constexpr):
    """Write (sequence, tile) of the tiles of sequence ``b`` to its place among all; the first writes their number."""
    before = 0
    total = 0
    for first in range(0, BATCH, 128):
        other = first + tl.arange(0, 128)
        at, next_at = tl.minimum(other, BATCH - 1), tl.minimum(other, BATCH - 1) + 1
        start = tl.minimum(tl.maximum(tl.load(starts_ptr + at), 0), TOTAL)
        end = tl.minimum(tl.maximum(tl.load(starts_ptr + next_at), start), TOTAL)
        count = tl.where(other < BATCH, tl.cdiv(tl.minimum(end - start, LONGEST), TILE), 0)
        before += tl.sum(tl.where(other < b, count, 0), 0)
        total += tl.sum(count, 0)
    if b == 0:
        tl.store(tiles_ptr, total)
    _, tokens = sequence_of(starts_ptr, b, TOTAL, LONGEST)
    for first in range(0, tl.cdiv(tokens, TILE), 128):
        tile = first + tl.arange(0, 128)
        inside = tile < tl.cdiv(tokens, TILE)
        tl.store(tiles_ptr + 2 + (before + tile) * 2, b, mask=inside)
        tl.store(tiles_ptr + 3 + (before + tile) * 2, tile, mask=inside)


@triton.jit(do_not_specialize=["BATCH", "Q_TOTAL", "K_TOTAL", "LONGEST_Q", "LONGEST_K", "K_GROUPS"])
def _packed_statistics_kernel(
    k,  # Heads, without a dimension of batches
    q_starts_ptr,  # (B + 1,) int32
    k_starts_ptr,
    q_tiles_ptr,  # (1 + tiles, 2) int32: the number of tiles, then sequence and tile of each
    k_tiles_ptr,
    sums_ptr,  # (B, Hkv, PARTS, D) fp32, or None: K is not smoothed
    counts_ptr,  # (B, Hkv, PARTS) int32, the number of keys in each sum
    norm_ptr,  # (B, Hkv) fp32, is zeroed
    k_scale_ptr,  # (B, Hkv, K_GROUPS) fp32; the first two are set where there is no key
    HKV,
    D,
    BATCH,
    Q_TOTAL,
    K_TOTAL,
    LONGEST_Q,
    LONGEST_K,
    K_GROUPS,
    SAMPLE: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Grid (2 B lists, then PARTS * Hkv * B sums of a part of a head's keys,)."""
    wait_for_previous_kernel(OVERLAP)
    pid = tl.program_id(0)
    if pid < BATCH:
        _list_tiles(q_tiles_ptr, q_starts_ptr, pid, BATCH, Q_TOTAL, LONGEST_Q, TILE)
    elif pid < 2 * BATCH:
        _list_tiles(k_tiles_ptr, k_starts_ptr, pid - BATCH, BATCH, K_TOTAL, LONGEST_K, TILE)
    else:
        item = (pid - 2 * BATCH).to(tl.int64)
        part, head = (item % PARTS).to(tl.int32), item // PARTS
        k_start, keys = sequence_of(k_starts_ptr, head // HKV, K_TOTAL, LONGEST_K)
        if part == 0:
            tl.store(norm_ptr + head, 0.0)
            group = tl.arange(0, 2)
            tl.store(k_scale_ptr + head * K_GROUPS + group, LEAST_SCALE, mask=(keys == 0) & (group < K_GROUPS))
        if sums_ptr is not None:
            # As stride_of of prepare.py.
            stride = tl.maximum(keys // SAMPLE - 1, 0) // 2 * 2 + 1
            steps = tl.cdiv(tl.cdiv(keys, stride), TILE * PARTS)
            d = tl.arange(0, BLOCK_D)
            base = k.data + k_start * k.token + head % HKV * k.head
            total = tl.zeros((BLOCK_D,), tl.float32)
            count = 0
            for step in range(part * steps, part * steps + steps):
                n = (step * TILE + tl.arange(0, TILE)) * stride
                used = n < keys
                x = tl.load(base + n[:, None] * k.token + d[None, :], mask=used[:, None] & (d < D)[None, :], other=0.0)
                count += tl.sum(used.to(tl.int32), 0)
                total += tl.sum(finite_or_zero(x.to(tl.float32)), 0)
            tl.store(sums_ptr + item * D + d, total, mask=d < D)
            tl.store(counts_ptr + item, count)


@triton.jit
def _listed(tiles_ptr, starts_ptr, index, TOTAL, LONGEST):
    """(sequence, its first token, its tokens, tile) of the ``index``-th tile; no tokens if there are fewer tiles."""
    there = index < tl.load(tiles_ptr)
    b = tl.load(tiles_ptr + 2 + index * 2, mask=there, other=0)
    tile = tl.load(tiles_ptr + 3 + index * 2, mask=there, other=0)
    start, tokens = sequence_of(starts_ptr, b, TOTAL, LONGEST)
    return b.to(tl.int64), start, tl.where(there, tokens, 0), tile


_UNSPECIALIZED = ["Q_TOTAL", "K_TOTAL", "LONGEST_Q", "LONGEST_K", "Q_PROGRAMS", "K_PROGRAMS", "Q_COUNT", "K_COUNT"]


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def _prepare_packed_kernel(
    q,  # Heads, without a dimension of batches, as the others
    k,
    v,  # or None where V is in bfloat16 already
    q8,  # int8
    k8,
    v_out,  # bfloat16; or None
    q_starts_ptr,  # (B + 1,) int32
    k_starts_ptr,
    q_tiles_ptr,  # of _packed_statistics_kernel, as the next
    k_tiles_ptr,
    q_scale_ptr,  # (B, H, Q_COUNT) fp32
    k_scale_ptr,  # (B, Hkv, K_COUNT) fp32
    sums_ptr,  # (B, Hkv, PARTS, D) fp32, or None: K is not smoothed
    counts_ptr,  # (B, Hkv, PARTS) int32
    norm_ptr,  # (B, Hkv) fp32
    factor,
    H,
    HKV,
    D,
    DV,
    Q_TOTAL,
    K_TOTAL,
    LONGEST_Q,
    LONGEST_K,
    Q_PROGRAMS,
    K_PROGRAMS,
    Q_COUNT,
    K_COUNT,
    Q_GROUPS: tl.constexpr,  # TokenGroups
    K_GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Grid (tiles of Q, then of K, then of V of all heads, which are next to each other in memory,)."""
    wait_for_previous_kernel(OVERLAP)
    pid = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)
    if pid < Q_PROGRAMS:
        b, start, tokens, tile = _listed(q_tiles_ptr, q_starts_ptr, pid // H, Q_TOTAL, LONGEST_Q)
        no_mean = tl.zeros((BLOCK_D,), tl.float32)
        quantized_tile(
            q, q8, None, None, q_scale_ptr, no_mean, factor, tile, b * H + pid % H, H, tokens, D, start,
            tl.where(tokens > 0, Q_COUNT, 0), Q_GROUPS, True, TILE, BLOCK_D,
        )  # fmt: skip
    elif pid < Q_PROGRAMS + K_PROGRAMS:
        item = pid - Q_PROGRAMS
        b, start, tokens, tile = _listed(k_tiles_ptr, k_starts_ptr, item // HKV, K_TOTAL, LONGEST_K)
        head = b * HKV + item % HKV
        mean = tl.zeros((BLOCK_D,), tl.float32)
        if sums_ptr is not None:
            mean = tile_mean(sums_ptr, counts_ptr, head, D, PARTS, BLOCK_D)
        values, scale = quantized_tile(
            k, k8, None, None, k_scale_ptr, mean, 1.0, tile, head, HKV, tokens, D, start,
            tl.where(tokens > 0, K_COUNT, 0), K_GROUPS, False, TILE, BLOCK_D,
        )  # fmt: skip
        values = values.to(tl.float32)
        norm = tl.sqrt(tl.sum(values * values, 1)) * scale
        norm = tl.max(tl.where(norm == norm, norm, float("inf")), 0)
        tl.atomic_max(norm_ptr + head, norm, mask=tokens > 0, sem="relaxed")
    elif v is not None:
        item = pid - Q_PROGRAMS - K_PROGRAMS
        n = (item // HKV).to(tl.int64) * TILE + tl.arange(0, TILE)
        inside = (n < K_TOTAL)[:, None] & (d < DV)[None, :]
        head = (item % HKV).to(tl.int64)
        x = tl.load(v.data + head * v.head + n[:, None] * v.token + d[None, :], mask=inside, other=0.0)
        tl.store(v_out.data + head * v_out.head + n[:, None] * v_out.token + d[None, :], x.to(tl.bfloat16), mask=inside)


def prepare_packed_triton(
    q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, scale: float, smooth_k: bool, lengths: Lengths
) -> tuple[QuantizedQK, Tensor]:
    """Quantized Q and K with the norms of each sequence's keys, and V in bfloat16, for the integer exponential.

    Args:
        q: ``(total, H, D)`` in 16 bit, its channels contiguous, as those of the others.
        k: ``(total_k, Hkv, D)``.
        v: ``(total_k, Hkv, Dv)``.
        variant: of :func:`~qframework.kernels.attention.hopper.prepare.can_prepare`, with the integer exponential.
        scale: of the softmax.
        smooth_k: whether to subtract K's mean.
        lengths: of the sequences; starts that are out of range are clamped, as in the other kernels.
    """
    check_device(q.device)
    check_offsets("attention", query=q, key=k, value=v)
    (total, heads, channels), (k_total, key_heads, values) = q.shape, v.shape
    sequences = lengths.q_starts.numel() - 1
    groups: list[TokenGroups] = [token_groups(variant.granularity, role) for role in ("query", "key")]
    most = [
        min(cdiv(tokens, TILE) + sequences, cdiv(longest, TILE) * sequences)
        for tokens, longest in ((total, lengths.longest_q), (k_total, lengths.longest_k))
    ]
    q_tiles, k_tiles = (torch.empty((1 + n, 2), dtype=torch.int32, device=q.device) for n in most)
    q8, k8 = (torch.empty(x.shape, dtype=torch.int8, device=q.device) for x in (q, k))
    q_scale = q.new_empty((sequences, heads, groups[0].count(lengths.longest_q)), dtype=torch.float32)
    k_scale = q.new_empty((sequences, key_heads, groups[1].count(lengths.longest_k)), dtype=torch.float32)
    norm = q.new_empty((sequences, key_heads), dtype=torch.float32)
    sums = counts = None
    if smooth_k:
        sums = q.new_empty((sequences, key_heads, SAMPLE_PARTS, channels), dtype=torch.float32)
        counts = q.new_empty((sequences, key_heads, SAMPLE_PARTS), dtype=torch.int32)
    block_d = max(power_of_2(max(channels, values)), 16)
    shared = {"PARTS": SAMPLE_PARTS, "TILE": TILE, "BLOCK_D": block_d}
    lengths_of = (total, k_total, lengths.longest_q, lengths.longest_k)
    launch(_packed_statistics_kernel, (2 * sequences + SAMPLE_PARTS * key_heads * sequences,))(
        _heads(k), lengths.q_starts, lengths.k_starts, q_tiles, k_tiles, sums, counts, norm, k_scale, key_heads,
        channels, sequences, *lengths_of, k_scale.shape[2], SAMPLE=SAMPLE, **shared, num_warps=4,
    )  # fmt: skip
    cast = v.dtype != torch.bfloat16
    out = torch.empty(v.shape, dtype=torch.bfloat16, device=v.device) if cast else v
    programs = (most[0] * heads, most[1] * key_heads, cdiv(k_total, TILE) * key_heads if cast else 0)
    launch(_prepare_packed_kernel, (sum(programs),))(
        _heads(q), _heads(k), _heads(v) if cast else None, _heads(q8), _heads(k8), _heads(out) if cast else None,
        lengths.q_starts, lengths.k_starts, q_tiles, k_tiles, q_scale, k_scale, sums, counts, norm, scale * LOG2_E,
        heads, key_heads, channels, values, *lengths_of, *programs[:2], q_scale.shape[2], k_scale.shape[2],
        Q_GROUPS=groups[0], K_GROUPS=groups[1], **shared, num_warps=warps(block_d),
    )  # fmt: skip
    return QuantizedQK(q8, q_scale, k8, k_scale, channels, k_norm=norm), out


def _heads(x: Tensor) -> Heads:
    return Heads(x, 0, x.stride(1), x.stride(0))
