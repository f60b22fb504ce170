"""Decoding for Hopper with many rows, in Gluon: keys multiplied as INT8 from shared memory, values converted there.

Queries are split into two INT8 numbers each, ``q = q_step * (256 high + low)``, so that Q K^T is two exact products of
integers, and keys are never converted. Keys and values of a block arrive by TMA a block or more ahead; values are
converted to float16 while Q K^T runs. P is float16 with V's scale in it: the base of its exponents is the row's maximum
plus that of V's largest scale so far, rounded down to a power of two, so that weights stay between 0 and 2.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from qframework.kernels.runtime.gluon import HAS_GLUON
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.numerics import MIN_SCALE

ROWS = 64  # queries of a warpgroup
QUERY_MAX = 127 * 256


class RowsForm(NamedTuple):
    """Compile-time sizes and options."""

    block_d: int  # channels of K, padded to a power of two
    block_dv: int
    channels: int  # of K
    width: int  # channels of V
    block_n: int  # keys of a block
    stages: int  # blocks of keys and values on their way
    warpgroups: int
    queries: int  # N rounded up to a power of two
    lengths: bool
    causal: bool
    window: bool
    masked: str  # "none", "keys" where all rows of a sequence share a mask, or "rows" where its queries differ
    split: bool


if HAS_GLUON:
    from qframework.kernels.attention.hopper.int8_values import store_as_float16
    from qframework.kernels.runtime.gluon import (
        barrier,
        fence_async_shared,
        gl,
        gluon,
        mbarrier,
        next_stage,
        tma_load,
        warpgroup_mma,
        warpgroup_mma_wait,
    )

    _ROWS, _QUERY_MAX, _MIN_SCALE = gl.constexpr(ROWS), gl.constexpr(QUERY_MAX), gl.constexpr(MIN_SCALE)
    _LEAST_OCTAVE = gl.constexpr(round(math.log2(MIN_SCALE)))
    _LEAST_FACTOR = gl.constexpr(2.0**-126)
    _HIDDEN = gl.constexpr(-1)  # in place of a token's two scales: a NaN that no quantization writes

    @gluon.constexpr_function
    def _scores(FORM):
        """Layout of Q K^T."""
        return gl.NVMMADistributedLayout([3, 0], [FORM.warpgroups * 4, 1], [16, FORM.block_n, 32])

    @gluon.constexpr_function
    def _result(FORM):
        """Layout of P V."""
        return gl.NVMMADistributedLayout([3, 0], [FORM.warpgroups * 4, 1], [16, FORM.block_dv, 16])

    @gluon.constexpr_function
    def _places(channels, FORM):
        """A layout of rows in registers, 8 channels a thread."""
        lanes = channels // 8
        return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [FORM.warpgroups * 4, 1], [1, 0])

    @gluon.jit
    def _request(n, slot, rings, ready, descs, place, blocks, FORM: gl.constexpr):
        """Load block ``n`` of keys and values, if there is one."""
        k_ring, v_ring = rings
        k_desc, v_desc = descs
        b, kv, begin = place
        there = n < blocks
        at = [b, kv, begin + n * FORM.block_n, 0]
        mbarrier.expect(ready.index(slot), k_desc.block_type.nbytes + v_desc.block_type.nbytes, pred=there)
        tma_load(k_desc, at, ready.index(slot), k_ring.index(slot), pred=there)
        tma_load(v_desc, at, ready.index(slot), v_ring.index(slot), pred=there)

    @gluon.jit
    def _load_scales(scales, mask, start, end, stride_mk, FORM: gl.constexpr):
        """Both scales of each key from ``start`` on, one word a key; _HIDDEN from ``end`` on and where masked."""
        n = start + gl.arange(0, FORM.block_n, layout=gl.BlockedLayout([1], [32], [FORM.warpgroups * 4], [0]))
        seen = n < end
        if FORM.masked == "keys":
            seen = seen & (gl.load(mask + n.to(gl.int64) * stride_mk, mask=seen, other=0) != 0)
        return gl.load(scales + n, mask=seen, other=_HIDDEN)

    @gluon.jit
    def _store_scales(words, lines, FORM: gl.constexpr):
        """Words of scales in shared memory, negative where V's is not finite, and whether keys are hidden."""
        line, _, flags = lines
        infinite = (words & 0x7F800000) == 0x7F800000
        line.store(gl.where(infinite, words | -0x400000, words))
        if FORM.masked == "keys":
            PARTS: gl.constexpr = FORM.block_n // 32
            flags.store(gl.max(gl.reshape(gl.where(words == _HIDDEN, 1, 0), (PARTS, 32)), 1))

    @gluon.constexpr_function
    def _mask_places(FORM):
        """A layout of a block's mask (queries, block_n): each thread has all queries of its keys."""
        return gl.BlockedLayout([FORM.queries, 1], [1, 32], [1, FORM.warpgroups * 4], [0, 1])

    @gluon.jit
    def _load_mask(mask, start, end, stride_mn, stride_mk, N, FORM: gl.constexpr):
        """The mask of each query (queries, block_n) from key ``start`` on, int8; 0 from ``end`` on."""
        PLACES: gl.constexpr = _mask_places(FORM)
        i = gl.arange(0, FORM.queries, layout=gl.SliceLayout(1, PLACES))
        n = start + gl.arange(0, FORM.block_n, layout=gl.SliceLayout(0, PLACES))
        at = (i.to(gl.int64) * stride_mn)[:, None] + (n.to(gl.int64) * stride_mk)[None, :]
        return gl.load(mask + at, mask=(i < N)[:, None] & (n < end)[None, :], other=0)

    @gluon.jit
    def _store_mask(tile, mask_line, flags, N, FORM: gl.constexpr):
        """A word for each key in shared memory, a bit for each query that sees it, and whether a query misses a key."""
        PARTS: gl.constexpr = FORM.block_n // 32
        i = gl.arange(0, FORM.queries, layout=gl.SliceLayout(1, _mask_places(FORM)))
        bits = gl.sum(gl.where(tile != 0, 1, 0) << i[:, None], 0)
        mask_line.store(bits)
        flags.store(gl.max(gl.reshape(gl.where(bits == (1 << N) - 1, 0, 1), (PARTS, 32)), 1))

    @gluon.jit
    def _any(flags, FORM: gl.constexpr):
        """Whether a warp stored a flag."""
        PARTS: gl.constexpr = FORM.block_n // 32
        return gl.max(flags.load(gl.BlockedLayout([PARTS], [32], [FORM.warpgroups * 4], [0])), 0) != 0

    @gluon.jit
    def _load_queries(q_ptr, row, inside, strides, FORM: gl.constexpr):
        """The queries (M, block_d) at ``row = (h, i)``, zero where there are none."""
        PLACES: gl.constexpr = _places(FORM.block_d, FORM)
        h, i = row
        d = gl.arange(0, FORM.block_d, layout=gl.SliceLayout(0, PLACES))
        place = h.to(gl.int64) * strides[0] + i.to(gl.int64) * strides[1]
        return gl.load(
            q_ptr + place[:, None] + d[None, :], mask=inside[:, None] & (d < FORM.channels)[None, :], other=0.0
        )

    @gluon.jit
    def _split_queries(q, sign, q_tiles, FORM: gl.constexpr):
        """Store the high and the low bytes of the queries, times ``sign``; returns the step of each row."""
        M: gl.constexpr = FORM.warpgroups * _ROWS
        q = q.to(gl.float32)
        magnitude = q.to(gl.int32, bitcast=True) & 0x7FFFFFFF  # as integers NaN is the largest
        step = gl.max(magnitude, 1).to(gl.float32, bitcast=True)
        step = gl.where(step < _MIN_SCALE, _MIN_SCALE, step) * (1.0 / _QUERY_MAX)
        # The sum with 1.5 * 2**23 has the integer in its low bits: its low byte, and after rounding its high byte.
        whole = gl.fma(q, (sign / step)[:, None] + gl.zeros_like(q), 12582912.0 + gl.zeros_like(q))
        whole = whole.to(gl.int32, bitcast=True)
        q_tiles.index(0).reshape((M, FORM.block_d)).store(((whole + 128) >> 8).to(gl.int8))
        q_tiles.index(1).reshape((M, FORM.block_d)).store(whole.to(gl.int8))
        return step

    @gluon.jit
    def _visible(words, mask_line, start, rows, window, FORM: gl.constexpr):
        """(M, block_n) bool: the keys that each row sees."""
        _, positions, i = rows
        SCORES: gl.constexpr = _scores(FORM)
        seen = (words != _HIDDEN)[None, :]
        n = (start + gl.arange(0, FORM.block_n, layout=gl.SliceLayout(0, SCORES)))[None, :]
        if FORM.causal:
            seen = seen & (n <= positions[:, None])
        if FORM.window:
            seen = seen & (n > positions[:, None] - window)
        if FORM.masked == "rows":
            seen = seen & (((mask_line.load(gl.SliceLayout(0, SCORES))[None, :] >> i[:, None]) & 1) != 0)
        return seen

    @gluon.jit
    def _products(q_tiles, k_tile, FORM: gl.constexpr):
        """The products of the queries' high and low bytes with a block of keys, in flight."""
        M: gl.constexpr = FORM.warpgroups * _ROWS
        k = k_tile.reshape((FORM.block_n, FORM.block_d)).permute((1, 0))
        BLOCK_N: gl.constexpr = FORM.block_n
        zeros = gl.zeros((M, BLOCK_N), gl.int32, _scores(FORM))
        high = warpgroup_mma(q_tiles.index(0).reshape((M, FORM.block_d)), k, zeros, use_acc=False, is_async=True)
        low = warpgroup_mma(q_tiles.index(1).reshape((M, FORM.block_d)), k, zeros, use_acc=False, is_async=True)
        return high, low

    @gluon.jit
    def _weighted(s, lines, start, rows, state, limits, PARTIAL: gl.constexpr, FORM: gl.constexpr):
        """Weights of a block's integer products ``s`` with V's scales in them, as P V's operand, and the new state.

        ``state`` is (P V, sums, maxima and the exponent of the largest V scale); P V and sums return rescaled. PARTIAL
        is "no", "yes" or "maybe" for whether there are rows that do not see all keys.
        """
        acc, total, top, octaves = state
        factor, _, _ = rows
        window, end = limits
        RESULT: gl.constexpr = _result(FORM)
        line, mask_line, flags = lines
        words = line.load(gl.SliceLayout(0, _scores(FORM)))
        x = s.to(gl.float32) * (words << 16).to(gl.float32, bitcast=True)[None, :]
        if PARTIAL == "maybe":
            partial = _any(flags, FORM) | (start + FORM.block_n > end)
            if partial:
                x = gl.where(_visible(words, mask_line, start, rows, window, FORM), x, float("-inf"))
        if PARTIAL == "yes":
            x = gl.where(_visible(words, mask_line, start, rows, window, FORM), x, float("-inf"))
        new_top = gl.maximum(top, gl.max(x, 1) * factor)
        new_octaves = gl.maximum(octaves, (gl.max(words, 0) >> 23) - 127)  # of V's largest scale, rounded down
        base = gl.where(new_top == float("-inf"), 0.0, new_top + new_octaves.to(gl.float32))  # of rows without keys
        decay = gl.exp2(top + octaves.to(gl.float32) - base)
        p = gl.exp2(x * factor[:, None] - base[:, None])
        total = total * decay + gl.sum(p, 1)
        weights = p * (words & -65536).to(gl.float32, bitcast=True)[None, :]
        if PARTIAL != "no":
            weights = gl.where(p > 0.0, weights, 0.0)  # a hidden key may hold NaN
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, RESULT))[:, None]
        operand = gl.convert_layout(weights.to(gl.float16), gl.DotOperandLayout(0, RESULT, 2))
        return operand, acc, total, new_top, new_octaves

    @gluon.jit
    def _visit_blocks(
        first, last, slot, phase, words, following, shared, ready, descs, place, tokens, rows, state,
        PARTIAL: gl.constexpr, FORM: gl.constexpr,
    ):  # fmt: skip
        """Blocks from ``first`` up to ``last``; returns the changed of its arguments, ``state`` flat."""
        BLOCK_N: gl.constexpr = FORM.block_n
        q_tiles, k_ring, v_ring, v_tile, line, mask_line, flags = shared
        scales, mask, end, stride_mn, stride_mk, N, window, whole_end, blocks = tokens
        tile = words
        if FORM.masked == "rows":
            tile = _load_mask(mask, place[2] + first * BLOCK_N, end, stride_mn, stride_mk, N, FORM)
        acc, total, top, octaves = state
        v = v_tile.reshape((BLOCK_N, FORM.block_dv))
        for n in range(first, last):
            mbarrier.wait(ready.index(slot), phase)
            high, low = _products(q_tiles, k_ring.index(slot), FORM)
            store_as_float16(
                v_tile, v_ring.index(slot).reshape((BLOCK_N, FORM.block_dv)).load(_places(FORM.block_dv, FORM))
            )
            lines = (line, mask_line, flags)
            _store_scales(words, lines, FORM)
            if FORM.masked == "rows":
                _store_mask(tile, mask_line, flags, N, FORM)
            fence_async_shared()
            high, low = warpgroup_mma_wait(0, deps=(high, low))
            barrier()  # all warps have read the block, and all values are converted
            _request(n + FORM.stages, slot, (k_ring, v_ring), ready, descs, place, blocks, FORM)
            start = place[2] + n * BLOCK_N
            words = following
            following = _load_scales(scales, mask, start + 2 * BLOCK_N, end, stride_mk, FORM)
            tile = words
            if FORM.masked == "rows":
                tile = _load_mask(mask, start + BLOCK_N, end, stride_mn, stride_mk, N, FORM)
            operand, acc, total, top, octaves = _weighted(
                high * 256 + low, lines, start, rows, (acc, total, top, octaves), (window, whole_end), PARTIAL, FORM
            )
            acc = warpgroup_mma(operand, v, acc, is_async=True)
            acc, operand = warpgroup_mma_wait(0, deps=(acc, operand))
            barrier()  # all warps have multiplied the values
            slot, phase = next_stage(slot, phase, FORM.stages)
        return slot, phase, words, following, acc, total, top, octaves

    _NOT_SPECIALIZED = ["HKV", "GROUP", "N", "capacity", "mask_keys", "splits", "window"]
    _NOT_SPECIALIZED += ["stride_length", "stride_mb", "stride_mn", "stride_mk"]

    @gluon.jit(do_not_specialize=_NOT_SPECIALIZED)
    def _decode_rows_kernel(
        k_desc,  # (B, Hkv, capacity, D) int8; blocks of (1, 1, block_n, block_d)
        v_desc,  # (B, Hkv, capacity, Dv) int8
        q_ptr,  # (B, H, N, D) float
        scales_ptr,  # (B, Hkv, capacity, 2) bf16: of K and of V
        lengths_ptr,  # (B,) or (1,) int32, with `lengths`
        mask_ptr,  # (B, N, keys) bool as int8, with `masked`
        out_ptr,  # (B, N, H, Dv), or with `split` (B * Hkv, splits, GROUP * queries, Dv) fp16 in the shares' units
        top_ptr,  # (B * Hkv, splits, GROUP * queries) fp32, with `split`: bases of the weights' exponents
        sum_ptr,  # (B * Hkv, splits, GROUP * queries) fp32, with `split`: sums of the weights
        unit_ptr,  # (B * Hkv, splits, GROUP * queries) fp32, with `split`: what a row of the share is divided by
        HKV,
        GROUP,  # query heads of one key head
        N,
        capacity,
        mask_keys,
        splits,
        window,
        logit_scale,  # to logits in base 2
        stride_qb,
        stride_qh,
        stride_qn,
        stride_sb,  # of scales, in tokens
        stride_sh,
        stride_length,
        stride_mb,
        stride_mn,
        stride_mk,
        V_LAYOUT: gl.constexpr,  # of float16 values in shared memory
        FORM: gl.constexpr,
        OVERLAP: gl.constexpr = False,
    ):
        """Grid (row blocks, splits, Hkv * B). A program attends with 64 rows for each of its warpgroups, of the
        GROUP * queries that share a key head, to one of ``splits`` shares of its visible keys."""
        M: gl.constexpr = FORM.warpgroups * _ROWS
        BLOCK_N: gl.constexpr = FORM.block_n
        BLOCK_DV: gl.constexpr = FORM.block_dv
        STAGES: gl.constexpr = FORM.stages
        SCORES: gl.constexpr = _scores(FORM)
        RESULT: gl.constexpr = _result(FORM)
        PARTS: gl.constexpr = BLOCK_N // 32
        LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        q_tiles = gl.allocate_shared_memory(gl.int8, [2, 1, 1, M, FORM.block_d], k_desc.layout)
        k_ring = gl.allocate_shared_memory(gl.int8, [STAGES, 1, 1, BLOCK_N, FORM.block_d], k_desc.layout)
        v_ring = gl.allocate_shared_memory(gl.int8, [STAGES, 1, 1, BLOCK_N, FORM.block_dv], v_desc.layout)
        v_tile = gl.allocate_shared_memory(gl.float16, [1, 1, BLOCK_N, FORM.block_dv], V_LAYOUT)
        line = gl.allocate_shared_memory(gl.int32, [BLOCK_N], LINE)
        mask_line = line
        flags = line
        if FORM.masked == "rows":
            mask_line = gl.allocate_shared_memory(gl.int32, [BLOCK_N], LINE)
        if FORM.masked != "none":
            flags = gl.allocate_shared_memory(gl.int32, [PARTS], LINE)
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(ready.index(i), count=1)
        fence_async_shared()
        wait_for_previous_kernel(OVERLAP)

        split, head = gl.program_id(1), gl.program_id(2)
        b, kv = head // HKV, head % HKV
        ROWS_OF_HEAD = GROUP * FORM.queries
        q_rows = gl.program_id(0) * M + gl.arange(0, M, layout=gl.SliceLayout(1, _places(FORM.block_d, FORM)))
        q_at = (kv * GROUP + q_rows // FORM.queries, q_rows % FORM.queries)
        inside = (q_rows < ROWS_OF_HEAD) & (q_at[1] < N)
        queries = _load_queries(q_ptr + b.to(gl.int64) * stride_qb, q_at, inside, (stride_qh, stride_qn), FORM)
        sign = gl.where(logit_scale < 0.0, -1.0, 1.0)
        length = capacity
        if FORM.lengths:
            length = gl.minimum(gl.load(lengths_ptr + b * stride_length), capacity)
        if FORM.masked != "none":
            length = gl.minimum(length, mask_keys)
        first = 0
        if FORM.window:
            first = gl.maximum(length - N - window + 1, 0) // BLOCK_N * BLOCK_N
        share = gl.cdiv(gl.cdiv(gl.maximum(length - first, 0), BLOCK_N), splits) * BLOCK_N
        begin = first + split * share
        end = gl.minimum(begin + share, length)
        blocks = gl.cdiv(gl.maximum(end - begin, 0), BLOCK_N)
        place = (b, kv, begin)
        rings = (k_ring, v_ring)
        descs = (k_desc, v_desc)
        for i in gl.static_range(STAGES):
            _request(i, i, rings, ready, descs, place, blocks, FORM)

        scales = (scales_ptr + (b.to(gl.int64) * stride_sb + kv.to(gl.int64) * stride_sh) * 2).to(
            gl.pointer_type(gl.int32)
        )
        mask = mask_ptr
        if FORM.masked != "none":
            mask = mask_ptr + b.to(gl.int64) * stride_mb
        words = _load_scales(scales, mask, begin, end, stride_mk, FORM)
        following = _load_scales(scales, mask, begin + BLOCK_N, end, stride_mk, FORM)

        step = _split_queries(queries, sign, q_tiles, FORM)
        fence_async_shared()
        barrier()

        factor = gl.convert_layout(step, gl.SliceLayout(1, SCORES)) * (logit_scale * sign)
        factor = gl.where(factor < _LEAST_FACTOR, _LEAST_FACTOR, factor)  # times -inf, 0 would not hide a key
        rows = gl.program_id(0) * M + gl.arange(0, M, layout=gl.SliceLayout(1, SCORES))
        positions = length - N + rows % FORM.queries
        # Without a mask or window all queries see the keys before this.
        whole_end = end
        if FORM.causal:
            whole_end = gl.minimum(end, length - N + 1)
        whole = 0
        if FORM.masked == "none" and not FORM.window:
            whole = gl.minimum(gl.maximum(whole_end - begin, 0) // BLOCK_N, blocks)
        top = gl.full((M,), float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.zeros((M,), gl.float32, gl.SliceLayout(1, SCORES))
        acc = gl.zeros((M, BLOCK_DV), gl.float32, RESULT)
        octaves = gl.to_tensor(_LEAST_OCTAVE)
        slot = gl.to_tensor(0)
        phase = gl.to_tensor(0)
        shared = (q_tiles, k_ring, v_ring, v_tile, line, mask_line, flags)
        tokens = (scales, mask, end, stride_mn, stride_mk, N, window, whole_end, blocks)
        state = (acc, total, top, octaves)
        of_rows = (factor, positions, rows % FORM.queries)
        PARTIAL: gl.constexpr = "maybe" if FORM.masked != "none" and not FORM.window else "yes"
        if FORM.masked == "none" and not FORM.window:
            slot, phase, words, following, acc, total, top, octaves = _visit_blocks(
                0, whole, slot, phase, words, following, shared, ready, descs, place, tokens, of_rows, state, "no", FORM
            )
        state = (acc, total, top, octaves)
        slot, phase, words, following, acc, total, top, octaves = _visit_blocks(
            whole,
            blocks,
            slot,
            phase,
            words,
            following,
            shared,
            ready,
            descs,
            place,
            tokens,
            of_rows,
            state,
            PARTIAL,
            FORM,
        )

        unit = total
        if FORM.split:  # means of values in this unit are 254 at most
            unit = total * gl.exp2(octaves.to(gl.float32))
        inverse = gl.where(unit > 0.0, 1.0 / unit, gl.where(unit == 0.0, 0.0, unit))
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, RESULT))[:, None]
        # 16 bytes a thread, of whole rows: stores of the products' layout would fill half of each sector.
        OUT: gl.constexpr = _places(FORM.block_dv, FORM)
        result = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), OUT)
        out_rows = gl.program_id(0) * M + gl.arange(0, M, layout=gl.SliceLayout(1, OUT))
        channels = gl.arange(0, FORM.block_dv, layout=gl.SliceLayout(0, OUT))
        i = out_rows % FORM.queries
        out_mask = ((out_rows < ROWS_OF_HEAD) & (i < N))[:, None] & (channels < FORM.width)[None, :]
        if FORM.split:
            part = (head.to(gl.int64) * splits + split) * ROWS_OF_HEAD
            in_rows = (rows < ROWS_OF_HEAD) & (rows % FORM.queries < N)
            gl.store(top_ptr + part + rows, top + octaves.to(gl.float32), mask=in_rows)
            gl.store(sum_ptr + part + rows, total, mask=in_rows)
            gl.store(unit_ptr + part + rows, unit, mask=in_rows)
            out_place = (part + out_rows) * FORM.width
        else:
            h = kv * GROUP + out_rows // FORM.queries
            out_place = ((b * N + i).to(gl.int64) * (HKV * GROUP) + h) * FORM.width
        gl.store(out_ptr + out_place[:, None] + channels[None, :], result, mask=out_mask)

    kernel: Any = _decode_rows_kernel
