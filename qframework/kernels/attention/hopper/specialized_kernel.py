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

Channels are one or two slices, each a power of two, so that heads of 96 are multiplied as 64 + 32 instead of 128.

Without a mask, blocks of keys are visited from the last, which alone needs one, to the first; with a bool mask in the
order of mask_blocks.py, which leaves out what no query of the tile attends to. Row maxima of 8-bit products are taken
from integers. A float bias arrives with the keys of its block; logits are natural then, not in base 2.
"""

from __future__ import annotations

from typing import Any

from qframework.kernels.attention import mask_blocks
from qframework.kernels.attention.hopper.loads import BLOCK_M
from qframework.kernels.attention.hopper.packed_items import EDGE, RECORD
from qframework.kernels.attention.hopper.softmax import ROWS
from qframework.kernels.attention.variants import KEY_BLOCK
from qframework.kernels.runtime.gluon import HAS_GLUON
from qframework.kernels.runtime.overlap import wait_for_previous_kernel

if HAS_GLUON:
    from qframework.kernels.attention.hopper.loads import (
        block_at,
        blocks_of,
        buffers,
        item_of,
        load_all,
        number_of_items,
        place_of,
    )
    from qframework.kernels.attention.hopper.logits import (
        bias_of,
        fp8_weights_of,
        head_bias_of,
        kept_by_place,
        logits_of,
        scale_of_queries,
        scales_of_block,
        weights_of,
    )
    from qframework.kernels.attention.hopper.products import (
        added_values,
        finish_values,
        products_of,
        rescaled,
        start_values,
        store_lse,
        store_result,
    )
    from qframework.kernels.attention.hopper.softmax import (
        LOWEST,
        bounded_weights,
        halves,
        integer_weights,
        is_bounded,
        kept_keys,
        left_operand,
        new_maxima,
        partial_sums,
        settled,
        sum_of_squares,
        whole,
    )
    from qframework.kernels.runtime.gluon import (
        fence_async_shared,
        gl,
        gluon,
        mbarrier,
        next_stage,
        tma,
        warpgroup_mma_wait,
    )

    _ROWS, _BLOCK_M, _KEY_BLOCK = (gl.constexpr(n) for n in (ROWS, BLOCK_M, KEY_BLOCK))
    _RECORD, _EDGE = gl.constexpr(RECORD), gl.constexpr(EDGE)
    _MASK_WORDS = gl.constexpr(BLOCK_M * mask_blocks.WORDS)  # of a block of the mask

    @gluon.jit
    def _visit(
        WHO: gl.constexpr, BOUNDED: gl.constexpr, PARTIAL: gl.constexpr, begin, end, state, at, q, q_scale, shared,
        barriers, keys, FORM: gl.constexpr,
    ):  # fmt: skip
        """Blocks of keys from the ``begin``-th, before which ``state`` holds the weights; the new state and place."""
        k_scales, k_groups, blocks, bits_ptr, entry, NK, mask, first, bias, natural = keys
        acc, acc_rest, total, top, weights, pending = state
        slot, phase, next_slot, next_phase = at
        _, _, k_ready, k_free, v_ready, v_free = barriers
        DV: gl.constexpr = FORM.block_dv
        BLOCK_N: gl.constexpr = FORM.block_n
        STAGES: gl.constexpr = FORM.stages
        K_SPAN: gl.constexpr = FORM.k_span
        INT8: gl.constexpr = K_SPAN > 0
        FP8: gl.constexpr = FORM.fp8
        MASKED_FORM: gl.constexpr = FORM.masked
        NATURAL: gl.constexpr = FORM.bias != "none"
        CAPPED: gl.constexpr = FORM.capped
        # Wide heads have no registers left for a bias that waits for products.
        LATE: gl.constexpr = FORM.bias != "none" and FORM.bias != "factors" and FORM.block_dv + FORM.rest_dv > 80
        VALUE_SLICES: gl.constexpr = 2 if FORM.rest_dv > 0 else 1
        DTYPE: gl.constexpr = shared[4].dtype
        SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32 if INT8 else 16])
        RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 32 if FP8 else 16])
        WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
        no_scores = gl.zeros((_ROWS, BLOCK_N), gl.int32 if INT8 else gl.float32, SCORES)
        HALVES: gl.constexpr = halves(no_scores).type.layout
        half = gl.arange(0, BLOCK_N // _KEY_BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(2, HALVES)))
        if not INT8:
            scale = q_scale[:, None] + gl.zeros_like(half).to(gl.float32)[None, :]
        for i in range(begin, end):
            block = block_at(i, blocks, entry, NK, mask, FORM)
            if INT8:  # with a mask it may be the last
                scale = scales_of_block(q_scale, k_scales, k_groups, block, MASKED_FORM, no_scores, FORM)
            before = slot
            before_phase = phase
            slot = next_slot
            phase = next_phase
            products = products_of(q, shared, slot, no_scores, FORM)
            mbarrier.wait(v_ready.index(before), before_phase)
            values, values_rest = start_values(weights, shared, before, acc, acc_rest, FORM)
            if NATURAL and not LATE:
                added = bias_of(WHO, block, slot, bias, shared, NK, no_scores, False, FORM)
            products = warpgroup_mma_wait(VALUE_SLICES, deps=(products,))
            if LATE:
                added = bias_of(WHO, block, slot, bias, shared, NK, no_scores, False, FORM)
            if NATURAL or CAPPED:
                products = logits_of(products, natural, FORM)
            if NATURAL:
                products = products + added
            scores = halves(products)
            mbarrier.arrive(k_free.index(slot), count=1)
            keep = scores == scores
            if PARTIAL:
                if MASKED_FORM:
                    keep = kept_keys(bits_ptr, block, no_scores)
                else:
                    keep = kept_by_place(block, first, NK, no_scores, True)
            if BOUNDED:
                p = bounded_weights(scores, scale, keep, PARTIAL)
            elif FP8:
                top, rescale, sums, p = fp8_weights_of(scores, top, scale, keep, PARTIAL, FORM)
                total = total * gl.convert_layout(rescale, gl.SliceLayout(1, total.type.layout))[:, None]
            else:
                top, rescale, p = weights_of(scores, top, scale, keep, PARTIAL, DTYPE, FORM)
                total = total * gl.convert_layout(rescale, gl.SliceLayout(1, total.type.layout))[:, None]
            if FP8:
                total += gl.convert_layout(sums, total.type.layout, assert_trivial=True)
            else:
                total += partial_sums(p, DTYPE)
            # Waiting ends a basic block, below which ptxas does not move the exponentials: they overlap P V.
            next_slot, next_phase = next_stage(slot, phase, STAGES)
            mbarrier.wait(k_ready.index(next_slot), next_phase, pred=i + 1 < blocks)
            acc, acc_rest, weights = finish_values(values, values_rest, weights, FORM)
            mbarrier.arrive(v_free.index(before), count=1)
            if FP8:
                acc = added_values(acc, acc_rest, pending)
                pending = rescale
                weights = settled(p)  # in words, which warpgroup_mma_wait takes
            else:
                if not BOUNDED:
                    acc, acc_rest = rescaled(acc, acc_rest, rescale, FORM)
                weights = left_operand(p, DTYPE, SCORES, WEIGHTS)
        return (acc, acc_rest, total, top, weights, pending), (slot, phase, next_slot, next_phase)

    @gluon.jit
    def _visit_all(
        WHO: gl.constexpr, BOUNDED: gl.constexpr, partial, state, at, q, q_scale, shared, barriers, keys,
        SEVERAL: gl.constexpr, FORM: gl.constexpr,
    ):  # fmt: skip
        """All blocks of keys but the first visited; SEVERAL: more than it may be kept in part."""
        blocks = keys[2]
        begin = 1
        if SEVERAL:
            state, at = _visit(WHO, BOUNDED, True, 1, partial, state, at, q, q_scale, shared, barriers, keys, FORM)
            begin = gl.maximum(partial, 1)
        return _visit(WHO, BOUNDED, False, begin, blocks, state, at, q, q_scale, shared, barriers, keys, FORM)

    @gluon.jit
    def _consume(
        WHO: gl.constexpr, descs, shared, barriers, scales, sizes, plan_ptr, mask, bias, CAUSAL: gl.constexpr,
        FORM: gl.constexpr,
    ):  # fmt: skip
        """Warpgroup 0 or 1: the first or last 64 queries of each tile."""
        q_ready, q_free, k_ready, k_free, v_ready, v_free = barriers
        q_scale_ptr, k_scale_ptr, k_norm_ptr, v_scale_ptr, lse_ptr, q_groups, k_groups, logit_scale, softcap = scales
        H, GROUP, ITEMS = sizes[0], sizes[1], sizes[4]
        bias_ptr, bias_batch, bias_head, bias_token = bias
        D: gl.constexpr = FORM.block_d
        DV: gl.constexpr = FORM.block_dv
        REST: gl.constexpr = FORM.rest_d
        REST_DV: gl.constexpr = FORM.rest_dv
        BLOCK_N: gl.constexpr = FORM.block_n
        STAGES: gl.constexpr = FORM.stages
        K_SPAN: gl.constexpr = FORM.k_span
        INTEGER: gl.constexpr = FORM.integer
        MASKED_FORM: gl.constexpr = FORM.masked
        NATURAL: gl.constexpr = FORM.bias != "none"
        CAPPED: gl.constexpr = FORM.capped
        SHARES_OUT: gl.constexpr = FORM.shares_out
        INT8: gl.constexpr = K_SPAN > 0
        FP8: gl.constexpr = FORM.fp8
        PACKED: gl.constexpr = FORM.packed
        LSE: gl.constexpr = FORM.lse
        # Blocks beside the first visited that may be kept in part.
        SEVERAL: gl.constexpr = FORM.masked or (CAUSAL and FORM.block_n < _BLOCK_M)
        # Where all keys are masked the maximum is finite, so that their weights are 0.
        LEAST: gl.constexpr = LOWEST if NATURAL else (-1e30 if SEVERAL or FORM.packed else float("-inf"))
        DTYPE: gl.constexpr = descs[4].dtype
        SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32 if INT8 else 16])
        RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 32 if FP8 else 16])
        REST_RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST_DV if REST_DV > 0 else DV, 16])
        WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
        ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
        no_scores = gl.zeros((_ROWS, BLOCK_N), gl.int32 if INT8 else gl.float32, SCORES)
        HALVES: gl.constexpr = halves(no_scores).type.layout
        half = gl.arange(0, BLOCK_N // _KEY_BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(2, HALVES)))
        natural = (logit_scale, softcap)
        q_unit = logit_scale  # from products, or from logits with a cap, to logits in base 2
        if CAPPED:
            q_unit = 1.0
        slot = 0
        phase = 0
        q_phase = 0
        for work in range(gl.program_id(0), number_of_items(plan_ptr, ITEMS, FORM), gl.num_programs(0)):
            tile, h, b, q_start, N, _k_start, NK = item_of(work, plan_ptr, sizes, FORM)
            first = tile * _BLOCK_M + WHO * _ROWS
            row = first + gl.arange(0, _ROWS, layout=ROW)
            k_scales = k_scale_ptr + (b * (H // GROUP) + h // GROUP) * k_groups
            blocks, partial, entry = blocks_of(tile, h, b, NK, mask, CAUSAL, FORM)
            block = block_at(0, blocks, entry, NK, mask, FORM)
            bits_ptr = k_scale_ptr
            if MASKED_FORM:
                bits_ptr = mask[0] + entry * gl.cdiv(NK, _BLOCK_M) * _MASK_WORDS + WHO * (_MASK_WORDS // 2)
            here = head_bias_of(bias_ptr, bias_batch, bias_head, bias_token, b, h, first, mask, FORM)
            head_bias = (here, bias_token, N - first)
            q_tile = shared[0].index(WHO).reshape((_ROWS, D))
            q_rest = q_tile
            if REST > 0:
                q_rest = shared[1].index(WHO).reshape((_ROWS, REST))
            q = (q_tile, q_rest)

            # The first visit, masked.
            mbarrier.wait(q_ready.index(WHO), q_phase)
            q_scale = scale_of_queries(q, q_scale_ptr, b, h, H, row, N, q_groups, q_unit, halves(no_scores), FORM)
            q_phase = q_phase ^ 1
            mbarrier.wait(k_ready.index(slot), phase)
            products = warpgroup_mma_wait(0, deps=(products_of(q, shared, slot, no_scores, FORM),))
            if NATURAL or CAPPED:
                products = logits_of(products, natural, FORM)
            if NATURAL:
                products = products + bias_of(WHO, block, slot, head_bias, shared, NK, no_scores, True, FORM)
            scores = halves(products)
            mbarrier.arrive(k_free.index(slot), count=1)
            if MASKED_FORM:
                keep = kept_keys(bits_ptr, block, no_scores) | (partial == 0)
            else:
                keep = kept_by_place(block, first, NK, no_scores, CAUSAL)
            if INT8:
                scale = scales_of_block(q_scale, k_scales, k_groups, block, True, no_scores, FORM)
            else:
                scale = q_scale[:, None] + gl.zeros_like(half).to(gl.float32)[None, :]
            least = gl.full((_ROWS,), LEAST, gl.float32, ROW)
            if INTEGER and INT8:
                top = whole(new_maxima(scores, least, scale, keep, True))
                squares = sum_of_squares(q_tile, q_scale)
                if REST > 0:
                    squares += sum_of_squares(q_rest, q_scale)
                bounded = is_bounded(squares, q_scale, gl.load(k_norm_ptr + b * (H // GROUP) + h // GROUP))
                top = gl.where(bounded, 0.0, top)
                p = integer_weights(scores, top, scale, keep, True)
            elif FP8:
                top, _, total, p = fp8_weights_of(scores, least, scale, keep, True, FORM)
            else:
                top, _, p = weights_of(scores, least, scale, keep, True, DTYPE, FORM)
            if FP8:
                weights = p
            else:
                total = partial_sums(p, DTYPE)
                weights = left_operand(p, DTYPE, SCORES, WEIGHTS)
            acc = gl.zeros((_ROWS, DV), gl.float32, RESULT)
            acc_rest = logit_scale  # stands for nothing
            if REST_DV > 0:
                acc_rest = gl.zeros((_ROWS, REST_DV), gl.float32, REST_RESULT)
            elif FP8:
                acc_rest = gl.zeros((_ROWS, DV), gl.float32, RESULT)
            next_slot, next_phase = next_stage(slot, phase, STAGES)
            mbarrier.wait(k_ready.index(next_slot), next_phase, pred=blocks > 1)

            pending = logit_scale  # stands for nothing
            if FP8:
                pending = gl.full((_ROWS,), 1.0, gl.float32, ROW)
            state = (acc, acc_rest, total, top, weights, pending)
            at = (slot, phase, next_slot, next_phase)
            keys = (k_scales, k_groups, blocks, bits_ptr, entry, NK, mask, first, head_bias, natural)
            if INTEGER and INT8:
                if bounded:
                    state, at = _visit_all(
                        WHO, True, partial, state, at, q, q_scale, shared, barriers, keys, SEVERAL, FORM
                    )
                else:
                    state, at = _visit_all(
                        WHO, False, partial, state, at, q, q_scale, shared, barriers, keys, SEVERAL, FORM
                    )
            else:
                state, at = _visit_all(
                    WHO, False, partial, state, at, q, q_scale, shared, barriers, keys, SEVERAL, FORM
                )
            acc, acc_rest, total, top, weights, pending = state
            slot, phase, next_slot, next_phase = at

            if not SHARES_OUT:
                mbarrier.arrive(q_free.index(WHO), count=1)
            mbarrier.wait(v_ready.index(slot), phase)
            values, values_rest = start_values(weights, shared, slot, acc, acc_rest, FORM)
            acc, acc_rest, weights = finish_values(values, values_rest, weights, FORM)
            if FP8:
                acc = added_values(acc, acc_rest, pending)
            mbarrier.arrive(v_free.index(slot), count=1)
            slot = next_slot
            phase = next_phase
            sums = gl.sum(total, 1)
            if LSE:
                store_lse(lse_ptr + (b * H + h).to(gl.int64) * N + first, sums, top, N - first, FORM)
            if SEVERAL or NATURAL or PACKED:
                sums = gl.where(sums == 0.0, 1.0, sums)  # a query without keys
            if not SHARES_OUT:
                tma.store_wait(0)  # the result before has left
            v_scales = v_scale_ptr + (b * (H // GROUP) + h // GROUP) * descs[6].shape[3] if FP8 else None
            store_result(
                acc, sums, v_scales, shared[6].index(WHO), descs[6], place_of(b, h, q_start, N, first, 0, FORM)
            )
            if REST_DV > 0:
                place = place_of(b, h, q_start, N, first, DV, FORM)
                store_result(acc_rest, sums, None, shared[7].index(WHO), descs[7], place)
            if SHARES_OUT:
                tma.store_wait(0)
                mbarrier.arrive(q_free.index(WHO), count=1)
        tma.store_wait(0)

    _UNSPECIALIZED = ["q_groups", "k_groups", "H", "GROUP", "N", "NK", "ITEMS", "HEADS_AT_ONCE", "BATCHES_AT_ONCE"]
    _UNSPECIALIZED += ["MASKS", "MASK_HEADS", "MASK_TILES", "bias_batch", "bias_head", "bias_token"]

    @gluon.jit(do_not_specialize=_UNSPECIALIZED)
    def _specialized_attention_kernel(
        q_desc,  # (B, H, N, D) int8, or as V; blocks of (1, 1, ROWS, block_d)
        q_rest_desc,  # the same with blocks of (1, 1, ROWS, rest_d); q_desc again without a second slice
        k_desc,  # (B, Hkv, Nk, D) int8 or as V, blocks of (1, 1, block_n, block_d)
        k_rest_desc,
        v_desc,  # (B, Hkv, Nk, Dv) 16 bit, blocks of (1, 1, block_n, block_dv); or E4M3 (B, Hkv, Dv, Nk), keys PAIRED
        v_rest_desc,
        out_desc,  # (B, H, N, Dv) 16 bit, blocks of (1, 1, ROWS, block_dv)
        out_rest_desc,
        bias_desc,  # (MASKS, MASK_HEADS, N, Nk) or, relative positions, (..., columns), blocks of 64 rows; or any
        q_scale_ptr,  # (B, H, q_groups) fp32; any pointer where Q and K are in 16 bit, as the next
        k_scale_ptr,  # (B, Hkv, k_groups) fp32
        k_norm_ptr,  # (B, Hkv) fp32, the largest norm of a key; any pointer without integer exponential
        v_scale_ptr,  # (B, Hkv, Dv) fp32, of values in FP8; or any pointer
        lse_ptr,  # (B, H, N) fp32, with `lse`; or any pointer
        q_groups,
        k_groups,
        logit_scale,
        softcap,  # of natural logits; any number without
        H,
        GROUP,  # query heads of a key head
        N,
        NK,
        ITEMS,  # tiles of all heads
        HEADS_AT_ONCE,  # divides B H
        BATCHES_AT_ONCE,  # 1 or B
        plan_ptr,  # of packed sequences, int32, see packed_items; or any pointer
        bits_ptr,  # MaskBlocks, or any pointers without a bool mask
        order_ptr,
        counts_ptr,
        MASKS,  # batches of the mask or bias; batch b uses b % MASKS
        MASK_HEADS,
        MASK_TILES,
        bias_ptr,  # a row (MASKS, MASK_HEADS, Nk), or relative positions (MASKS, MASK_HEADS, N, lines); or any pointer
        bias_batch,  # its strides, of a row in steps of 8 numbers
        bias_head,
        bias_token,
        CAUSAL: gl.constexpr,
        FORM: gl.constexpr,
        OVERLAP: gl.constexpr = False,
    ):
        """Persistent programs, each of which computes every ``num_programs``-th tile."""
        REST: gl.constexpr = FORM.rest_d
        REST_DV: gl.constexpr = FORM.rest_dv
        BLOCK_N: gl.constexpr = FORM.block_n
        STAGES: gl.constexpr = FORM.stages
        SHARES_OUT: gl.constexpr = FORM.shares_out
        TILE: gl.constexpr = FORM.bias == "tile"
        FACTORS: gl.constexpr = FORM.bias == "factors"
        q_tiles = buffers(2, q_desc)
        k_stages = buffers(STAGES, k_desc)
        v_stages = buffers(STAGES, v_desc)
        q_rest = q_tiles
        k_rest = k_stages
        v_rest = v_stages
        if REST > 0:
            q_rest = buffers(2, q_rest_desc)
            k_rest = buffers(STAGES, k_rest_desc)
        if REST_DV > 0:
            v_rest = buffers(STAGES, v_rest_desc)
        out_tiles = q_tiles
        out_rest = q_rest
        if not SHARES_OUT:
            out_tiles = buffers(2, out_desc)
            out_rest = out_tiles
            if REST_DV > 0:
                out_rest = buffers(2, out_rest_desc)
        bias_tiles = q_tiles
        if TILE:
            bias_tiles = gl.allocate_shared_memory(
                bias_desc.dtype, [2 * STAGES, 1, 1, _ROWS, BLOCK_N], bias_desc.layout
            )
        if FACTORS:
            COLUMNS: gl.constexpr = FORM.columns
            bias_tiles = gl.allocate_shared_memory(bias_desc.dtype, [2, 1, 1, _ROWS, COLUMNS], bias_desc.layout)
        q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        q_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(q_ready.index(i), count=1)
            mbarrier.init(q_free.index(i), count=1)
        for i in gl.static_range(STAGES):
            mbarrier.init(k_ready.index(i), count=1)
            mbarrier.init(v_ready.index(i), count=1)
            mbarrier.init(k_free.index(i), count=2)
            mbarrier.init(v_free.index(i), count=2)
        fence_async_shared()
        wait_for_previous_kernel(OVERLAP)
        descs = (
            q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, v_rest_desc, out_desc, out_rest_desc, bias_desc,
        )  # fmt: skip
        shared = (q_tiles, q_rest, k_stages, k_rest, v_stages, v_rest, out_tiles, out_rest, bias_tiles)
        barriers = (q_ready, q_free, k_ready, k_free, v_ready, v_free)
        scales = (q_scale_ptr, k_scale_ptr, k_norm_ptr, v_scale_ptr, lse_ptr, q_groups, k_groups, logit_scale, softcap)
        sizes = (H, GROUP, N, NK, ITEMS, HEADS_AT_ONCE, BATCHES_AT_ONCE)
        mask = (bits_ptr, order_ptr, counts_ptr, MASKS, MASK_HEADS, MASK_TILES)
        bias = (bias_ptr, bias_batch, bias_head, bias_token)
        plan = plan_ptr
        gl.warp_specialize(
            [
                (_consume, (gl.constexpr(0), descs, shared, barriers, scales, sizes, plan, mask, bias, CAUSAL, FORM)),
                (_consume, (gl.constexpr(1), descs, shared, barriers, scales, sizes, plan, mask, bias, CAUSAL, FORM)),
                (load_all, (descs, shared, barriers, sizes, plan, mask, CAUSAL, FORM)),
            ],
            [4, 1],  # warps of the second and third
            [240, 24],  # their registers; the first gets the rest
        )

    kernel: Any = _specialized_attention_kernel
