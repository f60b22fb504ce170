"""Attention of many small windows for Hopper, in Gluon: up to 64 tokens, with a bias that windows share.

A program computes windows one after the other. While it computes one, the next are on their way to shared memory. Where
the number of programs is a multiple of the number of different biases, as of Swin's heads and windows of an image, all
windows of a program have the same bias, which stays in shared memory.

Keys are one or two pieces (pieces.py) that a program sees at once, so that there is one exact softmax.
"""

from __future__ import annotations

from typing import Any

from qframework.kernels.attention.hopper.piece_form import ROWS
from qframework.kernels.runtime.gluon import HAS_GLUON
from qframework.kernels.runtime.overlap import wait_for_previous_kernel

if HAS_GLUON:
    from qframework.kernels.attention.hopper.piece_bias import load_biases, with_bias
    from qframework.kernels.attention.hopper.pieces import piece_products, store_result, visit_pieces
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

    _ROWS = gl.constexpr(ROWS)

    @gluon.constexpr_function
    def _held_layout(keys):
        """Of a bias in shared memory: rows that a warp reads at once lie in different banks."""
        return gl.SwizzledSharedLayout(8, 1, min(8, keys // 8), [1, 0])

    @gluon.jit
    def _load(item, sizes, descs, tiles, slot, ready, FORM: gl.constexpr):
        """Start to load the queries, keys and values of an item into ``slot``."""
        q_desc, k_first_desc, k_second_desc, v_first_desc, v_second_desc = descs
        q_tiles, k_first, k_second, v_first, v_second = tiles
        H, GROUP = sizes
        FIRST: gl.constexpr = FORM.first
        SECOND: gl.constexpr = FORM.second
        BYTES: gl.constexpr = (FIRST + SECOND) * (FORM.block_d + FORM.block_dv) * 2
        h = item % H
        b = item // H
        kv = h // GROUP
        loaded = ready.index(slot)
        mbarrier.expect(loaded, q_desc.block_type.nbytes + BYTES)
        tma_load(q_desc, [b, h, 0, 0], loaded, q_tiles.index(slot))
        tma_load(k_first_desc, [b, kv, 0, 0], loaded, k_first.index(slot))
        tma_load(v_first_desc, [b, kv, 0, 0], loaded, v_first.index(slot))
        if SECOND > 0:
            tma_load(k_second_desc, [b, kv, FIRST, 0], loaded, k_second.index(slot))
            tma_load(v_second_desc, [b, kv, FIRST, 0], loaded, v_second.index(slot))

    @gluon.jit(do_not_specialize=["H", "GROUP", "N", "NK", "MASKS", "MASK_HEADS", "ITEMS"])
    def _window_attention_kernel(
        q_desc,  # (B, H, N, D) in 16 bit; blocks of (1, 1, M, block_d)
        k_first_desc,  # (B, Hkv, Nk, D); blocks of `first` keys
        k_second_desc,  # blocks of `second` keys, or as the first
        v_first_desc,  # (B, Hkv, Nk, Dv) as K's
        v_second_desc,
        out_desc,  # (B, H, N, Dv); blocks of (1, 1, M, block_dv)
        bias_ptr,  # (masks, mask heads, N, Nk) float or bool, or None; batch b uses b % masks
        stride_bb,  # these four in multiples of FORM.step
        stride_bh,
        stride_bn,
        stride_bk,
        logit_scale,
        H,
        GROUP,  # query heads of a key head
        N,
        NK,
        MASKS,
        MASK_HEADS,
        ITEMS,  # B H
        FORM: gl.constexpr,
        OVERLAP: gl.constexpr = False,
    ):
        """Grid (programs,): each computes every so many windows of a head, B H in all, as they lie in memory."""
        M: gl.constexpr = FORM.warpgroups * _ROWS
        FIRST: gl.constexpr = FORM.first
        SECOND: gl.constexpr = FORM.second
        VALUES: gl.constexpr = out_desc.dtype
        BIASED: gl.constexpr = FORM.added != "none"
        q_tiles = gl.allocate_shared_memory(VALUES, [2, 1, 1, M, FORM.block_d], q_desc.layout)
        k_first = gl.allocate_shared_memory(VALUES, [2, 1, 1, FIRST, FORM.block_d], k_first_desc.layout)
        v_first = gl.allocate_shared_memory(VALUES, [2, 1, 1, FIRST, FORM.block_dv], v_first_desc.layout)
        k_second = k_first
        v_second = v_first
        if SECOND > 0:
            k_second = gl.allocate_shared_memory(VALUES, [2, 1, 1, SECOND, FORM.block_d], k_second_desc.layout)
            v_second = gl.allocate_shared_memory(VALUES, [2, 1, 1, SECOND, FORM.block_dv], v_second_desc.layout)
        out_tile = gl.allocate_shared_memory(VALUES, [1, 1, M, FORM.block_dv], out_desc.layout)
        if BIASED:
            ADDED: gl.constexpr = gl.float16 if FORM.added == "bool" else bias_ptr.dtype.element_ty
            held_first = gl.allocate_shared_memory(ADDED, [M, FIRST], _held_layout(FIRST))
            held_second = held_first
            if SECOND > 0:
                held_second = gl.allocate_shared_memory(ADDED, [M, SECOND], _held_layout(SECOND))
        ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(ready.index(i), count=1)
        fence_async_shared()

        item = gl.program_id(0)
        step = gl.num_programs(0)
        sizes = (H, GROUP)
        descs = (q_desc, k_first_desc, k_second_desc, v_first_desc, v_second_desc)
        tiles = (q_tiles, k_first, k_second, v_first, v_second)
        wait_for_previous_kernel(OVERLAP)
        _load(item, sizes, descs, tiles, 0, ready, FORM)
        if item + step < ITEMS:
            _load(item + step, sizes, descs, tiles, 1, ready, FORM)
        scale = logit_scale
        factor = logit_scale * 0.0 + 1.0
        held_place = item * 0 - 1
        slot = 0
        phase = 0
        for work in range(item, ITEMS, step):
            h = work % H
            b = work // H
            mbarrier.wait(ready.index(slot), phase)
            q = q_tiles.index(slot).reshape((M, FORM.block_d))
            keys, keys2 = k_first.index(slot), k_second.index(slot)
            s, s2 = piece_products((q, q), (keys, keys), (keys2, keys2), FORM)
            if BIASED:
                UNIT: gl.constexpr = FORM.step if FORM.step > 0 else 1
                mask = b % MASKS
                head = h % MASK_HEADS
                place = mask * MASK_HEADS + head
                if place != held_place:
                    start = mask.to(gl.int64) * stride_bb * UNIT + head * stride_bh * UNIT
                    bias = (bias_ptr + start, stride_bn, stride_bk)
                    x, x2 = load_biases(bias, 0, 0, N, NK, FIRST, SECOND, False, FORM.masked, FORM)
                    held_first.store(x)
                    if SECOND > 0:
                        held_second.store(x2)
                held_place = place
                y = held_first.load(s.type.layout)
                y2 = y
                if SECOND > 0:
                    y2 = held_second.load(s2.type.layout)
                s, s2 = with_bias(s, s2, y, y2, scale, SECOND > 0)
            values, values2 = v_first.index(slot), v_second.index(slot)
            values_of = ((values, values), (values2, values2))
            state = visit_pieces(s, s2, values_of, ready.index(slot), phase, scale, 0, NK, VALUES, FORM)
            barrier()  # all warps have read what is overwritten
            if work + 2 * step < ITEMS:
                _load(work + 2 * step, sizes, descs, tiles, slot, ready, FORM)
            tma.store_wait(0)  # the result before has left
            store_result((out_tile, out_tile), state, factor, FORM)
            fence_async_shared()
            tma_store(out_desc, [b, h, 0, 0], out_tile)
            slot, phase = next_stage(slot, phase, 2)
        tma.store_wait(0)

    kernel: Any = _window_attention_kernel
