"""What Hopper's kernels for many small programs share: products, the softmax and the result of pieces of keys.

Formula: :mod:`~qframework.kernels.attention.quantized_attention`, for one scale per head and a product of the scales
that is not negative: the maximum of a row is taken before its products are scaled. Weights of two neighbouring keys
share a word of 32 bits, as P V reads them, so that one instruction rounds, adds or moves both.
"""

from __future__ import annotations

from qframework.kernels.attention.hopper.piece_form import BLOCK_N, HALF, ROWS
from qframework.kernels.attention.operands import LOG2_E
from qframework.kernels.runtime.gluon import HAS_GLUON

if HAS_GLUON:
    from qframework.kernels.attention.hopper.piece_form import result_layout, scores_layout
    from qframework.kernels.attention.hopper.softmax import LOWEST, apart, in_octaves, natural_rescale, sums_of_two
    from qframework.kernels.runtime.gluon import gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait

    _ROWS, _BLOCK_N, _HALF, _NATURAL = (gl.constexpr(x) for x in (ROWS, BLOCK_N, HALF, 1 / LOG2_E))
    _LEAST = gl.constexpr(-(1 << 26))  # below all sums of INT8 products

    @gluon.jit
    def products(q, k, before, KEYS: gl.constexpr, FORM: gl.constexpr):
        """Q K^T of (M, D) queries and a piece of keys (KEYS, D), in flight; added to ``before`` if it is not None."""
        INT8: gl.constexpr = q.dtype == gl.int8
        SCORES: gl.constexpr = scores_layout(KEYS, INT8, FORM)
        if before is None:
            before = gl.zeros((FORM.warpgroups * _ROWS, KEYS), gl.int32 if INT8 else gl.float32, SCORES)
            started = warpgroup_mma(q, k.permute((1, 0)), before, use_acc=False, is_async=True)
        else:
            started = warpgroup_mma(q, k.permute((1, 0)), before, is_async=True)
        return started

    @gluon.jit
    def _begun(factors, places, KEYS: gl.constexpr, FORM: gl.constexpr):
        """Relative positions of queries and KEYS keys in flight, for Q K^T to be added; None where there are none."""
        begun = None
        if FORM.columns > 0:
            begun = products(factors[1], places, None, KEYS, FORM)
            begun = products(factors[0], places, begun, KEYS, FORM)
        return begun

    @gluon.jit
    def _thread_maxima(s):
        """(M, 4): maxima over the keys of each of the four threads of a row."""
        M: gl.constexpr = s.shape[0]
        by_thread = gl.reshape(s, (M, s.shape[1] // 8, 4, 2))
        return gl.max(gl.max(by_thread, 3), 1)

    @gluon.jit
    def _thread_sums(words, KEYS: gl.constexpr, DTYPE: gl.constexpr):
        """(M, 4): sums of the weights of each of the four threads of a row; up to eight are summed in 16 bit."""
        M: gl.constexpr = words.shape[0]
        words = gl.reshape(words, (M, KEYS // 8, 4))
        if KEYS >= 16:
            words = sums_of_two(words, KEYS // 8, DTYPE)
        if KEYS >= 32:
            words = sums_of_two(words, KEYS // 16, DTYPE)
        if KEYS >= 64:
            words = sums_of_two(words, KEYS // 32, DTYPE)
        low, high = apart(words, DTYPE)
        return gl.sum(low.to(gl.float32) + high.to(gl.float32), 1)

    @gluon.jit
    def _exponentials(s, scale, top, KEYS: gl.constexpr, DTYPE: gl.constexpr, start, NK, MASKED: gl.constexpr):
        """2^(s scale - top) rounded to DTYPE: (M, KEYS // 2) words. ``scale`` is a number or one for each row."""
        top = gl.convert_layout(top, gl.SliceLayout(1, s.type.layout))
        if scale.type.is_block():
            scale = gl.convert_layout(scale, top.type.layout)[:, None]
        p = gl.exp2(s.to(gl.float32) * scale - top[:, None])
        if MASKED:
            column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, s.type.layout))
            p = gl.where((start + column < NK)[None, :], p, 0.0)
        return _rounded_pairs(p, DTYPE)

    @gluon.jit
    def _rounded_pairs(p, DTYPE: gl.constexpr):
        """(M, KEYS) weights rounded to DTYPE: (M, KEYS // 2) words."""
        low, high = gl.split(gl.reshape(p, (p.shape[0], p.shape[1] // 2, 2)))
        ROUND: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;" if gl.float16 == DTYPE else "cvt.rn.bf16x2.f32 $0, $2, $1;"
        return gl.inline_asm_elementwise(ROUND, "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1)

    @gluon.jit
    def _left_operand(words, s, KEYS: gl.constexpr, DTYPE: gl.constexpr, RESULT: gl.constexpr):
        """Words as the left operand (M, KEYS) of P V; no value moves to another thread."""
        M: gl.constexpr = words.shape[0]
        low, high = apart(words, DTYPE)
        p = gl.convert_layout(gl.reshape(gl.join(low, high), (M, KEYS)), s.type.layout, assert_trivial=True)
        return gl.convert_layout(p, gl.DotOperandLayout(0, RESULT, 2))

    @gluon.jit
    def _kept(s, start, NK):
        """Products of keys that exist; the others below all products."""
        column = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
        return gl.where((start + column < NK)[None, :], s, _LEAST if s.dtype == gl.int32 else float("-inf"))

    @gluon.jit
    def _maxima(s, s2, scale, FORM: gl.constexpr):
        """The largest logits of rows, of one or two pieces' products; natural with a bias, and never -inf."""
        highest = _thread_maxima(s)
        if s2 is not None:
            highest = gl.maximum(
                highest, gl.convert_layout(_thread_maxima(s2), highest.type.layout, assert_trivial=True)
            )
        highest = gl.max(highest, 1).to(gl.float32)
        return gl.maximum(highest, LOWEST) if FORM.added != "none" else highest * scale

    @gluon.jit
    def _octaves(top, scale, FORM: gl.constexpr):
        """(factor, shift) so that weights are 2^(s factor - shift) for maxima ``top``."""
        if FORM.added != "none":
            factor, shift = in_octaves(top)
        else:
            factor = scale
            shift = top
        return factor, shift

    @gluon.jit
    def _of_slices(q, k, begun, start: gl.constexpr, KEYS: gl.constexpr, OF: gl.constexpr, FORM: gl.constexpr):
        """Q K^T in flight, of both slices of channels and KEYS of the OF keys in shared memory, from ``start``."""
        keys = k[0].reshape((OF, FORM.block_d)).slice(start, KEYS)
        started = products(q[0], keys, begun, KEYS, FORM)
        if FORM.rest_d > 0:
            keys = k[1].reshape((OF, FORM.rest_d)).slice(start, KEYS)
            started = products(q[1], keys, started, KEYS, FORM)
        return started

    @gluon.jit
    def piece_products(q, k_first, k_second, FORM: gl.constexpr, factors=None, first_places=None, second_places=None):
        """Q K^T of both pieces of the last keys, of the first twice where there is no second.

        Queries and keys are pairs of slices of channels, of which the second may be unused. ``factors`` are queries'
        relative positions in shared memory, if any, and ``places`` those of the keys.
        """
        FIRST: gl.constexpr = FORM.first
        SECOND: gl.constexpr = FORM.second
        first = _of_slices(q, k_first, _begun(factors, first_places, FIRST, FORM), 0, FIRST, FIRST, FORM)
        if SECOND > 0:
            second = _of_slices(q, k_second, _begun(factors, second_places, SECOND, FORM), 0, SECOND, SECOND, FORM)
            s, s2 = warpgroup_mma_wait(0, deps=(first, second))
        else:
            s = warpgroup_mma_wait(0, deps=(first,))
            s2 = s
        return s, s2

    @gluon.jit
    def _start_values(
        weights, v, acc, rest, ADD: gl.constexpr, start: gl.constexpr, KEYS: gl.constexpr, OF: gl.constexpr,
        FORM: gl.constexpr,
    ):  # fmt: skip
        """P V in flight of KEYS of OF keys for both slices of channels, added to ``acc`` and ``rest`` if ADD."""
        tile = v[0].reshape((OF, FORM.block_dv)).slice(start, KEYS)
        values = warpgroup_mma(weights, tile, acc, use_acc=ADD, is_async=True)
        if FORM.rest_dv > 0:
            PLACES: gl.constexpr = gl.DotOperandLayout(0, result_layout(FORM.rest_dv, FORM), 2)
            tile = v[1].reshape((OF, FORM.rest_dv)).slice(start, KEYS)
            rest = warpgroup_mma(gl.convert_layout(weights, PLACES), tile, rest, use_acc=ADD, is_async=True)
        return values, rest

    @gluon.jit
    def _finish_values(values, rest, weights, weights2, FORM: gl.constexpr):
        """Both slices of P V.

        The operands in registers are read until the wait, which takes them so that nothing else gets their place.
        """
        if FORM.rest_dv > 0:
            acc, rest, weights, weights2 = warpgroup_mma_wait(0, deps=(values, rest, weights, weights2))
        else:
            acc, weights, weights2 = warpgroup_mma_wait(0, deps=(values, weights, weights2))
        return acc, rest

    @gluon.jit
    def visit_pieces(s, s2, values_of, v_ready, v_phase, scale, start, NK, VALUES: gl.constexpr, FORM: gl.constexpr):
        """The first visit, of the last keys with products ``s`` and ``s2``: (P V of both slices, sums of P, maxima)."""
        v_first, v_second = values_of
        FIRST: gl.constexpr = FORM.first
        SECOND: gl.constexpr = FORM.second
        DV: gl.constexpr = FORM.block_dv
        RESULT: gl.constexpr = result_layout(DV, FORM)
        MASKED: gl.constexpr = FORM.masked and FORM.added == "none"  # a bias is -inf there
        MASK_FIRST: gl.constexpr = MASKED and SECOND == 0
        if SECOND > 0:
            top = _maxima(s, _kept(s2, start + FIRST, NK) if MASKED else s2, scale, FORM)
        else:
            top = _maxima(_kept(s, start, NK) if MASK_FIRST else s, None, scale, FORM)
        factor, shift = _octaves(top, scale, FORM)
        words = _exponentials(s, factor, shift, FIRST, VALUES, start, NK, MASK_FIRST)
        total = _thread_sums(words, FIRST, VALUES)
        weights = _left_operand(words, s, FIRST, VALUES, RESULT)
        if not FORM.int8_values:
            mbarrier.wait(v_ready, v_phase)
        acc = gl.zeros((FORM.warpgroups * _ROWS, DV), gl.float32, RESULT)
        rest = acc
        if FORM.rest_dv > 0:
            REST_DV: gl.constexpr = FORM.rest_dv
            rest = gl.zeros((FORM.warpgroups * _ROWS, REST_DV), gl.float32, result_layout(REST_DV, FORM))
        values, rest = _start_values(weights, v_first, acc, rest, False, 0, FIRST, FIRST, FORM)
        weights2 = weights
        if SECOND > 0:
            words2 = _exponentials(s2, factor, shift, SECOND, VALUES, start + FIRST, NK, MASKED)
            total += gl.convert_layout(_thread_sums(words2, SECOND, VALUES), total.type.layout, assert_trivial=True)
            weights2 = _left_operand(words2, s2, SECOND, VALUES, RESULT)
            values, rest = _start_values(weights2, v_second, values, rest, True, 0, SECOND, SECOND, FORM)
        acc, rest = _finish_values(values, rest, weights, weights2, FORM)
        return acc, rest, total, top

    @gluon.jit
    def first_products(WHO: gl.constexpr, q, k_tile, CAUSAL: gl.constexpr, FORM: gl.constexpr):
        """Q K^T of the pieces, within one block in shared memory, for warpgroup ``WHO`` of a tile of queries.

        Of the keys of a tile's own places, with CAUSAL, warpgroup 0 attends to the first half.
        """
        FIRST: gl.constexpr = FORM.first
        SECOND: gl.constexpr = 0 if CAUSAL and WHO == 0 and not FORM.clipped else FORM.second
        k = k_tile.reshape((FORM.block_n, FORM.block_d))
        first = products(q, k.slice(0, FIRST), None, FIRST, FORM)
        if SECOND > 0:
            second = products(q, k.slice(FIRST, SECOND), None, SECOND, FORM)
            s, s2 = warpgroup_mma_wait(0, deps=(first, second))
        else:
            s = warpgroup_mma_wait(0, deps=(first,))
            s2 = s
        return s, s2

    @gluon.jit
    def first_visit(
        WHO: gl.constexpr, s, s2, v_tile, scale, start, NK, row, VALUES: gl.constexpr, CAUSAL: gl.constexpr,
        FORM: gl.constexpr,
    ):  # fmt: skip
        """As ``visit_pieces`` with ``first_products``, for queries from ``row`` on and keys from ``start`` on."""
        FIRST: gl.constexpr = FORM.first
        SECOND: gl.constexpr = 0 if CAUSAL and WHO == 0 and not FORM.clipped else FORM.second
        DV: gl.constexpr = FORM.block_dv
        RESULT: gl.constexpr = result_layout(DV, FORM)
        LAST: gl.constexpr = FORM.masked or CAUSAL  # the last piece has a mask
        MASK_FIRST: gl.constexpr = (LAST and SECOND == 0) or FORM.clipped
        kept = _attended(s, start, NK, row, CAUSAL) if MASK_FIRST else None
        kept2 = _attended(s2, start + FIRST, NK, row, CAUSAL) if LAST and SECOND > 0 else None
        s = _only(s, kept)
        s2 = _only(s2, kept2)
        top = _maxima(s, s2 if SECOND > 0 else None, scale, FORM)
        words = _weights(s, scale, top, kept, VALUES)
        total = _thread_sums(words, FIRST, VALUES)
        weights = _left_operand(words, s, FIRST, VALUES, RESULT)
        v = v_tile.reshape((FORM.block_n, DV))
        acc = gl.zeros((FORM.warpgroups * _ROWS, DV), gl.float32, RESULT)
        rest = acc  # one slice of channels
        values = warpgroup_mma(weights, v.slice(0, FIRST), acc, use_acc=False, is_async=True)
        weights2 = weights
        if SECOND > 0:
            words2 = _weights(s2, scale, top, kept2, VALUES)
            total += gl.convert_layout(_thread_sums(words2, SECOND, VALUES), total.type.layout, assert_trivial=True)
            weights2 = _left_operand(words2, s2, SECOND, VALUES, RESULT)
            values = warpgroup_mma(weights2, v.slice(FIRST, SECOND), values, is_async=True)
        acc, weights, weights2 = warpgroup_mma_wait(0, deps=(values, weights, weights2))
        return acc, rest, total, top

    @gluon.jit
    def _attended(s, start, NK, row, CAUSAL: gl.constexpr):
        """Which keys from ``start`` on the queries from ``row`` on attend to."""
        column = start + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
        end = NK
        if CAUSAL:
            own = row + gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, s.type.layout))
            end = gl.minimum(own + 1, NK)[:, None]
        return column[None, :] < end

    @gluon.jit
    def _only(s, kept):
        """Products of keys that are attended to; the others below all products."""
        if kept is not None:
            s = gl.where(kept, s, _LEAST if s.dtype == gl.int32 else float("-inf"))
        return s

    @gluon.jit
    def _weights(s, scale, top, kept, DTYPE: gl.constexpr):
        """As ``_exponentials`` for products from ``_only``: 0 for keys that are not attended to."""
        p = gl.exp2(s.to(gl.float32) * scale - gl.convert_layout(top, gl.SliceLayout(1, s.type.layout))[:, None])
        if kept is not None and s.dtype == gl.int32:  # however small the scale is
            p = gl.where(kept, p, 0.0)
        return _rounded_pairs(p, DTYPE)

    @gluon.jit
    def block_products(q, k_tile, FORM: gl.constexpr, factors=None, places=None):
        """Q K^T of a whole block: of its two halves, or of all keys twice."""
        if FORM.halves:
            halves = (places, places)
            if FORM.columns > 0:
                halves = (places.slice(0, _HALF), places.slice(_HALF, _HALF))
            before = _begun(factors, halves[0], _HALF, FORM)
            before2 = _begun(factors, halves[1], _HALF, FORM)
            first = _of_slices(q, k_tile, before, 0, _HALF, FORM.block_n, FORM)
            second = _of_slices(q, k_tile, before2, _HALF, _HALF, FORM.block_n, FORM)
            s, s2 = warpgroup_mma_wait(0, deps=(first, second))
        else:
            before = _begun(factors, places, FORM.block_n, FORM)
            s = warpgroup_mma_wait(0, deps=(_of_slices(q, k_tile, before, 0, FORM.block_n, FORM.block_n, FORM),))
            s2 = s
        return s, s2

    @gluon.jit
    def no_visit(FORM: gl.constexpr):
        """The state of ``visit_pieces`` before any visit, for whole blocks of 16-bit keys.

        The maxima are finite, so that a row whose keys are all masked has weights of 0.
        """
        DV: gl.constexpr = FORM.block_dv
        RESULT: gl.constexpr = result_layout(DV, FORM)
        s = gl.zeros((FORM.warpgroups * _ROWS, _HALF), gl.float32, scores_layout(_HALF, False, FORM))
        by_thread = _thread_maxima(s)
        row = gl.max(by_thread, 1)
        acc = gl.zeros((FORM.warpgroups * _ROWS, DV), gl.float32, RESULT)
        total = gl.full(by_thread.shape, 0.0, gl.float32, by_thread.type.layout)
        return acc, acc, total, gl.full(row.shape, -1e30, gl.float32, row.type.layout)

    @gluon.jit
    def in_layouts(state, like):
        """``state`` in the layouts of ``like``, by which no value moves."""
        acc, rest, total, top = state
        acc = gl.convert_layout(acc, like[0].type.layout, assert_trivial=True)
        rest = gl.convert_layout(rest, like[1].type.layout, assert_trivial=True)
        total = gl.convert_layout(total, like[2].type.layout, assert_trivial=True)
        return acc, rest, total, gl.convert_layout(top, like[3].type.layout, assert_trivial=True)

    @gluon.jit
    def visit(s, s2, v_tile, state, scale, VALUES: gl.constexpr, FORM: gl.constexpr):
        """The state of ``visit_pieces`` with a whole block more, of products ``s`` and ``s2``."""
        acc, rest, total, top = state
        RESULT: gl.constexpr = acc.type.layout
        KEYS: gl.constexpr = s.shape[1]
        new_top = gl.maximum(
            top,
            gl.convert_layout(
                _maxima(s, s2 if FORM.halves else None, scale, FORM), top.type.layout, assert_trivial=True
            ),
        )
        rescale = natural_rescale(top, new_top) if FORM.added != "none" else gl.exp2(top - new_top)
        factor, shift = _octaves(new_top, scale, FORM)
        total = total * gl.convert_layout(rescale, gl.SliceLayout(1, total.type.layout))[:, None]
        words = _exponentials(s, factor, shift, KEYS, VALUES, 0, 0, False)
        sums = _thread_sums(words, KEYS, VALUES)
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, RESULT))[:, None]
        if FORM.rest_dv > 0:
            rest = rest * gl.convert_layout(rescale, gl.SliceLayout(1, rest.type.layout))[:, None]
        weights = _left_operand(words, s, KEYS, VALUES, RESULT)
        values, rest = _start_values(weights, v_tile, acc, rest, True, 0, KEYS, FORM.block_n, FORM)
        weights2 = weights
        if FORM.halves:
            words2 = _exponentials(s2, factor, shift, _HALF, VALUES, 0, 0, False)
            sums += _thread_sums(words2, _HALF, VALUES)
            weights2 = _left_operand(words2, s2, _HALF, VALUES, RESULT)
            values, rest = _start_values(weights2, v_tile, values, rest, True, _HALF, _HALF, FORM.block_n, FORM)
        total += gl.convert_layout(sums, total.type.layout, assert_trivial=True)
        acc, rest = _finish_values(values, rest, weights, weights2, FORM)
        return acc, rest, total, new_top

    @gluon.jit
    def store_result(tiles, state, factor, FORM: gl.constexpr):
        """P V / sum(P) * ``factor`` in the dtype of ``tiles``, in shared memory, for both slices of channels."""
        acc, rest, total, _ = state
        _store(tiles[0], acc, total, factor, FORM.block_dv, FORM)
        if FORM.rest_dv > 0:
            _store(tiles[1], rest, total, factor, FORM.rest_dv, FORM)

    @gluon.jit
    def _store(tile, acc, total, factor, DV: gl.constexpr, FORM: gl.constexpr):
        """One slice of channels for ``store_result``."""
        sums = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, acc.type.layout))
        if FORM.added != "none" or FORM.by_mask:
            sums = gl.where(sums == 0.0, 1.0, sums)  # all keys are masked: zeros
        result = acc * (factor / sums)[:, None]
        place = tile.reshape((FORM.warpgroups * _ROWS, DV))
        if tile.dtype == gl.int8:  # the sum with 1.5 * 2**23 has the integer in its lowest byte
            result = gl.minimum(gl.maximum(result, -127.0), 127.0) + 12582912.0
            place.store(result.to(gl.int32, bitcast=True).to(gl.int8))
        else:
            place.store(result.to(tile.dtype))

    @gluon.jit
    def store_log_sum_exp(lse_ptr, state, rows):
        """The natural log-sum-exp of the first ``rows`` queries, without a bias; -inf for a row without keys."""
        _acc, _rest, total, top = state
        sums = gl.convert_layout(gl.sum(total, 1), top.type.layout)
        row = gl.arange(0, top.shape[0], layout=top.type.layout)
        gl.store(lse_ptr + row, (top + gl.log2(sums)) * _NATURAL, mask=row < rows)

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
