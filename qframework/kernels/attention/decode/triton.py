"""The Triton kernels of ``qframework::decode_attention``: attention to a share of the keys, and the sum of the shares.

K and V stay in INT8 until they are in registers. There a pair of neighbouring channels of a token, read as one 16-bit
number, is split into an even and an odd channel of 16 bit each, which is exact. Pairs are loaded in the layout of a
tensor core's operand, so no thread needs values of another, and each product is done once for the even and once for the
odd channels.
"""

from __future__ import annotations

from qframework.kernels.attention.operands import LOG2_E
from qframework.kernels.attention.softcap import capped
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import INTERPRET, tl, triton
from qframework.numerics import MIN_SCALE

_INTERPRETED = tl.constexpr(INTERPRET)
_LOG2_E = tl.constexpr(LOG2_E)
_MIN_SCALE = tl.constexpr(MIN_SCALE)
_LOWEST = tl.constexpr(-3.0e38)
# A byte plus 128 in the mantissa of 1024, less 1152. 0x4240 takes the low bytes of two 16-bit numbers, 0x4341 the high.
_TO_FP16 = tl.constexpr(
    "{ .reg .b32 biased, high, offset; xor.b32 biased, $2, 0x80808080; mov.b32 high, 0x64646464;"
    " mov.b32 offset, 0x64806480; prmt.b32 $0, biased, high, 0x4240; prmt.b32 $1, biased, high, 0x4341;"
    " sub.rn.f16x2 $0, $0, offset; sub.rn.f16x2 $1, $1, offset; }"
)
# BF16 has seven bits of mantissa: 128 plus the low seven bits, less 128, or less 256 where the sign bit is set.
_TO_BF16 = tl.constexpr(
    "{ .reg .b32 low, sign, high, one, a, b; and.b32 low, $2, 0x7F7F7F7F; and.b32 sign, $2, 0x80808080;"
    " mov.b32 high, 0x43434343; mov.b32 one, 0xBF80BF80; prmt.b32 a, low, high, 0x4240; prmt.b32 b, sign, high, 0x4240;"
    " fma.rn.bf16x2 $0, b, one, a; prmt.b32 a, low, high, 0x4341; prmt.b32 b, sign, high, 0x4341;"
    " fma.rn.bf16x2 $1, b, one, a; }"
)


@triton.jit
def _bytes(pairs):
    """The low and the high bytes of an int16 tile, as signed numbers."""
    return (pairs << 8 >> 8).to(tl.float32), (pairs >> 8).to(tl.float32)


@triton.jit
def _bytes_to_fp16(pairs):
    """The low and the high bytes of an int16 tile, as signed numbers in fp16; exact."""
    if _INTERPRETED:
        low, high = _bytes(pairs)
        low, high = low.to(tl.float16), high.to(tl.float16)
    else:
        low, high = tl.inline_asm_elementwise(
            _TO_FP16, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    return low, high


@triton.jit
def _bytes_to_bf16(pairs):
    """The low and the high bytes of an int16 tile, as signed numbers in bf16; exact."""
    if _INTERPRETED:  # the interpreter multiplies the bits of bf16
        low, high = _bytes(pairs)
    else:
        low, high = tl.inline_asm_elementwise(
            _TO_BF16, "=r,=r,r", [pairs], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    return low, high


@triton.jit
def _row_amax(x):
    """The largest magnitude of each row of a float32 tile, (M,), at least MIN_SCALE."""
    return tl.maximum(tl.max(tl.abs(x), 1), _MIN_SCALE)


@triton.jit
def _load_queries(
    q_ptr, row, rows_mask, stride_qb, stride_qh, stride_qn, D: tl.constexpr, BLOCK_D: tl.constexpr, BF16: tl.constexpr
):
    """Even and odd channels of the queries at ``row = (b, h, i)``, in fp16 or bf16, and a factor for each row.

    The factor of float32 queries is their largest magnitude, by which they are divided; that of others is 1.
    """
    b, h, i = row
    pairs = tl.arange(0, BLOCK_D // 2)
    inside = rows_mask[:, None] & (pairs < D // 2)[None, :]
    if q_ptr.dtype.element_ty == tl.float32:
        place = b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh + i.to(tl.int64) * stride_qn
        ptrs = q_ptr + place[:, None] + 2 * pairs[None, :]
        even, odd = tl.load(ptrs, mask=inside, other=0.0), tl.load(ptrs + 1, mask=inside, other=0.0)
        factor = tl.maximum(_row_amax(even), _row_amax(odd))
        even, odd = (even * (1.0 / factor)[:, None]).to(tl.float16), (odd * (1.0 / factor)[:, None]).to(tl.float16)
    else:
        place = (
            b.to(tl.int64) * (stride_qb // 2) + h.to(tl.int64) * (stride_qh // 2) + i.to(tl.int64) * (stride_qn // 2)
        )
        ptrs = q_ptr.to(tl.pointer_type(tl.int32)) + place[:, None] + pairs[None, :]
        both = tl.load(ptrs, mask=inside, other=0)
        factor = tl.full(rows_mask.shape, 1.0, tl.float32)
        if not BF16:
            even = both.to(tl.int16).to(tl.float16, bitcast=True)
            odd = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        elif _INTERPRETED:
            even, odd = (both << 16).to(tl.float32, bitcast=True), (both & -65536).to(tl.float32, bitcast=True)
        else:
            even = both.to(tl.int16).to(tl.bfloat16, bitcast=True)
            odd = (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return even, odd, factor


_NOT_SPECIALIZED = ["HKV", "GROUP", "N", "capacity", "mask_keys", "splits", "window", "stride_length"]
_NOT_SPECIALIZED += [*(f"stride_m{x}" for x in "bhnk"), *(f"stride_sink_{x}" for x in "bhn")]


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _decode_attention_kernel(
    q_ptr,  # (B, H, N, D) float
    k_ptr,  # (B, Hkv, capacity, D) int8
    v_ptr,  # (B, Hkv, capacity, DV) int8
    scales_ptr,  # (B, Hkv, capacity, 2) bf16: of K and of V
    lengths_ptr,  # (B,) or (1,) int32, with LENGTHS
    mask_ptr,  # (B, H, N, mask_keys) bool as int8, or float
    key_mean_ptr,  # (B, Hkv, D) fp32, what the keys lack, with a soft cap or sinks; or None
    sinks_ptr,  # (B, H, N) float: one more natural logit of each row, without a value; or None
    out_ptr,  # (B, N, H, DV), or with SPLIT (B * Hkv, splits, GROUP * QUERIES, DV) fp32
    top_ptr,  # (B * Hkv, splits, GROUP * QUERIES) fp32, with SPLIT: maxima of the logits in base 2
    sum_ptr,  # (B * Hkv, splits, GROUP * QUERIES) fp32, with SPLIT: sums of the weights
    HKV,
    GROUP,  # query heads of one key head
    N,
    capacity,
    mask_keys,
    splits,
    window,
    logit_scale,  # to logits in base 2
    softcap,  # of natural logits, or None
    stride_qb,
    stride_qh,
    stride_qn,
    stride_kb,
    stride_kh,
    stride_vb,
    stride_vh,
    stride_sb,
    stride_sh,
    stride_length,
    stride_mb,
    stride_mh,
    stride_mn,
    stride_mk,
    stride_sink_b,
    stride_sink_h,
    stride_sink_n,
    D: tl.constexpr,
    DV: tl.constexpr,
    READ_D: tl.constexpr,  # channels that are read, at least D: of a padded row more, in whole vectors
    READ_DV: tl.constexpr,
    STRIDE_KN: tl.constexpr,
    STRIDE_VN: tl.constexpr,
    QUERIES: tl.constexpr,  # N rounded up to a power of two
    BF16: tl.constexpr,  # the product of Q and K is in bf16 instead of fp16
    LENGTHS: tl.constexpr,
    MASK: tl.constexpr,  # "none", "bool" or "float"
    MASK_PER_ROW: tl.constexpr,  # the mask differs between the rows of a program
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Grid (row blocks, splits, Hkv * B). A program attends with BLOCK_M of the GROUP * QUERIES rows that share a key
    head to one of ``splits`` shares of its visible keys."""
    wait_for_previous_kernel(OVERLAP)
    ROWS = GROUP * QUERIES
    split, head = tl.program_id(1), tl.program_id(2)
    b, kv = head // HKV, head % HKV
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    h, i = kv * GROUP + rows // QUERIES, rows % QUERIES
    in_rows = (rows < ROWS) & (i < N)
    q_even, q_odd, q_factor = _load_queries(
        q_ptr, (b, h, i), in_rows, stride_qb, stride_qh, stride_qn, D, BLOCK_D, BF16
    )

    length = capacity
    if LENGTHS:
        length = tl.minimum(tl.load(lengths_ptr + b * stride_length), capacity)
    if MASK != "none":
        length = tl.minimum(length, mask_keys)
    position = length - N + i  # of each row's token
    first = 0
    if WINDOW:
        first = tl.maximum(length - N - window + 1, 0) // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(tl.maximum(length - first, 0), BLOCK_N), splits) * BLOCK_N
    begin = first + split * share
    end = tl.minimum(begin + share, length)

    k_base = (k_ptr + b.to(tl.int64) * stride_kb + kv.to(tl.int64) * stride_kh).to(tl.pointer_type(tl.int16))
    v_base = (v_ptr + b.to(tl.int64) * stride_vb + kv.to(tl.int64) * stride_vh).to(tl.pointer_type(tl.int16))
    # Both scales of a token are one load of four bytes, which is the least that an asynchronous copy takes.
    scales_base = (scales_ptr + b.to(tl.int64) * stride_sb + kv.to(tl.int64) * stride_sh).to(tl.pointer_type(tl.int32))
    pairs, pairs_v = tl.arange(0, BLOCK_D // 2), tl.arange(0, BLOCK_DV // 2)
    if MASK != "none":
        mask_base = mask_ptr + b.to(tl.int64) * stride_mb
        mask_rows = h.to(tl.int64) * stride_mh + i.to(tl.int64) * stride_mn

    if key_mean_ptr is not None:
        mean_ptrs = key_mean_ptr + head * D + 2 * pairs
        even = tl.load(mean_ptrs, mask=pairs < D // 2, other=0.0)
        odd = tl.load(mean_ptrs + 1, mask=pairs < D // 2, other=0.0)
        offset = tl.sum(q_even.to(tl.float32) * even[None, :] + q_odd.to(tl.float32) * odd[None, :], 1)
        offset = offset * q_factor * logit_scale

    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if sinks_ptr is not None:  # the first share has it
        sink_ptrs = sinks_ptr + b * stride_sink_b + h * stride_sink_h + i * stride_sink_n
        sink = tl.load(sink_ptrs, mask=in_rows & (split == 0), other=float("-inf"))
        top = sink.to(tl.float32) * _LOG2_E
        total = tl.where(top == float("-inf"), 0.0, 1.0)
    acc_even = tl.zeros((BLOCK_M, BLOCK_DV // 2), tl.float32)
    acc_odd = tl.zeros((BLOCK_M, BLOCK_DV // 2), tl.float32)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK_N)
        at = tl.minimum(n, capacity - 1)  # what is read past the end has weight 0
        seen = n < end
        scales = tl.load(scales_base + n, mask=seen, other=0)
        k_scale = (scales << 16).to(tl.float32, bitcast=True)
        v_scale = (scales & -65536).to(tl.float32, bitcast=True)
        k_ptrs = k_base + at[:, None] * (STRIDE_KN // 2) + pairs[None, :]
        k = tl.load(k_ptrs) if BLOCK_D == READ_D else tl.load(k_ptrs, mask=(pairs < READ_D // 2)[None, :], other=0)
        if BF16:
            k_even, k_odd = _bytes_to_bf16(k)
        else:
            k_even, k_odd = _bytes_to_fp16(k)
        s = tl.dot(q_even, tl.trans(k_even))
        s = tl.dot(q_odd, tl.trans(k_odd), s)
        s = s * (k_scale * logit_scale)[None, :]
        if q_ptr.dtype.element_ty == tl.float32:
            s = s * q_factor[:, None]
        if key_mean_ptr is not None:
            s += offset[:, None]
        if softcap is not None:
            s = capped(s, softcap, _LOG2_E)
        visible = seen[None, :]
        if CAUSAL:
            visible = visible & (n[None, :] <= position[:, None])
        if WINDOW:
            visible = visible & (n[None, :] > position[:, None] - window)
        if MASK != "none":
            if MASK_PER_ROW:
                mask = tl.load(
                    mask_base + mask_rows[:, None] + n[None, :] * stride_mk,
                    mask=in_rows[:, None] & seen[None, :],
                    other=0,
                )
            else:
                mask = tl.load(mask_base + n * stride_mk, mask=seen, other=0)[None, :]
            if MASK == "bool":
                visible = visible & (mask != 0)
            else:
                mask = mask.to(tl.float32)
                hidden = mask == float("-inf")
                s = s + tl.where(hidden, float("-inf"), tl.maximum(mask * _LOG2_E, _LOWEST))
        s = tl.where(visible, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        base = tl.where(new == float("-inf"), 0.0, new)  # of rows that have seen no key
        p = tl.math.exp2(s - base[:, None])
        decay = tl.math.exp2(top - base)
        total = total * decay + tl.sum(p, 1)
        weights = tl.where(p > 0.0, p * v_scale[None, :], 0.0).to(tl.bfloat16)  # a hidden key may hold NaN
        if _INTERPRETED:
            weights = weights.to(tl.float32)
        v_ptrs = v_base + at[:, None] * (STRIDE_VN // 2) + pairs_v[None, :]
        v = tl.load(v_ptrs) if BLOCK_DV == READ_DV else tl.load(v_ptrs, mask=(pairs_v < READ_DV // 2)[None, :], other=0)
        v_even, v_odd = _bytes_to_bf16(v)
        acc_even = tl.dot(weights, v_even, acc_even * decay[:, None])
        acc_odd = tl.dot(weights, v_odd, acc_odd * decay[:, None])
        top = new

    out_mask = in_rows[:, None] & (pairs_v < DV // 2)[None, :]
    if SPLIT:
        place = (head.to(tl.int64) * splits + split) * ROWS + rows
        tl.store(top_ptr + place, top, mask=in_rows)
        tl.store(sum_ptr + place, total, mask=in_rows)
        out_ptrs = out_ptr + (place * DV)[:, None] + 2 * pairs_v[None, :]
    else:
        inverse = tl.where(total > 0.0, 1.0 / total, tl.where(total == 0.0, 0.0, total))
        acc_even, acc_odd = acc_even * inverse[:, None], acc_odd * inverse[:, None]
        place = (b * N + i).to(tl.int64) * (HKV * GROUP) + h
        out_ptrs = out_ptr + (place * DV)[:, None] + 2 * pairs_v[None, :]
    tl.store(out_ptrs, acc_even.to(out_ptr.dtype.element_ty), mask=out_mask)
    tl.store(out_ptrs + 1, acc_odd.to(out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit(do_not_specialize=["HKV", "GROUP", "N", "splits"])
def _combine_kernel(
    part_ptr,  # (B * Hkv, splits, GROUP * QUERIES, DV) fp32, or with HAS_UNITS fp16
    top_ptr,  # (B * Hkv, splits, GROUP * QUERIES) fp32
    sum_ptr,  # (B * Hkv, splits, GROUP * QUERIES) fp32
    unit_ptr,  # (B * Hkv, splits, GROUP * QUERIES) fp32: times this a row of a share is what the others hold
    out_ptr,  # (B, N, H, DV) float
    HKV,
    GROUP,
    N,
    splits,
    DV: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_UNITS: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Grid (GROUP * N, DV / BLOCK_DV, B * Hkv); a program weighs the shares of one row by their sums of weights."""
    wait_for_previous_kernel(OVERLAP)
    ROWS = GROUP * QUERIES
    g, i, head = tl.program_id(0) // N, tl.program_id(0) % N, tl.program_id(2)
    b, h, row = head // HKV, (head % HKV) * GROUP + g, g * QUERIES + i
    channels = tl.program_id(1) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    top = float("-inf")
    total = 0.0
    acc = tl.zeros((BLOCK_DV,), tl.float32)
    for first in range(0, splits, BLOCK_S):
        s = first + tl.arange(0, BLOCK_S)
        place = (head.to(tl.int64) * splits + s) * ROWS + row
        tops = tl.load(top_ptr + place, mask=s < splits, other=float("-inf"))
        sums = tl.load(sum_ptr + place, mask=s < splits, other=0.0)
        parts = tl.load(
            part_ptr + (place * DV)[:, None] + channels[None, :],
            mask=(s < splits)[:, None] & (channels < DV)[None, :],
            other=0.0,
        )
        new = tl.maximum(top, tl.max(tops, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.math.exp2(tops - base)
        decay = tl.math.exp2(top - base)
        total = total * decay + tl.sum(sums * weights, 0)
        if HAS_UNITS:
            weights = weights * tl.load(unit_ptr + place, mask=s < splits, other=0.0)
        acc = acc * decay + tl.sum(parts.to(tl.float32) * weights[:, None], 0)
        top = new
    inverse = tl.where(total > 0.0, 1.0 / total, tl.where(total == 0.0, 0.0, total))
    place = (b * N + i).to(tl.int64) * (HKV * GROUP) + h
    out = (acc * inverse).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place * DV + channels, out, mask=channels < DV)


@triton.jit(do_not_specialize=["HKV", "GROUP", "N", "splits"])
def _combine_rows_kernel(
    part_ptr,  # (B * Hkv, splits, GROUP * QUERIES, DV) fp32, or with HAS_UNITS fp16
    top_ptr,  # (B * Hkv, splits, GROUP * QUERIES) fp32
    sum_ptr,  # (B * Hkv, splits, GROUP * QUERIES) fp32
    unit_ptr,  # (B * Hkv, splits, GROUP * QUERIES) fp32: times this a row of a share is what the others hold
    out_ptr,  # (B, N, H, DV) float
    HKV,
    GROUP,
    N,
    splits,
    DV: tl.constexpr,
    QUERIES: tl.constexpr,
    STEP: tl.constexpr,  # splits whose loads are in flight together
    BLOCK_R: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_UNITS: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """As ``_combine_kernel`` for many rows; grid (cdiv(GROUP * QUERIES, BLOCK_R), B * Hkv).

    Neighbouring threads read the maxima and sums of neighbouring rows, and no thread needs another's share.
    """
    wait_for_previous_kernel(OVERLAP)
    ROWS = GROUP * QUERIES
    head = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    channels = tl.arange(0, BLOCK_DV)
    g, i = rows // QUERIES, rows % QUERIES
    inside = (rows < ROWS) & (i < N)
    seen = inside[:, None] & (channels < DV)[None, :]
    top = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_R,), tl.float32)
    acc = tl.zeros((BLOCK_R, BLOCK_DV), tl.float32)
    for first in range(0, splits, STEP):
        new = top
        for j in tl.static_range(STEP):
            place = (head.to(tl.int64) * splits + first + j) * ROWS + rows
            there = inside & (first + j < splits)
            new = tl.maximum(new, tl.load(top_ptr + place, mask=there, other=float("-inf")))
        base = tl.where(new == float("-inf"), 0.0, new)
        decay = tl.math.exp2(top - base)
        total = total * decay
        acc = acc * decay[:, None]
        for j in tl.static_range(STEP):
            place = (head.to(tl.int64) * splits + first + j) * ROWS + rows
            there = inside & (first + j < splits)
            weight = tl.math.exp2(tl.load(top_ptr + place, mask=there, other=float("-inf")) - base)
            total += tl.load(sum_ptr + place, mask=there, other=0.0) * weight
            if HAS_UNITS:
                weight = weight * tl.load(unit_ptr + place, mask=there, other=0.0)
            parts = tl.load(
                part_ptr + (place * DV)[:, None] + channels[None, :], mask=seen & (first + j < splits), other=0.0
            )
            acc += parts.to(tl.float32) * weight[:, None]
        top = new
    inverse = tl.where(total > 0.0, 1.0 / total, tl.where(total == 0.0, 0.0, total))
    place = ((head // HKV) * N + i).to(tl.int64) * (HKV * GROUP) + (head % HKV) * GROUP + g
    out = (acc * inverse[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (place * DV)[:, None] + channels[None, :], out, mask=seen)
