"""What specialized_kernel.py reads, in one pass: Q and K in INT8, and V in bfloat16 with the norm of K, or V in E4M3.

V is in bfloat16 for the integer exponential. Formulas: :mod:`~qframework.kernels.attention.quantize_qk`, for groups
within blocks of QUERY_BLOCK tokens, and :mod:`~qframework.kernels.attention.quantize_v`. The norm is the largest
``|k|`` of a head's quantized keys, infinite where a key held NaN or infinity.

K's mean is that of a sample of at least SAMPLE keys: the softmax does not change whatever is subtracted from all keys,
and a mean that is off by a 16th of the standard deviation takes as little from the range of the integers. Keys that no
query attends to do not affect the mean and the scales; they and their values are 0.

Layout: ``q (B, H, N, D)``, ``k (B, Hkv, Nk, D)``, ``v (B, Hkv, Nk, Dv)`` with contiguous channels; E4M3 is
``(B, Hkv, Dv, P)`` with its keys PAIRED. Two launches: sums of sampled keys and magnitudes of channels of V, where
either is needed, and one program for each tile of any of the three.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qframework.kernels.attention.operands import LOG2_E, QuantizedQK, Values, check_offsets, last_contiguous
from qframework.kernels.attention.quantize_qk import (
    finite_or_zero,
    finite_rows,
    group_scale,
    mark_rows,
    row_amax,
    saturated,
    to_integers,
)
from qframework.kernels.attention.quantize_v import key_of_pair, padded_tokens, round_to_e4m3
from qframework.kernels.attention.triton import INTERPRETED, LEAST_SCALE, Heads
from qframework.kernels.attention.variants import (
    QUERY_BLOCK,
    AttentionVariant,
    TokenGroups,
    fp8_ranges,
    paired,
    token_groups,
)
from qframework.kernels.runtime.chip import check_device
from qframework.kernels.runtime.launch import cdiv, launch, power_of_2
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.rounding import round_half_even
from qframework.kernels.runtime.triton import tl, triton

PARTS = 16  # sums of a head's keys: enough programs to fill a chip, few enough for every tile to add them
TILE = QUERY_BLOCK
SAMPLE = 256  # keys of a mean, at least
SAMPLE_PARTS = 4  # of fewer than twice as many keys: one for each tile


@triton.jit(do_not_specialize=["NK", "STRIDE", "STEPS", "V_STEPS", "K_PROGRAMS"])
def _statistics_kernel(
    k,  # Heads, or None: K is not smoothed
    v,  # Heads, or None: V stays in 16 bit
    seen,  # Seen, or None: all keys
    sums_ptr,  # (B, Hkv, K_PARTS, D) fp32
    counts_ptr,  # (B, Hkv, K_PARTS) int32, the number of keys in each sum
    norm_ptr,  # (B, Hkv) fp32, zeroed, or None
    amax_ptr,  # (B, Hkv, PARTS, Dv) fp32
    HKV,
    NK,
    D,
    DV,
    STRIDE,  # between sampled keys
    STEPS,  # tiles of sampled keys of a part
    V_STEPS,  # tiles of values of a part
    K_PROGRAMS,
    K_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Grid (K_PARTS * Hkv * B of K, then PARTS * Hkv * B of V,): sums of a part of a head, or magnitudes."""
    wait_for_previous_kernel(OVERLAP)
    pid = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    if pid < K_PROGRAMS:
        part, head = (pid % K_PARTS).to(tl.int32), pid // K_PARTS
        if k is not None:
            base = k.data + head // HKV * k.batch + head % HKV * k.head
            total = tl.zeros((BLOCK_D,), tl.float32)
            count = 0
            for step in range(part * STEPS, part * STEPS + STEPS):
                n = (step * TILE + tl.arange(0, TILE)) * STRIDE
                used = _seen(seen, head // HKV, head % HKV, n, NK)
                x = tl.load(base + n[:, None] * k.token + d[None, :], mask=used[:, None] & (d < D)[None, :], other=0.0)
                count += tl.sum(used.to(tl.int32), 0)
                total += tl.sum(finite_or_zero(x.to(tl.float32)), 0)
            tl.store(sums_ptr + pid * D + d, total, mask=d < D)
            tl.store(counts_ptr + pid, count)
        if norm_ptr is not None and part == 0:
            tl.store(norm_ptr + head, 0.0)
    elif v is not None:
        item = pid - K_PROGRAMS
        part, head = (item % PARTS).to(tl.int32), item // PARTS
        base = v.data + head // HKV * v.batch + head % HKV * v.head
        amax = tl.zeros((BLOCK_D,), tl.float32)
        for step in range(part * V_STEPS, part * V_STEPS + V_STEPS):
            n = step * TILE + tl.arange(0, TILE)
            used = _seen(seen, head // HKV, head % HKV, n, NK)
            x = tl.load(base + n[:, None] * v.token + d[None, :], mask=used[:, None] & (d < DV)[None, :], other=0.0)
            x = tl.abs(x.to(tl.float32))
            amax = tl.maximum(amax, tl.max(tl.where(x == x, x, float("inf")), 0))
        tl.store(amax_ptr + item * DV + d, amax, mask=d < DV)


@triton.jit
def _seen(seen, batch, head, n, N):
    """Which tokens exist and are seen."""
    used = n < N
    if seen is not None:
        at = (batch % seen.batches * seen.heads + head % seen.heads) * N + n
        used = tl.load(seen.data + at, mask=used, other=0) != 0
    return used


@triton.jit
def quantized_tile(
    x, q, rounded, seen, scale_ptr, mean, factor, tile, head, HEADS, N, D, START, GROUPS, G: tl.constexpr,
    QUERIES: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Quantize one tile of a head of ``x`` and store it; ``(integers, scale of each row)``.

    Its sequence has N tokens from START on, and GROUPS scales. ``rounded``, Heads or None, gets the integers times
    their scales, as round_tokens.py has them.
    """
    n = tile * TILE + tl.arange(0, TILE)
    d = tl.arange(0, BLOCK_D)
    mask = (n < N)[:, None] & (d < D)[None, :]
    x_base = x.data + START * x.token + head // HEADS * x.batch + head % HEADS * x.head
    x_ptrs = x_base + n[:, None] * x.token + d[None, :]
    used = mask & _seen(seen, head // HEADS, head % HEADS, n, N)[:, None]
    y = tl.load(x_ptrs, mask=used, other=0.0).to(tl.float32)
    y = tl.where(used, (y - mean[None, :]) * factor, 0.0)
    amax = row_amax(y)
    counted = finite_rows(amax) if QUERIES else amax
    scale, row_scale = group_scale(counted, 127, LEAST_SCALE, G.span, G.groups, G.modulo, G.divisor, TILE)
    IN_TILE: tl.constexpr = TILE // G.span * G.groups
    g = tile * IN_TILE + tl.arange(0, IN_TILE)
    tl.store(scale_ptr + head * GROUPS + g, scale, mask=g < GROUPS)
    inverse = tl.math.div_rn(1.0, row_scale)[:, None]
    values = to_integers(y, inverse, 127)
    if rounded is not None:
        y = round_half_even(saturated(y, inverse, 127)) * (row_scale / factor)[:, None]  # integers would be converted
        if QUERIES:
            y = tl.where((counted == amax)[:, None], y, float("nan"))
        base = rounded.data + START * rounded.token + head // HEADS * rounded.batch + head % HEADS * rounded.head
        y = y.to(rounded.data.dtype.element_ty)
        tl.store(base + n[:, None] * rounded.token + d[None, :], y, mask=mask)
    if QUERIES:
        values = mark_rows(values, amax, d < D, 127)
    q_base = q.data + START * q.token + head // HEADS * q.batch + head % HEADS * q.head
    tl.store(q_base + n[:, None] * q.token + d[None, :], values, mask=mask)
    return values, row_scale


@triton.jit
def tile_mean(sums_ptr, counts_ptr, head, D, PARTS: tl.constexpr, BLOCK_D: tl.constexpr):
    """The mean of a head's keys from the sums of its parts."""
    d = tl.arange(0, BLOCK_D)
    part = head * PARTS + tl.arange(0, PARTS)
    count = tl.maximum(tl.sum(tl.load(counts_ptr + part), 0), 1)
    total = tl.sum(tl.load(sums_ptr + part[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0), 0)
    return tl.math.div_rn(total, count.to(tl.float32))


@triton.jit
def _values(v, seen, head, HKV, n, NK, d, DV):
    """Values of keys ``n``, and which of them exist and are seen; others are 0."""
    used = _seen(seen, head // HKV, head % HKV, n, NK)[:, None] & (d < DV)[None, :]
    ptrs = v.data + head // HKV * v.batch + head % HKV * v.head + n[:, None] * v.token + d[None, :]
    return tl.load(ptrs, mask=used, other=0.0), used


@triton.jit(do_not_specialize=["N", "NK", "Q_PROGRAMS", "K_PROGRAMS"])
def _prepare_kernel(
    q,  # Heads
    k,  # Heads
    v,  # Heads, or None where V is in bfloat16 already
    q8,  # Heads, int8
    k8,  # Heads, int8
    v_out,  # Heads, bfloat16, or E4M3 (B, Hkv, Dv, P); or None
    seen,  # Seen, or None: all keys
    q_scale_ptr,  # (B, H, Gq) fp32
    k_scale_ptr,  # (B, Hkv, Gk) fp32
    v_scale_ptr,  # (B, Hkv, Dv) fp32, of E4M3, or None
    sums_ptr,  # (B, Hkv, K_PARTS, D) fp32, or None: K is not smoothed
    counts_ptr,  # (B, Hkv, K_PARTS) int32
    norm_ptr,  # (B, Hkv) fp32, or None
    amax_ptr,  # (B, Hkv, PARTS, Dv) fp32, or None
    rounded_q,  # Heads of Q's integers times their scales, in its dtype, or None
    rounded_k,  # the same of K
    mean_ptr,  # (B, Hkv, D) fp32, where K is rounded
    factor,
    H,
    HKV,
    N,
    NK,
    D,
    DV,
    Q_PROGRAMS,
    K_PROGRAMS,
    Q_GROUPS: tl.constexpr,  # TokenGroups
    K_GROUPS: tl.constexpr,
    V_RANGE: tl.constexpr,  # what the largest magnitude of a channel becomes in E4M3
    K_PARTS: tl.constexpr,
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
        groups = tl.cdiv(N, Q_GROUPS.span) * Q_GROUPS.groups
        quantized_tile(
            q, q8, rounded_q, None, q_scale_ptr, no_mean, factor, pid % tiles, head, H, N, D, 0, groups, Q_GROUPS,
            True, TILE, BLOCK_D,
        )  # fmt: skip
    elif pid < Q_PROGRAMS + K_PROGRAMS:
        item = pid - Q_PROGRAMS
        head = (item // k_tiles).to(tl.int64)
        mean = tl.zeros((BLOCK_D,), tl.float32)
        if sums_ptr is not None:
            mean = tile_mean(sums_ptr, counts_ptr, head, D, K_PARTS, BLOCK_D)
        if rounded_k is not None and item % k_tiles == 0:
            tl.store(mean_ptr + head * D + d, mean, mask=d < D)
        groups = tl.cdiv(NK, K_GROUPS.span) * K_GROUPS.groups
        values, scale = quantized_tile(
            k, k8, rounded_k, seen, k_scale_ptr, mean, 1.0, item % k_tiles, head, HKV, NK, D, 0, groups, K_GROUPS,
            False, TILE, BLOCK_D,
        )  # fmt: skip
        if norm_ptr is not None:
            values = values.to(tl.float32)
            norm = tl.sqrt(tl.sum(values * values, 1)) * scale
            norm = tl.max(tl.where(norm == norm, norm, float("inf")), 0)
            tl.atomic_max(norm_ptr + head, norm, sem="relaxed")  # in any order the same
    elif v is not None:
        item = pid - Q_PROGRAMS - K_PROGRAMS
        head = (item // k_tiles).to(tl.int64)
        first = item % k_tiles * TILE
        out = v_out.data + head // HKV * v_out.batch + head % HKV * v_out.head
        if amax_ptr is not None:
            parts = (head * PARTS + tl.arange(0, PARTS))[:, None] * DV + d[None, :]
            v_amax = tl.max(tl.load(amax_ptr + parts, mask=(d < DV)[None, :], other=0.0), 0)
            v_scale = tl.maximum(tl.math.div_rn(v_amax, V_RANGE), LEAST_SCALE)
            v_scale = tl.where(v_amax < float("inf"), v_scale, float("nan"))
            if item % k_tiles == 0:
                tl.store(v_scale_ptr + head * DV + d, v_scale, mask=d < DV)
            inverse = tl.math.div_rn(1.0, v_scale)[None, :]
            padded = v_out.token  # a channel has so many keys
            place = first + tl.arange(0, TILE)
            x, used = _values(v, seen, head, HKV, key_of_pair(place), NK, d, DV)
            y = tl.where(used, x.to(tl.float32) * inverse, 0.0)
            y = tl.minimum(tl.maximum(y, -V_RANGE), V_RANGE)
            if INTERPRETED:  # its casts truncate
                y = round_to_e4m3(y)
            y = tl.trans(y.to(tl.float8e4nv))
            tl.store(out + d[:, None] * padded + place[None, :], y, mask=(d < DV)[:, None] & (place < padded)[None, :])
        else:
            n = first + tl.arange(0, TILE)
            x, _ = _values(v, seen, head, HKV, n, NK, d, DV)
            inside = (n < NK)[:, None] & (d < DV)[None, :]
            tl.store(out + n[:, None] * v_out.token + d[None, :], x.to(tl.bfloat16), mask=inside)


class Rounded(NamedTuple):
    """Where the pass stores Q and K rounded to their integers, and K's mean, for a gradient."""

    query: Tensor  # like Q, of any strides but for contiguous channels, as the next
    key: Tensor
    mean: Tensor  # (B, Hkv, 1, D) fp32, contiguous


class Seen(NamedTuple):
    """Keys that some query attends to."""

    data: Tensor  # (batches, heads, Nk) int32
    batches: int
    heads: int


def can_prepare(variant: AttentionVariant) -> bool:
    """Whether the pass quantizes for the variant: groups lie within tiles, and Hopper's kernel takes its values."""
    groups = [token_groups(variant.granularity, role) for role in ("query", "key")]
    within = variant.qk_bits == 8 and not variant.smooth_q and all(group.span <= TILE for group in groups)
    integer = variant.exponential == "integer" and all(group.groups == 1 for group in groups)
    return within and (integer or paired(variant))


def warps(block_d: int) -> int:
    """Warps of a program that quantizes a tile of so many channels."""
    return 4 if block_d <= 64 else 8


def stride_of(keys: int, all_of_them: bool) -> int:
    """Between the keys of a sample; odd, so that the columns of an image, mostly a power of two, have equal shares."""
    return 1 if all_of_them else max(keys // SAMPLE - 1, 0) // 2 * 2 + 1


def parts_of(keys: int, all_of_them: bool) -> int:
    """How many sums the mean of a head's keys is made of."""
    return SAMPLE_PARTS if cdiv(keys, stride_of(keys, all_of_them)) <= SAMPLE_PARTS * TILE else PARTS


class _Statistics(NamedTuple):
    """Of parts of the keys; None where they are not needed."""

    sums: Tensor | None
    counts: Tensor | None
    norm: Tensor | None
    amax: Tensor | None


def _statistics(k: Tensor, v: Tensor, smooth_k: bool, fp8: bool, seen: Seen | None) -> _Statistics:
    """What tiles need to know of all keys; the norm is zeroed."""
    (batch, heads, keys, channels), values = k.shape, v.shape[3]
    norm = None if fp8 else k.new_empty((batch, heads), dtype=torch.float32)
    if not smooth_k and norm is not None:
        return _Statistics(None, None, norm.zero_(), None)
    sums = counts = amax = None
    parts = parts_of(keys, seen is not None)
    if smooth_k:
        counts = k.new_empty((batch, heads, parts), dtype=torch.int32)
        sums = k.new_empty((batch, heads, parts, channels), dtype=torch.float32)
    if fp8:
        amax = k.new_empty((batch, heads, PARTS, values), dtype=torch.float32)
    if sums is None and amax is None:
        return _Statistics(None, None, None, None)
    stride = stride_of(keys, seen is not None)
    k_programs, v_programs = (0 if x is None else n * heads * batch for x, n in ((sums, parts), (amax, PARTS)))
    block_d = max(power_of_2(max(channels, values)), 16)
    launch(_statistics_kernel, (k_programs + v_programs,))(
        None if sums is None else _heads(k),
        None if amax is None else _heads(v),
        seen,
        sums,
        counts,
        norm,
        amax,
        heads,
        keys,
        channels,
        values,
        stride,
        cdiv(cdiv(cdiv(keys, stride), TILE), parts),
        cdiv(cdiv(keys, TILE), PARTS),
        k_programs,
        K_PARTS=parts,
        PARTS=PARTS,
        TILE=TILE,
        BLOCK_D=block_d,
        num_warps=4,
    )
    return _Statistics(sums, counts, norm, amax)


def prepare_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: AttentionVariant,
    scale: float,
    smooth_k: bool,
    seen: Tensor | None = None,
    rounded: Rounded | None = None,
) -> tuple[QuantizedQK, Values]:
    """Quantized Q and K, and V in bfloat16 with K's norm, or in E4M3, for a variant that :func:`can_prepare` accepts.

    ``seen (M, Hkv or 1, Nk)`` int32 is 0 for keys that no query attends to; batch b uses b % M. ``rounded`` is filled.
    """
    check_device(q.device)
    q, k, v = last_contiguous(q), last_contiguous(k), last_contiguous(v)
    check_offsets("attention", query=q, key=k, value=v)
    (batch, heads, tokens, channels), (key_heads, keys), values = q.shape, k.shape[1:3], v.shape[3]
    groups: list[TokenGroups] = [token_groups(variant.granularity, role) for role in ("query", "key")]
    fp8 = variant.pv == "fp8"
    seen_keys = None if seen is None else Seen(seen, *seen.shape[:2])
    k8 = torch.empty(k.shape, dtype=torch.int8, device=q.device)
    q8 = torch.empty(q.shape, dtype=torch.int8, device=q.device)
    q_scale = q.new_empty((batch, heads, groups[0].count(tokens)), dtype=torch.float32)
    k_scale = q.new_empty((batch, key_heads, groups[1].count(keys)), dtype=torch.float32)
    statistics = _statistics(k, v, smooth_k, fp8, seen_keys)
    out, v_scale = v, None
    if fp8:
        size = (batch, key_heads, values, padded_tokens(keys))
        out = torch.empty(size, dtype=torch.float8_e4m3fn, device=v.device)
        v_scale = q.new_empty((batch, key_heads, values), dtype=torch.float32)
    elif v.dtype != torch.bfloat16 or seen is not None:
        out = torch.empty(v.shape, dtype=torch.bfloat16, device=v.device)
    cast = out is not v
    block_d = max(power_of_2(max(channels, values)), 16)
    q_programs, k_programs = cdiv(tokens, TILE) * heads * batch, cdiv(keys, TILE) * key_heads * batch
    launch(_prepare_kernel, (q_programs + k_programs * (2 if cast else 1),))(
        _heads(q),
        _heads(k),
        _heads(v) if cast else None,
        _heads(q8),
        _heads(k8),
        _heads(out) if cast else None,
        seen_keys,
        q_scale,
        k_scale,
        v_scale,
        statistics.sums,
        statistics.counts,
        statistics.norm,
        statistics.amax,
        *((None, None, None) if rounded is None else (_heads(rounded.query), _heads(rounded.key), rounded.mean)),
        scale * LOG2_E,
        heads,
        key_heads,
        tokens,
        keys,
        channels,
        values,
        q_programs,
        k_programs,
        Q_GROUPS=groups[0],
        K_GROUPS=groups[1],
        V_RANGE=fp8_ranges(variant.accumulator)[1],
        K_PARTS=parts_of(keys, seen is not None),
        PARTS=PARTS,
        TILE=TILE,
        BLOCK_D=block_d,
        num_warps=warps(block_d) if rounded is None else 4,  # then 2 to 14 percent faster
    )
    qk = QuantizedQK(q8, q_scale, k8, k_scale, channels, k_norm=statistics.norm)
    return qk, Values(out, v_scale, paired=fp8)


def _heads(x: Tensor) -> Heads:
    return Heads(x, *x.stride()[:3])
