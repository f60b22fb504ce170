"""The softmax of Hopper's attention: maxima of rows, weights of a block of keys, their sums, and P as an operand.

Formula: :mod:`~qframework.kernels.attention.quantized_attention`. A thread holds two neighbouring keys of two rows in
every eight; two weights are kept in one word of 32 bits, which is what P V reads, so that one instruction rounds, adds
or moves both.
"""

from __future__ import annotations

from qframework.kernels.attention.mask_blocks import WORDS
from qframework.kernels.attention.operands import LOG2_E
from qframework.kernels.attention.variants import KEY_BLOCK
from qframework.kernels.runtime.gluon import HAS_GLUON

ROWS = 64  # queries of a warpgroup

if HAS_GLUON:
    from qframework.kernels.runtime.gluon import gl, gluon

    _ROWS, _KEY_BLOCK, _MASK_WORDS = (gl.constexpr(n) for n in (ROWS, KEY_BLOCK, WORDS))
    _MASKED = gl.constexpr(-(1 << 26))  # below all sums of INT8 products
    _BOUND = gl.constexpr(60.0)  # logits up to this need no maximum: 2^60 and its sums are far from BF16's limit
    _ONE = gl.constexpr(127 << 7)  # the bits of 1 in BF16; a step is a 128th of an octave
    _MAGIC = gl.constexpr(8388608.0)  # 2^23: a float from here to 2^24 has its value in the low bits
    _LOG2_E = gl.constexpr(LOG2_E)
    _LARGE = gl.constexpr(2.0**28)  # two floats from here on are equal or at least 32 apart
    LOWEST = gl.constexpr(-3.4028234663852886e38)

    @gluon.jit
    def halves(x):
        """(ROWS, BLOCK_N) as (ROWS, BLOCK_N // KEY_BLOCK, KEY_BLOCK), whose last dimension shares a scale."""
        return gl.reshape(x, (_ROWS, x.shape[1] // _KEY_BLOCK, _KEY_BLOCK))

    @gluon.jit
    def of_threads(x):
        """(ROWS, BLOCK_N) as (ROWS, halves, 8, 4, 2), whose fourth dimension tells the four threads of a row apart."""
        return gl.reshape(x, (_ROWS, x.shape[1] // _KEY_BLOCK, _KEY_BLOCK // 8, 4, 2))

    @gluon.jit
    def of_each(scale, s):
        """Scales of all ``s (ROWS, halves, KEY_BLOCK)``: from (ROWS, halves) or, per thread, (ROWS, halves, 4)."""
        if len(scale.shape) == 3:
            by_thread = gl.reshape(s, (_ROWS, s.shape[1], _KEY_BLOCK // 8, 4, 2))
            LAYOUT: gl.constexpr = by_thread.type.layout
            scale = gl.convert_layout(scale, gl.SliceLayout(2, gl.SliceLayout(4, LAYOUT)), assert_trivial=True)
            wide = gl.expand_dims(gl.expand_dims(scale, 2), 4) + gl.zeros(by_thread.shape, gl.float32, LAYOUT)
            each = gl.convert_layout(gl.reshape(wide, s.shape), s.type.layout, assert_trivial=True)
        else:
            each = scale[:, :, None]
        return each

    @gluon.jit
    def kept_keys(bits_ptr, block, scores):
        """Which keys of ``block`` each row attends to, bool as ``halves(scores)``; ``bits_ptr`` is the first row's."""
        BLOCK_N: gl.constexpr = scores.shape[1]
        WORDS: gl.constexpr = BLOCK_N // 32
        IN_ONE: gl.constexpr = _MASK_WORDS // WORDS  # such blocks in a block of the mask
        by_word = gl.reshape(scores, (_ROWS, WORDS, 32))
        ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, by_word.type.layout))
        WORD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, by_word.type.layout))
        BIT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, by_word.type.layout))
        word = gl.arange(0, _ROWS, layout=ROW)[:, None] * _MASK_WORDS + gl.arange(0, WORDS, layout=WORD)[None, :]
        first = (block // IN_ONE).to(gl.int64) * (2 * _ROWS * _MASK_WORDS) + block % IN_ONE * WORDS
        words = gl.load(bits_ptr + first + word)
        keep = (words[:, :, None] >> gl.arange(0, 32, layout=BIT)[None, None, :]) & 1
        keep = gl.reshape(keep, (_ROWS, BLOCK_N // _KEY_BLOCK, _KEY_BLOCK)) != 0
        return gl.convert_layout(keep, halves(scores).type.layout, assert_trivial=True)

    @gluon.jit
    def new_maxima(s, top, scale, keep, PARTIAL: gl.constexpr):
        """The maxima of rows (ROWS,): of ``top`` and the logits ``s * scale``, scale as :func:`of_each` takes it.

        With PARTIAL of the keys that ``keep`` has, as ``halves`` does s.
        """
        OF_THREADS: gl.constexpr = len(scale.shape) == 3
        INT8: gl.constexpr = s.dtype == gl.int32
        if PARTIAL:
            s = gl.where(keep, s, _MASKED if INT8 else float("-inf"))
        by_thread = gl.reshape(s, (_ROWS, s.shape[1], _KEY_BLOCK // 8, 4, 2))
        products = gl.max(gl.max(by_thread, 4), 2)  # the four threads of a row meet once, after the scales
        if OF_THREADS:
            highest = products.to(gl.float32) * gl.convert_layout(scale, products.type.layout, assert_trivial=True)
        else:
            scale = gl.convert_layout(scale, gl.SliceLayout(2, products.type.layout), assert_trivial=True)
            highest = products.to(gl.float32) * scale[:, :, None]
        if PARTIAL and INT8:  # keys that are all masked have no logit, however small their scale
            highest = gl.where(products == _MASKED, float("-inf"), highest)
        return gl.maximum(top, gl.convert_layout(gl.max(gl.max(highest, 1), 1), top.type.layout))

    @gluon.jit
    def integer_weights(s, top, scale, keep, PARTIAL: gl.constexpr):
        """As ``exact_weights`` in BF16 with 2^x read off the bits of ``128 x + 127 * 128`` (Schraudolph 1999).

        The mantissa is linear instead of exponential, at most 6 percent above, most of which cancels in P / sum(P).
        """
        top = gl.convert_layout(top, gl.SliceLayout(1, gl.SliceLayout(2, s.type.layout)))
        zero = (_MAGIC + _ONE) - top * 128.0
        x = gl.fma(s.to(gl.float32), 128.0 * scale[:, :, None] + gl.zeros_like(s).to(gl.float32), zero[:, None, None])
        bits = gl.maximum(x.to(gl.int32, bitcast=True), 0x4B000000)  # 0 for all below; NaN stays NaN
        if PARTIAL:
            bits = gl.where(keep, bits, 0)
        low, high = gl.split(gl.reshape(bits, (_ROWS, s.shape[1] * (_KEY_BLOCK // 2), 2)))
        return _of_halves(low, high, 0x5410)

    @gluon.jit
    def bounded_weights(s, scale, keep, PARTIAL: gl.constexpr):
        """As ``integer_weights`` for bounded logits of INT8 products and ``top`` 0: a multiplication and addition."""
        step = (scale * 8388608.0 + 0.5).to(gl.int32)[:, :, None]
        bits = s * step + ((_ONE << 16) + (1 << 15))
        if PARTIAL:
            bits = gl.where(keep, bits, 0)
        low, high = gl.split(gl.reshape(bits, (_ROWS, s.shape[1] * (_KEY_BLOCK // 2), 2)))
        return _of_halves(low, high, 0x7632)

    @gluon.jit
    def _of_halves(low, high, SELECT: gl.constexpr):
        """Words of the low (0x5410) or the high (0x7632) halves of two words."""
        PERMUTE: gl.constexpr = "prmt.b32 $0, $1, $2, 0x5410;" if SELECT == 0x5410 else "prmt.b32 $0, $1, $2, 0x7632;"
        return gl.inline_asm_elementwise(PERMUTE, "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1)

    @gluon.jit
    def sum_of_squares(q, q_scale):
        """Of the integers (ROWS, D) of each query, float32 as ``q_scale``."""
        D: gl.constexpr = q.shape[1]
        values = q.load(gl.BlockedLayout([1, D // 2], [16, 2], [4, 1], [1, 0])).to(gl.int32)
        return gl.convert_layout(gl.sum(values * values, 1).to(gl.float32), q_scale.type.layout)

    @gluon.jit
    def is_bounded(squares, q_scale, k_norm):
        """Whether no logit of queries with these squared norms exceeds _BOUND: |q k| <= |q| |k| (Cauchy, Schwarz)."""
        bound = gl.sqrt(squares) * q_scale * k_norm
        return gl.min(gl.where(bound <= _BOUND, 1, 0), 0) == 1  # NaN is not

    @gluon.jit
    def exact_weights(s, top, scale, keep, PARTIAL: gl.constexpr, DTYPE: gl.constexpr):
        """exp2(s * scale - top), rounded to DTYPE: (ROWS, BLOCK_N // 2) words, each of two neighbouring keys.

        With PARTIAL the keys that ``keep`` leaves out weigh 0, whatever their scale: a NaN of theirs must not spread.
        """
        top = gl.convert_layout(top, gl.SliceLayout(1, gl.SliceLayout(2, s.type.layout)))
        x = s.to(gl.float32) * of_each(scale, s) - top[:, None, None]
        p = gl.exp2(gl.where(keep, x, float("-inf")) if PARTIAL else x)
        low, high = gl.split(gl.reshape(p, (_ROWS, s.shape[1] * (_KEY_BLOCK // 2), 2)))
        ROUND: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;" if gl.float16 == DTYPE else "cvt.rn.bf16x2.f32 $0, $2, $1;"
        return gl.inline_asm_elementwise(ROUND, "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1)

    @gluon.jit
    def fp8_weights(s, top, scale, keep, PARTIAL: gl.constexpr, SHIFT: gl.constexpr):
        """``2^SHIFT exp2(s * scale - top)``: its sums as :func:`partial_sums`, and in E4M3 four keys to a word.

        Words are (ROWS, BLOCK_N // 16, 4): a thread's keys among 16 are two neighbours in each eight.
        """
        BLOCK_N: gl.constexpr = s.shape[1] * _KEY_BLOCK
        top = gl.convert_layout(top, gl.SliceLayout(1, gl.SliceLayout(2, s.type.layout)))
        x = s.to(gl.float32) * of_each(scale, s) - (top - SHIFT)[:, None, None]
        p = gl.exp2(gl.where(keep, x, float("-inf")) if PARTIAL else x)
        first, second = gl.split(gl.reshape(p, (_ROWS, BLOCK_N // 16, 2, 4, 2)))
        a, c = gl.split(gl.permute(first, (0, 1, 3, 2)))
        b, d = gl.split(gl.permute(second, (0, 1, 3, 2)))
        sums = gl.sum((a + b) + (c + d), 1)
        ROUND: gl.constexpr = (
            "{ .reg .b16 x, y; cvt.rn.satfinite.e4m3x2.f32 x, $2, $1; cvt.rn.satfinite.e4m3x2.f32 y, $4, $3; "
            "mov.b32 $0, {x, y}; }"
        )
        words = gl.inline_asm_elementwise(ROUND, "=r,f,f,f,f", [a, b, c, d], dtype=gl.int32, is_pure=True, pack=1)
        return sums, words

    @gluon.jit
    def settled(words):
        """``words`` in registers that nothing writes before this place: ptxas serializes P V that reads others."""
        return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [words], dtype=gl.int32, is_pure=False, pack=1)

    @gluon.jit
    def fp8_operand(words, LAYOUT: gl.constexpr):
        """Words of :func:`fp8_weights` as the left operand (ROWS, BLOCK_N) of P V, whose keys are in the order of
        :data:`~qframework.kernels.attention.variants.PAIRED`; no value moves to another thread.
        """
        a, b, c, d = words.to(gl.int8), (words >> 8).to(gl.int8), (words >> 16).to(gl.int8), (words >> 24).to(gl.int8)
        p = gl.join(gl.join(a, c), gl.join(b, d))  # (ROWS, BLOCK_N // 16, 4, pair, key of a pair)
        p = gl.reshape(p, (_ROWS, words.shape[1] * 16)).to(gl.float8e4nv, bitcast=True)
        return gl.convert_layout(p, LAYOUT, assert_trivial=True)

    @gluon.jit
    def apart(words, DTYPE: gl.constexpr):
        """The low and the high halves of words as DTYPE."""
        low, high = words.to(gl.int16), (words >> 16).to(gl.int16)
        return low.to(DTYPE, bitcast=True), high.to(DTYPE, bitcast=True)

    @gluon.jit
    def left_operand(words, DTYPE: gl.constexpr, SCORES: gl.constexpr, LAYOUT: gl.constexpr):
        """Words as the left operand (ROWS, BLOCK_N) of P V; no value moves to another thread."""
        low, high = apart(words, DTYPE)
        p = gl.convert_layout(gl.reshape(gl.join(low, high), (_ROWS, words.shape[1] * 2)), SCORES, assert_trivial=True)
        return gl.convert_layout(p, LAYOUT)

    @gluon.jit
    def sums_of_two(words, COUNT: gl.constexpr, DTYPE: gl.constexpr):
        """(M, COUNT, 4) words to (M, COUNT // 2, 4): sums of two, in 16 bit."""
        M: gl.constexpr = words.shape[0]
        a, b = gl.split(gl.permute(gl.reshape(words, (M, 2, COUNT // 2, 4)), (0, 2, 3, 1)))
        ADD: gl.constexpr = "add.rn.f16x2 $0, $1, $2;" if gl.float16 == DTYPE else "add.rn.bf16x2 $0, $1, $2;"
        return gl.inline_asm_elementwise(ADD, "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)

    @gluon.jit
    def partial_sums(words, DTYPE: gl.constexpr):
        """(ROWS, 4): sums over the columns of each of the four threads of a row, which need no exchange.

        Eight weights each are summed in 16 bit, where an instruction adds two pairs.
        """
        COUNT: gl.constexpr = words.shape[1] // 4
        words = gl.reshape(words, (_ROWS, COUNT, 4))
        words = sums_of_two(words, COUNT, DTYPE)
        words = sums_of_two(words, COUNT // 2, DTYPE)
        words = sums_of_two(words, COUNT // 4, DTYPE)
        low, high = apart(words, DTYPE)
        return gl.sum(low.to(gl.float32) + high.to(gl.float32), 1)

    @gluon.jit
    def whole(x):
        """Rounded to integers, up to 2^22; then powers of two of them are exact."""
        return (x + 12582912.0) - 12582912.0

    @gluon.jit
    def _times_log2_e(x):
        """Rounded in any context: the shift of all blocks is the same number only if no addition is fused with it."""
        return gl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, 0f3FB8AA3B;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
        )

    @gluon.jit
    def in_octaves(top):
        """(factor, shift) with e^(x - top) = 2^(x * factor - shift) for natural logits ``x``.

        The shift is rounded, by which all weights of a row change alike, at most 2^12 times. Of larger logits, as where
        a mask holds the lowest float32, only those that equal the maximum have a weight, whatever the base.
        """
        large = gl.maximum(top, -top) > _LARGE
        return gl.where(large, 1.0, _LOG2_E), gl.where(large, top, _times_log2_e(top))

    @gluon.jit
    def natural_rescale(top, new_top):
        """e^(top - new_top), consistent with :func:`in_octaves`."""
        same = gl.where(top == new_top, 1.0, 0.0)
        rescale = gl.exp2(_times_log2_e(top) - _times_log2_e(new_top))
        return gl.where(gl.maximum(top, -top) > _LARGE, same, rescale)
