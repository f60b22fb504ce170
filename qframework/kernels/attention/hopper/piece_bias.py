"""Biases, masks and relative positions of a piece of keys, for Hopper's kernels for many small programs.

A bias or mask is loaded in the layout of the products that it is added to. Relative positions in factors are columns of
queries and of keys, so that the tensor cores add them: a query has its heights and widths, a key 1 at its own.
"""

from __future__ import annotations

from qframework.kernels.attention.hopper.piece_form import ROWS
from qframework.kernels.attention.operands import LOG2_E
from qframework.kernels.runtime.gluon import HAS_GLUON

if HAS_GLUON:
    from qframework.kernels.attention.hopper.piece_form import scores_layout
    from qframework.kernels.runtime.gluon import gl, gluon

    _ROWS, _LOG2_E = gl.constexpr(ROWS), gl.constexpr(LOG2_E)

    @gluon.jit
    def load_factors(positions, first, N, NK, FORM: gl.constexpr):
        """Relative positions of queries from ``first``: heights, then widths, then zeros (M, columns), in registers.

        ``positions`` are pointers to both, their strides of queries, and the number of widths.
        """
        height_ptr, stride_hn, width_ptr, stride_wn, KW = positions
        M: gl.constexpr = FORM.warpgroups * _ROWS
        LANES: gl.constexpr = FORM.columns // 8 if FORM.columns < 256 else 32
        PLACES: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [FORM.warpgroups * 4, 1], [1, 0])
        KH = NK // KW
        row = gl.minimum(first + gl.arange(0, M, layout=gl.SliceLayout(1, PLACES)), N - 1)
        column = gl.arange(0, FORM.columns, layout=gl.SliceLayout(0, PLACES))
        inside = (column < KH + KW)[None, :] & (row[:, None] >= 0)
        heights = (row * stride_hn)[:, None] + column[None, :]
        widths = (row * stride_wn)[:, None] + (column - KH)[None, :]
        is_height = (column < KH)[None, :] & (row[:, None] >= 0)
        return gl.load(gl.where(is_height, height_ptr + heights, width_ptr + widths), mask=inside, other=0.0)

    @gluon.jit
    def store_places(tile, one, start, KEYS: gl.constexpr, NK, KW, FORM: gl.constexpr):
        """``one`` where a key has the height or width of a column of :func:`load_factors`, else 0: (KEYS, columns)."""
        LANES: gl.constexpr = FORM.columns // 8 if FORM.columns < 256 else 32
        PLACES: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [FORM.warpgroups * 4, 1], [1, 0])
        KH = NK // KW
        key = start + gl.arange(0, KEYS, layout=gl.SliceLayout(1, PLACES))
        column = gl.arange(0, FORM.columns, layout=gl.SliceLayout(0, PLACES))
        here = ((key // KW)[:, None] == column[None, :]) | ((key % KW + KH)[:, None] == column[None, :])
        tile.store(gl.where(here & (key < NK)[:, None], one, 0.0).to(tile.dtype))

    @gluon.jit
    def store_factors(tiles, factors, inverse):
        """What :func:`load_factors` loaded times ``inverse``, as sums of two numbers in 16 bit, which keep 22 or 16."""
        x = factors.to(gl.float32) * inverse
        high = x.to(tiles[0].dtype)
        tiles[0].store(high)
        tiles[1].store((x - high.to(gl.float32)).to(tiles[0].dtype))

    @gluon.jit
    def load_bias(
        bias, first, start, N, NK, KEYS: gl.constexpr, INT8: gl.constexpr, MASKED: gl.constexpr, FORM: gl.constexpr
    ):
        """The bias of queries from ``first`` and KEYS keys from ``start``, in the layout of their products.

        ``bias`` is a pointer and the strides of queries and keys, in multiples of FORM.step. Queries after the last get
        the bias of the last; with MASKED keys after the last get -inf.
        """
        ptr, stride_n, stride_k = bias
        SCORES: gl.constexpr = scores_layout(KEYS, INT8, FORM)
        row = first + gl.arange(0, FORM.warpgroups * _ROWS, layout=gl.SliceLayout(1, SCORES))
        key = start + gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
        token = gl.minimum(row, N - 1) * stride_n
        if FORM.step == 0:
            places = ptr + token[:, None] + (key * stride_k)[None, :]
        else:
            places = ptr + (token * FORM.step)[:, None] + key[None, :]
        if MASKED:
            inside = (key < NK)[None, :] & (row[:, None] >= 0)
            x = gl.load(places, mask=inside, other=0 if FORM.added == "bool" else float("-inf"))
        else:
            x = gl.load(places)
        if FORM.added == "bool":
            x = gl.where(x != 0, 0.0, float("-inf")).to(gl.float16)
        return x

    @gluon.jit
    def load_biases(
        bias, first, start, N, NK, FIRST: gl.constexpr, SECOND: gl.constexpr, INT8: gl.constexpr, MASKED: gl.constexpr,
        FORM: gl.constexpr,
    ):  # fmt: skip
        """:func:`load_bias` of FIRST and then SECOND keys, which may be 0: of the first twice."""
        x = load_bias(bias, first, start, N, NK, FIRST, INT8, MASKED and SECOND == 0, FORM)
        x2 = x
        if SECOND > 0:
            x2 = load_bias(bias, first, start + FIRST, N, NK, SECOND, INT8, MASKED, FORM)
        return x, x2

    @gluon.jit
    def with_bias(s, s2, x, x2, scale, BOTH: gl.constexpr):
        """Natural logits of products and biases, of the first twice without BOTH; ``scale`` leads to octaves."""
        natural = scale * (1.0 / _LOG2_E)
        logits = s.to(gl.float32) * natural + x.to(gl.float32)
        logits2 = logits
        if BOTH:
            logits2 = s2.to(gl.float32) * natural + x2.to(gl.float32)
        return logits, logits2
