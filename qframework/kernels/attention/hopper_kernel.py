"""Attention for Hopper, in Gluon: one warp loads, two warpgroups compute.

The arithmetic is that of the general kernel for Q and K in 8 or 16 bit and P and V in 16 bit, with FP32 sums; formula:
:mod:`~qframework.kernels.attention.quantized_attention`. The structure is that of FlashAttention-3 (Shah et al. 2024):

- persistent programs; the loading warp runs ahead into the next tile of queries;
- one warpgroup of 64 queries uses the tensor cores while the other computes its softmax;
- within a warpgroup, Q K^T of one block of keys and P V of the block before are in flight together, and the
  exponentials run while P V does.

The warpgroups do not wait for each other's turn: instructions of P V hold the warps that issue them until they have
read P, so that a turn passed on after them would exclude the other warpgroup for as long (``docs/experiments.md``).

With the integer exponential and a bound on all logits of a tile, there is no running maximum and nothing to rescale: a
weight takes one multiplication and addition and half a permutation.

Without a mask, blocks of keys are visited from the last, which alone needs one, to the first; with a mask in the order
of mask_blocks.py, which leaves out what no query of the tile attends to. Row maxima of 8-bit products are taken from
integers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from qframework.kernels.attention import mask_blocks
from qframework.kernels.attention.hopper_softmax import BLOCK_N, ROWS
from qframework.kernels.attention.variants import KEY_BLOCK
from qframework.kernels.runtime.gluon import HAS_GLUON
from qframework.kernels.runtime.overlap import wait_for_previous_kernel

BLOCK_M = 2 * ROWS
assert BLOCK_N == BLOCK_M  # so that under causal attention every query attends to a key of its tile's last block
assert BLOCK_N == mask_blocks.BLOCK
STAGES = 2


class Form(NamedTuple):
    """Compile-time sizes: channels padded to a power of two, and tokens that share a scale."""

    block_d: int
    block_dv: int
    q_span: int  # 0: Q and K are in 16 bit, without scales
    k_span: int
    integer: bool  # integer exponential
    masked: bool  # a mask's blocks are given


if HAS_GLUON:
    from qframework.kernels.attention.hopper_softmax import (
        bounded_weights,
        exact_weights,
        halves,
        integer_weights,
        is_bounded,
        kept_keys,
        left_operand,
        new_maxima,
        partial_sums,
        whole,
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
        warpgroup_mma,
        warpgroup_mma_wait,
    )

    _ROWS, _BLOCK_M, _BLOCK_N, _STAGES, _KEY_BLOCK = (
        gl.constexpr(n) for n in (ROWS, BLOCK_M, BLOCK_N, STAGES, KEY_BLOCK)
    )
    _MASK_WORDS = gl.constexpr(BLOCK_M * mask_blocks.WORDS)  # of a block

    @gluon.jit
    def _place(work, tiles, H, HEADS_AT_ONCE):
        """(tile of queries, head, batch) of item ``work``: some heads at a time, their last tiles first.

        Under causal attention the last tiles take longest; the heads in flight share the L2 cache.
        """
        items = tiles * HEADS_AT_ONCE
        within = work % items
        head = work // items * HEADS_AT_ONCE + within % HEADS_AT_ONCE
        return tiles - 1 - within // HEADS_AT_ONCE, head % H, head // H

    @gluon.jit
    def _blocks_of(tile, h, b, NK, mask, CAUSAL: gl.constexpr, MASKED_FORM: gl.constexpr):
        """(blocks of keys that a tile of queries attends to, how many of them in part, its entry in ``mask``)."""
        if MASKED_FORM:
            counts_ptr, MASKS, MASK_HEADS, MASK_TILES = mask[2:]
            entry = ((b % MASKS * MASK_HEADS + h % MASK_HEADS) * MASK_TILES + tile % MASK_TILES).to(gl.int64)
            partial = gl.load(counts_ptr + entry * 2)
            blocks = gl.load(counts_ptr + entry * 2 + 1)
        else:
            end = NK
            if CAUSAL:
                end = gl.minimum(NK, (tile + 1) * _BLOCK_M)
            blocks = gl.cdiv(end, _BLOCK_N)
            partial = 1
            entry = tile
        return blocks, partial, entry

    @gluon.jit
    def _block_at(i, blocks, entry, NK, mask, MASKED_FORM: gl.constexpr):
        """The block of keys that a tile visits as its ``i``-th."""
        if MASKED_FORM:
            return gl.load(mask[1] + entry * gl.cdiv(NK, _BLOCK_N) + gl.minimum(i, blocks - 1))
        return blocks - 1 - i

    @gluon.jit
    def _produce(descs, shared, barriers, sizes, mask, CAUSAL: gl.constexpr, FORM: gl.constexpr):
        """The loading warp."""
        q_desc, k_desc, v_desc, _ = descs
        q_tiles, k_stages, v_stages, _ = shared
        q_ready, q_free, k_ready, k_free, v_ready, v_free = barriers
        H, GROUP, N, NK, ITEMS, HEADS_AT_ONCE = sizes
        MASKED_FORM: gl.constexpr = FORM.masked
        tiles = gl.cdiv(N, _BLOCK_M)
        slot = 0
        phase = 1  # waiting for phase 1 of a fresh barrier returns at once: everything is free
        q_phase = 1
        for work in range(gl.program_id(0), ITEMS, gl.num_programs(0)):
            tile, h, b = _place(work, tiles, H, HEADS_AT_ONCE)
            for who in gl.static_range(2):
                mbarrier.wait(q_free.index(who), q_phase)
                mbarrier.expect(q_ready.index(who), q_desc.block_type.nbytes)
                tma_load(q_desc, [b, h, tile * _BLOCK_M + who * _ROWS, 0], q_ready.index(who), q_tiles.index(who))
            q_phase = q_phase ^ 1
            blocks, _partial, entry = _blocks_of(tile, h, b, NK, mask, CAUSAL, MASKED_FORM)
            block = _block_at(0, blocks, entry, NK, mask, MASKED_FORM)
            for i in range(blocks):
                place = [b, h // GROUP, block * _BLOCK_N, 0]
                block = _block_at(i + 1, blocks, entry, NK, mask, MASKED_FORM)  # early: it may be a load
                mbarrier.wait(k_free.index(slot), phase)
                mbarrier.expect(k_ready.index(slot), k_desc.block_type.nbytes)
                tma_load(k_desc, place, k_ready.index(slot), k_stages.index(slot))
                mbarrier.wait(v_free.index(slot), phase)
                mbarrier.expect(v_ready.index(slot), v_desc.block_type.nbytes)
                tma_load(v_desc, place, v_ready.index(slot), v_stages.index(slot))
                slot, phase = next_stage(slot, phase, _STAGES)

    @gluon.jit
    def _visit(
        BOUNDED: gl.constexpr, PARTIAL: gl.constexpr, begin, end, state, at, q, q_scale, shared, barriers, keys,
        FORM: gl.constexpr,
    ):  # fmt: skip
        """Blocks of keys from the ``begin``-th, before which ``state`` holds the weights; the new state and place."""
        k_scales, k_groups, blocks, bits_ptr, entry, NK, mask = keys
        acc, total, top, weights = state
        slot, phase, next_slot, next_phase = at
        _, k_stages, v_stages, _ = shared
        _, _, k_ready, k_free, v_ready, v_free = barriers
        D: gl.constexpr = FORM.block_d
        DV: gl.constexpr = FORM.block_dv
        K_SPAN: gl.constexpr = FORM.k_span
        INT8: gl.constexpr = K_SPAN > 0
        INTEGER: gl.constexpr = FORM.integer
        MASKED_FORM: gl.constexpr = FORM.masked
        DTYPE: gl.constexpr = v_stages.dtype
        SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _BLOCK_N, 32 if INT8 else 16])
        RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
        WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
        no_scores = gl.zeros((_ROWS, _BLOCK_N), gl.int32 if INT8 else gl.float32, SCORES)
        HALVES: gl.constexpr = halves(no_scores).type.layout
        half = gl.arange(0, _BLOCK_N // _KEY_BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(2, HALVES)))
        scale = q_scale[:, None] + gl.zeros_like(half).to(gl.float32)[None, :]
        for i in range(begin, end):
            block = _block_at(i, blocks, entry, NK, mask, MASKED_FORM)
            if INT8:
                groups = (block * _BLOCK_N + half * _KEY_BLOCK) // K_SPAN
                if MASKED_FORM:  # it may be the last
                    groups = gl.minimum(groups, k_groups - 1)
                scale = q_scale[:, None] * gl.load(k_scales + groups)[None, :]
            before = slot
            before_phase = phase
            slot = next_slot
            phase = next_phase
            k = k_stages.index(slot).reshape((_BLOCK_N, D)).permute((1, 0))
            products = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
            mbarrier.wait(v_ready.index(before), before_phase)
            v = v_stages.index(before).reshape((_BLOCK_N, DV))
            values = warpgroup_mma(weights, v, acc, is_async=True)
            scores = halves(warpgroup_mma_wait(1, deps=(products,)))
            mbarrier.arrive(k_free.index(slot), count=1)
            keep = scores == scores
            if PARTIAL:
                keep = kept_keys(bits_ptr, block, no_scores)
            if BOUNDED:
                p = bounded_weights(scores, scale, keep, PARTIAL)
            else:
                new_top = new_maxima(scores, top, scale, keep, PARTIAL)
                if INTEGER:
                    new_top = whole(new_top)
                rescale = gl.exp2(top - new_top)
                top = new_top
                total = total * gl.convert_layout(rescale, gl.SliceLayout(1, total.type.layout))[:, None]
                if INTEGER:
                    p = integer_weights(scores, top, scale, keep, PARTIAL)
                else:
                    p = exact_weights(scores, top, scale, keep, PARTIAL, DTYPE)
            total += partial_sums(p, DTYPE)
            # Waiting ends a basic block, below which ptxas does not move the exponentials: they overlap P V.
            next_slot, next_phase = next_stage(slot, phase, _STAGES)
            mbarrier.wait(k_ready.index(next_slot), next_phase, pred=i + 1 < blocks)
            # P V reads its weights until here: without this use, new weights get their registers, and ptxas serializes.
            acc, weights = warpgroup_mma_wait(0, deps=(values, weights))
            mbarrier.arrive(v_free.index(before), count=1)
            if not BOUNDED:
                acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]
            weights = left_operand(p, DTYPE, SCORES, WEIGHTS)
        return (acc, total, top, weights), (slot, phase, next_slot, next_phase)

    @gluon.jit
    def _visit_all(BOUNDED: gl.constexpr, partial, state, at, q, q_scale, shared, barriers, keys, FORM: gl.constexpr):
        """All blocks of keys but the first visited."""
        MASKED_FORM: gl.constexpr = FORM.masked
        blocks = keys[2]
        begin = 1
        if MASKED_FORM:
            state, at = _visit(BOUNDED, True, 1, partial, state, at, q, q_scale, shared, barriers, keys, FORM)
            begin = gl.maximum(partial, 1)
        return _visit(BOUNDED, False, begin, blocks, state, at, q, q_scale, shared, barriers, keys, FORM)

    @gluon.jit
    def _consume(
        WHO: gl.constexpr, descs, shared, barriers, scales, sizes, mask, CAUSAL: gl.constexpr, FORM: gl.constexpr
    ):
        """Warpgroup 0 or 1: the first or last 64 queries of each tile."""
        _, _, v_desc, out_desc = descs
        q_tiles, k_stages, v_stages, out_tiles = shared
        q_ready, q_free, k_ready, k_free, v_ready, v_free = barriers
        q_scale_ptr, k_scale_ptr, k_norm_ptr, q_groups, k_groups, logit_scale = scales
        H, GROUP, N, NK, ITEMS, HEADS_AT_ONCE = sizes
        D: gl.constexpr = FORM.block_d
        DV: gl.constexpr = FORM.block_dv
        Q_SPAN: gl.constexpr = FORM.q_span
        K_SPAN: gl.constexpr = FORM.k_span
        INTEGER: gl.constexpr = FORM.integer
        MASKED_FORM: gl.constexpr = FORM.masked
        INT8: gl.constexpr = Q_SPAN > 0
        DTYPE: gl.constexpr = v_desc.dtype
        SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _BLOCK_N, 32 if INT8 else 16])
        RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
        WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
        ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
        RESULT_ROW: gl.constexpr = gl.SliceLayout(1, RESULT)
        no_scores = gl.zeros((_ROWS, _BLOCK_N), gl.int32 if INT8 else gl.float32, SCORES)
        HALVES: gl.constexpr = halves(no_scores).type.layout
        half = gl.arange(0, _BLOCK_N // _KEY_BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(2, HALVES)))
        column = gl.arange(0, _BLOCK_N, layout=gl.SliceLayout(0, SCORES))
        last_k_group = k_groups - 1
        tiles = gl.cdiv(N, _BLOCK_M)
        slot = 0
        phase = 0
        q_phase = 0
        for work in range(gl.program_id(0), ITEMS, gl.num_programs(0)):
            tile, h, b = _place(work, tiles, H, HEADS_AT_ONCE)
            first = tile * _BLOCK_M + WHO * _ROWS
            row = first + gl.arange(0, _ROWS, layout=ROW)
            k_scales = k_scale_ptr + (b * (H // GROUP) + h // GROUP) * k_groups
            blocks, partial, entry = _blocks_of(tile, h, b, NK, mask, CAUSAL, MASKED_FORM)
            block = _block_at(0, blocks, entry, NK, mask, MASKED_FORM)
            bits_ptr = k_scale_ptr
            if MASKED_FORM:
                bits_ptr = mask[0] + entry * gl.cdiv(NK, _BLOCK_N) * _MASK_WORDS + WHO * (_MASK_WORDS // 2)
            q = q_tiles.index(WHO).reshape((_ROWS, D))

            # The first visit, masked.
            mbarrier.wait(q_ready.index(WHO), q_phase)
            q_phase = q_phase ^ 1
            if INT8:
                q_scale = gl.load(q_scale_ptr + (b * H + h) * q_groups + gl.minimum(row, N - 1) // Q_SPAN) * logit_scale
                marks = q.slice(0, 32, dim=1).load(gl.BlockedLayout([1, 32], [32, 1], [4, 1], [1, 0]))
                marked = gl.convert_layout(gl.min(marks.to(gl.int32), 1), ROW) == -128  # it held NaN or infinity
                q_scale = gl.where(marked, float("nan"), q_scale)
            else:
                q_scale = gl.full((_ROWS,), 0.0, gl.float32, ROW) + logit_scale
            q_scale = gl.convert_layout(q_scale, gl.SliceLayout(1, gl.SliceLayout(2, HALVES)))
            mbarrier.wait(k_ready.index(slot), phase)
            k = k_stages.index(slot).reshape((_BLOCK_N, D)).permute((1, 0))
            products = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
            scores = halves(warpgroup_mma_wait(0, deps=(products,)))
            mbarrier.arrive(k_free.index(slot), count=1)
            start = block * _BLOCK_N
            if MASKED_FORM:
                keep = kept_keys(bits_ptr, block, no_scores) | (partial == 0)
            else:
                keep = (start + column < NK)[None, :] & (row[:, None] >= 0)
                if CAUSAL:
                    keep = keep & ((start + column)[None, :] <= row[:, None])
                keep = halves(keep)
            if INT8:
                groups = gl.minimum((start + half * _KEY_BLOCK) // K_SPAN, last_k_group)
                scale = q_scale[:, None] * gl.load(k_scales + groups)[None, :]
            else:
                scale = q_scale[:, None] + gl.zeros_like(half).to(gl.float32)[None, :]
            # Where all keys are masked the maximum is finite, so that their weights are 0.
            least = -1e30 if MASKED_FORM else float("-inf")
            top = new_maxima(scores, gl.full((_ROWS,), least, gl.float32, ROW), scale, keep, True)
            if INTEGER:
                top = whole(top)
                if INT8:
                    bounded = is_bounded(q, q_scale, gl.load(k_norm_ptr + b * (H // GROUP) + h // GROUP))
                    top = gl.where(bounded, 0.0, top)
                p = integer_weights(scores, top, scale, keep, True)
            else:
                p = exact_weights(scores, top, scale, keep, True, DTYPE)
            total = partial_sums(p, DTYPE)
            weights = left_operand(p, DTYPE, SCORES, WEIGHTS)
            acc = gl.zeros((_ROWS, DV), gl.float32, RESULT)
            next_slot, next_phase = next_stage(slot, phase, _STAGES)
            mbarrier.wait(k_ready.index(next_slot), next_phase, pred=blocks > 1)

            state = (acc, total, top, weights)
            at = (slot, phase, next_slot, next_phase)
            keys = (k_scales, k_groups, blocks, bits_ptr, entry, NK, mask)
            if INTEGER and INT8:
                if bounded:
                    state, at = _visit_all(True, partial, state, at, q, q_scale, shared, barriers, keys, FORM)
                else:
                    state, at = _visit_all(False, partial, state, at, q, q_scale, shared, barriers, keys, FORM)
            else:
                state, at = _visit_all(False, partial, state, at, q, q_scale, shared, barriers, keys, FORM)
            acc, total, top, weights = state
            slot, phase, next_slot, next_phase = at

            mbarrier.arrive(q_free.index(WHO), count=1)
            mbarrier.wait(v_ready.index(slot), phase)
            v = v_stages.index(slot).reshape((_BLOCK_N, DV))
            acc = warpgroup_mma_wait(0, deps=(warpgroup_mma(weights, v, acc, is_async=True),))
            mbarrier.arrive(v_free.index(slot), count=1)
            slot = next_slot
            phase = next_phase
            sums = gl.convert_layout(gl.sum(total, 1), RESULT_ROW)
            if MASKED_FORM:
                sums = gl.where(sums == 0.0, 1.0, sums)  # a query without keys
            result = acc * (1.0 / sums)[:, None]
            out = out_tiles.index(WHO)
            tma.store_wait(0)  # the result before has left
            out.reshape((_ROWS, DV)).store(result.to(out_desc.dtype))
            fence_async_shared()
            tma_store(out_desc, [b, h, first, 0], out)
        tma.store_wait(0)

    _UNSPECIALIZED = ["q_groups", "k_groups", "H", "GROUP", "N", "NK", "ITEMS", "HEADS_AT_ONCE"]
    _UNSPECIALIZED += ["MASKS", "MASK_HEADS", "MASK_TILES"]

    @gluon.jit(do_not_specialize=_UNSPECIALIZED)
    def _specialized_attention_kernel(
        q_desc,  # (B, H, N, D) int8, or as V; blocks of (1, 1, ROWS, block_d)
        k_desc,  # (B, Hkv, Nk, D) as Q, blocks of (1, 1, BLOCK_N, block_d)
        v_desc,  # (B, Hkv, Nk, Dv) 16 bit, blocks of (1, 1, BLOCK_N, block_dv)
        out_desc,  # (B, H, N, Dv) 16 bit, blocks of (1, 1, ROWS, block_dv)
        q_scale_ptr,  # (B, H, q_groups) fp32; any pointer where Q and K are in 16 bit, as the next
        k_scale_ptr,  # (B, Hkv, k_groups) fp32
        k_norm_ptr,  # (B, Hkv) fp32, the largest norm of a key; any pointer without integer exponential
        q_groups,
        k_groups,
        logit_scale,
        H,
        GROUP,  # query heads of a key head
        N,
        NK,
        ITEMS,  # tiles of all heads
        HEADS_AT_ONCE,  # divides B H
        bits_ptr,  # MaskBlocks, or any pointers without a mask
        order_ptr,
        counts_ptr,
        MASKS,
        MASK_HEADS,
        MASK_TILES,
        CAUSAL: gl.constexpr,
        FORM: gl.constexpr,
        OVERLAP: gl.constexpr = False,
    ):
        """Persistent programs, each of which computes every ``num_programs``-th tile."""
        D: gl.constexpr = FORM.block_d
        DV: gl.constexpr = FORM.block_dv
        q_tiles = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 1, _ROWS, D], q_desc.layout)
        k_stages = gl.allocate_shared_memory(k_desc.dtype, [_STAGES, 1, 1, _BLOCK_N, D], k_desc.layout)
        v_stages = gl.allocate_shared_memory(v_desc.dtype, [_STAGES, 1, 1, _BLOCK_N, DV], v_desc.layout)
        out_tiles = gl.allocate_shared_memory(out_desc.dtype, [2, 1, 1, _ROWS, DV], out_desc.layout)
        q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        q_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        k_ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
        k_free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
        v_ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
        v_free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(q_ready.index(i), count=1)
            mbarrier.init(q_free.index(i), count=1)
        for i in gl.static_range(_STAGES):
            mbarrier.init(k_ready.index(i), count=1)
            mbarrier.init(v_ready.index(i), count=1)
            mbarrier.init(k_free.index(i), count=2)
            mbarrier.init(v_free.index(i), count=2)
        fence_async_shared()
        wait_for_previous_kernel(OVERLAP)
        descs = (q_desc, k_desc, v_desc, out_desc)
        shared = (q_tiles, k_stages, v_stages, out_tiles)
        barriers = (q_ready, q_free, k_ready, k_free, v_ready, v_free)
        scales = (q_scale_ptr, k_scale_ptr, k_norm_ptr, q_groups, k_groups, logit_scale)
        sizes = (H, GROUP, N, NK, ITEMS, HEADS_AT_ONCE)
        mask = (bits_ptr, order_ptr, counts_ptr, MASKS, MASK_HEADS, MASK_TILES)
        gl.warp_specialize(
            [
                (_consume, (gl.constexpr(0), descs, shared, barriers, scales, sizes, mask, CAUSAL, FORM)),
                (_consume, (gl.constexpr(1), descs, shared, barriers, scales, sizes, mask, CAUSAL, FORM)),
                (_produce, (descs, shared, barriers, sizes, mask, CAUSAL, FORM)),
            ],
            [4, 1],  # warps of the second and third
            [240, 24],  # their registers; the first gets the rest
        )

    kernel: Any = _specialized_attention_kernel
