"""Attention for Hopper with keys that pass through shared memory, by two warpgroups that do not wait for each other.

In Gluon, for operands in 16 bit. A program computes a tile of 128 queries, each warpgroup 64 of them; each
multiprocessor runs two programs. The first warpgroup loads: it lets the other be up to two blocks of keys behind.

The last keys that a tile attends to, which alone need a mask, are visited first: under causality the keys of its own
places, of which the first warpgroup needs only half.
"""

from __future__ import annotations

from typing import Any

from qframework.kernels.attention.hopper_pieces import BLOCK_N, ROWS
from qframework.kernels.runtime.gluon import HAS_GLUON
from qframework.kernels.runtime.overlap import wait_for_previous_kernel

STAGES = 3

if HAS_GLUON:
    from qframework.kernels.attention.hopper_pieces import (
        block_products,
        first_visit,
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

    _ROWS, _BLOCK_N, _STAGES = gl.constexpr(ROWS), gl.constexpr(BLOCK_N), gl.constexpr(STAGES)

    @gluon.jit
    def _place(sizes, FORM: gl.constexpr):
        """(tile of queries, head, batch, head of keys, whole blocks of keys before the last)."""
        H, GROUP, N, NK, PARTS, AT_ONCE = sizes
        CAUSAL: gl.constexpr = FORM.causal
        pid = gl.program_id(0)
        blocks = (NK - 1) // _BLOCK_N
        if CAUSAL:
            within = pid % (PARTS * AT_ONCE)
            tile = PARTS - 1 - within // AT_ONCE
            head = pid // (PARTS * AT_ONCE) * AT_ONCE + within % AT_ONCE
            blocks = gl.minimum(blocks, tile)
        else:
            tile = pid % PARTS
            head = pid // PARTS
        h = head % H
        return tile, h, head // H, h // GROUP, blocks

    @gluon.jit
    def _load(i, slot, b, kv, blocks, descs, shared, barriers):
        """The keys and values of the ``i``-th visit, if there is one."""
        k_desc, v_desc = descs[1], descs[2]
        some = i <= blocks
        block = gl.where(i == 0, blocks, i - 1)
        place = [b, kv, block * _BLOCK_N, 0]
        mbarrier.expect(barriers[1].index(slot), k_desc.block_type.nbytes, pred=some)
        mbarrier.expect(barriers[2].index(slot), v_desc.block_type.nbytes, pred=some)
        tma_load(k_desc, place, barriers[1].index(slot), shared[1].index(slot), pred=some)
        tma_load(v_desc, place, barriers[2].index(slot), shared[2].index(slot), pred=some)

    @gluon.jit
    def _compute(WHO: gl.constexpr, descs, shared, barriers, sizes, logit_scale, FORM: gl.constexpr):
        """Warpgroup 0 or 1: the first or last 64 queries of the tile."""
        q_tiles, k_stages, v_stages = shared
        q_ready, k_ready, v_ready, free = barriers
        D: gl.constexpr = FORM.block_d
        VALUES: gl.constexpr = v_stages.dtype
        tile, h, b, kv, blocks = _place(sizes, FORM)
        NK = sizes[3]
        row = (tile * 2 + WHO) * _ROWS
        q_tile = q_tiles.index(WHO)
        q = q_tile.reshape((_ROWS, D))
        mbarrier.wait(q_ready.index(WHO), 0)
        mbarrier.wait(k_ready.index(0), 0)
        state = first_visit(
            WHO, q, k_stages.index(0), v_stages.index(0), v_ready.index(0), logit_scale, blocks * _BLOCK_N, NK, row,
            VALUES, FORM,
        )  # fmt: skip
        mbarrier.arrive(free.index(0), count=1)
        slot = 1
        phase = 0
        for i in range(1, blocks + 1):
            mbarrier.wait(k_ready.index(slot), phase)
            s, s2 = block_products(q, k_stages.index(slot), FORM)
            after, after_phase = next_stage(slot, phase, _STAGES)
            if WHO == 0:
                some = (i >= 2) & (i < blocks)
                mbarrier.wait(free.index(after), after_phase ^ 1, pred=some)
                if some:
                    _load(i + 1, after, b, kv, blocks, descs, shared, barriers)
            mbarrier.wait(v_ready.index(slot), phase)
            state = visit(s, s2, v_stages.index(slot), state, logit_scale, VALUES, FORM)
            mbarrier.arrive(free.index(slot), count=1)
            slot = after
            phase = after_phase
        store_result(q_tile, state[0], state[1], 1.0, FORM)
        fence_async_shared()
        tma_store(descs[3], [b, h, row, 0], q_tile)
        tma.store_wait(0)

    @gluon.jit(do_not_specialize=["H", "GROUP", "N", "NK", "PARTS", "AT_ONCE"])
    def _pair_attention_kernel(
        q_desc,  # (B, H, N, D) 16 bit; blocks of (1, 1, ROWS, block_d)
        k_desc,  # (B, Hkv, Nk, D); blocks of 128 keys, as V's
        v_desc,  # (B, Hkv, Nk, Dv)
        out_desc,  # (B, H, N, Dv); blocks of (1, 1, ROWS, block_dv)
        logit_scale,
        H,
        GROUP,  # query heads of a key head
        N,
        NK,
        PARTS,  # tiles of queries of a head
        AT_ONCE,  # heads whose tiles are computed together, under causality
        FORM: gl.constexpr,
        OVERLAP: gl.constexpr = False,
    ):
        """Grid (PARTS H B,): each program computes one tile of a head's queries."""
        q_tiles = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 1, _ROWS, FORM.block_d], q_desc.layout)
        k_stages = gl.allocate_shared_memory(k_desc.dtype, [_STAGES, 1, 1, _BLOCK_N, FORM.block_d], k_desc.layout)
        v_stages = gl.allocate_shared_memory(v_desc.dtype, [_STAGES, 1, 1, _BLOCK_N, FORM.block_dv], v_desc.layout)
        q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        k_ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
        v_ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
        free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(q_ready.index(i), count=1)
        for i in gl.static_range(_STAGES):
            mbarrier.init(k_ready.index(i), count=1)
            mbarrier.init(v_ready.index(i), count=1)
            mbarrier.init(free.index(i), count=2)
        fence_async_shared()
        sizes = (H, GROUP, N, NK, PARTS, AT_ONCE)
        descs = (q_desc, k_desc, v_desc, out_desc)
        shared = (q_tiles, k_stages, v_stages)
        barriers = (q_ready, k_ready, v_ready, free)
        tile, h, b, kv, blocks = _place(sizes, FORM)
        wait_for_previous_kernel(OVERLAP)
        for i in gl.static_range(2):
            mbarrier.expect(q_ready.index(i), q_desc.block_type.nbytes)
            tma_load(q_desc, [b, h, (tile * 2 + i) * _ROWS, 0], q_ready.index(i), q_tiles.index(i))
        for i in gl.static_range(_STAGES):
            _load(i, i, b, kv, blocks, descs, shared, barriers)
        gl.warp_specialize(
            [
                (_compute, (gl.constexpr(0), descs, shared, barriers, sizes, logit_scale, FORM)),
                (_compute, (gl.constexpr(1), descs, shared, barriers, sizes, logit_scale, FORM)),
            ],
            [4],
            [128],
        )

    kernel: Any = _pair_attention_kernel
