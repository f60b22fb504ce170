"""What Hopper's kernels for many small programs share: keys in pieces, the softmax of a piece, INT8 values as float16.

Formula: :mod:`~qframework.kernels.attention.quantized_attention`, for one scale per head and a product of the scales
that is not negative: the maximum of a row is taken before its products are scaled. Weights of two neighbouring keys
share a word of 32 bits, as P V reads them, so that one instruction rounds, adds or moves both.
"""

from __future__ import annotations

from typing import NamedTuple

from qframework.kernels.runtime.gluon import HAS_GLUON

BLOCK_N = 128  # keys of a whole block
HALF = BLOCK_N // 2
ROWS = 64  # queries of a warpgroup


class PieceForm(NamedTuple):
    """Compile-time sizes and formats."""

    block_d: int  # channels of Q and K, padded to a power of two
    block_dv: int
    warpgroups: int  # of a program
    first: int  # keys of the first piece
    second: int  # of the second piece, 0 for none
    halves: bool  # whole blocks in two halves: P V of one runs while the other's weights are computed
    masked: bool  # whether the last piece holds more than the last keys
    int8_values: bool
    whole_values: bool  # block_dv is the number of V's channels
    reuses_query: bool  # the result takes the place of its queries in shared memory
    causal: bool = False  # the pieces are the keys of the queries' own places (streaming only)
    rolled: bool = False
    poly: int = 0
    magic: bool = False
    ragged: bool = False  # causal with more queries than keys


# 2^x for x = n + f, n an integer and |f| <= 1/2: the bits of a cubic polynomial of f plus n in the exponent.
_CUBIC = ("0f3D61FBB0", "0f3E786F0E", "0f3F31798D", "0f3F7FFB49")


def _polynomial(out: int, x: int) -> str:
    c3, c2, c1, c0 = _CUBIC
    return f"""
    max.NaN.f32 x, ${x}, 0fC2FC0000;
    add.rn.ftz.f32 n, x, 0f4B400000;
    sub.rn.ftz.f32 f, n, 0f4B400000;
    sub.rn.ftz.f32 f, x, f;
    fma.rn.ftz.f32 p, f, {c3}, {c2};
    fma.rn.ftz.f32 p, f, p, {c1};
    fma.rn.ftz.f32 p, f, p, {c0};
    shl.b32 e, n, 23;
    add.s32 ${out}, e, p;"""


def _mixed(count: int, by_polynomial: tuple[int, ...]) -> str:
    lines = [
        _polynomial(i, count + i) if i in by_polynomial else f"ex2.approx.ftz.f32 ${i}, ${count + i};"
        for i in range(count)
    ]
    return "{ .reg .f32 x, f; .reg .b32 n, p, e;" + "\n".join(lines) + "}"


if HAS_GLUON:
    from qframework.kernels.runtime.gluon import gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait

    _ROWS, _BLOCK_N, _HALF = gl.constexpr(ROWS), gl.constexpr(BLOCK_N), gl.constexpr(HALF)
    _QUARTER = gl.constexpr(BLOCK_N // 4)
    _ASM2 = gl.constexpr(_mixed(4, (1,)))
    _ASM3 = gl.constexpr(_mixed(8, (1, 4, 7)))
    _ASM4 = gl.constexpr(_mixed(2, (1,)))
    _LEAST = gl.constexpr(-(1 << 26))  # below all sums of INT8 products

    @gluon.jit
    def products(q, k, KEYS: gl.constexpr, FORM: gl.constexpr):
        """Q K^T of (M, D) queries and a piece of keys (KEYS, D), in flight."""
        INT8: gl.constexpr = q.dtype == gl.int8
        WARPS: gl.constexpr = FORM.warpgroups * 4
        SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEYS, 32 if INT8 else 16])
        if INT8 and FORM.magic:
            begin = gl.full((FORM.warpgroups * _ROWS, KEYS), 0x4B400000, gl.int32, SCORES)
            result = warpgroup_mma(q, k.permute((1, 0)), begin, use_acc=True, is_async=True)
        else:
            zeros = gl.zeros((FORM.warpgroups * _ROWS, KEYS), gl.int32 if INT8 else gl.float32, SCORES)
            result = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        return result

    @gluon.jit
    def _thread_maxima(s):
        """(M, 4): maxima over the keys of each of the four threads of a row."""
        M: gl.constexpr = s.shape[0]
        by_thread = gl.reshape(s, (M, s.shape[1] // 8, 4, 2))
        return gl.max(gl.max(by_thread, 3), 1)

    @gluon.jit
    def _added(words, COUNT: gl.constexpr, DTYPE: gl.constexpr):
        """(M, COUNT, 4) words to (M, COUNT // 2, 4): sums of two, in 16 bit."""
        M: gl.constexpr = words.shape[0]
        a, b = gl.split(gl.permute(gl.reshape(words, (M, 2, COUNT // 2, 4)), (0, 2, 3, 1)))
        ADD: gl.constexpr = "add.rn.f16x2 $0, $1, $2;" if gl.float16 == DTYPE else "add.rn.bf16x2 $0, $1, $2;"
        return gl.inline_asm_elementwise(ADD, "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)

    @gluon.jit
    def _apart(words, DTYPE: gl.constexpr):
        """The low and the high halves of words as DTYPE."""
        low, high = words.to(gl.int16), (words >> 16).to(gl.int16)
        return low.to(DTYPE, bitcast=True), high.to(DTYPE, bitcast=True)

    @gluon.jit
    def _thread_sums(words, KEYS: gl.constexpr, DTYPE: gl.constexpr):
        """(M, 4): sums of the weights of each of the four threads of a row; up to eight are summed in 16 bit."""
        M: gl.constexpr = words.shape[0]
        words = gl.reshape(words, (M, KEYS // 8, 4))
        if KEYS >= 16:
            words = _added(words, KEYS // 8, DTYPE)
        if KEYS >= 32:
            words = _added(words, KEYS // 16, DTYPE)
        if KEYS >= 64:
            words = _added(words, KEYS // 32, DTYPE)
        low, high = _apart(words, DTYPE)
        return gl.sum(low.to(gl.float32) + high.to(gl.float32), 1)

    @gluon.jit
    def _powers(x, POLY: gl.constexpr):
        """2^x; POLY of 8 by polynomials of degree 3."""
        if POLY == 0:
            p = gl.exp2(x)
        elif POLY == 2:
            p = gl.inline_asm_elementwise(_ASM2, "=f,=f,=f,=f,f,f,f,f", [x], dtype=gl.float32, is_pure=True, pack=4)
        elif POLY == 3:
            p = gl.inline_asm_elementwise(
                _ASM3,
                "=f,=f,=f,=f,=f,=f,=f,=f,f,f,f,f,f,f,f,f",
                [x],
                dtype=gl.float32,
                is_pure=True,
                pack=8,
            )
        else:
            p = gl.inline_asm_elementwise(_ASM4, "=f,=f,f,f", [x], dtype=gl.float32, is_pure=True, pack=2)
        return p

    @gluon.jit
    def _inside(s, start, NK, row, CAUSAL: gl.constexpr):
        """Which keys of a piece from ``start`` on each query attends to, of those from ``row`` on."""
        column = start + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
        if CAUSAL:
            place = row + gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, s.type.layout))
            keep = column[None, :] < gl.minimum(place + 1, NK)[:, None]
        else:
            keep = (column < NK)[None, :]
        return keep

    @gluon.jit
    def _exponentials(
        s, scale, top, KEYS: gl.constexpr, DTYPE: gl.constexpr, start, NK, MASKED: gl.constexpr, row=0,
        CAUSAL: gl.constexpr = False, POLY: gl.constexpr = 0, MAGIC: gl.constexpr = False,
    ):  # fmt: skip
        """2^(s scale - top) rounded to DTYPE: (M, KEYS // 2) words."""
        M: gl.constexpr = s.shape[0]
        top = gl.convert_layout(top, gl.SliceLayout(1, s.type.layout))
        x = s.to(gl.float32, bitcast=True) if MAGIC else s.to(gl.float32)
        p = _powers(x * scale - top[:, None], POLY)
        if MASKED:
            p = gl.where(_inside(s, start, NK, row, CAUSAL), p, 0.0)
        low, high = gl.split(gl.reshape(p, (M, KEYS // 2, 2)))
        ROUND: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;" if gl.float16 == DTYPE else "cvt.rn.bf16x2.f32 $0, $2, $1;"
        return gl.inline_asm_elementwise(ROUND, "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1)

    @gluon.jit
    def _left_operand(words, s, KEYS: gl.constexpr, DTYPE: gl.constexpr, RESULT: gl.constexpr):
        """Words as the left operand (M, KEYS) of P V; no value moves to another thread."""
        M: gl.constexpr = words.shape[0]
        low, high = _apart(words, DTYPE)
        p = gl.convert_layout(gl.reshape(gl.join(low, high), (M, KEYS)), s.type.layout, assert_trivial=True)
        return gl.convert_layout(p, gl.DotOperandLayout(0, RESULT, 2))

    @gluon.jit
    def _kept(s, start, NK, row=0, CAUSAL: gl.constexpr = False):
        """Products of keys that exist, and are seen by their query; the others below all products."""
        return gl.where(
            _inside(s, start, NK, row, CAUSAL), s, _LEAST if s.dtype == gl.int32 else float("-inf")
        )

    @gluon.jit
    def _maxima(s, s2, scale, MAGIC: gl.constexpr = False):
        """The largest logits of rows, of one or two pieces' products."""
        highest = _thread_maxima(s)
        if s2 is not None:
            highest = gl.maximum(
                highest, gl.convert_layout(_thread_maxima(s2), highest.type.layout, assert_trivial=True)
            )
        highest = gl.max(highest, 1)
        return (highest.to(gl.float32, bitcast=True) if MAGIC else highest.to(gl.float32)) * scale

    @gluon.jit
    def visit_pieces(q, pieces, v_ready, scale, start, NK, VALUES: gl.constexpr, FORM: gl.constexpr, row=0):
        """The first visit, of the last keys: (P V, sums of P, maxima in octaves)."""
        k_first, k_second, v_first, v_second = pieces
        FIRST: gl.constexpr = FORM.first
        SECOND: gl.constexpr = FORM.second
        DV: gl.constexpr = FORM.block_dv
        RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [FORM.warpgroups * 4, 1], [16, DV, 16])
        CAUSAL: gl.constexpr = FORM.causal
        MASK_FIRST: gl.constexpr = FORM.masked and (SECOND == 0 or FORM.causal)
        MAGIC: gl.constexpr = FORM.magic and FORM.int8_values
        if SECOND > 0:
            first = products(q, k_first.reshape((FIRST, FORM.block_d)), FIRST, FORM)
            second = products(q, k_second.reshape((SECOND, FORM.block_d)), SECOND, FORM)
            s, s2 = warpgroup_mma_wait(0, deps=(first, second))
            top = _maxima(
                _kept(s, start, NK, row, True) if CAUSAL else s,
                _kept(s2, start + FIRST, NK, row, CAUSAL) if FORM.masked else s2,
                scale,
                MAGIC,
            )
        else:
            first = products(q, k_first.reshape((FIRST, FORM.block_d)), FIRST, FORM)
            s = warpgroup_mma_wait(0, deps=(first,))
            top = _maxima(_kept(s, start, NK) if MASK_FIRST else s, None, scale, MAGIC)
        words = _exponentials(s, scale, top, FIRST, VALUES, start, NK, MASK_FIRST, row, CAUSAL, FORM.poly, MAGIC)
        total = _thread_sums(words, FIRST, VALUES)
        weights = _left_operand(words, s, FIRST, VALUES, RESULT)
        if not FORM.int8_values:
            mbarrier.wait(v_ready, 0)
        acc = gl.zeros((FORM.warpgroups * _ROWS, DV), gl.float32, RESULT)
        values = warpgroup_mma(weights, v_first.reshape((FIRST, DV)), acc, use_acc=False, is_async=True)
        weights2 = weights
        if SECOND > 0:
            words2 = _exponentials(
                s2, scale, top, SECOND, VALUES, start + FIRST, NK, FORM.masked, row, CAUSAL, FORM.poly, MAGIC
            )
            total += gl.convert_layout(_thread_sums(words2, SECOND, VALUES), total.type.layout, assert_trivial=True)
            weights2 = _left_operand(words2, s2, SECOND, VALUES, RESULT)
            values = warpgroup_mma(weights2, v_second.reshape((SECOND, DV)), values, is_async=True)
        # The operands in registers are read until the wait, which takes them so that nothing else gets their place.
        acc, weights, weights2 = warpgroup_mma_wait(0, deps=(values, weights, weights2))
        return acc, total, top

    @gluon.jit
    def first_visit(
        WHO: gl.constexpr, q, k_tile, v_tile, v_ready, scale, start, NK, row, VALUES: gl.constexpr, FORM: gl.constexpr
    ):
        """As ``visit_pieces`` for pieces of one block in shared memory, in 16 bit."""
        DV: gl.constexpr = FORM.block_dv
        CAUSAL: gl.constexpr = FORM.causal
        MAGIC: gl.constexpr = FORM.magic and FORM.int8_values
        AGAIN: gl.constexpr = FORM.masked and FORM.int8_values  # scales may be small; floats are masked by infinity
        FIRST: gl.constexpr = FORM.first
        SECOND: gl.constexpr = 0 if (FORM.causal and WHO == 0) else FORM.second
        # A causal warpgroup's last piece is that of its own places; those before it are kept whole.
        MASK_FIRST: gl.constexpr = FORM.masked and (SECOND == 0 or FORM.ragged)
        RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [FORM.warpgroups * 4, 1], [16, DV, 16])
        k = k_tile.reshape((_BLOCK_N, FORM.block_d))
        v = v_tile.reshape((_BLOCK_N, DV))
        begun = products(q, k.slice(0, FIRST), FIRST, FORM)
        if SECOND > 0:
            following = products(q, k.slice(FIRST, SECOND), SECOND, FORM)
            s, s2 = warpgroup_mma_wait(0, deps=(begun, following))
            if FORM.masked:
                s2 = _kept(s2, start + FIRST, NK, row, CAUSAL)
        else:
            s = warpgroup_mma_wait(0, deps=(begun,))
        if MASK_FIRST:
            s = _kept(s, start, NK, row, CAUSAL)
        top = _maxima(s, s2 if SECOND > 0 else None, scale, MAGIC)
        words = _exponentials(
            s, scale, top, FIRST, VALUES, start, NK, AGAIN and MASK_FIRST, row, CAUSAL, FORM.poly, MAGIC
        )
        total = _thread_sums(words, FIRST, VALUES)
        weights = _left_operand(words, s, FIRST, VALUES, RESULT)
        mbarrier.wait(v_ready, 0)
        acc = gl.zeros((FORM.warpgroups * _ROWS, DV), gl.float32, RESULT)
        values = warpgroup_mma(weights, v.slice(0, FIRST), acc, use_acc=False, is_async=True)
        weights2 = weights
        if SECOND > 0:
            words2 = _exponentials(
                s2, scale, top, SECOND, VALUES, start + FIRST, NK, AGAIN, row, CAUSAL, FORM.poly, MAGIC
            )
            total += gl.convert_layout(_thread_sums(words2, SECOND, VALUES), total.type.layout, assert_trivial=True)
            weights2 = _left_operand(words2, s2, SECOND, VALUES, RESULT)
            values = warpgroup_mma(weights2, v.slice(FIRST, SECOND), values, is_async=True)
        acc, weights, weights2 = warpgroup_mma_wait(0, deps=(values, weights, weights2))
        return acc, total, top

    @gluon.jit
    def block_products(q, k_tile, FORM: gl.constexpr):
        """Q K^T of a whole block: of its two halves, or of all keys twice."""
        k = k_tile.reshape((_BLOCK_N, FORM.block_d))
        if FORM.halves:
            first = products(q, k.slice(0, _HALF), _HALF, FORM)
            second = products(q, k.slice(_HALF, _HALF), _HALF, FORM)
            s, s2 = warpgroup_mma_wait(0, deps=(first, second))
        else:
            s = warpgroup_mma_wait(0, deps=(products(q, k, _BLOCK_N, FORM),))
            s2 = s
        return s, s2

    @gluon.jit
    def visit(s, s2, v_tile, state, scale, VALUES: gl.constexpr, FORM: gl.constexpr):
        """The state of ``visit_pieces`` with a whole block more, of products ``s`` and ``s2``."""
        acc, total, top = state
        RESULT: gl.constexpr = acc.type.layout
        KEYS: gl.constexpr = s.shape[1]
        MAGIC: gl.constexpr = FORM.magic and FORM.int8_values
        v = v_tile.reshape((_BLOCK_N, FORM.block_dv))
        new_top = gl.maximum(
            top,
            gl.convert_layout(
                _maxima(s, s2 if FORM.halves else None, scale, MAGIC), top.type.layout, assert_trivial=True
            ),
        )
        rescale = gl.exp2(top - new_top)
        total = total * gl.convert_layout(rescale, gl.SliceLayout(1, total.type.layout))[:, None]
        words = _exponentials(s, scale, new_top, KEYS, VALUES, 0, 0, False, 0, False, FORM.poly, MAGIC)
        sums = _thread_sums(words, KEYS, VALUES)
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, RESULT))[:, None]
        weights = _left_operand(words, s, KEYS, VALUES, RESULT)
        values = warpgroup_mma(weights, v.slice(0, KEYS), acc, is_async=True)
        weights2 = weights
        if FORM.halves:
            words2 = _exponentials(s2, scale, new_top, _HALF, VALUES, 0, 0, False, 0, False, FORM.poly, MAGIC)
            sums += _thread_sums(words2, _HALF, VALUES)
            weights2 = _left_operand(words2, s2, _HALF, VALUES, RESULT)
            values = warpgroup_mma(weights2, v.slice(_HALF, _HALF), values, is_async=True)
        total += gl.convert_layout(sums, total.type.layout, assert_trivial=True)
        acc, weights, weights2 = warpgroup_mma_wait(0, deps=(values, weights, weights2))
        return acc, total, new_top

    @gluon.jit
    def advance(q, s, k_next, v, state, scale, VALUES: gl.constexpr, FORM: gl.constexpr):
        """Softmax and P V of 64 keys with products ``s``; Q K^T of the next 64 is in flight meanwhile."""
        first, second = s
        acc, total, top = state
        RESULT: gl.constexpr = acc.type.layout
        MAGIC: gl.constexpr = FORM.magic and FORM.int8_values
        begun = products(q, k_next.slice(0, _QUARTER), _QUARTER, FORM)
        new_top = gl.maximum(
            top, gl.convert_layout(_maxima(first, second, scale, MAGIC), top.type.layout, assert_trivial=True)
        )
        rescale = gl.exp2(top - new_top)
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, RESULT))[:, None]
        total = total * gl.convert_layout(rescale, gl.SliceLayout(1, total.type.layout))[:, None]
        words = _exponentials(first, scale, new_top, _QUARTER, VALUES, 0, 0, False, 0, False, FORM.poly, MAGIC)
        weights = _left_operand(words, first, _QUARTER, VALUES, RESULT)
        following = products(q, k_next.slice(_QUARTER, _QUARTER), _QUARTER, FORM)
        words2 = _exponentials(second, scale, new_top, _QUARTER, VALUES, 0, 0, False, 0, False, FORM.poly, MAGIC)
        weights2 = _left_operand(words2, second, _QUARTER, VALUES, RESULT)
        sums = _thread_sums(words, _QUARTER, VALUES) + _thread_sums(words2, _QUARTER, VALUES)
        total += gl.convert_layout(sums, total.type.layout, assert_trivial=True)
        first, second = warpgroup_mma_wait(0, deps=(begun, following))
        values = warpgroup_mma(weights, v.slice(0, _QUARTER), acc, is_async=True)
        values = warpgroup_mma(weights2, v.slice(_QUARTER, _QUARTER), values, is_async=True)
        acc, weights, weights2 = warpgroup_mma_wait(0, deps=(values, weights, weights2))
        return (first, second), (acc, total, new_top)

    @gluon.jit
    def store_result(tile, acc, total, factor, FORM: gl.constexpr):
        """P V / sum(P) * ``factor`` in the dtype of ``tile``, in shared memory."""
        DV: gl.constexpr = FORM.block_dv
        sums = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, acc.type.layout))
        result = acc * (factor / sums)[:, None]
        place = tile.reshape((FORM.warpgroups * _ROWS, DV))
        if tile.dtype == gl.int8:  # the sum with 1.5 * 2**23 has the integer in its lowest byte
            result = gl.minimum(gl.maximum(result, -127.0), 127.0) + 12582912.0
            place.store(result.to(gl.int32, bitcast=True).to(gl.int8))
        else:
            place.store(result.to(tile.dtype))

    @gluon.constexpr_function
    def places_of_values(FORM):
        """A layout of INT8 values (keys, block_dv) in registers, 16 bytes a thread."""
        PER_ROW = FORM.block_dv // 16
        return gl.BlockedLayout([1, 16], [32 // PER_ROW, PER_ROW], [FORM.warpgroups * 4, 1], [1, 0])

    @gluon.jit
    def load_int8_values(ptr, start, KEYS: gl.constexpr, stride, NK, DV, FORM: gl.constexpr):
        """INT8 values (KEYS, block_dv) from ``start`` on, in registers; 0 where there are none."""
        PLACES: gl.constexpr = places_of_values(FORM)
        row = start + gl.arange(0, KEYS, layout=gl.SliceLayout(1, PLACES))
        column = gl.arange(0, FORM.block_dv, layout=gl.SliceLayout(0, PLACES))
        inside = (row < NK)[:, None]
        if not FORM.whole_values:
            inside = inside & (column < DV)[None, :]
        return gl.load(ptr + row[:, None] * stride + column[None, :], mask=inside, other=0)

    @gluon.jit
    def store_as_float16(tile, values):
        """INT8 values as float16 in shared memory, exactly: a float16 of 1024 and more has integers in its bits."""
        halves = gl.inline_asm_elementwise(
            """{
            .reg .b32 bytes, low, high, offset;
            xor.b32 bytes, $2, 0x80808080;
            mov.b32 offset, 0x64806480;
            prmt.b32 low, bytes, 0x64646464, 0x4140;
            prmt.b32 high, bytes, 0x64646464, 0x4342;
            sub.f16x2 $0, low, offset;
            sub.f16x2 $1, high, offset;
            }""",
            "=r,=r,r",
            [values],
            dtype=gl.float16,
            is_pure=True,
            pack=4,
        )
        if len(tile.shape) == 4:
            tile.reshape((values.shape[0], values.shape[1])).store(halves)
        else:
            tile.store(halves)

    @gluon.jit
    def scales_of(scales, h, kv, logit_scale, PER_HEAD: gl.constexpr):
        """(factor from products to logits in octaves, factor of the result) from the pointers to four scales."""
        q_scale, k_scale, v_scale, out_scale = scales
        scale = logit_scale
        factor = 1.0
        if q_scale is not None:
            scale = scale * gl.load(q_scale + (h if PER_HEAD[0] else 0))
        if k_scale is not None:
            scale = scale * gl.load(k_scale + (kv if PER_HEAD[1] else 0))
        if v_scale is not None:
            factor = gl.load(v_scale + (kv if PER_HEAD[2] else 0))
        if out_scale is not None:
            factor = factor / gl.load(out_scale + (h if PER_HEAD[3] else 0))
        return scale, factor
