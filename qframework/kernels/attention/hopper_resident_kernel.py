"""Attention for Hopper with all keys of a head in shared memory, in Gluon; for sequences of a few hundred tokens.

A program computes some tiles of queries of one head. It loads the head's keys and values once. Each multiprocessor runs
several programs: while one waits for memory or tensor cores, others compute exponentials.

Keys are split into pieces, so that 197 keys take the time of 208: first the last keys, which alone may need a mask, in
one or two pieces with powers of two of keys, then whole blocks of 128.
"""

from __future__ import annotations

from typing import Any

from qframework.kernels.attention.hopper_pieces import BLOCK_N, ROWS
from qframework.kernels.runtime.gluon import HAS_GLUON
from qframework.kernels.runtime.overlap import wait_for_previous_kernel

if HAS_GLUON:
    from qframework.kernels.attention.hopper_pieces import (
        block_products,
        load_int8_values,
        scales_of,
        store_as_float16,
        store_result,
        visit,
        visit_pieces,
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

    _ROWS, _BLOCK_N = gl.constexpr(ROWS), gl.constexpr(BLOCK_N)

    @gluon.jit(do_not_specialize=["H", "GROUP", "N", "NK", "PARTS"])
    def _resident_attention_kernel(
        q_desc,  # (B, H, N, D) int8 or 16 bit; blocks of (1, 1, M, block_d)
        k_first_desc,  # (B, Hkv, Nk, D) as Q; blocks of `first` keys
        k_second_desc,  # blocks of `second` keys, or as the first
        k_desc,  # blocks of 128 keys
        v_first_desc,  # (B, Hkv, Nk, Dv) as K's; not used for INT8 values
        v_second_desc,
        v_desc,
        out_desc,  # (B, H, N, Dv) int8 or 16 bit; blocks of (1, 1, M, block_dv)
        v_ptr,  # (B, Hkv, Nk, Dv) int8, or any pointer
        stride_vb,
        stride_vh,
        stride_vn,
        q_scale_ptr,  # (1,) or one per head fp32, or None; as the next three
        k_scale_ptr,
        v_scale_ptr,
        out_scale_ptr,
        logit_scale,
        H,
        GROUP,  # query heads of a key head
        N,
        NK,
        DV,
        PARTS,  # programs of a head
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
        VALUES: gl.constexpr = gl.float16 if INT8_VALUES else out_desc.dtype
        q_tiles = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 1, M, D], q_desc.layout)
        k_first = gl.allocate_shared_memory(k_desc.dtype, [1, 1, FIRST, D], k_first_desc.layout)
        v_first = gl.allocate_shared_memory(VALUES, [1, 1, FIRST, DV_BLOCK], V_LAYOUT)
        k_second = k_first
        v_second = v_first
        if SECOND > 0:
            k_second = gl.allocate_shared_memory(k_desc.dtype, [1, 1, SECOND, D], k_second_desc.layout)
            v_second = gl.allocate_shared_memory(VALUES, [1, 1, SECOND, DV_BLOCK], V_LAYOUT)
        if BLOCKS > 0:
            k_blocks = gl.allocate_shared_memory(k_desc.dtype, [BLOCKS, 1, 1, _BLOCK_N, D], k_desc.layout)
            v_blocks = gl.allocate_shared_memory(VALUES, [BLOCKS, 1, 1, _BLOCK_N, DV_BLOCK], V_LAYOUT)
        out_tile = q_tiles.index(0)
        if not FORM.reuses_query:
            out_tile = gl.allocate_shared_memory(out_desc.dtype, [1, 1, M, DV_BLOCK], out_desc.layout)
        q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        k_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        v_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
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
        mbarrier.expect(q_ready.index(0), q_desc.block_type.nbytes)
        tma_load(q_desc, [b, h, part * M, 0], q_ready.index(0), q_tiles.index(0))
        KEYS: gl.constexpr = FIRST + SECOND + BLOCKS * _BLOCK_N
        mbarrier.expect(k_ready, KEYS * D * (1 if q_desc.dtype == gl.int8 else 2))
        tma_load(k_first_desc, [b, kv, start, 0], k_ready, k_first)
        if SECOND > 0:
            tma_load(k_second_desc, [b, kv, start + FIRST, 0], k_ready, k_second)
        for i in gl.static_range(BLOCKS):
            tma_load(k_desc, [b, kv, i * _BLOCK_N, 0], k_ready, k_blocks.index(i))
        if part + PARTS < tiles:
            mbarrier.expect(q_ready.index(1), q_desc.block_type.nbytes)
            tma_load(q_desc, [b, h, (part + PARTS) * M, 0], q_ready.index(1), q_tiles.index(1))
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
            mbarrier.expect(v_ready, KEYS * DV_BLOCK * 2)
            tma_load(v_first_desc, [b, kv, start, 0], v_ready, v_first)
            if SECOND > 0:
                tma_load(v_second_desc, [b, kv, start + FIRST, 0], v_ready, v_second)
            for i in gl.static_range(BLOCKS):
                tma_load(v_desc, [b, kv, i * _BLOCK_N, 0], v_ready, v_blocks.index(i))

        scales = (q_scale_ptr, k_scale_ptr, v_scale_ptr, out_scale_ptr)
        scale, factor = scales_of(scales, h, kv, logit_scale, PER_HEAD)
        mbarrier.wait(k_ready, 0)
        pieces = (k_first, k_second, v_first, v_second)
        slot = 0
        phase = 0
        for tile in range(part, tiles, PARTS):
            q_tile = q_tiles.index(slot)
            q = q_tile.reshape((M, D))
            mbarrier.wait(q_ready.index(slot), phase)
            state = visit_pieces(q, pieces, v_ready, scale, start, NK, VALUES, FORM)
            if BLOCKS > 0:
                for block in range(BLOCKS):
                    s, s2 = block_products(q, k_blocks.index(block), FORM)
                    state = visit(s, s2, v_blocks.index(block), state, scale, VALUES, FORM)
            if FORM.reuses_query:
                out_tile = q_tile
            else:
                tma.store_wait(0)  # the result before has left
            store_result(out_tile, state[0], state[1], factor, FORM)
            fence_async_shared()
            tma_store(out_desc, [b, h, tile * M, 0], out_tile)
            if tile + 2 * PARTS < tiles:
                if FORM.reuses_query:
                    tma.store_wait(0)
                mbarrier.expect(q_ready.index(slot), q_desc.block_type.nbytes)
                tma_load(q_desc, [b, h, (tile + 2 * PARTS) * M, 0], q_ready.index(slot), q_tile)
            slot, phase = next_stage(slot, phase, 2)
        tma.store_wait(0)

    kernel: Any = _resident_attention_kernel
