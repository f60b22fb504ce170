"""What specialized_kernel.py is compiled for, its order of tiles, and its loading warp.

Items are tiles of queries; all warps visit them, and the blocks of keys of each, in the order of these functions.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from qframework.kernels.attention import mask_blocks
from qframework.kernels.attention.hopper.packed_items import EDGE, RECORD
from qframework.kernels.attention.hopper.softmax import ROWS
from qframework.kernels.runtime.gluon import HAS_GLUON

BLOCK_M = 2 * ROWS
assert BLOCK_M == mask_blocks.BLOCK

BiasKind = Literal["none", "tile", "row", "factors"]
"""What is added to logits: nothing, a bias of each query, one of all queries, or relative positions in factors."""


class Form(NamedTuple):
    """Compile-time sizes: slices of channels, each a power of two or 0, and tokens that share a scale."""

    block_d: int
    rest_d: int  # the second slice of channels of Q and K
    block_dv: int
    rest_dv: int
    block_n: int  # keys of a block, 64 or 128
    stages: int  # blocks of keys and values in shared memory
    shares_out: bool  # the result leaves through Q's shared memory
    q_span: int  # 0: Q and K are in 16 bit, without scales
    k_span: int
    integer: bool  # integer exponential
    masked: bool  # a bool mask's blocks are given
    bias: BiasKind = "none"  # others with Q and K in 16 bit only
    columns: int = 0  # of the image that relative positions describe, a power of two that divides block_n,
    padded: bool = False  # of which the last do not exist: their keys are zeros and their widths -inf
    of_threads: bool = False  # 8 queries' scales in q_span and 4 keys' in k_span, as variants.py has them per thread
    fp8: bool = False  # P and V in E4M3, V transposed with its keys PAIRED
    p_shift: float = 0.0  # log2 of the quantized 1 in P
    packed: bool = False  # sequences follow each other in memory, and items are those of packed_items.py
    lse: bool = False  # the log-sum-exp of logits is stored, too; without bias and mask, and with exact exponentials
    capped: bool = False  # logits have a soft cap, with Q and K in 16 bit only


if HAS_GLUON:
    from qframework.kernels.attention.hopper.mask import entry_of
    from qframework.kernels.runtime.gluon import gl, gluon, mbarrier, next_stage, tma_load

    _ROWS, _BLOCK_M = gl.constexpr(ROWS), gl.constexpr(BLOCK_M)
    _RECORD, _EDGE = gl.constexpr(RECORD), gl.constexpr(EDGE)

    @gluon.jit
    def buffers(COUNT: gl.constexpr, desc):
        """Shared memory for so many blocks of ``desc``."""
        shape: gl.constexpr = [COUNT] + desc.block_type.shape  # noqa: RUF005 - Gluon knows no starred expression
        return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)

    @gluon.jit
    def _place(work, tiles, H, HEADS_AT_ONCE, BATCHES_AT_ONCE):
        """(tile of queries, head, batch) of item ``work``: all tiles of some heads, which share the L2 cache.

        Under causal attention the last tiles take longest: they come first, and last in every second group of heads, so
        that each program's items take about as long. With a bias that broadcasts over batches, a group is of several
        batches of a head.
        """
        items = tiles * HEADS_AT_ONCE
        within = work % items
        group = work // items
        rank = within // HEADS_AT_ONCE
        tile = gl.where(group % 2 == 0, tiles - 1 - rank, rank)
        head = group * HEADS_AT_ONCE + within % HEADS_AT_ONCE
        batch = head % BATCHES_AT_ONCE + head // (BATCHES_AT_ONCE * H) * BATCHES_AT_ONCE
        return tile, head // BATCHES_AT_ONCE % H, batch

    @gluon.jit
    def item_of(work, plan_ptr, sizes, FORM: gl.constexpr):
        """(tile, head, batch, first query in memory, queries, first key in memory, keys) of item ``work``.

        Of a dense batch, whose memory has a dimension for it, all sequences start at 0.
        """
        H, _, N, NK, _, HEADS_AT_ONCE, BATCHES_AT_ONCE = sizes
        PACKED: gl.constexpr = FORM.packed
        if PACKED:
            item = plan_ptr + (work + 1) * _RECORD
            tile, h, b = gl.load(item), gl.load(item + 1), gl.load(item + 2)
            q_start, queries = gl.load(item + 3), gl.load(item + 4)
            k_start, keys = gl.load(item + 5), gl.load(item + 6)
        else:
            tile, h, b = _place(work, gl.cdiv(N, _BLOCK_M), H, HEADS_AT_ONCE, BATCHES_AT_ONCE)
            q_start = 0
            queries = N
            k_start = 0
            keys = NK
        return tile, h, b, q_start, queries, k_start, keys

    @gluon.jit
    def number_of_items(plan_ptr, ITEMS, FORM: gl.constexpr):
        PACKED: gl.constexpr = FORM.packed
        return gl.load(plan_ptr) if PACKED else ITEMS

    @gluon.jit
    def place_of(b, h, start, tokens, token, channel, FORM: gl.constexpr):
        """Where TMA finds a block that starts at ``token`` of a sequence; what is beyond its ``tokens`` is outside.

        Packed: see :func:`~qframework.kernels.attention.hopper.packed_items.ragged`.
        """
        PACKED: gl.constexpr = FORM.packed
        if PACKED:
            place = (gl.to_tensor(_EDGE), start + tokens, h, _EDGE - tokens + token, channel)
        else:
            place = (b, h, token, channel)  # type: ignore[assignment]
        return place

    @gluon.jit
    def place_of_keys(b, h, start, keys, key, channel, FORM: gl.constexpr):
        """As :func:`place_of` for keys and values, of which a padded image has a dimension for rows."""
        PADDED: gl.constexpr = FORM.padded
        here = (b, h, key // (FORM.columns if PADDED else 1), 0, channel)
        return here if PADDED else place_of(b, h, start, keys, key, channel, FORM)

    @gluon.jit
    def blocks_of(tile, h, b, NK, mask, CAUSAL: gl.constexpr, FORM: gl.constexpr):
        """(blocks of keys that a tile of queries attends to, how many of them in part, its entry in ``mask``)."""
        MASKED_FORM: gl.constexpr = FORM.masked
        BLOCK_N: gl.constexpr = FORM.block_n
        IN_ONE: gl.constexpr = _BLOCK_M // BLOCK_N  # blocks in a block of the mask
        if MASKED_FORM:
            entry = entry_of(tile, h, b, mask)
            partial = gl.load(mask[2] + entry * 3) * IN_ONE
            blocks = gl.load(mask[2] + entry * 3 + 1) * IN_ONE
        else:
            end = NK
            if CAUSAL:
                end = gl.minimum(NK, (tile + 1) * _BLOCK_M)
            blocks = gl.maximum(gl.cdiv(end, BLOCK_N), 1)  # packed sequences may have no key
            partial = gl.minimum(IN_ONE if CAUSAL else 1, blocks)
            entry = tile
        return blocks, partial, entry

    @gluon.jit
    def block_at(i, blocks, entry, NK, mask, FORM: gl.constexpr):
        """The block of keys that a tile visits as its ``i``-th."""
        MASKED_FORM: gl.constexpr = FORM.masked
        BLOCK_N: gl.constexpr = FORM.block_n
        IN_ONE: gl.constexpr = _BLOCK_M // BLOCK_N
        if MASKED_FORM:
            i = gl.minimum(i, blocks - 1)
            return gl.load(mask[1] + entry * gl.cdiv(NK, _BLOCK_M) + i // IN_ONE) * IN_ONE + i % IN_ONE
        return blocks - 1 - i

    @gluon.jit
    def _load_queries(item, descs, shared, barriers, q_phase, mask, FORM: gl.constexpr):
        """Both warpgroups' queries, and their factors of relative positions within a row of the image."""
        tile, h, b, q_start, queries, _, _ = item
        q_desc, q_rest_desc, bias_desc = descs[0], descs[1], descs[8]
        q_tiles, q_rest, bias_tiles = shared[0], shared[1], shared[8]
        q_ready, q_free = barriers[0], barriers[1]
        D: gl.constexpr = FORM.block_d
        REST: gl.constexpr = FORM.rest_d
        FACTORS: gl.constexpr = FORM.bias == "factors"
        REST_BYTES: gl.constexpr = q_rest_desc.block_type.nbytes if REST > 0 else 0
        BIAS_BYTES: gl.constexpr = bias_desc.block_type.nbytes if FACTORS else 0
        for who in gl.static_range(2):
            first = tile * _BLOCK_M + who * _ROWS
            ready = q_ready.index(who)
            mbarrier.wait(q_free.index(who), q_phase)
            mbarrier.expect(ready, q_desc.block_type.nbytes + REST_BYTES + BIAS_BYTES)
            tma_load(q_desc, place_of(b, h, q_start, queries, first, 0, FORM), ready, q_tiles.index(who))
            if REST > 0:
                tma_load(q_rest_desc, place_of(b, h, q_start, queries, first, D, FORM), ready, q_rest.index(who))
            if FACTORS:
                tma_load(bias_desc, [b % mask[3], h % mask[4], first, 0], ready, bias_tiles.index(who))

    @gluon.jit
    def load_all(descs, shared, barriers, sizes, plan_ptr, mask, CAUSAL: gl.constexpr, FORM: gl.constexpr):
        """The loading warp."""
        _, _, k_desc, k_rest_desc, v_desc, v_rest_desc, _, _, bias_desc = descs
        k_stages, k_rest, v_stages, v_rest = shared[2], shared[3], shared[4], shared[5]
        bias_stages = shared[8]
        _, _, k_ready, k_free, v_ready, v_free = barriers
        GROUP, ITEMS = sizes[1], sizes[4]
        D: gl.constexpr = FORM.block_d
        DV: gl.constexpr = FORM.block_dv
        REST: gl.constexpr = FORM.rest_d
        REST_DV: gl.constexpr = FORM.rest_dv
        BLOCK_N: gl.constexpr = FORM.block_n
        STAGES: gl.constexpr = FORM.stages
        SHARES_OUT: gl.constexpr = FORM.shares_out
        FP8: gl.constexpr = FORM.fp8
        TILE: gl.constexpr = FORM.bias == "tile"
        K_REST_BYTES: gl.constexpr = k_rest_desc.block_type.nbytes if REST > 0 else 0
        V_REST_BYTES: gl.constexpr = v_rest_desc.block_type.nbytes if REST_DV > 0 else 0
        BIAS_BYTES: gl.constexpr = 2 * bias_desc.block_type.nbytes if TILE else 0
        slot = 0
        phase = 1  # waiting for phase 1 of a fresh barrier returns at once: everything is free
        q_phase = 1
        for work in range(gl.program_id(0), number_of_items(plan_ptr, ITEMS, FORM), gl.num_programs(0)):
            item = item_of(work, plan_ptr, sizes, FORM)
            tile, h, b, _q_start, _queries, k_start, NK = item
            if not SHARES_OUT:
                _load_queries(item, descs, shared, barriers, q_phase, mask, FORM)
            blocks, _partial, entry = blocks_of(tile, h, b, NK, mask, CAUSAL, FORM)
            block = block_at(0, blocks, entry, NK, mask, FORM)
            for i in range(blocks):
                start = block * BLOCK_N
                kv = h // GROUP
                block = block_at(i + 1, blocks, entry, NK, mask, FORM)  # early: it may be a load
                ready = k_ready.index(slot)
                mbarrier.wait(k_free.index(slot), phase)
                mbarrier.expect(ready, k_desc.block_type.nbytes + K_REST_BYTES + BIAS_BYTES)
                tma_load(k_desc, place_of_keys(b, kv, k_start, NK, start, 0, FORM), ready, k_stages.index(slot))
                if REST > 0:
                    tma_load(k_rest_desc, place_of_keys(b, kv, k_start, NK, start, D, FORM), ready, k_rest.index(slot))
                if TILE:
                    for who in gl.static_range(2):
                        place = [b % mask[3], h % mask[4], tile * _BLOCK_M + who * _ROWS, start]
                        tma_load(bias_desc, place, ready, bias_stages.index(slot * 2 + who))
                ready = v_ready.index(slot)
                mbarrier.wait(v_free.index(slot), phase)
                mbarrier.expect(ready, v_desc.block_type.nbytes + V_REST_BYTES)
                if FP8:
                    tma_load(v_desc, [b, kv, 0, start], ready, v_stages.index(slot))
                else:
                    tma_load(v_desc, place_of_keys(b, kv, k_start, NK, start, 0, FORM), ready, v_stages.index(slot))
                if REST_DV > 0:
                    tma_load(v_rest_desc, place_of_keys(b, kv, k_start, NK, start, DV, FORM), ready, v_rest.index(slot))
                if SHARES_OUT and i == gl.minimum(STAGES, blocks) - 1:  # the results before leave meanwhile
                    _load_queries(item, descs, shared, barriers, q_phase, mask, FORM)
                slot, phase = next_stage(slot, phase, STAGES)
            q_phase = q_phase ^ 1
