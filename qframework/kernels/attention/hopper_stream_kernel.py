"""Attention for Hopper with keys that pass through shared memory, in Gluon; for sequences of any length.

A program computes one tile of queries. Each multiprocessor runs two programs of two warpgroups, which take no turns.
Q K^T of a block of 128 keys and P V of the block before are in flight together; blocks alternate between two buffers.
INT8 values arrive two blocks ahead and are converted to float16 one block ahead.

The last keys, which alone may need a mask, are visited first, in pieces as in hopper_resident_kernel.py.
"""

from __future__ import annotations

from typing import Any

from qframework.kernels.attention.hopper_pieces import BLOCK_N, ROWS
from qframework.kernels.runtime.gluon import HAS_GLUON
from qframework.kernels.runtime.overlap import wait_for_previous_kernel

if HAS_GLUON:
    from qframework.kernels.attention.hopper_pieces import (
        advance,
        block_products,
        load_int8_values,
        places_of_values,
        products,
        scales_of,
        store_as_float16,
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
        warpgroup_mma_wait,
    )

    _ROWS, _BLOCK_N, _HALF = gl.constexpr(ROWS), gl.constexpr(BLOCK_N), gl.constexpr(BLOCK_N // 2)

    @gluon.jit
    def _refill(n, slot, phase, shared, ready, descs, b, kv, blocks, FORM: gl.constexpr):
        """After block ``n``'s products: its keys' buffer gets block n + 2, the other values' buffer block n + 1.

        INT8 values pass through ``staged``, which is a block ahead.
        """
        k_ring, v_ring, staged = shared
        k_desc, v_desc = descs
        barrier()  # all warps have read the buffers
        later = n + 2 < blocks
        following = n + 1 < blocks
        k_place = [b, kv, (n + 2) * _BLOCK_N, 0]
        if FORM.int8_values:
            mbarrier.expect(ready[0].index(slot), k_desc.block_type.nbytes + v_desc.block_type.nbytes, pred=later)
            tma_load(k_desc, k_place, ready[0].index(slot), k_ring.index(slot), pred=later)
            tma_load(v_desc, k_place, ready[0].index(slot), staged.index(slot), pred=later)
            if following:
                mbarrier.wait(ready[0].index(slot ^ 1), phase ^ slot)
                values = staged.index(slot ^ 1).reshape((_BLOCK_N, FORM.block_dv)).load(places_of_values(FORM))
                store_as_float16(v_ring.index(slot ^ 1), values)
                fence_async_shared()
        else:
            mbarrier.expect(ready[0].index(slot), k_desc.block_type.nbytes, pred=later)
            mbarrier.expect(ready[1].index(slot ^ 1), v_desc.block_type.nbytes, pred=following)
            v_place = [b, kv, (n + 1) * _BLOCK_N, 0]
            tma_load(k_desc, k_place, ready[0].index(slot), k_ring.index(slot), pred=later)
            tma_load(v_desc, v_place, ready[1].index(slot ^ 1), v_ring.index(slot ^ 1), pred=following)

    @gluon.jit
    def _announce(n, ready, descs, blocks, FORM: gl.constexpr):
        """Expect what ``_load_next`` will load."""
        k_desc, v_desc = descs
        BOTH: gl.constexpr = k_desc.block_type.nbytes + (v_desc.block_type.nbytes if FORM.int8_values else 0)
        mbarrier.expect(ready[0].index(n & 1), BOTH, pred=n + 2 < blocks)
        if not FORM.int8_values:
            mbarrier.expect(ready[1].index((n + 1) & 1), v_desc.block_type.nbytes, pred=n + 1 < blocks)

    @gluon.jit
    def _load_next(n, shared, ready, descs, b, kv, blocks, FORM: gl.constexpr):
        """After Q K^T of block ``n`` and P V of the one before: their buffers get keys n + 2 and values n + 1."""
        k_ring, v_ring, staged = shared
        k_desc, v_desc = descs
        slot = n & 1
        later = n + 2 < blocks
        barrier()  # all warps have read the buffers
        place = [b, kv, (n + 2) * _BLOCK_N, 0]
        tma_load(k_desc, place, ready[0].index(slot), k_ring.index(slot), pred=later)
        if FORM.int8_values:
            tma_load(v_desc, place, ready[0].index(slot), staged.index(slot), pred=later)
            if n + 1 < blocks:
                mbarrier.wait(ready[0].index(slot ^ 1), ((n + 1) >> 1) & 1)
                values = staged.index(slot ^ 1).reshape((_BLOCK_N, FORM.block_dv)).load(places_of_values(FORM))
                store_as_float16(v_ring.index(slot ^ 1), values)
                fence_async_shared()
        else:
            place = [b, kv, (n + 1) * _BLOCK_N, 0]
            tma_load(v_desc, place, ready[1].index(slot ^ 1), v_ring.index(slot ^ 1), pred=n + 1 < blocks)

    @gluon.jit
    def _half(ring, slot, HALF: gl.constexpr):
        """The first or second 64 tokens of a block."""
        return ring.index(slot).reshape((_BLOCK_N, ring.shape[4])).slice(HALF * _HALF, _HALF)

    @gluon.jit
    def _roll(q, state, shared, ready, descs, b, kv, blocks, scale, VALUES: gl.constexpr, FORM: gl.constexpr):
        """All whole blocks, in halves, while the products of the half after are in flight."""
        k_ring, v_ring, _staged = shared
        INT8_VALUES: gl.constexpr = FORM.int8_values
        mbarrier.wait(ready[0].index(0), 0)
        k = _half(k_ring, 0, 0)
        begun = products(q, k.slice(0, _HALF // 2), _HALF // 2, FORM)
        following = products(q, k.slice(_HALF // 2, _HALF // 2), _HALF // 2, FORM)
        first, second = warpgroup_mma_wait(0, deps=(begun, following))
        s = (first, second)
        for n in range(blocks):
            slot = n & 1
            if not INT8_VALUES:
                mbarrier.wait(ready[1].index(slot), (n >> 1) & 1)
            _announce(n, ready, descs, blocks, FORM)
            s, state = advance(q, s, _half(k_ring, slot, 1), _half(v_ring, slot, 0), state, scale, VALUES, FORM)
            _load_next(n, shared, ready, descs, b, kv, blocks, FORM)
            if not INT8_VALUES:
                mbarrier.wait(ready[0].index(slot ^ 1), ((n + 1) >> 1) & 1, pred=n + 1 < blocks)
            # After the last block these products are of any keys, and are not used.
            s, state = advance(q, s, _half(k_ring, slot ^ 1, 0), _half(v_ring, slot, 1), state, scale, VALUES, FORM)
        return state

    @gluon.jit(do_not_specialize=["H", "GROUP", "N", "NK", "PARTS", "AT_ONCE"])
    def _streaming_attention_kernel(
        q_desc,  # arguments as in hopper_resident_kernel.py
        k_first_desc,
        k_second_desc,
        k_desc,
        v_first_desc,
        v_second_desc,
        v_desc,
        out_desc,
        v_ptr,
        stride_vb,
        stride_vh,
        stride_vn,
        q_scale_ptr,
        k_scale_ptr,
        v_scale_ptr,
        out_scale_ptr,
        logit_scale,
        H,
        GROUP,
        N,
        NK,
        DV,
        PARTS,  # tiles of queries of a head
        AT_ONCE,  # heads whose tiles are computed together, under causality
        V_LAYOUT: gl.constexpr,
        PER_HEAD: gl.constexpr,
        FORM: gl.constexpr,
        OVERLAP: gl.constexpr = False,
    ):
        """Grid (PARTS H B,): each program computes one tile of a head's queries; there is at least one whole block."""
        M: gl.constexpr = FORM.warpgroups * _ROWS
        D: gl.constexpr = FORM.block_d
        DV_BLOCK: gl.constexpr = FORM.block_dv
        FIRST: gl.constexpr = FORM.first
        SECOND: gl.constexpr = FORM.second
        INT8_VALUES: gl.constexpr = FORM.int8_values
        VALUES: gl.constexpr = gl.float16 if INT8_VALUES else out_desc.dtype
        q_tile = gl.allocate_shared_memory(q_desc.dtype, [1, 1, M, D], q_desc.layout)
        k_first = gl.allocate_shared_memory(k_desc.dtype, [1, 1, FIRST, D], k_first_desc.layout)
        v_first = gl.allocate_shared_memory(VALUES, [1, 1, FIRST, DV_BLOCK], V_LAYOUT)
        k_second = k_first
        v_second = v_first
        if SECOND > 0:
            k_second = gl.allocate_shared_memory(k_desc.dtype, [1, 1, SECOND, D], k_second_desc.layout)
            v_second = gl.allocate_shared_memory(VALUES, [1, 1, SECOND, DV_BLOCK], V_LAYOUT)
        k_ring = gl.allocate_shared_memory(k_desc.dtype, [2, 1, 1, _BLOCK_N, D], k_desc.layout)
        v_ring = gl.allocate_shared_memory(VALUES, [2, 1, 1, _BLOCK_N, DV_BLOCK], V_LAYOUT)
        staged = v_ring
        if INT8_VALUES:
            staged = gl.allocate_shared_memory(gl.int8, [2, 1, 1, _BLOCK_N, DV_BLOCK], v_desc.layout)
        out_tile = q_tile
        if not FORM.reuses_query:
            out_tile = gl.allocate_shared_memory(out_desc.dtype, [1, 1, M, DV_BLOCK], out_desc.layout)
        first_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())  # of keys, of values
        k_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())  # even and odd blocks
        v_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(first_ready.index(i), count=1)
        for i in gl.static_range(2):
            mbarrier.init(k_ready.index(i), count=1)
            mbarrier.init(v_ready.index(i), count=1)
        fence_async_shared()

        pid = gl.program_id(0)
        CAUSAL: gl.constexpr = FORM.causal
        tile = pid % PARTS
        head = pid // PARTS
        blocks = (NK - 1) // _BLOCK_N
        if CAUSAL:
            within = pid % (PARTS * AT_ONCE)
            tile = PARTS - 1 - within // AT_ONCE
            head = pid // (PARTS * AT_ONCE) * AT_ONCE + within % AT_ONCE
            blocks = gl.minimum(blocks, tile)
        h = head % H
        b = head // H
        kv = h // GROUP
        start = blocks * _BLOCK_N
        wait_for_previous_kernel(OVERLAP)
        K_BYTES: gl.constexpr = (FIRST + SECOND) * D * (1 if q_desc.dtype == gl.int8 else 2)
        mbarrier.expect(first_ready.index(0), q_desc.block_type.nbytes + K_BYTES)
        tma_load(q_desc, [b, h, tile * M, 0], first_ready.index(0), q_tile)
        tma_load(k_first_desc, [b, kv, start, 0], first_ready.index(0), k_first)
        if SECOND > 0:
            tma_load(k_second_desc, [b, kv, start + FIRST, 0], first_ready.index(0), k_second)
        V_BYTES: gl.constexpr = v_desc.block_type.nbytes if INT8_VALUES else 0
        some = blocks > 0
        mbarrier.expect(k_ready.index(0), k_desc.block_type.nbytes, pred=some)
        mbarrier.expect(k_ready.index(1), k_desc.block_type.nbytes + V_BYTES, pred=blocks > 1)
        tma_load(k_desc, [b, kv, 0, 0], k_ready.index(0), k_ring.index(0), pred=some)
        tma_load(k_desc, [b, kv, _BLOCK_N, 0], k_ready.index(1), k_ring.index(1), pred=blocks > 1)
        if INT8_VALUES:
            tma_load(v_desc, [b, kv, _BLOCK_N, 0], k_ready.index(1), staged.index(1), pred=blocks > 1)
            v_base = v_ptr + b.to(gl.int64) * stride_vb + kv * stride_vh
            # All loads before the first conversion, which waits for them.
            first = load_int8_values(v_base, start, FIRST, stride_vn, NK, DV, FORM)
            second = first
            if SECOND > 0:
                second = load_int8_values(v_base, start + FIRST, SECOND, stride_vn, NK, DV, FORM)
            block_values = load_int8_values(v_base, 0, _BLOCK_N, stride_vn, NK, DV, FORM)
            store_as_float16(v_first, first)
            if SECOND > 0:
                store_as_float16(v_second, second)
            store_as_float16(v_ring.index(0), block_values)
            fence_async_shared()
        else:
            mbarrier.expect(first_ready.index(1), (FIRST + SECOND) * DV_BLOCK * 2)
            tma_load(v_first_desc, [b, kv, start, 0], first_ready.index(1), v_first)
            if SECOND > 0:
                tma_load(v_second_desc, [b, kv, start + FIRST, 0], first_ready.index(1), v_second)
            mbarrier.expect(v_ready.index(0), v_desc.block_type.nbytes, pred=some)
            tma_load(v_desc, [b, kv, 0, 0], v_ready.index(0), v_ring.index(0), pred=some)

        scales = (q_scale_ptr, k_scale_ptr, v_scale_ptr, out_scale_ptr)
        scale, factor = scales_of(scales, h, kv, logit_scale, PER_HEAD)
        q = q_tile.reshape((M, D))
        mbarrier.wait(first_ready.index(0), 0)
        pieces = (k_first, k_second, v_first, v_second)
        row = tile * M
        state = visit_pieces(q, pieces, first_ready.index(1), scale, start, NK, VALUES, FORM, row)
        shared = (k_ring, v_ring, staged)
        ready = (k_ready, v_ready)
        descs = (k_desc, v_desc)
        if FORM.rolled:
            if blocks > 0:
                state = _roll(q, state, shared, ready, descs, b, kv, blocks, scale, VALUES, FORM)
        else:
            slot = 0
            phase = 0
            for n in range(blocks):
                if not INT8_VALUES or n == 0:  # else they came with the values
                    mbarrier.wait(k_ready.index(slot), phase)
                s, s2 = block_products(q, k_ring.index(slot), FORM)
                _refill(n, slot, phase, shared, ready, descs, b, kv, blocks, FORM)
                if not INT8_VALUES:
                    mbarrier.wait(v_ready.index(slot), phase)
                state = visit(s, s2, v_ring.index(slot), state, scale, VALUES, FORM)
                slot, phase = next_stage(slot, phase, 2)
        store_result(out_tile, state[0], state[1], factor, FORM)
        fence_async_shared()
        tma_store(out_desc, [b, h, tile * M, 0], out_tile)
        tma.store_wait(0)

    kernel: Any = _streaming_attention_kernel
