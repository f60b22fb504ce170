"""From products of a block of keys to weights in specialized_kernel.py: scales, biases, masks.

The arithmetic itself is that of softmax.py.
"""

from __future__ import annotations

from qframework.kernels.attention.hopper.softmax import ROWS
from qframework.kernels.attention.operands import LOG2_E
from qframework.kernels.attention.softcap import INVERSE_OF_ONE_PLUS_EXP2
from qframework.kernels.attention.variants import KEY_BLOCK
from qframework.kernels.runtime.gluon import HAS_GLUON

if HAS_GLUON:
    from qframework.kernels.attention.hopper.softmax import (
        exact_weights,
        fp8_weights,
        halves,
        in_octaves,
        integer_weights,
        natural_rescale,
        new_maxima,
        of_threads,
        whole,
    )
    from qframework.kernels.runtime.gluon import gl, gluon

    _ROWS, _KEY_BLOCK = gl.constexpr(ROWS), gl.constexpr(KEY_BLOCK)
    _LOG2_E, _INVERSE = gl.constexpr(LOG2_E), gl.constexpr(INVERSE_OF_ONE_PLUS_EXP2)

    @gluon.jit
    def logits_of(products, natural, FORM: gl.constexpr):
        """Logits of products in 16 bit, capped or before a bias: natural with a bias, otherwise in base 2.

        ``natural``: what makes products logits in base 2, and the cap of natural ones; formula of softcap.capped.
        """
        CAPPED: gl.constexpr = FORM.capped
        NATURAL: gl.constexpr = FORM.bias != "none"
        logit_scale, softcap = natural
        if CAPPED:
            cap = softcap if NATURAL else softcap * _LOG2_E
            x = products * (2 * logit_scale / softcap)
            inverse = gl.inline_asm_elementwise(_INVERSE, "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)
            logits = cap - 2 * cap * inverse
        else:
            logits = products * (logit_scale * (1 / _LOG2_E))
        return logits

    @gluon.jit
    def bias_of(WHO: gl.constexpr, block, slot, bias, shared, NK, no_scores, FIRST: gl.constexpr, FORM: gl.constexpr):
        """The natural bias of a block of keys, float32 (ROWS, BLOCK_N) or (1, BLOCK_N)."""
        KIND: gl.constexpr = FORM.bias
        BLOCK_N: gl.constexpr = FORM.block_n
        SCORES: gl.constexpr = no_scores.type.layout
        bias_ptr, bias_token, queries = bias
        if KIND == "tile":
            added = shared[8].index(slot * 2 + WHO).reshape((_ROWS, BLOCK_N)).load(SCORES).to(gl.float32)
        elif KIND == "row":
            key = block * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
            if FIRST:  # the last block
                added = gl.load(bias_ptr + key, mask=key < NK, other=0.0).to(gl.float32)[None, :]
            else:
                added = gl.load(bias_ptr + key).to(gl.float32)[None, :]
        else:
            COLUMNS: gl.constexpr = FORM.columns
            by_row = gl.reshape(no_scores, (_ROWS, BLOCK_N // COLUMNS, COLUMNS))
            width = shared[8].index(WHO).reshape((_ROWS, COLUMNS)).load(gl.SliceLayout(1, by_row.type.layout))
            QUERY: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, by_row.type.layout))
            LINE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, by_row.type.layout))
            line = block * (BLOCK_N // COLUMNS) + gl.arange(0, BLOCK_N // COLUMNS, layout=LINE)
            line = gl.minimum(line, NK // COLUMNS - 1)
            query = gl.minimum(gl.arange(0, _ROWS, layout=QUERY), queries - 1)
            height = gl.load(bias_ptr + query[:, None] * bias_token + line[None, :])
            both = height.to(gl.float32)[:, :, None] + width.to(gl.float32)[:, None, :]
            added = gl.convert_layout(gl.reshape(both, (_ROWS, BLOCK_N)), SCORES, assert_trivial=True)
        return added

    @gluon.jit
    def head_bias_of(bias_ptr, bias_batch, bias_head, bias_token, b, h, first, mask, FORM: gl.constexpr):
        """Where the bias of a row starts, or the relative positions of the queries from ``first``."""
        KIND: gl.constexpr = FORM.bias
        if KIND == "row":  # in steps of 8, so that several are loaded at once
            return bias_ptr + (b % mask[3] * bias_batch + h % mask[4] * bias_head) * 8
        if KIND == "factors":
            return bias_ptr + b % mask[3] * bias_batch + h % mask[4] * bias_head + first * bias_token
        return bias_ptr

    @gluon.jit
    def kept_by_place(block, first, NK, scores, CAUSAL: gl.constexpr):
        """Which keys of ``block`` the queries from ``first`` attend to, as :func:`kept_keys`."""
        BLOCK_N: gl.constexpr = scores.shape[1]
        EIGHTS: gl.constexpr = gl.reshape(scores, (_ROWS, BLOCK_N // 8, 8)).type.layout
        ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, EIGHTS))
        row = first + gl.arange(0, _ROWS, layout=ROW)
        last = gl.minimum(row, NK - 1) if CAUSAL else gl.where(row >= 0, NK - 1, -1)
        last -= block * BLOCK_N  # then no key of the block comes before a negative one
        # Compared in eights, since the indices of all keys would be kept in registers from tile to tile.
        eight = gl.arange(0, BLOCK_N // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, EIGHTS)))
        rest = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, EIGHTS)))
        keep = rest[None, None, :] <= (last[:, None] - 8 * eight[None, :])[:, :, None]
        keep = gl.convert_layout(gl.reshape(keep, (_ROWS, BLOCK_N)), scores.type.layout, assert_trivial=True)
        return halves(keep)

    @gluon.jit
    def _by_row(x, like):
        """(ROWS,) for every row and half of ``halves`` like ``like``."""
        HALVES: gl.constexpr = like.type.layout
        half = gl.arange(0, like.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, HALVES)))
        x = gl.convert_layout(x, gl.SliceLayout(1, gl.SliceLayout(2, HALVES)))
        return x[:, None] + gl.zeros_like(half).to(gl.float32)[None, :]

    @gluon.jit
    def weights_of(scores, top, scale, keep, PARTIAL: gl.constexpr, DTYPE: gl.constexpr, FORM: gl.constexpr):
        """(maxima of rows, what sums before are multiplied by, weights in words)."""
        INTEGER: gl.constexpr = FORM.integer
        NATURAL: gl.constexpr = FORM.bias != "none"
        if NATURAL:
            ones = gl.full(scale.shape, 1.0, gl.float32, scale.type.layout)
            new_top = new_maxima(scores, top, ones, keep, PARTIAL)
            rescale = natural_rescale(top, new_top)
            factor, shift = in_octaves(new_top)
            p = exact_weights(scores, shift, _by_row(factor, scores), keep, PARTIAL, DTYPE)
        else:
            new_top = new_maxima(scores, top, scale, keep, PARTIAL)
            if INTEGER:
                new_top = whole(new_top)
            rescale = gl.exp2(top - new_top)
            if INTEGER:
                p = integer_weights(scores, new_top, scale, keep, PARTIAL)
            else:
                p = exact_weights(scores, new_top, scale, keep, PARTIAL, DTYPE)
        return new_top, rescale, p

    @gluon.jit
    def fp8_weights_of(scores, top, scale, keep, PARTIAL: gl.constexpr, FORM: gl.constexpr):
        """As :func:`weights_of`, with the sums of unrounded weights before the words."""
        SHIFT: gl.constexpr = FORM.p_shift
        new_top = new_maxima(scores, top, scale, keep, PARTIAL)
        sums, words = fp8_weights(scores, new_top, scale, keep, PARTIAL, SHIFT)
        return new_top, gl.exp2(top - new_top), sums, words

    @gluon.jit
    def scales_of_block(q_scale, k_scales, k_groups, block, CLAMP: gl.constexpr, no_scores, FORM: gl.constexpr):
        """From products of a block to logits: (ROWS, halves), or per thread (ROWS, halves, 4)."""
        BLOCK_N: gl.constexpr = FORM.block_n
        K_SPAN: gl.constexpr = FORM.k_span
        OF_THREADS: gl.constexpr = FORM.of_threads
        if OF_THREADS:
            LAYOUT: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, of_threads(no_scores).type.layout))
            HALF: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, LAYOUT))
            THREAD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT))
            groups = block * (BLOCK_N // _KEY_BLOCK) + gl.arange(0, BLOCK_N // _KEY_BLOCK, layout=HALF)
            groups = gl.expand_dims(groups, 1) * 4 + gl.expand_dims(gl.arange(0, 4, layout=THREAD), 0)
            if CLAMP:
                groups = gl.minimum(groups, k_groups - 1)
            rows = gl.convert_layout(q_scale, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
            scale = gl.expand_dims(gl.expand_dims(rows, 1), 2) * gl.expand_dims(gl.load(k_scales + groups), 0)
        else:
            HALVES: gl.constexpr = halves(no_scores).type.layout
            half = gl.arange(0, BLOCK_N // _KEY_BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(2, HALVES)))
            groups = (block * BLOCK_N + half * _KEY_BLOCK) // K_SPAN
            if CLAMP:
                groups = gl.minimum(groups, k_groups - 1)
            scale = q_scale[:, None] * gl.load(k_scales + groups)[None, :]
        return scale

    @gluon.jit
    def scale_of_queries(q, q_scale_ptr, b, h, H, row, N, q_groups, logit_scale, like, FORM: gl.constexpr):
        """From products to logits in base 2 before the scales of keys, (ROWS,); NaN for a query that is not finite."""
        Q_SPAN: gl.constexpr = FORM.q_span
        OF_THREADS: gl.constexpr = FORM.of_threads
        ROW: gl.constexpr = row.type.layout
        if Q_SPAN > 0:
            row = gl.minimum(row, N - 1)
            group = row // Q_SPAN * 8 + row % 8 if OF_THREADS else row // Q_SPAN
            q_scale = gl.load(q_scale_ptr + (b * H + h) * q_groups + group) * logit_scale
            marks = q[0].slice(0, 32, dim=1).load(gl.BlockedLayout([1, 32], [32, 1], [4, 1], [1, 0]))
            marked = gl.convert_layout(gl.min(marks.to(gl.int32), 1), ROW) == -128  # it held NaN or infinity
            q_scale = gl.where(marked, float("nan"), q_scale)
        else:
            q_scale = gl.full((_ROWS,), 0.0, gl.float32, ROW) + logit_scale
        return gl.convert_layout(q_scale, gl.SliceLayout(1, gl.SliceLayout(2, like.type.layout)))
