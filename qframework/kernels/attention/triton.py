"""The Triton kernel of quantized attention: one for every variant, mask and layout.

Formula and layout: see :mod:`~qframework.kernels.attention.quantized_attention`, which launches it.
"""

from __future__ import annotations

from qframework.kernels.attention.operands import sequence_of
from qframework.kernels.attention.quantize_qk import finite_rows, group_scale, row_amax, to_integers
from qframework.kernels.attention.quantize_v import round_to_e4m3
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.rounding import round_half_even, round_to_int8
from qframework.kernels.runtime.triton import INTERPRET, tl, triton

INTERPRETED = tl.constexpr(INTERPRET)


@triton.jit
def _scores(
    q, q_high, q_scale, k_ptrs, k_scale_ptrs, k_mask, inside, INT4: tl.constexpr, K_TOKEN_SCALE: tl.constexpr
):  # fmt: skip
    """Logits (BLOCK_M, BLOCK_N) of one block of keys in the unit of ``q_scale``, before any bias."""
    k = tl.load(k_ptrs, mask=k_mask, other=0)
    if INT4:  # low and high halves hold different channels: two products, no shuffle
        products = tl.dot(q, ((k << 4) >> 4), out_dtype=tl.int32)
        products = tl.dot(q_high, (k >> 4), products, out_dtype=tl.int32)
    else:
        products = tl.dot(q, k, out_dtype=tl.int32)
    if K_TOKEN_SCALE:
        k_scale = tl.load(k_scale_ptrs, mask=inside, other=0.0)
        s = products.to(tl.float32) * q_scale[:, None] * k_scale[None, :]
    else:
        s = products.to(tl.float32) * (q_scale * tl.load(k_scale_ptrs))[:, None]
    return s


@triton.jit
def _kept_apart(product):
    """``product``, hidden from Triton, which turns ``acc += tl.dot(a, b)`` into ``acc = tl.dot(a, b, acc)``.

    ptxas removes the move.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [product], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _weighted_values(p, v, MODE: tl.constexpr, ACCUMULATE_FP16: tl.constexpr, ROUND_FP8: tl.constexpr):
    """P V of one block of keys as float32, by the precision of P and V."""
    if MODE == "int8":
        out = tl.dot(round_half_even(p).to(tl.int8), v, out_dtype=tl.int32).to(tl.float32)
    elif MODE == "fp32":
        out = tl.dot(p, v, input_precision="tf32")
    else:
        if MODE == "fp8" and ROUND_FP8:
            p = round_to_e4m3(p)
        if ACCUMULATE_FP16:
            out = tl.dot(p.to(v.dtype), v, out_dtype=tl.float16).to(tl.float32)
        elif INTERPRETED:  # the interpreter multiplies the bits of bfloat16
            out = tl.dot(p.to(v.dtype).to(tl.float32), v.to(tl.float32))
        else:
            out = tl.dot(p.to(v.dtype), v, out_dtype=tl.float32)
            if MODE == "fp8" and not ROUND_FP8:  # tensor cores sum FP8 products in 22 bits: start each block at zero
                out = _kept_apart(out)
    return out


@triton.jit(do_not_specialize=["N", "NK", "Q_TOTAL", "K_TOTAL"])  # any length runs the same code
def _quantized_attention_kernel(
    q_ptr,  # (B, H, N, D) int8, or float for QUANTIZE_Q
    k_ptr,  # (B, Hkv, Nk, D) int8
    v_ptr,  # (B, Hkv, Nk, Dv), or (B, Hkv, Dv, P) for 8-bit products
    q_scale_ptr,  # (B, H, Gq) fp32
    k_scale_ptr,  # (B, Hkv, Gk) fp32
    v_scale_ptr,  # (B, Hkv, Dv) or (B, Hkv, 1) fp32
    v_mean_ptr,  # (B, Hkv, Dv) fp32
    row_bias_ptr,  # (B, H, ceil(N / QUERY_BLOCK), Nk) fp32
    mask_ptr,  # (MASKS, H, N, Nk), batch b uses b % MASKS, strides of 0 broadcast
    rel_h_ptr,  # (B, H, N, Kh)
    rel_w_ptr,  # (B, H, N, Kw)
    out_scale_ptr,  # (1,) or (H,) fp32
    out_ptr,  # (B, H, N, Dv)
    lse_ptr,  # (B, H, N) fp32
    q_starts_ptr,  # (B + 1,) int32, for VARLEN
    k_starts_ptr,
    logit_scale,
    H,
    N,
    NK,
    Q_TOTAL,
    K_TOTAL,
    KW,
    MASKS,
    GQ,
    GK,
    ROW_BLOCKS,
    stride_qb,
    stride_qh,
    stride_qn,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_mb,
    stride_mh,
    stride_mm,
    stride_mn,
    stride_hb,
    stride_hh,
    stride_hn,
    stride_wb,
    stride_wh,
    stride_wn,
    stride_ob,
    stride_oh,
    stride_on,
    D: tl.constexpr,  # stored channels of Q and K
    DV: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of one key head
    P_SHIFT: tl.constexpr,  # log2(P_range)
    MODE: tl.constexpr,  # "fp16", "fp32", "int8", "fp8", "int8_dequantized"
    ACCUMULATE_FP16: tl.constexpr,
    ROUND_FP8: tl.constexpr,
    INT4: tl.constexpr,
    QUANTIZE_Q: tl.constexpr,  # whole groups of queries lie in one tile
    MARKED_Q: tl.constexpr,  # a row of -128 (INT4: -8) held NaN
    MIN_SCALE: tl.constexpr,
    Q_SPAN: tl.constexpr,
    Q_GROUPS: tl.constexpr,
    Q_MODULO: tl.constexpr,
    Q_DIVISOR: tl.constexpr,
    K_SPAN: tl.constexpr,
    K_GROUPS: tl.constexpr,
    K_MODULO: tl.constexpr,
    K_DIVISOR: tl.constexpr,
    V_SCALE: tl.constexpr,  # "none", "head", "channel"
    SMOOTH_V: tl.constexpr,
    ROW_BIAS: tl.constexpr,
    MASK: tl.constexpr,  # "none", "bool", "float"
    RELATIVE: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,  # a block of keys is one row of the image: KW == BLOCK_N
    CAUSAL: tl.constexpr,
    OUT_SCALE: tl.constexpr,  # "none", "tensor", "head"
    LSE: tl.constexpr,
    VARLEN: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Grid (cdiv(N, BLOCK_M) * H * B,); a program computes BLOCK_M rows of one head, all keys."""
    wait_for_previous_kernel(OVERLAP)
    LOG2E: tl.constexpr = 1.4426950408889634
    # Logits are in base 2. A float mask may hold the lowest float32, which has no multiple: there they are natural.
    NATURAL: tl.constexpr = MASK == "float"
    NATURAL_UNIT: tl.constexpr = 1.0 if NATURAL else LOG2E
    TRANSPOSED: tl.constexpr = MODE == "int8" or MODE == "fp8"
    K_TOKEN_SCALE: tl.constexpr = K_GROUPS > 1 or K_SPAN < BLOCK_N
    MAY_BE_EMPTY: tl.constexpr = MASK != "none" or VARLEN  # rows without any key
    tiles = tl.cdiv(N, BLOCK_M)
    pid = tl.program_id(0).to(tl.int64)
    tile, h, b = (pid % tiles).to(tl.int32), (pid // tiles) % H, pid // (tiles * H)
    if CAUSAL:
        tile = tiles - 1 - tile  # the longest rows first
    kv = h // GROUP
    heads_kv = H // GROUP
    q_base = q_ptr + b * stride_qb + h * stride_qh
    k_base = k_ptr + b * stride_kb + kv * stride_kh
    v_base = v_ptr + b * stride_vb + kv * stride_vh
    out_base = out_ptr + b * stride_ob + h * stride_oh
    queries, keys = N, NK
    if VARLEN:
        q_start, queries = sequence_of(q_starts_ptr, b, Q_TOTAL, N)
        k_start, keys = sequence_of(k_starts_ptr, b, K_TOTAL, NK)
        q_base = q_ptr + q_start * stride_qn + h * stride_qh
        k_base = k_ptr + k_start * stride_kn + kv * stride_kh
        out_base = out_ptr + q_start * stride_on + h * stride_oh
        if not TRANSPOSED:
            v_base = v_ptr + k_start * stride_vn + kv * stride_vh
        if b == tl.num_programs(0) // (tiles * H) - 1:  # what lies behind the last sequence belongs to none
            for first in range(q_start + queries + tile * BLOCK_M, Q_TOTAL, tiles * BLOCK_M):
                n = first + tl.arange(0, BLOCK_M)
                d = tl.arange(0, BLOCK_DV)
                spare = (n < Q_TOTAL)[:, None] & (d < DV)[None, :]
                tl.store(out_ptr + h * stride_oh + n[:, None] * stride_on + d[None, :], 0.0, mask=spare)
        if tile * BLOCK_M >= queries:
            return

    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    rows = m < queries
    row = tl.minimum(m, queries - 1)  # rows past the end repeat the last one and are not stored
    q_packed = tl.load(q_base + row[:, None] * stride_qn + d[None, :], mask=(d < D)[None, :], other=0)
    q, q_high = q_packed, q_packed
    if INT4:
        q, q_high = (q_packed << 4) >> 4, q_packed >> 4
    if QUANTIZE_Q:
        q_float = tl.where(rows[:, None], q_packed.to(tl.float32) * logit_scale, 0.0)  # repeated rows have no say
        amax = row_amax(q_float)
        _, q_scale = group_scale(finite_rows(amax), 127, MIN_SCALE, Q_SPAN, Q_GROUPS, Q_MODULO, Q_DIVISOR, BLOCK_M)
        q = to_integers(q_float, tl.math.div_rn(1.0, q_scale)[:, None], 127)
        q_scale = tl.where(amax < float("inf"), q_scale, float("nan"))
    else:
        q_group = (row // Q_SPAN) * Q_GROUPS + (row % Q_MODULO) // Q_DIVISOR
        q_scale = tl.load(q_scale_ptr + (b * H + h) * GQ + q_group) * logit_scale
        if MARKED_Q:
            first = tl.load(q_base + row * stride_qn)
            q_scale = tl.where((((first << 4) >> 4) == -8) if INT4 else (first == -128), float("nan"), q_scale)
    if NATURAL:
        q_scale = q_scale * (1 / LOG2E)
    k_scale_base = k_scale_ptr + (b * heads_kv + kv) * GK
    if ROW_BIAS:
        row_bias_base = row_bias_ptr + ((b * H + h) * ROW_BLOCKS + (tile * BLOCK_M) // QUERY_BLOCK) * NK
    if MASK != "none":
        mask_base = mask_ptr + (b % MASKS) * stride_mb + h * stride_mh + row.to(tl.int64)[:, None] * stride_mm
    if RELATIVE:
        rel_h_base = rel_h_ptr + b * stride_hb + h * stride_hh + row[:, None] * stride_hn
        rel_w_base = rel_w_ptr + b * stride_wb + h * stride_wh + row[:, None] * stride_wn
        if WHOLE_ROWS:
            row_width = tl.load(rel_w_base + tl.arange(0, BLOCK_N)[None, :]).to(tl.float32)

    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    end = keys
    if CAUSAL:
        end = tl.minimum(keys, (tile + 1) * BLOCK_M)
    for start in range(0, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        if K_TOKEN_SCALE:
            k_scale_ptrs = k_scale_base + (n // K_SPAN) * K_GROUPS + (n % K_MODULO) // K_DIVISOR
        else:
            k_scale_ptrs = k_scale_base + start // K_SPAN
        inside = n < keys
        k_ptrs, k_mask = k_base + n[None, :] * stride_kn + d[:, None], (d < D)[:, None] & inside[None, :]
        s = _scores(q, q_high, q_scale, k_ptrs, k_scale_ptrs, k_mask, inside, INT4, K_TOKEN_SCALE)
        if ROW_BIAS:
            row_bias = tl.load(row_bias_base + n, mask=inside, other=0.0)
            if NATURAL:
                row_bias = row_bias * (1 / LOG2E)
            s += row_bias[None, :]
        if MASK == "float":
            bias = tl.load(mask_base + n[None, :] * stride_mn, mask=inside[None, :], other=0.0)
            s += bias.to(tl.float32)
        elif MASK == "bool":
            keep = tl.load(mask_base + n[None, :] * stride_mn, mask=inside[None, :], other=0)
            s = tl.where(keep != 0, s, float("-inf"))
        if RELATIVE and WHOLE_ROWS:
            s += (tl.load(rel_h_base + start // BLOCK_N).to(tl.float32) + row_width) * NATURAL_UNIT
        elif RELATIVE:
            height = tl.load(rel_h_base + (n // KW)[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
            width = tl.load(rel_w_base + (n % KW)[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
            s += (height + width) * NATURAL_UNIT
        if CAUSAL:
            s = tl.where((n[None, :] <= m[:, None]) & inside[None, :], s, float("-inf"))
        else:
            s = tl.where(inside[None, :], s, float("-inf"))

        new_top = tl.maximum(top, tl.max(s, 1))
        if NATURAL:  # P_SHIFT is added to the difference: beside a large logit it would be rounded away
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            rescale = tl.exp2((top - shift) * LOG2E)
            p = tl.exp2((s - shift[:, None]) * LOG2E + P_SHIFT)
        else:
            if MAY_BE_EMPTY:
                shift = tl.where(new_top == float("-inf"), 0.0, new_top - P_SHIFT)
                rescale = tl.exp2(top - tl.where(new_top == float("-inf"), 0.0, new_top))
            else:
                shift = new_top - P_SHIFT
                rescale = tl.exp2(top - new_top)
            p = tl.exp2(s - shift[:, None])
        total = total * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None]
        if TRANSPOSED:  # stride_vn is the padded number of keys
            v_ptrs = v_base + dv[None, :] * stride_vn + n[:, None]
            v = tl.load(v_ptrs, mask=(dv < DV)[None, :] & (n < stride_vn)[:, None], other=0.0)
        else:
            v_ptrs = v_base + n[:, None] * stride_vn + dv[None, :]
            v = tl.load(v_ptrs, mask=(dv < DV)[None, :] & inside[:, None], other=0.0)
        if MODE == "int8_dequantized":
            v = v.to(tl.float16)  # exact; the scale follows at the end
        acc += _weighted_values(p, v, MODE, ACCUMULATE_FP16, ROUND_FP8)
        top = new_top

    safe_total = total
    if MAY_BE_EMPTY:
        safe_total = tl.where(total == 0.0, 1.0, total)
    out = acc / safe_total[:, None]
    head_kv = b * heads_kv + kv
    if V_SCALE == "channel":
        out = out * tl.load(v_scale_ptr + head_kv * DV + dv, mask=dv < DV, other=0.0)[None, :]
    elif V_SCALE == "head":
        out = out * tl.load(v_scale_ptr + head_kv)
    if SMOOTH_V:
        v_mean = tl.load(v_mean_ptr + head_kv * DV + dv, mask=dv < DV, other=0.0)[None, :]
        out = tl.where((total == 0.0)[:, None], 0.0, out + v_mean)
    if OUT_SCALE != "none":
        out_scale = tl.load(out_scale_ptr + (h if OUT_SCALE == "head" else 0))
        out = round_to_int8(out * tl.math.div_rn(1.0, out_scale))
    out_ptrs = out_base + m.to(tl.int64)[:, None] * stride_on + dv[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=rows[:, None] & (dv < DV)[None, :])
    if LSE:
        if NATURAL:
            lse = top + (tl.log2(safe_total) - P_SHIFT) / LOG2E
        else:
            lse = (top + tl.log2(safe_total) - P_SHIFT) / LOG2E
        if MAY_BE_EMPTY:
            lse = tl.where(total == 0.0, float("-inf"), lse)
        tl.store(lse_ptr + (b * H + h) * N + m, lse, mask=rows)
