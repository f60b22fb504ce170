"""Attention for Hopper with all keys of a head in shared memory, in Gluon; for sequences of a few hundred tokens.

A program computes some tiles of queries of one head. It loads the head's keys and values once. Each multiprocessor runs
several programs: while one waits for memory or tensor cores, others compute exponentials.

Keys are split into pieces, so that 197 keys take the time of 208: first the last keys, which alone may need a mask, in
one or two pieces with powers of two of keys, then whole blocks of 128.

A mask or bias is loaded into registers, in the layout of the products, before they are started. Relative positions in
factors are a product of their own, heights and widths of the queries times ones where a key has them, to which Q K^T is
added. The ones are a power of two, and the factors the sum of two numbers in 16 bit, so that nothing is lost.
"""

from __future__ import annotations

from typing import Any

from qframework.kernels.attention.hopper.piece_form import BLOCK_N, ROWS
from qframework.kernels.attention.operands import LOG2_E
from qframework.kernels.runtime.gluon import HAS_GLUON
from qframework.kernels.runtime.overlap import wait_for_previous_kernel

if HAS_GLUON:
    from qframework.kernels.attention.hopper.int8_values import load_int8_values, store_as_float16
    from qframework.kernels.attention.hopper.piece_bias import (
        load_biases,
        load_factors,
        store_factors,
        store_places,
        with_bias,
    )
    from qframework.kernels.attention.hopper.pieces import (
        block_products,
        piece_products,
        scales_of,
        store_log_sum_exp,
        store_result,
        visit,
        visit_pieces,
    )
    from qframework.kernels.runtime.gluon import (
        barrier,
        fence_async_shared,
        gl,
        gluon,
        mbarrier,
        next_stage,
        tma,
        tma_load,
        tma_store,
    )

    _ROWS, _BLOCK_N, _LOG2_E = gl.constexpr(ROWS), gl.constexpr(BLOCK_N), gl.constexpr(LOG2_E)

    @gluon.constexpr_function
    def _factor_layout(rows, columns):
        """Of relative positions in shared memory, as an operand of tensor cores."""
        return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.float16)

    @gluon.jit
    def _rests(descs, CHANNELS: gl.constexpr, BLOCKS: gl.constexpr, FORM: gl.constexpr):
        """Shared memory for the second slice of channels of both pieces and the blocks of keys."""
        first_desc, second_desc, desc = descs
        first = gl.allocate_shared_memory(desc.dtype, [1, 1, FORM.first, CHANNELS], first_desc.layout)
        second = first
        if FORM.second > 0:
            second = gl.allocate_shared_memory(desc.dtype, [1, 1, FORM.second, CHANNELS], second_desc.layout)
        blocks = first
        if BLOCKS > 0:
            blocks = gl.allocate_shared_memory(desc.dtype, [BLOCKS, 1, 1, _BLOCK_N, CHANNELS], desc.layout)
        return first, second, blocks

    @gluon.jit
    def _load_keys(descs, tiles, b, kv, channel, ready, BLOCKS: gl.constexpr, FORM: gl.constexpr):
        """Start to load a slice of channels of all keys or values of a head."""
        first_desc, second_desc, desc = descs
        start = BLOCKS * _BLOCK_N  # the first key of the pieces
        tma_load(first_desc, [b, kv, start, channel], ready, tiles[0])
        if FORM.second > 0:
            tma_load(second_desc, [b, kv, start + FORM.first, channel], ready, tiles[1])
        for i in gl.static_range(BLOCKS):
            tma_load(desc, [b, kv, i * _BLOCK_N, channel], ready, tiles[2].index(i))

    @gluon.jit
    def _load_queries(descs, place, ready, tile, rest, FORM: gl.constexpr):
        """Start to load a tile of queries."""
        b, h, first = place
        REST: gl.constexpr = FORM.rest_d
        REST_BYTES: gl.constexpr = descs[1].block_type.nbytes if REST > 0 else 0
        mbarrier.expect(ready, descs[0].block_type.nbytes + REST_BYTES)
        tma_load(descs[0], [b, h, first, 0], ready, tile)
        if REST > 0:
            tma_load(descs[1], [b, h, first, FORM.block_d], ready, rest)

    @gluon.jit(do_not_specialize=["H", "GROUP", "N", "NK", "PARTS", "MASKS", "MASK_HEADS", "KW"])
    def _resident_attention_kernel(
        q_desc,  # (B, H, N, D) int8 or 16 bit; blocks of (1, 1, M, block_d)
        k_first_desc,  # (B, Hkv, Nk, D) as Q; blocks of `first` keys
        k_second_desc,  # blocks of `second` keys, or as the first
        k_desc,  # blocks of 128 keys
        v_first_desc,  # (B, Hkv, Nk, Dv) as K's; not used for INT8 values
        v_second_desc,
        v_desc,
        out_desc,  # (B, H, N, Dv) int8 or 16 bit; blocks of (1, 1, M, block_dv)
        q_rest_desc,  # the second slice of channels of each, or as the first where there is none
        k_first_rest_desc,
        k_second_rest_desc,
        k_rest_desc,
        v_first_rest_desc,
        v_second_rest_desc,
        v_rest_desc,
        out_rest_desc,
        v_ptr,  # (B, Hkv, Nk, Dv) int8, or any pointer
        stride_vb,
        stride_vh,
        stride_vn,
        q_scale_ptr,  # (1,) or one per head fp32, or None; as the next three
        k_scale_ptr,
        v_scale_ptr,
        out_scale_ptr,
        lse_ptr,  # (B, H, N) fp32, or None; without a bias
        logit_scale,
        H,
        GROUP,  # query heads of a key head
        N,
        NK,
        DV,
        PARTS,  # programs of a head
        bias_ptr,  # (masks, mask heads, N, Nk) float or bool, or None
        stride_bb,  # these four in multiples of FORM.step
        stride_bh,
        stride_bn,
        stride_bk,
        MASKS,
        MASK_HEADS,
        width_ptr,  # (masks, mask heads, N, KW): with it, bias_ptr is of relative heights (..., N, NK / KW)
        stride_wb,
        stride_wh,
        stride_wn,
        KW,
        ONE,  # a power of two in places of keys, about the inverse of the scale, for which factors fit 16 bits
        V_LAYOUT: gl.constexpr,  # of values in shared memory
        PER_HEAD: gl.constexpr,  # whether each of the scales is one per head
        FORM: gl.constexpr,
        BLOCKS: gl.constexpr,  # whole blocks of 128 keys
        OVERLAP: gl.constexpr = False,
    ):
        """Grid (PARTS H B,): each program computes every PARTS-th tile of a head's queries."""
        M: gl.constexpr = FORM.warpgroups * _ROWS
        D: gl.constexpr = FORM.block_d
        DV_BLOCK: gl.constexpr = FORM.block_dv
        FIRST: gl.constexpr = FORM.first
        SECOND: gl.constexpr = FORM.second
        INT8_VALUES: gl.constexpr = FORM.int8_values
        BIASED: gl.constexpr = FORM.added != "none"
        FACTORS: gl.constexpr = FORM.columns > 0
        INT8: gl.constexpr = q_desc.dtype == gl.int8
        AT_ONCE: gl.constexpr = _BLOCK_N // 2 if FORM.halves else _BLOCK_N
        LATER: gl.constexpr = _BLOCK_N - AT_ONCE
        REST: gl.constexpr = FORM.rest_d
        REST_DV: gl.constexpr = FORM.rest_dv
        QUERIES: gl.constexpr = FORM.queries
        VALUES: gl.constexpr = gl.float16 if INT8_VALUES else out_desc.dtype
        q_tiles = gl.allocate_shared_memory(q_desc.dtype, [QUERIES, 1, 1, M, D], q_desc.layout)
        k_first = gl.allocate_shared_memory(k_desc.dtype, [1, 1, FIRST, D], k_first_desc.layout)
        v_first = gl.allocate_shared_memory(VALUES, [1, 1, FIRST, DV_BLOCK], V_LAYOUT)
        k_second = k_first
        v_second = v_first
        if SECOND > 0:
            k_second = gl.allocate_shared_memory(k_desc.dtype, [1, 1, SECOND, D], k_second_desc.layout)
            v_second = gl.allocate_shared_memory(VALUES, [1, 1, SECOND, DV_BLOCK], V_LAYOUT)
        k_blocks = k_first
        v_blocks = v_first
        if BLOCKS > 0:
            k_blocks = gl.allocate_shared_memory(k_desc.dtype, [BLOCKS, 1, 1, _BLOCK_N, D], k_desc.layout)
            v_blocks = gl.allocate_shared_memory(VALUES, [BLOCKS, 1, 1, _BLOCK_N, DV_BLOCK], V_LAYOUT)
        out_tile = q_tiles.index(0)
        if not FORM.reuses_query:
            out_tile = gl.allocate_shared_memory(out_desc.dtype, [1, 1, M, DV_BLOCK], out_desc.layout)
        q_rests = q_tiles
        out_rest = out_tile
        k_rests = (k_first, k_second, k_blocks)
        v_rests = (v_first, v_second, v_blocks)
        if REST > 0:
            q_rests = gl.allocate_shared_memory(VALUES, [QUERIES, 1, 1, M, REST], q_rest_desc.layout)
            out_rest = q_rests.index(0)
            descs = (k_first_rest_desc, k_second_rest_desc, k_rest_desc)
            k_rests = _rests(descs, REST, BLOCKS, FORM)
        if REST_DV > 0:
            descs = (v_first_rest_desc, v_second_rest_desc, v_rest_desc)
            v_rests = _rests(descs, REST_DV, BLOCKS, FORM)
            if not FORM.reuses_query:
                out_rest = gl.allocate_shared_memory(VALUES, [1, 1, M, REST_DV], out_rest_desc.layout)
        factors = None
        first_places = None
        second_places = None
        block_places = q_tiles  # not used without factors
        if FACTORS:
            COLUMNS: gl.constexpr = FORM.columns
            high = gl.allocate_shared_memory(VALUES, [M, COLUMNS], _factor_layout(M, COLUMNS))
            low = gl.allocate_shared_memory(VALUES, [M, COLUMNS], _factor_layout(M, COLUMNS))
            factors = (high, low)
            first_places = gl.allocate_shared_memory(VALUES, [FIRST, COLUMNS], _factor_layout(FIRST, COLUMNS))
            if SECOND > 0:
                second_places = gl.allocate_shared_memory(VALUES, [SECOND, COLUMNS], _factor_layout(SECOND, COLUMNS))
            if BLOCKS > 0:
                SHAPE: gl.constexpr = [BLOCKS, _BLOCK_N, COLUMNS]
                block_places = gl.allocate_shared_memory(VALUES, SHAPE, _factor_layout(_BLOCK_N, COLUMNS))
        q_ready = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], mbarrier.MBarrierLayout())
        k_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        v_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        for i in gl.static_range(QUERIES):
            mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(k_ready, count=1)
        mbarrier.init(v_ready, count=1)
        fence_async_shared()

        pid = gl.program_id(0)
        part = pid % PARTS
        h = pid // PARTS % H
        b = pid // PARTS // H
        kv = h // GROUP
        tiles = gl.cdiv(N, M)
        start = BLOCKS * _BLOCK_N  # the first key of the pieces
        wait_for_previous_kernel(OVERLAP)
        KEYS: gl.constexpr = FIRST + SECOND + BLOCKS * _BLOCK_N
        q_descs = (q_desc, q_rest_desc)
        _load_queries(q_descs, [b, h, part * M], q_ready.index(0), q_tiles.index(0), q_rests.index(0), FORM)
        mbarrier.expect(k_ready, KEYS * (D + REST) * (1 if INT8 else 2))
        _load_keys(
            (k_first_desc, k_second_desc, k_desc), (k_first, k_second, k_blocks), b, kv, 0, k_ready, BLOCKS, FORM
        )
        if REST > 0:
            descs = (k_first_rest_desc, k_second_rest_desc, k_rest_desc)
            _load_keys(descs, k_rests, b, kv, D, k_ready, BLOCKS, FORM)
        if QUERIES > 1 and part + PARTS < tiles:
            later = [b, h, (part + PARTS) * M]
            _load_queries(q_descs, later, q_ready.index(1), q_tiles.index(1), q_rests.index(1), FORM)
        if INT8_VALUES:
            values = v_ptr + b.to(gl.int64) * stride_vb + kv * stride_vh
            # All loads before the first conversion, which waits for them.
            first = load_int8_values(values, start, FIRST, stride_vn, NK, DV, FORM)
            second = first
            if SECOND > 0:
                second = load_int8_values(values, start + FIRST, SECOND, stride_vn, NK, DV, FORM)
            for i in gl.static_range(BLOCKS):
                block_values = load_int8_values(values, i * _BLOCK_N, _BLOCK_N, stride_vn, NK, DV, FORM)
                store_as_float16(v_blocks.index(i), block_values)
            store_as_float16(v_first, first)
            if SECOND > 0:
                store_as_float16(v_second, second)
            fence_async_shared()
        else:
            mbarrier.expect(v_ready, KEYS * (DV_BLOCK + REST_DV) * 2)
            descs = (v_first_desc, v_second_desc, v_desc)
            _load_keys(descs, (v_first, v_second, v_blocks), b, kv, 0, v_ready, BLOCKS, FORM)
            if REST_DV > 0:
                descs = (v_first_rest_desc, v_second_rest_desc, v_rest_desc)
                _load_keys(descs, v_rests, b, kv, DV_BLOCK, v_ready, BLOCKS, FORM)

        scales = (q_scale_ptr, k_scale_ptr, v_scale_ptr, out_scale_ptr)
        scale, factor = scales_of(scales, h, kv, logit_scale, PER_HEAD)
        if BIASED:
            step: gl.constexpr = FORM.step if FORM.step > 0 else 1
            place = (b % MASKS).to(gl.int64) * stride_bb * step + h % MASK_HEADS * stride_bh * step
            bias = (bias_ptr + place, stride_bn, stride_bk)
        if FACTORS:
            place = (b % MASKS).to(gl.int64)
            heights = bias_ptr + place * stride_bb + h % MASK_HEADS * stride_bh
            widths = width_ptr + place * stride_wb + h % MASK_HEADS * stride_wh
            where = (heights, stride_bn, widths, stride_wn, KW)
            inverse = _LOG2_E / (scale * ONE)
            if REST == 0:
                loaded = load_factors(where, part * M, N, NK, FORM)
            store_places(first_places, ONE, start, FIRST, NK, KW, FORM)
            if SECOND > 0:
                store_places(second_places, ONE, start + FIRST, SECOND, NK, KW, FORM)
            for i in gl.static_range(BLOCKS):
                store_places(block_places.index(i), ONE, i * _BLOCK_N, _BLOCK_N, NK, KW, FORM)
        mbarrier.wait(k_ready, 0)
        first_keys = (k_first, k_rests[0])
        second_keys = (k_second, k_rests[1])
        values_of = ((v_first, v_rests[0]), (v_second, v_rests[1]))
        slot = 0
        phase = 0
        for tile in range(part, tiles, PARTS):
            q_tile = q_tiles.index(slot)
            q_rest = q_rests.index(slot)
            q = (q_tile.reshape((M, D)), q_rest.reshape((M, REST)) if REST > 0 else q_tile.reshape((M, D)))
            if FACTORS:
                if REST > 0:
                    loaded = load_factors(where, tile * M, N, NK, FORM)
                store_factors(factors, loaded, inverse)
                if REST == 0:  # else they would be spilled
                    loaded = load_factors(where, (tile + PARTS) * M, N, NK, FORM)
                fence_async_shared()
                barrier()
            if BIASED:
                x, x2 = load_biases(bias, tile * M, start, N, NK, FIRST, SECOND, INT8, FORM.masked, FORM)
            mbarrier.wait(q_ready.index(slot), phase)
            s, s2 = piece_products(q, first_keys, second_keys, FORM, factors, first_places, second_places)
            if BIASED:
                s, s2 = with_bias(s, s2, x, x2, scale, SECOND > 0)
            state = visit_pieces(s, s2, values_of, v_ready, 0, scale, start, NK, VALUES, FORM)
            if BLOCKS > 0:
                for block in range(BLOCKS):
                    places = _places_of(block_places, block, FACTORS)
                    if BIASED:
                        key = block * _BLOCK_N
                        y, y2 = load_biases(bias, tile * M, key, N, NK, AT_ONCE, LATER, INT8, False, FORM)
                    keys = (k_blocks.index(block), k_rests[2].index(block))
                    t, t2 = block_products(q, keys, FORM, factors, places)
                    if BIASED:
                        t, t2 = with_bias(t, t2, y, y2, scale, FORM.halves)
                    values_at = (v_blocks.index(block), v_rests[2].index(block))
                    state = visit(t, t2, values_at, state, scale, VALUES, FORM)
            if lse_ptr is not None:
                store_log_sum_exp(lse_ptr + (b * H + h).to(gl.int64) * N + tile * M, state, N - tile * M)
            if FORM.reuses_query:
                out_tile = q_tile
                out_rest = q_rest
            else:
                tma.store_wait(0)  # the result before has left
            store_result((out_tile, out_rest), state, factor, FORM)
            fence_async_shared()
            tma_store(out_desc, [b, h, tile * M, 0], out_tile)
            if REST_DV > 0:
                tma_store(out_rest_desc, [b, h, tile * M, DV_BLOCK], out_rest)
            if tile + QUERIES * PARTS < tiles:
                if FORM.reuses_query:
                    tma.store_wait(0)
                later = [b, h, (tile + QUERIES * PARTS) * M]
                _load_queries(q_descs, later, q_ready.index(slot), q_tile, q_rest, FORM)
            slot, phase = next_stage(slot, phase, QUERIES)
        tma.store_wait(0)

    @gluon.jit
    def _places_of(block_places, block, FACTORS: gl.constexpr):
        """Where the keys of a block are in the image; not used without relative positions."""
        if FACTORS:
            block_places = block_places.index(block)
        return block_places

    kernel: Any = _resident_attention_kernel
