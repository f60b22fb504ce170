"""Quantized attention for Hopper, in Gluon: one warp loads, two warpgroups take turns on the tensor cores.

The arithmetic is that of the general kernel for 8-bit Q and K and 16-bit P and V with FP32 sums; formula:
:mod:`~qframework.kernels.attention.quantized_attention`. The structure is that of FlashAttention-3 (Shah et al. 2024):

- persistent programs; the loading warp runs ahead into the next tile of queries;
- ping-pong: one warpgroup of 64 queries issues its products while the other computes its softmax;
- within a warpgroup, Q K^T of one block of keys and P V of the block before are in flight together, and the
  exponentials run while P V does.

Blocks of keys are visited from the last, which alone needs a mask, to the first. Row maxima are taken from integers.
Used for large dense problems without mask, bias or log-sum-exp; triton.py handles all others.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qframework.kernels.attention.operands import QuantizedQK, query_memory_order
from qframework.kernels.attention.variants import KEY_BLOCK, AttentionVariant, fits_hopper, token_groups
from qframework.kernels.runtime.chip import chip_of
from qframework.kernels.runtime.gluon import HAS_GLUON
from qframework.kernels.runtime.launch import cdiv, launch
from qframework.kernels.runtime.overlap import wait_for_previous_kernel

ROWS = 64  # queries of a warpgroup
BLOCK_M = 2 * ROWS
BLOCK_N = BLOCK_M  # so that under causal attention every query attends to a key of its tile's last block
STAGES = 2
LEAST_TOKENS = 512  # shorter sequences spend on a pass over Q, which triton.py saves, what they gain; from 577 measured


class Groups(NamedTuple):
    """Compile-time sizes: channels padded to a power of two, and tokens that share a scale."""

    block_d: int
    block_dv: int
    q_span: int
    k_span: int


if HAS_GLUON:
    from qframework.kernels.runtime.gluon import (
        TensorDescriptor,
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
    _MASKED = gl.constexpr(-(1 << 26))  # below all sums of products

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
    def _blocks_of(tile, NK, CAUSAL: gl.constexpr):
        """The number of blocks of keys that a tile of queries attends to."""
        end = NK
        if CAUSAL:
            end = gl.minimum(NK, (tile + 1) * _BLOCK_M)
        return gl.cdiv(end, _BLOCK_N)

    @gluon.jit
    def _produce(descs, shared, barriers, sizes, CAUSAL: gl.constexpr):
        """The loading warp."""
        q_desc, k_desc, v_desc, _ = descs
        q_tiles, k_stages, v_stages, _ = shared
        q_ready, q_free, k_ready, k_free, v_ready, v_free, _ = barriers
        H, GROUP, N, NK, ITEMS, HEADS_AT_ONCE = sizes
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
            blocks = _blocks_of(tile, NK, CAUSAL)
            for i in range(blocks):
                place = [b, h // GROUP, (blocks - 1 - i) * _BLOCK_N, 0]
                mbarrier.wait(k_free.index(slot), phase)
                mbarrier.expect(k_ready.index(slot), k_desc.block_type.nbytes)
                tma_load(k_desc, place, k_ready.index(slot), k_stages.index(slot))
                mbarrier.wait(v_free.index(slot), phase)
                mbarrier.expect(v_ready.index(slot), v_desc.block_type.nbytes)
                tma_load(v_desc, place, v_ready.index(slot), v_stages.index(slot))
                slot, phase = next_stage(slot, phase, _STAGES)

    @gluon.jit
    def _halves(x):
        """(ROWS, BLOCK_N) as (ROWS, BLOCK_N // KEY_BLOCK, KEY_BLOCK), whose last dimension shares a scale."""
        return gl.reshape(x, (_ROWS, _BLOCK_N // _KEY_BLOCK, _KEY_BLOCK))

    @gluon.jit
    def _new_top(s, top, scale, MASKED: gl.constexpr):
        """The maxima of rows (ROWS,): of ``top`` and the logits ``s * scale``, scale (ROWS, BLOCK_N // KEY_BLOCK)."""
        products = gl.max(s, 2)
        highest = products.to(gl.float32) * scale
        if MASKED:  # keys that are all masked have no logit, however small their scale
            highest = gl.where(products == _MASKED, float("-inf"), highest)
        return gl.maximum(top, gl.convert_layout(gl.max(highest, 1), top.type.layout))

    @gluon.jit
    def _weights(s, top, scale):
        """exp2(s * scale - top) as (ROWS, BLOCK_N)."""
        top = gl.convert_layout(top, gl.SliceLayout(1, gl.SliceLayout(2, s.type.layout)))
        p = gl.exp2(s.to(gl.float32) * scale[:, :, None] - top[:, None, None])
        return gl.reshape(p, (_ROWS, _BLOCK_N))

    @gluon.jit
    def _partial_sums(p):
        """(ROWS, 4): sums over the columns of each of the four threads of a row, which need no exchange."""
        return gl.sum(gl.sum(gl.reshape(p, (_ROWS, _BLOCK_N // 8, 4, 2)), 3), 1)

    @gluon.jit
    def _consume(WHO: gl.constexpr, descs, shared, barriers, scales, sizes, CAUSAL: gl.constexpr, GROUPS: gl.constexpr):
        """Warpgroup 0 or 1: the first or last 64 queries of each tile."""
        _, _, v_desc, out_desc = descs
        q_tiles, k_stages, v_stages, out_tiles = shared
        q_ready, q_free, k_ready, k_free, v_ready, v_free, turn = barriers
        q_scale_ptr, k_scale_ptr, q_groups, k_groups, logit_scale = scales
        H, GROUP, N, NK, ITEMS, HEADS_AT_ONCE = sizes
        D: gl.constexpr = GROUPS.block_d
        DV: gl.constexpr = GROUPS.block_dv
        Q_SPAN: gl.constexpr = GROUPS.q_span
        K_SPAN: gl.constexpr = GROUPS.k_span
        SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _BLOCK_N, 32])
        RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
        WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
        ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
        RESULT_ROW: gl.constexpr = gl.SliceLayout(1, RESULT)
        no_scores = gl.zeros((_ROWS, _BLOCK_N), gl.int32, SCORES)
        HALVES: gl.constexpr = _halves(no_scores).type.layout
        half = gl.arange(0, _BLOCK_N // _KEY_BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(2, HALVES)))
        column = gl.arange(0, _BLOCK_N, layout=gl.SliceLayout(0, SCORES))
        last_k_group = k_groups - 1
        tiles = gl.cdiv(N, _BLOCK_M)
        own_turn = 1 - WHO
        slot = 0
        phase = 0
        q_phase = 0
        for work in range(gl.program_id(0), ITEMS, gl.num_programs(0)):
            tile, h, b = _place(work, tiles, H, HEADS_AT_ONCE)
            first = tile * _BLOCK_M + WHO * _ROWS
            row = first + gl.arange(0, _ROWS, layout=ROW)
            k_scales = k_scale_ptr + (b * (H // GROUP) + h // GROUP) * k_groups
            blocks = _blocks_of(tile, NK, CAUSAL)
            q = q_tiles.index(WHO).reshape((_ROWS, D))

            # The last block of keys, masked.
            mbarrier.wait(q_ready.index(WHO), q_phase)
            q_phase = q_phase ^ 1
            q_scale = gl.load(q_scale_ptr + (b * H + h) * q_groups + gl.minimum(row, N - 1) // Q_SPAN) * logit_scale
            marks = q.slice(0, 32, dim=1).load(gl.BlockedLayout([1, 32], [32, 1], [4, 1], [1, 0]))
            marked = gl.convert_layout(gl.min(marks.to(gl.int32), 1), ROW) == -128  # a query that held NaN or infinity
            q_scale = gl.where(marked, float("nan"), q_scale)
            q_scale = gl.convert_layout(q_scale, gl.SliceLayout(1, gl.SliceLayout(2, HALVES)))
            mbarrier.wait(k_ready.index(slot), phase)
            mbarrier.wait(turn.index(WHO), own_turn)
            own_turn = own_turn ^ 1
            k = k_stages.index(slot).reshape((_BLOCK_N, D)).permute((1, 0))
            products = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
            mbarrier.arrive(turn.index(1 - WHO), count=1)
            s = warpgroup_mma_wait(0, deps=(products,))
            mbarrier.arrive(k_free.index(slot), count=1)
            start = (blocks - 1) * _BLOCK_N
            keep = (start + column < NK)[None, :]
            if CAUSAL:
                keep = keep & ((start + column)[None, :] <= row[:, None])
            s = _halves(gl.where(keep, s, _MASKED))
            groups = gl.minimum((start + half * _KEY_BLOCK) // K_SPAN, last_k_group)
            scale = q_scale[:, None] * gl.load(k_scales + groups)[None, :]
            top = _new_top(s, gl.full((_ROWS,), float("-inf"), gl.float32, ROW), scale, True)
            p = gl.where(keep, gl.convert_layout(_weights(s, top, scale), SCORES), 0.0)
            total = _partial_sums(p)
            TOTAL_ROW: gl.constexpr = gl.SliceLayout(1, total.type.layout)
            weights = gl.convert_layout(p.to(v_desc.dtype), WEIGHTS)
            acc = gl.zeros((_ROWS, DV), gl.float32, RESULT)
            next_slot, next_phase = next_stage(slot, phase, _STAGES)
            mbarrier.wait(k_ready.index(next_slot), next_phase, pred=blocks > 1)

            for i in range(1, blocks):
                start = (blocks - 1 - i) * _BLOCK_N
                scale = q_scale[:, None] * gl.load(k_scales + (start + half * _KEY_BLOCK) // K_SPAN)[None, :]
                before = slot
                before_phase = phase
                slot = next_slot
                phase = next_phase
                mbarrier.wait(turn.index(WHO), own_turn)
                own_turn = own_turn ^ 1
                k = k_stages.index(slot).reshape((_BLOCK_N, D)).permute((1, 0))
                products = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
                mbarrier.wait(v_ready.index(before), before_phase)
                v = v_stages.index(before).reshape((_BLOCK_N, DV))
                values = warpgroup_mma(weights, v, acc, is_async=True)
                mbarrier.arrive(turn.index(1 - WHO), count=1)
                s = _halves(warpgroup_mma_wait(1, deps=(products,)))
                mbarrier.arrive(k_free.index(slot), count=1)
                new_top = _new_top(s, top, scale, False)
                rescale = gl.exp2(top - new_top)
                top = new_top
                p = gl.convert_layout(_weights(s, top, scale), SCORES)
                total = total * gl.convert_layout(rescale, TOTAL_ROW)[:, None] + _partial_sums(p)
                # Waiting ends a basic block, below which ptxas does not move the exponentials: they overlap P V.
                next_slot, next_phase = next_stage(slot, phase, _STAGES)
                mbarrier.wait(k_ready.index(next_slot), next_phase, pred=i + 1 < blocks)
                acc = warpgroup_mma_wait(0, deps=(values,))
                mbarrier.arrive(v_free.index(before), count=1)
                acc = acc * gl.convert_layout(rescale, RESULT_ROW)[:, None]
                weights = gl.convert_layout(p.to(v_desc.dtype), WEIGHTS)

            mbarrier.arrive(q_free.index(WHO), count=1)
            mbarrier.wait(v_ready.index(slot), phase)
            v = v_stages.index(slot).reshape((_BLOCK_N, DV))
            acc = warpgroup_mma_wait(0, deps=(warpgroup_mma(weights, v, acc, is_async=True),))
            mbarrier.arrive(v_free.index(slot), count=1)
            slot = next_slot
            phase = next_phase
            result = acc * (1.0 / gl.convert_layout(gl.sum(total, 1), RESULT_ROW))[:, None]
            out = out_tiles.index(WHO)
            tma.store_wait(0)  # the result before has left
            out.reshape((_ROWS, DV)).store(result.to(out_desc.dtype))
            fence_async_shared()
            tma_store(out_desc, [b, h, first, 0], out)
        tma.store_wait(0)

    @gluon.jit(do_not_specialize=["q_groups", "k_groups", "H", "GROUP", "N", "NK", "ITEMS", "HEADS_AT_ONCE"])
    def _specialized_attention_kernel(
        q_desc,  # (B, H, N, D) int8, blocks of (1, 1, ROWS, block_d)
        k_desc,  # (B, Hkv, Nk, D) int8, blocks of (1, 1, BLOCK_N, block_d)
        v_desc,  # (B, Hkv, Nk, Dv) 16 bit, blocks of (1, 1, BLOCK_N, block_dv)
        out_desc,  # (B, H, N, Dv) 16 bit, blocks of (1, 1, ROWS, block_dv)
        q_scale_ptr,  # (B, H, q_groups) fp32
        k_scale_ptr,  # (B, Hkv, k_groups) fp32
        q_groups,
        k_groups,
        logit_scale,
        H,
        GROUP,  # query heads of a key head
        N,
        NK,
        ITEMS,  # tiles of all heads
        HEADS_AT_ONCE,  # divides B H
        CAUSAL: gl.constexpr,
        GROUPS: gl.constexpr,
        OVERLAP: gl.constexpr = False,
    ):
        """Persistent programs, each of which computes every ``num_programs``-th tile."""
        D: gl.constexpr = GROUPS.block_d
        DV: gl.constexpr = GROUPS.block_dv
        q_tiles = gl.allocate_shared_memory(gl.int8, [2, 1, 1, _ROWS, D], q_desc.layout)
        k_stages = gl.allocate_shared_memory(gl.int8, [_STAGES, 1, 1, _BLOCK_N, D], k_desc.layout)
        v_stages = gl.allocate_shared_memory(v_desc.dtype, [_STAGES, 1, 1, _BLOCK_N, DV], v_desc.layout)
        out_tiles = gl.allocate_shared_memory(out_desc.dtype, [2, 1, 1, _ROWS, DV], out_desc.layout)
        q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        q_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        k_ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
        k_free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
        v_ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
        v_free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(q_ready.index(i), count=1)
            mbarrier.init(q_free.index(i), count=1)
            mbarrier.init(turn.index(i), count=1)
        for i in gl.static_range(_STAGES):
            mbarrier.init(k_ready.index(i), count=1)
            mbarrier.init(v_ready.index(i), count=1)
            mbarrier.init(k_free.index(i), count=2)
            mbarrier.init(v_free.index(i), count=2)
        fence_async_shared()
        wait_for_previous_kernel(OVERLAP)
        descs = (q_desc, k_desc, v_desc, out_desc)
        shared = (q_tiles, k_stages, v_stages, out_tiles)
        barriers = (q_ready, q_free, k_ready, k_free, v_ready, v_free, turn)
        scales = (q_scale_ptr, k_scale_ptr, q_groups, k_groups, logit_scale)
        sizes = (H, GROUP, N, NK, ITEMS, HEADS_AT_ONCE)
        gl.warp_specialize(
            [
                (_consume, (gl.constexpr(0), descs, shared, barriers, scales, sizes, CAUSAL, GROUPS)),
                (_consume, (gl.constexpr(1), descs, shared, barriers, scales, sizes, CAUSAL, GROUPS)),
                (_produce, (descs, shared, barriers, sizes, CAUSAL)),
            ],
            [4, 1],  # warps of the second and third
            [240, 24],  # their registers; the first gets the rest
        )

    kernel: Any = _specialized_attention_kernel


def fits(
    q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, dtype: torch.dtype, capability: tuple[int, int] | None
) -> bool:
    """Whether the kernel computes this dense attention, and is faster than the general one.

    Args:
        q: ``(B, H, N, D)`` of any dtype, before or after quantization, as are the others.
        k: ``(B, Hkv, Nk, D)``.
        v: ``(B, Hkv, Nk, Dv)``, as it is multiplied.
        variant: its format must be INT8, with P and V in 16 bit, FP32 sums, and whole blocks of keys in a group.
        dtype: of the result.
        capability: CUDA's, None for a CPU.
    """
    if capability != (9, 0) or not HAS_GLUON or v.dtype != dtype:
        return False
    q_groups, k_groups = (token_groups(variant.granularity, role) for role in ("query", "key"))
    half = variant.accumulator == "fp16" and v.dtype == torch.float16
    if variant.qk_bits != 8 or variant.pv != "fp16" or half or variant.smooth_q or v.dtype.itemsize != 2:
        return False
    if q_groups.groups > 1 or k_groups.groups > 1 or k_groups.span % KEY_BLOCK:
        return False
    (batch, heads, queries, channels), keys, values = q.shape, k.shape[2], v.shape[3]
    large = min(queries, keys) >= LEAST_TOKENS and cdiv(queries, BLOCK_M) * heads * batch >= chip_of(v.device)[1]
    sizes = fits_hopper(channels) and values <= 128 and values % 8 == 0
    return large and sizes and all(_addressable(x) for x in (q, k, v) if x is v or x.dtype == torch.int8)


def _addressable(x: Tensor) -> bool:
    """Whether TMA can address the heads: 16-byte strides and a 16-byte start."""
    strides = all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in x.stride()[:3])
    return strides and x.stride(3) == 1 and x.data_ptr() % 16 == 0


def _describe(x: Tensor, rows: int, channels: int) -> Any:
    """Gluon's descriptor of heads ``(B, H, N, channels)``, for blocks of ``rows`` tokens of a head."""
    block = [1, 1, rows, channels]
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout(rows, channels, x.dtype))


@functools.cache
def layout(rows: int, channels: int, dtype: torch.dtype) -> Any:
    """Layout of such a block in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, channels], getattr(gl, str(dtype).removeprefix("torch.")))


def attention_hopper(
    qk: QuantizedQK, v: Tensor, variant: AttentionVariant, logit_scale: float, causal: bool, dtype: torch.dtype
) -> Tensor:
    """Launch the kernel for operands that :func:`fits` accepts; ``out (B, H, N, Dv)``, in memory (B, N, H, Dv)."""
    assert qk.q_scale is not None
    (batch, heads, tokens, channels), values = qk.q.shape, v.shape[3]
    padded = 64 if max(channels, values) <= 64 else 128
    out = query_memory_order(batch, heads, tokens, values, qk.q, dtype)
    items = cdiv(tokens, BLOCK_M) * heads * batch
    at_once = next(count for count in (32, 16, 8, 4, 2, 1) if heads * batch % count == 0) if causal else 1
    launch(kernel, (min(items, chip_of(v.device)[1]),))(
        _describe(qk.q, ROWS, padded),
        _describe(qk.k, BLOCK_N, padded),
        _describe(v, BLOCK_N, padded),
        _describe(out, ROWS, padded),
        qk.q_scale,
        qk.k_scale,
        qk.q_scale.shape[2],
        qk.k_scale.shape[2],
        logit_scale,
        heads,
        heads // qk.k.shape[1],
        tokens,
        qk.k.shape[2],
        items,
        at_once,
        CAUSAL=causal,
        GROUPS=Groups(
            padded,
            padded,
            token_groups(variant.granularity, "query").span,
            token_groups(variant.granularity, "key").span,
        ),
        num_warps=4,
    )
    return out
