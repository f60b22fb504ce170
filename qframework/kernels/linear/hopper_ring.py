"""What Hopper's kernels of linears share: the ring of stages, the warp that fills it, and the products of its tiles.

The loading warp fills the stages with tiles of a and b by TMA. ``ready`` barriers pass a stage to the multiplying
warpgroups, ``free`` barriers return it. With ``pingpong``, ``turn`` barriers let the warpgroups multiply in turn.

A warpgroup has two accumulators of 64 rows, in tiles of 192 rows one. They lie below each other; hopper_wide.py has
those that lie side by side.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from qframework.kernels.linear.epilogue import fold_columns, load_columns
from qframework.kernels.linear.triton import first_inside, place
from qframework.kernels.runtime.gluon import HAS_GLUON
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import tl, triton

LEFT = tl.constexpr(128)  # columns of the left accumulator in tiles of more


class LinearForm(NamedTuple):
    """What a kernel is compiled for beside its epilogue: sizes, and how programs and warpgroups share the work."""

    block_m: int
    block_n: int  # rows of b in a stage
    block_k: int
    columns: int  # of a tile of the result; fewer than block_n where a stage holds rows of several weights
    group_m: int  # rows of tiles before the next column of tiles
    stages: int
    pingpong: bool  # else cooperative
    single: bool  # a grid of two dimensions, one program per tile; else persistent programs


# Functions, not properties: Triton compiles again what calls a function that has changed.
@triton.constexpr_function
def parts(block_m):
    """Tensors that hold a tile's rows of a, since the sizes of each must be powers of two."""
    return 3 if block_m == 192 else 1


@triton.constexpr_function
def workers(block_m):
    """Multiplying warpgroups."""
    return {64: 1, 192: 3}.get(block_m, 2)


@triton.constexpr_function
def readers(form):
    """Warpgroups that read a stage."""
    return 1 if form.pingpong else workers(form.block_m)


@triton.constexpr_function
def right_columns(columns):
    """Columns of the right accumulator in tiles of hopper_wide.py, whose left one has ``LEFT``; else 0."""
    return max(columns - LEFT.value, 0)


@triton.constexpr_function
def accumulator(columns):
    """Layout of 64 rows of INT32 sums in the registers of a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32])


@triton.constexpr_function
def _in_turn(form):
    """Whether warpgroups wait for each other: those of a ping-pong, except for one tile, which the first one has."""
    return form.pingpong and not form.single


class Ring(NamedTuple):
    """The stages in shared memory, and their barriers."""

    a_stages: Any
    b_stages: Any
    b_right: Any  # the columns of the right accumulators; unused without these
    ready: Any
    free: Any
    turn: Any


if HAS_GLUON:
    from qframework.kernels.runtime.gluon import (
        fence_async_shared,
        gl,
        gluon,
        mbarrier,
        next_stage,
        parts_of_rows,
        tma_load,
        warpgroup_mma,
        warpgroup_mma_wait,
    )

    @gluon.jit
    def load_columns_once(pointers, start, N, COLUMNS: gl.constexpr, FORM: gl.constexpr):
        """``load_columns`` of a tile, one column for each thread of a warpgroup: one register for each vector."""
        a_scale_ptr, b_scale_ptr, bias_ptr, out_scale_ptr, zero_point_ptr = pointers
        n = gl.arange(0, COLUMNS, layout=gl.BlockedLayout([1], [32], [4], [0]))
        return load_columns(a_scale_ptr, b_scale_ptr, bias_ptr, out_scale_ptr, zero_point_ptr, start, n, N, FORM)

    @gluon.jit
    def spread_columns(loaded, COLUMNS: gl.constexpr, FORM: gl.constexpr):
        """``fold_columns`` of what :func:`load_columns_once` gave; each thread gets the columns of its results."""
        scale, bias, inverse, zero_point = fold_columns(loaded, FORM)
        layout: gl.constexpr = gl.SliceLayout(0, accumulator(COLUMNS))
        if FORM.b_per_channel:
            scale = gl.convert_layout(scale, layout)
        if FORM.has_bias:
            bias = gl.convert_layout(bias, layout)
        if FORM.out_scale == "channel":
            inverse = gl.convert_layout(inverse, layout)
        return scale, bias, inverse, zero_point

    @gluon.jit
    def tiles_of_program(M, N, FORM: gl.constexpr):
        """First, end and step of the range of this program's tiles."""
        SINGLE: gl.constexpr = FORM.single
        first = 0
        end = 1
        by = 1
        if not SINGLE:
            first = gl.program_id(0)
            end = gl.cdiv(M, FORM.block_m) * gl.cdiv(N, FORM.columns)
            by = gl.num_programs(0)
        return first, end, by

    @gluon.jit
    def place_of(tile, M, N, FORM: gl.constexpr):
        """First row and column of a tile of the result."""
        SINGLE: gl.constexpr = FORM.single
        start_m = gl.program_id(0) * FORM.block_m
        start_n = gl.program_id(1) * FORM.columns
        if not SINGLE:
            start_m, start_n = place(tile, M, N, FORM.block_m, FORM.columns, FORM.group_m)
        return first_inside(start_m, M, FORM.block_m), first_inside(start_n, N, FORM.columns)

    @gluon.jit
    def begin(a_desc, b_descs, M, N, K, FORM: gl.constexpr, OVERLAP: gl.constexpr):
        """The ring, with the loads of the first tile's first stages under way.

        They start before the rest of the setup, to hide their latency. ``fence_async_shared`` must follow before the
        warps part.
        """
        PARTS: gl.constexpr = parts(FORM.block_m)
        STAGES: gl.constexpr = FORM.stages
        BLOCK_K: gl.constexpr = FORM.block_k
        a_stages = gl.allocate_shared_memory(gl.int8, [STAGES * PARTS, FORM.block_m // PARTS, BLOCK_K], a_desc.layout)
        RIGHT: gl.constexpr = right_columns(FORM.columns)
        b_stages = gl.allocate_shared_memory(gl.int8, [STAGES, FORM.block_n - RIGHT, BLOCK_K], b_descs[0].layout)
        b_right = b_stages
        if RIGHT > 0:
            b_right = gl.allocate_shared_memory(gl.int8, [STAGES, RIGHT, BLOCK_K], b_descs[0].layout)
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        ring = Ring(a_stages, b_stages, b_right, ready, free, turn)
        gl.static_assert(STAGES > 2)
        mbarrier.init(ready.index(0), count=1)
        mbarrier.init(ready.index(1), count=1)
        fence_async_shared()
        wait_for_previous_kernel(OVERLAP)
        first, _, _ = tiles_of_program(M, N, FORM)
        start_m, start_n = place_of(first, M, N, FORM)
        _load(a_desc, b_descs, ring, start_m, start_n, 0, 0, FORM)
        if K > BLOCK_K:
            _load(a_desc, b_descs, ring, start_m, start_n, BLOCK_K, 1, FORM)
        for i in gl.static_range(STAGES):
            if i > 1:
                mbarrier.init(ready.index(i), count=1)
            mbarrier.init(free.index(i), count=readers(FORM))
        if _in_turn(FORM):
            for i in gl.static_range(2):
                mbarrier.init(turn.index(i), count=1)
        return ring

    @gluon.jit
    def _load(a_desc, b_descs, ring, start_m, start_n, start, slot, FORM: gl.constexpr):
        """Start loading the tiles of a and b at column ``start`` into stage ``slot``."""
        PARTS: gl.constexpr = parts(FORM.block_m)
        PART: gl.constexpr = FORM.block_m // PARTS
        RIGHT: gl.constexpr = right_columns(FORM.columns)
        ready = ring.ready.index(slot)
        mbarrier.expect(ready, (FORM.block_m + FORM.block_n) * FORM.block_k)
        for part in gl.static_range(PARTS):
            tma_load(a_desc, [start_m + part * PART, start], ready, ring.a_stages.index(slot * PARTS + part))
        if RIGHT > 0:  # all loads of b have as many rows as the right accumulator has columns
            PIECES: gl.constexpr = LEFT // RIGHT
            b_left = parts_of_rows(ring.b_stages, PIECES)
            for part in gl.static_range(PIECES):
                tma_load(b_descs[0], [start_n + part * RIGHT, start], ready, b_left.index(slot * PIECES + part))
            tma_load(b_descs[0], [start_n + LEFT, start], ready, ring.b_right.index(slot))
        else:
            WEIGHTS: gl.constexpr = FORM.block_n // FORM.columns
            b_stages = parts_of_rows(ring.b_stages, WEIGHTS)
            for part in gl.static_range(WEIGHTS):
                tma_load(b_descs[part], [start_n, start], ready, b_stages.index(slot * WEIGHTS + part))

    @gluon.jit
    def produce(a_desc, b_descs, ring, M, N, K, FORM: gl.constexpr):
        """The loading warp, behind :func:`begin`."""
        BLOCK_K: gl.constexpr = FORM.block_k
        first, end, by = tiles_of_program(M, N, FORM)
        asked_for = gl.where(K > BLOCK_K, 2, 1)
        slot = asked_for
        phase = 1  # waiting for phase 1 of a fresh barrier returns at once: all stages are free
        for tile in range(first, end, by):
            start_m, start_n = place_of(tile, M, N, FORM)
            for start in range(gl.where(tile == first, asked_for * BLOCK_K, 0), K, BLOCK_K):
                mbarrier.wait(ring.free.index(slot), phase)
                _load(a_desc, b_descs, ring, start_m, start_n, start, slot, FORM)
                slot, phase = next_stage(slot, phase, FORM.stages)

    @gluon.jit
    def _add_product(WHO: gl.constexpr, ring, slot, upper, lower, FORM: gl.constexpr):
        """Start adding the products of a step to a warpgroup's accumulators; those of the step before are done."""
        b = ring.b_stages.index(slot).permute((1, 0))
        if workers(FORM.block_m) == 3:
            upper = warpgroup_mma(ring.a_stages.index(slot * 3 + WHO), b, upper, is_async=True)
            upper = warpgroup_mma_wait(1, deps=(upper,))
        else:
            FIRST_ROW: gl.constexpr = 0 if FORM.pingpong else WHO * 128
            a = ring.a_stages.index(slot)
            upper = warpgroup_mma(a.slice(FIRST_ROW, 64), b, upper, is_async=True)
            lower = warpgroup_mma(a.slice(FIRST_ROW + 64, 64), b, lower, is_async=True)
            upper, lower = warpgroup_mma_wait(2, deps=(upper, lower))
        return upper, lower

    @gluon.jit
    def start_product(
        WHO: gl.constexpr,
        ring,
        own_turn,  # the phase of ``turn`` to wait for
        steps,
        total,  # steps of all tiles before this one
        FORM: gl.constexpr,
    ):
        """Start the product of a warpgroup's rows of a tile: two accumulators of 64 rows, or one and 0.

        The other warpgroup has its turn then, while the last step, whose slot is the third result, is under way.
        """
        BLOCK_N: gl.constexpr = FORM.block_n
        STAGES: gl.constexpr = FORM.stages
        IN_TURN: gl.constexpr = _in_turn(FORM)
        layout: gl.constexpr = accumulator(BLOCK_N)
        if IN_TURN:
            # Barriers tell phases apart by parity only, so no warpgroup may run a full round ahead.
            mbarrier.wait(ring.turn.index(WHO), own_turn)
        slot = total % STAGES
        phase = (total // STAGES) & 1
        mbarrier.wait(ring.ready.index(slot), phase)
        upper = gl.zeros((64, BLOCK_N), gl.int32, layout)  # constants, which take no registers
        upper, lower = _add_product(WHO, ring, slot, upper, upper, FORM)
        for _ in range(1, steps):
            before = slot
            slot, phase = next_stage(slot, phase, STAGES)
            mbarrier.wait(ring.ready.index(slot), phase)
            upper, lower = _add_product(WHO, ring, slot, upper, lower, FORM)
            mbarrier.arrive(ring.free.index(before), count=1)
        if IN_TURN:
            mbarrier.arrive(ring.turn.index(1 - WHO), count=1)
        return upper, lower, slot

    @gluon.jit
    def finish_product(upper, lower, slot, ring, FORM: gl.constexpr):
        """The accumulators of :func:`start_product`, done."""
        if workers(FORM.block_m) == 3:
            upper = warpgroup_mma_wait(0, deps=(upper,))
        else:
            upper, lower = warpgroup_mma_wait(0, deps=(upper, lower))
        mbarrier.arrive(ring.free.index(slot), count=1)
        return upper, lower
