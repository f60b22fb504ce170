"""As hopper_pair_kernel.py for INT8: each warpgroup converts half of a block's values to float16, a block ahead."""

from __future__ import annotations

from typing import Any

from qframework.kernels.attention.hopper_pieces import BLOCK_N, ROWS
from qframework.kernels.runtime.gluon import HAS_GLUON
from qframework.kernels.runtime.overlap import wait_for_previous_kernel

STAGES = 3

if HAS_GLUON:
    from qframework.kernels.attention.hopper_pair_kernel import _place
    from qframework.kernels.attention.hopper_pieces import (
        block_products,
        first_visit,
        places_of_values,
        scales_of,
        store_as_float16,
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

    _ROWS, _BLOCK_N, _HALF, _STAGES = (gl.constexpr(n) for n in (ROWS, BLOCK_N, BLOCK_N // 2, STAGES))

    @gluon.jit
    def _load(i, slot, b, kv, blocks, descs, shared, barriers):
        """The keys and values of the ``i``-th visit, if there is one."""
        k_desc, v_desc = descs[1], descs[2]
        some = i <= blocks
        block = gl.where(i == 0, blocks, i - 1)
        place = [b, kv, block * _BLOCK_N, 0]
        mbarrier.expect(barriers[1].index(slot), k_desc.block_type.nbytes + v_desc.block_type.nbytes, pred=some)
        tma_load(k_desc, place, barriers[1].index(slot), shared[1].index(slot), pred=some)
        tma_load(v_desc, place, barriers[1].index(slot), shared[2].index(slot), pred=some)

    @gluon.jit
    def _convert(WHO: gl.constexpr, slot, shared, barriers, FORM: gl.constexpr):
        """This warpgroup's half of the values of a block in shared memory."""
        staged = shared[2].index(slot).reshape((_BLOCK_N, FORM.block_dv)).slice(WHO * _HALF, _HALF)
        place = shared[3].index(slot).reshape((_BLOCK_N, FORM.block_dv)).slice(WHO * _HALF, _HALF)
        store_as_float16(place, staged.load(places_of_values(FORM)))
        fence_async_shared()
        mbarrier.arrive(barriers[2].index(slot), count=1)

    @gluon.jit
    def _compute(WHO: gl.constexpr, descs, shared, barriers, scales, sizes, logit_scale, PER_HEAD: gl.constexpr, FORM: gl.constexpr):
        """Warpgroup 0 or 1: the first or last 64 queries of the tile."""
        q_tiles, k_stages, _staged, v_stages, out_tiles = shared
        q_ready, ready, converted, free = barriers
        D: gl.constexpr = FORM.block_d
        tile, h, b, kv, blocks = _place(sizes, FORM)
        NK = sizes[3]
        scale, factor = scales_of(scales, h, kv, logit_scale, PER_HEAD)
        row = (tile * 2 + WHO) * _ROWS
        q = q_tiles.index(WHO).reshape((_ROWS, D))
        mbarrier.wait(ready.index(0), 0)
        _convert(WHO, 0, shared, barriers, FORM)
        mbarrier.wait(ready.index(1), 0, pred=blocks > 0)
        if blocks > 0:
            _convert(WHO, 1, shared, barriers, FORM)
        mbarrier.wait(q_ready.index(WHO), 0)
        state = first_visit(
            WHO, q, k_stages.index(0), v_stages.index(0), converted.index(0), scale, blocks * _BLOCK_N, NK, row,
            gl.float16, FORM,
        )  # fmt: skip
        mbarrier.arrive(free.index(0), count=1)
        slot = 1
        phase = 0
        for i in range(1, blocks + 1):
            s, s2 = block_products(q, k_stages.index(slot), FORM)
            after, after_phase = next_stage(slot, phase, _STAGES)
            following = i < blocks
            old = (i >= 2) & following
            mbarrier.wait(free.index(after), after_phase ^ 1, pred=old)
            if WHO == 0:
                if old:
                    _load(i + 1, after, b, kv, blocks, descs, shared, barriers)
            mbarrier.wait(converted.index(slot), phase)
            state = visit(s, s2, v_stages.index(slot), state, scale, gl.float16, FORM)
            mbarrier.arrive(free.index(slot), count=1)
            if following:
                mbarrier.wait(ready.index(after), after_phase)
                _convert(WHO, after, shared, barriers, FORM)
            slot = after
            phase = after_phase
        out_tile = out_tiles.index(WHO)
        store_result(out_tile, state[0], state[1], factor, FORM)
        fence_async_shared()
        tma_store(descs[3], [b, h, row, 0], out_tile)
        tma.store_wait(0)

    @gluon.jit(do_not_specialize=["H", "GROUP", "N", "NK", "PARTS", "AT_ONCE"])
    def _pair8_attention_kernel(
        q_desc,
        k_desc,
        v_desc,
        out_desc,
        q_scale_ptr,
        k_scale_ptr,
        v_scale_ptr,
        out_scale_ptr,
        logit_scale,
        H,
        GROUP,
        N,
        NK,
        PARTS,
        AT_ONCE,
        V_LAYOUT: gl.constexpr,
        PER_HEAD: gl.constexpr,
        FORM: gl.constexpr,
        OVERLAP: gl.constexpr = False,
    ):
        """Grid (PARTS H B,): each program computes one tile of a head's queries."""
        q_tiles = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 1, _ROWS, FORM.block_d], q_desc.layout)
        k_stages = gl.allocate_shared_memory(k_desc.dtype, [_STAGES, 1, 1, _BLOCK_N, FORM.block_d], k_desc.layout)
        staged = gl.allocate_shared_memory(v_desc.dtype, [_STAGES, 1, 1, _BLOCK_N, FORM.block_dv], v_desc.layout)
        v_stages = gl.allocate_shared_memory(gl.float16, [_STAGES, 1, 1, _BLOCK_N, FORM.block_dv], V_LAYOUT)
        out_tiles = q_tiles
        if not FORM.reuses_query:
            out_tiles = gl.allocate_shared_memory(out_desc.dtype, [2, 1, 1, _ROWS, FORM.block_dv], out_desc.layout)
        q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
        converted = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
        free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(q_ready.index(i), count=1)
        for i in gl.static_range(_STAGES):
            mbarrier.init(ready.index(i), count=1)
            mbarrier.init(converted.index(i), count=2)
            mbarrier.init(free.index(i), count=2)
        fence_async_shared()
        sizes = (H, GROUP, N, NK, PARTS, AT_ONCE)
        descs = (q_desc, k_desc, v_desc, out_desc)
        shared = (q_tiles, k_stages, staged, v_stages, out_tiles)
        barriers = (q_ready, ready, converted, free)
        scales = (q_scale_ptr, k_scale_ptr, v_scale_ptr, out_scale_ptr)
        tile, h, b, kv, blocks = _place(sizes, FORM)
        wait_for_previous_kernel(OVERLAP)
        for i in gl.static_range(2):
            mbarrier.expect(q_ready.index(i), q_desc.block_type.nbytes)
            tma_load(q_desc, [b, h, (tile * 2 + i) * _ROWS, 0], q_ready.index(i), q_tiles.index(i))
        for i in gl.static_range(_STAGES):
            _load(i, i, b, kv, blocks, descs, shared, barriers)
        gl.warp_specialize(
            [
                (_compute, (gl.constexpr(0), descs, shared, barriers, scales, sizes, logit_scale, PER_HEAD, FORM)),
                (_compute, (gl.constexpr(1), descs, shared, barriers, scales, sizes, logit_scale, PER_HEAD, FORM)),
            ],
            [4],
            [128],
        )

    kernel: Any = _pair8_attention_kernel
