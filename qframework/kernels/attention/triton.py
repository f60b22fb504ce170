"""The Triton kernel of quantized attention, for every variant, mask and layout.

Formula and layout: see its launcher, :mod:`~qframework.kernels.attention.quantized_attention`. The kernel's arguments
are grouped in the records below.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from qframework.kernels.attention.operands import sequence_of
from qframework.kernels.attention.quantize_qk import finite_rows, group_scale, row_amax, to_integers
from qframework.kernels.attention.quantize_v import round_to_e4m3
from qframework.kernels.attention.softcap import capped
from qframework.kernels.attention.variants import QUERY_BLOCK
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.rounding import round_half_even, round_to_int8
from qframework.kernels.runtime.triton import INTERPRET, tl, triton
from qframework.numerics import MIN_SCALE

INTERPRETED = tl.constexpr(INTERPRET)
LEAST_SCALE = tl.constexpr(MIN_SCALE)
ROWS_OF_BIAS = tl.constexpr(QUERY_BLOCK)
WHOLE_BELOW = tl.constexpr(2.0**22)  # larger maxima are a mask's lowest number and need not be whole octaves


@triton.jit
def _scale_of_token(n, GROUPS: tl.constexpr):
    """``TokenGroups.index``, inside a kernel."""
    return (n // GROUPS.span) * GROUPS.groups + (n % GROUPS.modulo) // GROUPS.divisor


@triton.jit
def _scores(
    q, q_high, q_scale, k_ptrs, k_scale_ptrs, k_mask, inside, BITS: tl.constexpr, K_TOKEN_SCALE: tl.constexpr
):  # fmt: skip
    """Logits (BLOCK_M, BLOCK_N) of one block of keys, in the unit of ``q_scale`` and without biases."""
    k = tl.load(k_ptrs, mask=k_mask, other=0)
    if BITS == 16:
        s = _float_products(q, k) * q_scale[:, None]
    else:
        if BITS == 4:  # two products, since the low and high nibbles are different channels
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
def _exp2(x, INTEGER: tl.constexpr):
    """2^x; with INTEGER for x up to 0 as ``reference.integer_exp2``."""
    if INTEGER:
        steps = round_half_even(tl.maximum(x * 128.0 + 127.0 * 128.0, 0.0))
        y = (steps.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        y = tl.where(x != x, x, y)
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def _float_products(q, k):
    """Q K^T of floats, summed in float32. Float32 is not rounded to TF32: an error of a logit multiplies its weight."""
    if q.dtype == tl.float32:
        out = tl.dot(q, k, input_precision="ieee")
    elif INTERPRETED:  # the interpreter multiplies the bits of bfloat16
        out = tl.dot(q.to(tl.float32), k.to(tl.float32))
    else:
        out = tl.dot(q, k, out_dtype=tl.float32)
    return out


@triton.jit
def _kept_apart(product):
    """``product`` itself. Keeps Triton from rewriting ``acc += tl.dot(a, b)`` as ``acc = tl.dot(a, b, acc)``.

    ptxas removes the move.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [product], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _weighted_values(p, v, MODE: tl.constexpr, ACCUMULATE_FP16: tl.constexpr, ROUND_FP8: tl.constexpr):
    """P V of one block of keys as float32, computed in the precision that ``MODE`` says."""
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
            if MODE == "fp8" and not ROUND_FP8:  # tensor cores sum FP8 products in 22 bits: each block starts at zero
                out = _kept_apart(out)
    return out


class Heads(NamedTuple):
    """A tensor of heads ``(B, H, N, channels)`` with strides in elements; channels are contiguous.

    Packed sequences are ``(total, H, channels)`` with a batch stride of 0. V that is stored along the tokens,
    ``(B, Hkv, Dv, P)``, has the stride of a channel as ``token``.
    """

    data: Tensor
    batch: int
    head: int
    token: int


class Mask(NamedTuple):
    """A mask ``(batches, H, N, Nk)``, uint8 or float; batch b uses ``b % batches``. Strides of 0 broadcast."""

    data: Tensor
    batches: int
    batch: int
    head: int
    query: int
    key: int


class PositionFactors(NamedTuple):
    """SAM's bias ``height[n // columns] + width[n % columns]`` of key n, with strides as in :class:`Heads`.

    Without groups inside: in a loop, Triton 3.6 loses integers of 1, which it compiles in, from a group in a group.
    """

    height: Tensor  # (B, H, N, rows)
    height_batch: int
    height_head: int
    height_token: int
    width: Tensor  # (B, H, N, columns)
    width_batch: int
    width_head: int
    width_token: int
    columns: int


class RowBias(NamedTuple):
    """Smooth Q's logits ``(B, H, blocks, Nk)`` fp32, a row for each block of queries."""

    data: Tensor
    blocks: int


class Scales(NamedTuple):
    """Scales of the operands and V's mean, all fp32; None if absent."""

    q: Tensor | None  # (B, H, q_groups); None: q is float, and each program quantizes its own tile, or with 16 bits not
    q_groups: int
    k: Tensor | None  # (B, Hkv, k_groups); None with 16 bits
    k_groups: int
    v: Tensor | None  # (B, Hkv, Dv), or (B, Hkv, 1)
    v_mean: Tensor | None  # (B, Hkv, Dv)
    out: Tensor | None  # (1,), or (H,)


class Layout(NamedTuple):
    """Compile-time sizes and formats of the operands."""

    d: int  # stored channels of Q and K
    dv: int
    group: int  # query heads of one key head
    block_d: int
    block_dv: int
    qk_bits: int  # 16: Q and K are float and have no scales
    marked: bool  # a row of Q that starts with -128 (INT4: -8) held NaN
    mask: str  # "none", "bool", "float"
    whole_rows: bool  # a block of keys is one row of the image that relative positions describe
    whole_blocks: bool  # no block of keys ends early, so that masks are read without conditions, many bytes at a time
    v_scale_per_channel: bool
    out_scale_per_head: bool


class Product(NamedTuple):
    """How P V is computed, at compile time."""

    mode: str  # "fp16", "fp32", "int8", "fp8", "int8_dequantized"
    accumulate_fp16: bool
    round_fp8: bool  # P's FP8 values are multiplied in another dtype
    p_shift: float  # log2(P_range)
    integer: bool  # integer exponential; p_shift is 0
    lse_shift: float  # octaves by which sums of weights exceed those of exponentials


@triton.jit(do_not_specialize=["N", "NK", "Q_TOTAL", "K_TOTAL"])  # any length runs the same code
def _quantized_attention_kernel(
    q,  # Heads, int8, or float where scales.q is None
    k,  # Heads, int8
    v,  # Heads
    out,  # Heads
    scales,
    row_bias,  # RowBias or None
    mask,  # Mask or None
    relative,  # PositionFactors or None
    lse_ptr,  # (B, H, N) fp32 or None
    offsets_ptr,  # (B, H, N) fp32, base-2 logits that are added to all of a query, or None
    starts,  # of packed queries and of packed keys, (B + 1,) int32 each, or None
    softcap,  # of natural logits, or None
    logit_scale,
    H,
    N,
    NK,
    Q_TOTAL,
    K_TOTAL,
    LAYOUT: tl.constexpr,
    PRODUCT: tl.constexpr,
    Q_GROUPS: tl.constexpr,  # TokenGroups; for float queries whole groups lie in one tile
    K_GROUPS: tl.constexpr,
    CAUSAL: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Grid (cdiv(N, block_m) * H * B,); a program computes block_m rows of one head, all keys."""
    wait_for_previous_kernel(OVERLAP)
    LOG2E: tl.constexpr = 1.4426950408889634
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    D: tl.constexpr = LAYOUT.d
    DV: tl.constexpr = LAYOUT.dv
    BLOCK_D: tl.constexpr = LAYOUT.block_d
    BLOCK_DV: tl.constexpr = LAYOUT.block_dv
    BITS: tl.constexpr = LAYOUT.qk_bits
    INT4: tl.constexpr = BITS == 4
    MODE: tl.constexpr = PRODUCT.mode
    P_SHIFT: tl.constexpr = PRODUCT.p_shift
    # Logits are in base 2, except with float masks: log2(e) times the lowest float32 would overflow.
    NATURAL: tl.constexpr = LAYOUT.mask == "float"
    NATURAL_UNIT: tl.constexpr = 1.0 if NATURAL else LOG2E
    OCTAVE: tl.constexpr = LOG2E if NATURAL else 1.0
    TRANSPOSED: tl.constexpr = MODE == "int8" or MODE == "fp8"
    K_TOKEN_SCALE: tl.constexpr = BITS < 16 and (K_GROUPS.groups > 1 or K_GROUPS.span < BLOCK_N)
    WHOLE_ROWS: tl.constexpr = LAYOUT.whole_rows
    VARLEN: tl.constexpr = starts is not None
    MAY_BE_EMPTY: tl.constexpr = LAYOUT.mask != "none" or VARLEN  # rows without any key
    tiles = tl.cdiv(N, BLOCK_M)
    pid = tl.program_id(0).to(tl.int64)
    tile, h, b = (pid % tiles).to(tl.int32), (pid // tiles) % H, pid // (tiles * H)
    if CAUSAL:
        tile = tiles - 1 - tile  # the longest rows first
    kv = h // LAYOUT.group
    heads_kv = H // LAYOUT.group
    q_base = q.data + b * q.batch + h * q.head
    k_base = k.data + b * k.batch + kv * k.head
    v_base = v.data + b * v.batch + kv * v.head
    out_base = out.data + b * out.batch + h * out.head
    queries, keys = N, NK
    if VARLEN:
        q_start, queries = sequence_of(starts[0], b, Q_TOTAL, N)
        k_start, keys = sequence_of(starts[1], b, K_TOTAL, NK)
        q_base = q.data + q_start * q.token + h * q.head
        k_base = k.data + k_start * k.token + kv * k.head
        out_base = out.data + q_start * out.token + h * out.head
        if not TRANSPOSED:
            v_base = v.data + k_start * v.token + kv * v.head
        if b == tl.num_programs(0) // (tiles * H) - 1:  # rows after the last sequence belong to no sequence: zeros
            for first in range(q_start + queries + tile * BLOCK_M, Q_TOTAL, tiles * BLOCK_M):
                n = first + tl.arange(0, BLOCK_M)
                d = tl.arange(0, BLOCK_DV)
                spare = (n < Q_TOTAL)[:, None] & (d < DV)[None, :]
                tl.store(out.data + h * out.head + n[:, None] * out.token + d[None, :], 0.0, mask=spare)
        if tile * BLOCK_M >= queries:
            return

    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    rows = m < queries
    row = tl.minimum(m, queries - 1)  # rows past the end repeat the last row and are not stored
    q_packed = tl.load(q_base + row[:, None] * q.token + d[None, :], mask=(d < D)[None, :], other=0)
    q_tile, q_high = q_packed, q_packed
    if INT4:
        q_tile, q_high = (q_packed << 4) >> 4, q_packed >> 4
    if BITS == 16:
        q_scale = tl.zeros((BLOCK_M,), tl.float32) + logit_scale
    elif scales.q is None:
        q_float = q_packed.to(tl.float32) * logit_scale
        q_float = tl.where(rows[:, None], q_float, 0.0)  # repeated rows must not affect scales
        amax = row_amax(q_float)
        _, q_scale = group_scale(
            finite_rows(amax), 127, LEAST_SCALE, Q_GROUPS.span, Q_GROUPS.groups, Q_GROUPS.modulo, Q_GROUPS.divisor,
            BLOCK_M,
        )  # fmt: skip
        q_tile = to_integers(q_float, tl.math.div_rn(1.0, q_scale)[:, None], 127)
        q_scale = tl.where(amax < float("inf"), q_scale, float("nan"))
    else:
        q_scale = tl.load(scales.q + (b * H + h) * scales.q_groups + _scale_of_token(row, Q_GROUPS)) * logit_scale
        if LAYOUT.marked:
            first = tl.load(q_base + row * q.token)
            q_scale = tl.where((((first << 4) >> 4) == -8) if INT4 else (first == -128), float("nan"), q_scale)
    if NATURAL:
        q_scale = q_scale * (1 / LOG2E)
    if offsets_ptr is not None:
        offset = tl.load(offsets_ptr + (b * H + h) * N + row) * (NATURAL_UNIT / LOG2E)
    k_scale_base = k_base
    if BITS < 16:
        k_scale_base = scales.k + (b * heads_kv + kv) * scales.k_groups
    if row_bias is not None:
        row_bias_base = row_bias.data + ((b * H + h) * row_bias.blocks + (tile * BLOCK_M) // ROWS_OF_BIAS) * NK
    if mask is not None:
        mask_base = mask.data + (b % mask.batches) * mask.batch + h * mask.head + row.to(tl.int64)[:, None] * mask.query
    if relative is not None:
        height_base = relative.height + b * relative.height_batch + h * relative.height_head
        height_base += row[:, None] * relative.height_token
        width_base = relative.width + b * relative.width_batch + h * relative.width_head
        width_base += row[:, None] * relative.width_token
        if WHOLE_ROWS:
            row_width = tl.load(width_base + tl.arange(0, BLOCK_N)[None, :]).to(tl.float32)

    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    end = keys
    if CAUSAL:
        end = tl.minimum(keys, (tile + 1) * BLOCK_M)
    for start in range(0, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        k_scale_ptrs = k_scale_base
        if K_TOKEN_SCALE:
            k_scale_ptrs = k_scale_base + _scale_of_token(n, K_GROUPS)
        elif BITS < 16:
            k_scale_ptrs = k_scale_base + start // K_GROUPS.span
        inside = tl.full((BLOCK_N,), True, tl.int1) if LAYOUT.whole_blocks else n < keys
        k_ptrs, k_mask = k_base + n[None, :] * k.token + d[:, None], (d < D)[:, None] & inside[None, :]
        s = _scores(q_tile, q_high, q_scale, k_ptrs, k_scale_ptrs, k_mask, inside, BITS, K_TOKEN_SCALE)
        if row_bias is not None:
            bias = tl.load(row_bias_base + n, mask=inside, other=0.0)
            if NATURAL:
                bias = bias * (1 / LOG2E)
            s += bias[None, :]
        if offsets_ptr is not None:
            s += offset[:, None]
        if softcap is not None:
            s = capped(s, softcap, NATURAL_UNIT)
        if LAYOUT.mask == "float":
            s += tl.load(mask_base + n[None, :] * mask.key, mask=inside[None, :], other=0.0).to(tl.float32)
        elif LAYOUT.mask == "bool":
            keep = tl.load(mask_base + n[None, :] * mask.key, mask=inside[None, :], other=0)
            s = tl.where(keep != 0, s, float("-inf"))
        if relative is not None and WHOLE_ROWS:
            s += (tl.load(height_base + start // BLOCK_N).to(tl.float32) + row_width) * NATURAL_UNIT
        elif relative is not None:
            height = tl.load(height_base + (n // relative.columns)[None, :], mask=inside[None, :], other=0.0)
            width = tl.load(width_base + (n % relative.columns)[None, :], mask=inside[None, :], other=0.0)
            s += (height.to(tl.float32) + width.to(tl.float32)) * NATURAL_UNIT
        if CAUSAL:
            s = tl.where((n[None, :] <= m[:, None]) & inside[None, :], s, float("-inf"))
        else:
            s = tl.where(inside[None, :], s, float("-inf"))

        new_top = tl.maximum(top, tl.max(s, 1))
        if PRODUCT.integer:  # then rescaling is exact
            whole = tl.ceil(new_top * OCTAVE) * (1 / OCTAVE)
            new_top = tl.where(tl.abs(new_top) < WHOLE_BELOW, whole, new_top)
        if NATURAL:  # P_SHIFT is added to the difference: added to a large logit, it would be rounded away
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            rescale = tl.exp2((top - shift) * LOG2E)
            p = _exp2((s - shift[:, None]) * LOG2E + P_SHIFT, PRODUCT.integer)
        else:
            if MAY_BE_EMPTY:
                shift = tl.where(new_top == float("-inf"), 0.0, new_top - P_SHIFT)
                rescale = tl.exp2(top - tl.where(new_top == float("-inf"), 0.0, new_top))
            else:
                shift = new_top - P_SHIFT
                rescale = tl.exp2(top - new_top)
            p = _exp2(s - shift[:, None], PRODUCT.integer)
        total = total * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None]
        if TRANSPOSED:  # the stride of a channel is the padded number of keys
            v_ptrs = v_base + dv[None, :] * v.token + n[:, None]
            v_tile = tl.load(v_ptrs, mask=(dv < DV)[None, :] & (n < v.token)[:, None], other=0.0)
        else:
            v_ptrs = v_base + n[:, None] * v.token + dv[None, :]
            v_tile = tl.load(v_ptrs, mask=(dv < DV)[None, :] & inside[:, None], other=0.0)
        if MODE == "int8_dequantized":
            v_tile = v_tile.to(tl.float16)  # exact; the scale follows at the end
        acc += _weighted_values(p, v_tile, MODE, PRODUCT.accumulate_fp16, PRODUCT.round_fp8)
        top = new_top

    safe_total = total
    if MAY_BE_EMPTY:
        safe_total = tl.where(total == 0.0, 1.0, total)
    result = acc / safe_total[:, None]
    head_kv = b * heads_kv + kv
    if scales.v is not None:
        if LAYOUT.v_scale_per_channel:
            result = result * tl.load(scales.v + head_kv * DV + dv, mask=dv < DV, other=0.0)[None, :]
        else:
            result = result * tl.load(scales.v + head_kv)
    if scales.v_mean is not None:
        v_mean = tl.load(scales.v_mean + head_kv * DV + dv, mask=dv < DV, other=0.0)[None, :]
        result = tl.where((total == 0.0)[:, None], 0.0, result + v_mean)
    if scales.out is not None:
        out_scale = tl.load(scales.out + (h if LAYOUT.out_scale_per_head else 0))
        result = round_to_int8(result * tl.math.div_rn(1.0, out_scale))
    out_ptrs = out_base + m.to(tl.int64)[:, None] * out.token + dv[None, :]
    tl.store(out_ptrs, result.to(out.data.dtype.element_ty), mask=rows[:, None] & (dv < DV)[None, :])
    if lse_ptr is not None:
        if NATURAL:
            lse = top + (tl.log2(safe_total) - PRODUCT.lse_shift) / LOG2E
        else:
            lse = (top + tl.log2(safe_total) - PRODUCT.lse_shift) / LOG2E
        if MAY_BE_EMPTY:
            lse = tl.where(total == 0.0, float("-inf"), lse)
        tl.store(lse_ptr + (b * H + h) * N + m, lse, mask=rows)
