"""Attention for Hopper with keys that pass through shared memory, in Gluon; for sequences of any length.

A program computes tiles of 128 queries, each of its two warpgroups 64 of them, in partitions of their own: neither
waits for the other unless it is more than a block of keys ahead. Each multiprocessor runs two programs, so that four
warpgroups in different phases share its tensor cores and special functions. The first warpgroup loads, a block ahead,
and across tiles. Of INT8 values each warpgroup converts half of a block to float16, a block ahead.

The last keys that a tile attends to, which alone may need a mask, are visited first, in pieces as in
resident_kernel.py: under causality those of the tile's own places. With a bool mask the blocks of mask_blocks.py
are visited instead: those kept in part, then those kept whole, whose instructions are those without a mask. Where the
first is that of the tile's own places and keeps what causality would, it is visited as a causal one.
"""

from __future__ import annotations

from typing import Any

from qframework.kernels.attention import mask_blocks
from qframework.kernels.attention.hopper.piece_form import BLOCK_N, ROWS
from qframework.kernels.runtime.gluon import HAS_GLUON
from qframework.kernels.runtime.overlap import wait_for_previous_kernel

KEY_STAGES = 2
VALUE_STAGES = 3
REGISTERS = 128  # of a thread

if HAS_GLUON:
    from qframework.kernels.attention.hopper.int8_values import as_float16, places_of_values
    from qframework.kernels.attention.hopper.mask import entry_of, kept_scores, kept_words
    from qframework.kernels.attention.hopper.piece_form import scores_layout
    from qframework.kernels.attention.hopper.pieces import (
        block_products,
        first_products,
        first_visit,
        in_layouts,
        no_visit,
        scales_of,
        store_log_sum_exp,
        store_result,
        visit,
    )
    from qframework.kernels.runtime.gluon import (
        fence_async_shared,
        gl,
        gluon,
        mbarrier,
        next_stage,
        tma,
        tma_load,
        tma_store,
    )

    _ROWS, _BLOCK_N, _HALF = gl.constexpr(ROWS), gl.constexpr(BLOCK_N), gl.constexpr(BLOCK_N // 2)
    _KEY_STAGES, _VALUE_STAGES = gl.constexpr(KEY_STAGES), gl.constexpr(VALUE_STAGES)
    _REGISTERS = gl.constexpr(REGISTERS)
    _MASK_BLOCK, _MASK_WORDS = gl.constexpr(mask_blocks.BLOCK), gl.constexpr(mask_blocks.WORDS)
    assert mask_blocks.BLOCK == 2 * ROWS == BLOCK_N

    @gluon.jit
    def _place(work, sizes, mask, FORM: gl.constexpr):
        """Item ``work``: (tile of queries, head, batch, head of keys, blocks of keys to visit but the first).

        Under causality the last tiles take longest: they come first, of as many heads as share the L2 cache. The same
        order serves masks, most of which are causal where tiles differ.
        """
        H, GROUP, NK, TILES, HEADS_AT_ONCE, _ITEMS = sizes
        CAUSAL: gl.constexpr = FORM.causal
        BY_MASK: gl.constexpr = FORM.by_mask
        IN_TILE: gl.constexpr = 2 * _ROWS // FORM.block_n  # blocks of keys of a tile's own places
        blocks = (NK - 1) // FORM.block_n
        if CAUSAL or BY_MASK:
            within = work % (TILES * HEADS_AT_ONCE)
            tile = TILES - 1 - within // HEADS_AT_ONCE
            head = work // (TILES * HEADS_AT_ONCE) * HEADS_AT_ONCE + within % HEADS_AT_ONCE
        else:
            tile = work % TILES
            head = work // TILES
        h = head % H
        b = head // H
        if CAUSAL:
            blocks = gl.minimum(blocks, (tile + 1) * IN_TILE - 1)
        if BY_MASK:
            blocks = gl.load(mask[2] + entry_of(tile, h, b, mask) * 3 + 1) * IN_TILE - 1
        return tile, h, b, h // GROUP, blocks

    @gluon.jit
    def _visits(WHO: gl.constexpr, tile, h, b, NK, mask, FORM: gl.constexpr):
        """Of a warpgroup's part of a tile: (its blocks in the order of visits, their bits, how many are partial, ...).

        The last is 1 if the first block is causal, of the tile's own places.
        """
        BY_MASK: gl.constexpr = FORM.by_mask
        order = tile  # stands for nothing, as the others
        bits = tile
        partial = tile
        own = tile
        if BY_MASK:
            entry = entry_of(tile, h, b, mask)
            before = entry * gl.cdiv(NK, _MASK_BLOCK)
            order = mask[1] + before
            bits = mask[0] + before * (_MASK_BLOCK * _MASK_WORDS) + WHO * (_ROWS * _MASK_WORDS)
            partial = gl.load(mask[2] + entry * 3) * (_MASK_BLOCK // FORM.block_n)
            own = gl.load(mask[2] + entry * 3 + 2)
        return order, bits, partial, own

    @gluon.jit
    def _block(i, blocks, order, FORM: gl.constexpr):
        """The block of keys of a tile's ``i``-th visit; of a block of the mask the last first."""
        BY_MASK: gl.constexpr = FORM.by_mask
        IN_ONE: gl.constexpr = _MASK_BLOCK // FORM.block_n
        return gl.load(order + i // IN_ONE) * IN_ONE + (IN_ONE - 1 - i % IN_ONE) if BY_MASK else blocks - i

    @gluon.jit
    def _following(WHO: gl.constexpr, i, blocks, order, ahead, FORM: gl.constexpr):
        """The block to load during the ``i``-th visit, of this tile or the next. Early: with a mask it is a load."""
        BY_MASK: gl.constexpr = FORM.by_mask
        block = 0
        if BY_MASK and WHO == 0:
            block = _block(gl.minimum(i + 1, blocks), blocks, order, FORM)
            if FORM.several:
                block = gl.where(i == blocks, ahead[6], block)
        if not BY_MASK:
            block = gl.where(i == blocks, ahead[5], blocks - i - 1)
        return block

    @gluon.jit
    def _ahead(work, tile, h, b, kv, blocks, sizes, mask, FORM: gl.constexpr):
        """(whether this program has an item after ``work``, its place, and with a mask its first block)."""
        more = False
        first = 0
        if FORM.several:
            after = work + gl.num_programs(0)
            more = after < sizes[5]
            tile, h, b, kv, blocks = _place(after, sizes, mask, FORM)
            if FORM.by_mask:
                first = gl.load(mask[1] + entry_of(tile, h, b, mask) * gl.cdiv(sizes[2], _MASK_BLOCK))
        return more, tile, h, b, kv, blocks, first

    @gluon.jit
    def _begin(WHO: gl.constexpr, tile, blocks, FORM: gl.constexpr):
        """The first visit to keys that this warpgroup attends to: the last 64 of a causal tile's are the other's."""
        begin = 0
        if FORM.causal and FORM.block_n == _ROWS and WHO == 0:
            begin = gl.where(blocks == 2 * tile + 1, 1, 0)
        return begin

    @gluon.jit
    def _load(block, b, kv, key_slot, value_slot, descs, shared, barriers, FORM: gl.constexpr):
        """Keys and values of a block."""
        k_desc, v_desc = descs[1], descs[2]
        k_ring, staged, v_ring = shared[1], shared[2], shared[3]
        k_ready, v_ready = barriers[1], barriers[3]
        INT8: gl.constexpr = FORM.int8_values
        place = [b, kv, block * FORM.block_n, 0]
        ready = k_ready.index(key_slot)
        if INT8:
            mbarrier.expect(ready, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
            tma_load(k_desc, place, ready, k_ring.index(key_slot))
            tma_load(v_desc, place, ready, staged.index(key_slot))
        else:
            mbarrier.expect(ready, k_desc.block_type.nbytes)
            mbarrier.expect(v_ready.index(value_slot), v_desc.block_type.nbytes)
            tma_load(k_desc, place, ready, k_ring.index(key_slot))
            tma_load(v_desc, place, v_ready.index(value_slot), v_ring.index(value_slot))

    @gluon.jit
    def _load_queries(WHO: gl.constexpr, tile, h, b, descs, shared, barriers):
        """This warpgroup's queries of a tile."""
        ready = barriers[0].index(WHO)
        mbarrier.expect(ready, descs[0].block_type.nbytes)
        tma_load(descs[0], [b, h, (tile * 2 + WHO) * _ROWS, 0], ready, shared[0].index(WHO))

    @gluon.jit
    def _after_products(
        WHO: gl.constexpr, i, following, kv, b, blocks, at, ahead, descs, shared, barriers, FORM: gl.constexpr
    ):  # fmt: skip
        """Q K^T of the ``i``-th visit is done: load what the next one needs, this tile's or the next tile's."""
        key_slot, key_phase, value_slot, value_phase = at
        more, next_tile, next_h, next_b, next_kv, _next_blocks, _next_first = ahead
        k_free, v_free = barriers[2], barriers[4]
        mbarrier.arrive(k_free.index(key_slot), count=1)
        last = i == blocks
        if WHO == 0:  # noqa: SIM102  (at compile time)
            if (i < blocks) | more:
                key_slot, key_phase = next_stage(key_slot, key_phase, _KEY_STAGES)
                value_slot, value_phase = next_stage(value_slot, value_phase, _VALUE_STAGES)
                mbarrier.wait(k_free.index(key_slot), key_phase ^ 1)
                mbarrier.wait(v_free.index(value_slot), value_phase ^ 1)
                _load(
                    following, gl.where(last, next_b, b), gl.where(last, next_kv, kv), key_slot, value_slot, descs,
                    shared, barriers, FORM,
                )  # fmt: skip
        REUSES: gl.constexpr = FORM.reuses_query
        if not REUSES:  # noqa: SIM102  (at compile time)
            if more & last:
                _load_queries(WHO, next_tile, next_h, next_b, descs, shared, barriers)

    @gluon.jit
    def _after_values(WHO: gl.constexpr, i, blocks, more, at, shared, barriers, FORM: gl.constexpr):
        """P V of the ``i``-th visit is done: the next stages, for which INT8 values are converted."""
        key_slot, key_phase, value_slot, value_phase = at
        INT8: gl.constexpr = FORM.int8_values
        mbarrier.arrive(barriers[4].index(value_slot), count=1)
        key_slot, key_phase = next_stage(key_slot, key_phase, _KEY_STAGES)
        value_slot, value_phase = next_stage(value_slot, value_phase, _VALUE_STAGES)
        at = (key_slot, key_phase, value_slot, value_phase)
        if INT8:  # noqa: SIM102  (at compile time)
            if more | (i < blocks):
                _convert(WHO, at, shared, barriers, FORM)
        return at

    @gluon.jit
    def _keep_pace(
        WHO: gl.constexpr, i, kv, b, blocks, order, at, ahead, descs, shared, barriers, FORM: gl.constexpr
    ):  # fmt: skip
        """The ``i``-th visit of a warpgroup without queries that attend to its keys."""
        following = _following(WHO, i, blocks, order, ahead, FORM)
        mbarrier.wait(barriers[1].index(at[0]), at[1])
        _after_products(WHO, i, following, kv, b, blocks, at, ahead, descs, shared, barriers, FORM)
        mbarrier.wait(barriers[3].index(at[2]), at[3])
        return _after_values(WHO, i, blocks, ahead[0], at, shared, barriers, FORM)

    @gluon.jit
    def _convert(WHO: gl.constexpr, at, shared, barriers, FORM: gl.constexpr):
        """This warpgroup's half of the values of a block to float16."""
        key_slot, key_phase, value_slot, value_phase = at
        mbarrier.wait(barriers[1].index(key_slot), key_phase)
        mbarrier.wait(barriers[4].index(value_slot), value_phase ^ 1)
        staged = shared[2].index(key_slot).reshape((_BLOCK_N, FORM.block_dv)).slice(WHO * _HALF, _HALF)
        place = shared[3].index(value_slot).reshape((_BLOCK_N, FORM.block_dv)).slice(WHO * _HALF, _HALF)
        place.store(as_float16(staged.load(places_of_values(FORM))))
        fence_async_shared()
        mbarrier.arrive(barriers[3].index(value_slot), count=1)

    @gluon.jit
    def _visit(
        WHO: gl.constexpr, PARTIAL: gl.constexpr, i, kv, b, blocks, order, bits, q, scale, state, at, ahead, descs,
        shared, barriers, VALUES: gl.constexpr, FORM: gl.constexpr,
    ):  # fmt: skip
        """The ``i``-th visit, of a whole block, of which a mask may keep a PARTIAL: (the state after it, the place)."""
        following = _following(WHO, i, blocks, order, ahead, FORM)
        if PARTIAL:
            block = _block(i, blocks, order, FORM)
            no_scores = gl.zeros((_ROWS, _HALF), gl.float32, scores_layout(_HALF, False, FORM))
            if FORM.halves:
                words = kept_words(bits, block, 0, no_scores)
                words2 = kept_words(bits, block, _HALF, no_scores)
            else:
                words = kept_words(bits, block // 2, block % 2 * _HALF, no_scores)
        mbarrier.wait(barriers[1].index(at[0]), at[1])
        keys = shared[1].index(at[0])
        s, s2 = block_products((q, q), (keys, keys), FORM)
        _after_products(WHO, i, following, kv, b, blocks, at, ahead, descs, shared, barriers, FORM)
        if PARTIAL:
            s = kept_scores(s, words)
            s2 = kept_scores(s2, words2) if FORM.halves else s
        mbarrier.wait(barriers[3].index(at[2]), at[3])
        values = shared[3].index(at[2])
        state = visit(s, s2, (values, values), state, scale, VALUES, FORM)
        return state, _after_values(WHO, i, blocks, ahead[0], at, shared, barriers, FORM)

    @gluon.jit
    def _compute(
        WHO: gl.constexpr, descs, shared, barriers, reads, N, logit_scale, PER_HEAD: gl.constexpr, FORM: gl.constexpr
    ):  # fmt: skip
        """Warpgroup 0 or 1: the first or last 64 queries of each tile."""
        scales, sizes, mask, lse_ptr = reads
        q_tiles, k_ring, _staged, v_ring, out_tiles = shared
        q_ready, k_ready, _k_free, v_ready, _v_free = barriers
        INT8: gl.constexpr = FORM.int8_values
        BY_MASK: gl.constexpr = FORM.by_mask
        VALUES: gl.constexpr = v_ring.dtype
        NK, ITEMS = sizes[2], sizes[5]
        q = q_tiles.index(WHO).reshape((_ROWS, FORM.block_d))
        out_tile = out_tiles.index(WHO)
        at = (0, 0, 0, 0)
        q_phase = 0
        if INT8:
            _convert(WHO, at, shared, barriers, FORM)
        for work in range(gl.program_id(0), ITEMS, gl.num_programs(0)):
            tile, h, b, kv, blocks = _place(work, sizes, mask, FORM)
            order, bits, partial, own = _visits(WHO, tile, h, b, NK, mask, FORM)
            ahead = _ahead(work, tile, h, b, kv, blocks, sizes, mask, FORM)
            more = ahead[0]
            scale, factor = scales_of(scales, h, kv, logit_scale, PER_HEAD)
            row = (tile * 2 + WHO) * _ROWS
            mbarrier.wait(q_ready.index(WHO), q_phase)
            q_phase = q_phase ^ 1
            begin = _begin(WHO, tile, blocks, FORM)
            if begin == 1:
                at = _keep_pace(WHO, 0, kv, b, blocks, order, at, ahead, descs, shared, barriers, FORM)
            if row < N:
                if BY_MASK:
                    state = no_visit(FORM)
                    begin = own
                    if own == 1:
                        # Of two blocks of its own places the first visited is the second warpgroup's alone.
                        SKIPS: gl.constexpr = 1 if WHO == 0 and not FORM.halves else 0
                        if SKIPS == 1:
                            at = _keep_pace(WHO, 0, kv, b, blocks, order, at, ahead, descs, shared, barriers, FORM)
                            begin = own + 1
                        following = _following(WHO, SKIPS, blocks, order, ahead, FORM)
                        mbarrier.wait(k_ready.index(at[0]), at[1])
                        first, second = first_products(WHO, q, k_ring.index(at[0]), True, FORM)
                        _after_products(WHO, SKIPS, following, kv, b, blocks, at, ahead, descs, shared, barriers, FORM)
                        mbarrier.wait(v_ready.index(at[2]), at[3])
                        start = (tile * 2 + (0 if FORM.halves else WHO)) * _ROWS
                        first_state = first_visit(
                            WHO, first, second, v_ring.index(at[2]), scale, start, NK, row, VALUES, True, FORM
                        )
                        state = in_layouts(first_state, state)
                        at = _after_values(WHO, SKIPS, blocks, more, at, shared, barriers, FORM)
                    for i in range(begin, partial):
                        state, at = _visit(
                            WHO, True, i, kv, b, blocks, order, bits, q, scale, state, at, ahead, descs, shared,
                            barriers, VALUES, FORM,
                        )  # fmt: skip
                    begin = partial
                else:
                    following = _following(WHO, begin, blocks, order, ahead, FORM)
                    mbarrier.wait(k_ready.index(at[0]), at[1])
                    first, second = first_products(WHO, q, k_ring.index(at[0]), FORM.causal, FORM)
                    _after_products(WHO, begin, following, kv, b, blocks, at, ahead, descs, shared, barriers, FORM)
                    mbarrier.wait(v_ready.index(at[2]), at[3])
                    start = (blocks - begin) * FORM.block_n
                    state = first_visit(
                        WHO, first, second, v_ring.index(at[2]), scale, start, NK, row, VALUES, FORM.causal, FORM
                    )
                    at = _after_values(WHO, begin, blocks, more, at, shared, barriers, FORM)
                    begin = begin + 1
                for i in range(begin, blocks + 1):
                    state, at = _visit(
                        WHO, False, i, kv, b, blocks, order, bits, q, scale, state, at, ahead, descs, shared,
                        barriers, VALUES, FORM,
                    )  # fmt: skip
                if lse_ptr is not None:
                    store_log_sum_exp(lse_ptr + (b * sizes[0] + h).to(gl.int64) * N + row, state, N - row)
                if not FORM.reuses_query:
                    tma.store_wait(0)  # the result before has left
                store_result((out_tile, out_tile), state, factor, FORM)
                fence_async_shared()
                tma_store(descs[3], [b, h, row, 0], out_tile)
                if FORM.reuses_query:
                    tma.store_wait(0)
            else:  # no queries: keep pace
                for i in range(blocks + 1):
                    at = _keep_pace(WHO, i, kv, b, blocks, order, at, ahead, descs, shared, barriers, FORM)
            if FORM.reuses_query:  # noqa: SIM102  (at compile time)
                if more:
                    _load_queries(WHO, ahead[1], ahead[2], ahead[3], descs, shared, barriers)
        tma.store_wait(0)

    _UNSPECIALIZED = ["H", "GROUP", "N", "NK", "TILES", "HEADS_AT_ONCE", "ITEMS", "MASKS", "MASK_HEADS", "MASK_TILES"]

    @gluon.jit(do_not_specialize=_UNSPECIALIZED)
    def _streaming_attention_kernel(
        q_desc,  # (B, H, N, D) int8 or 16 bit; blocks of (1, 1, 64, block_d)
        k_desc,  # (B, Hkv, Nk, D) as Q; blocks of 128 keys
        v_desc,  # (B, Hkv, Nk, Dv) as K
        out_desc,  # (B, H, N, Dv) int8 or 16 bit; blocks of (1, 1, 64, block_dv)
        q_scale_ptr,  # (1,) or one per head fp32, or None; as the next three
        k_scale_ptr,
        v_scale_ptr,
        out_scale_ptr,
        lse_ptr,  # (B, H, N) fp32, or None
        logit_scale,
        H,
        GROUP,  # query heads of a key head
        N,
        NK,
        TILES,  # of 128 queries of a head
        HEADS_AT_ONCE,  # under causality and with a mask; divides B H
        ITEMS,  # tiles of all heads
        bits_ptr,  # MaskBlocks, or None as the next five
        order_ptr,
        counts_ptr,
        MASKS,  # batches of the mask; batch b uses b % MASKS
        MASK_HEADS,
        MASK_TILES,
        V_LAYOUT: gl.constexpr,  # of values in shared memory
        PER_HEAD: gl.constexpr,  # whether each of the scales is one per head
        FORM: gl.constexpr,
        OVERLAP: gl.constexpr = False,
    ):
        """Grid of any size up to ITEMS: each program computes every ``num_programs``-th tile."""
        INT8: gl.constexpr = FORM.int8_values
        D: gl.constexpr = FORM.block_d
        DV: gl.constexpr = FORM.block_dv
        BLOCK: gl.constexpr = FORM.block_n
        VALUES: gl.constexpr = gl.float16 if INT8 else v_desc.dtype
        q_tiles = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 1, _ROWS, D], q_desc.layout)
        k_ring = gl.allocate_shared_memory(k_desc.dtype, [_KEY_STAGES, 1, 1, BLOCK, D], k_desc.layout)
        v_ring = gl.allocate_shared_memory(VALUES, [_VALUE_STAGES, 1, 1, BLOCK, DV], V_LAYOUT)
        staged = v_ring
        if INT8:
            staged = gl.allocate_shared_memory(gl.int8, [_KEY_STAGES, 1, 1, BLOCK, DV], v_desc.layout)
        out_tiles = q_tiles
        if not FORM.reuses_query:
            out_tiles = gl.allocate_shared_memory(out_desc.dtype, [2, 1, 1, _ROWS, DV], out_desc.layout)
        q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        k_ready = gl.allocate_shared_memory(gl.int64, [_KEY_STAGES, 1], mbarrier.MBarrierLayout())
        k_free = gl.allocate_shared_memory(gl.int64, [_KEY_STAGES, 1], mbarrier.MBarrierLayout())
        v_ready = gl.allocate_shared_memory(gl.int64, [_VALUE_STAGES, 1], mbarrier.MBarrierLayout())
        v_free = gl.allocate_shared_memory(gl.int64, [_VALUE_STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(q_ready.index(i), count=1)
        for i in gl.static_range(_KEY_STAGES):
            mbarrier.init(k_ready.index(i), count=1)
            mbarrier.init(k_free.index(i), count=2)
        for i in gl.static_range(_VALUE_STAGES):
            mbarrier.init(v_ready.index(i), count=2 if INT8 else 1)
            mbarrier.init(v_free.index(i), count=2)
        fence_async_shared()
        sizes = (H, GROUP, NK, TILES, HEADS_AT_ONCE, ITEMS)
        descs = (q_desc, k_desc, v_desc, out_desc)
        shared = (q_tiles, k_ring, staged, v_ring, out_tiles)
        barriers = (q_ready, k_ready, k_free, v_ready, v_free)
        scales = (q_scale_ptr, k_scale_ptr, v_scale_ptr, out_scale_ptr)
        mask = (bits_ptr, order_ptr, counts_ptr, MASKS, MASK_HEADS, MASK_TILES)
        wait_for_previous_kernel(OVERLAP)
        tile, h, b, kv, blocks = _place(gl.program_id(0), sizes, mask, FORM)
        order, _bits, _partial, _own = _visits(0, tile, h, b, NK, mask, FORM)
        for i in gl.static_range(2):
            _load_queries(i, tile, h, b, descs, shared, barriers)
        _load(_block(0, blocks, order, FORM), b, kv, 0, 0, descs, shared, barriers, FORM)
        reads = (scales, sizes, mask, lse_ptr)
        gl.warp_specialize(
            [
                (_compute, (gl.constexpr(0), descs, shared, barriers, reads, N, logit_scale, PER_HEAD, FORM)),
                (_compute, (gl.constexpr(1), descs, shared, barriers, reads, N, logit_scale, PER_HEAD, FORM)),
            ],
            [4],  # warps of the second
            [_REGISTERS],
        )

    kernel: Any = _streaming_attention_kernel
