"""int8_linear's kernel for Hopper, in Gluon: one warp loads, two or three warpgroups multiply and run the epilogue.

Gluon is Triton's dialect with explicit layouts, shared memory and barriers. The loading warp fills a ring buffer with
tiles of a and b by TMA; ``ready`` barriers pass a stage to the multiplying warpgroups, ``free`` barriers return it. The
warpgroups share the work in one of two ways, as in CUTLASS's "pingpong" and "cooperative" kernels:

- pingpong: they alternate between whole tiles, so that one multiplies while the other runs its epilogue. For small K,
  where the epilogue takes as long as the product.
- cooperative: each computes half of the rows of every tile, which can thus be twice as large and loads fewer bytes per
  product. For large K. Tiles of 192 rows have three warpgroups with 64 rows each.

Used where TMA can address operands and result; triton.py handles all other problems.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from qframework.kernels.linear.epilogue import finish, load_columns, load_rows
from qframework.kernels.linear.triton import place
from qframework.kernels.runtime.gluon import HAS_GLUON
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import triton


@triton.constexpr_function
def parts(block_m):
    """Tensors that hold a tile's rows of a, since the sizes of each must be powers of two."""
    return 3 if block_m == 192 else 1


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

    @gluon.jit
    def tiles_of_program(M, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SINGLE: gl.constexpr):
        """First, end and step of the range of this program's tiles."""
        first = 0
        end = 1
        by = 1
        if not SINGLE:
            first = gl.program_id(0)
            end = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
            by = gl.num_programs(0)
        return first, end, by

    @gluon.jit
    def place_of(tile, M, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr, SINGLE: gl.constexpr):
        start_m = gl.program_id(0) * BLOCK_M
        start_n = gl.program_id(1) * BLOCK_N
        if not SINGLE:
            start_m, start_n = place(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        return start_m, start_n

    @gluon.jit
    def load(
        a_desc, b_descs, a_stages, b_stages, ready, start_m, start_n, start, slot,
        BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    ):  # fmt: skip
        """Start loading the tiles of a and b at column ``start`` into stage ``slot``.

        Several weights have equal parts of the rows of b's tile, one below the other.
        """
        mbarrier.expect(ready.index(slot), (BLOCK_M + BLOCK_N) * BLOCK_K)
        PARTS: gl.constexpr = parts(BLOCK_M)
        for part in gl.static_range(PARTS):
            stage = a_stages.index(slot * PARTS + part)
            tma_load(a_desc, [start_m + part * (BLOCK_M // PARTS), start], ready.index(slot), stage)
        WEIGHTS: gl.constexpr = len(b_descs)
        for part in gl.static_range(WEIGHTS):
            tma_load(b_descs[part], [start_n, start], ready.index(slot), b_stages.index(slot * WEIGHTS + part))

    @gluon.jit
    def produce(
        a_desc,
        b_descs,
        a_stages,
        b_stages,
        ready,
        free,
        M,
        N,
        K,
        BLOCK_M: gl.constexpr,
        BLOCK_N: gl.constexpr,
        COLUMNS: gl.constexpr,  # of a tile of the result
        BLOCK_K: gl.constexpr,
        GROUP_M: gl.constexpr,
        STAGES: gl.constexpr,
        SINGLE: gl.constexpr,
    ):
        """The loading warp. The kernel has started the loads of the first tile's first stages."""
        first, end, by = tiles_of_program(M, N, BLOCK_M, COLUMNS, SINGLE)
        asked_for = gl.where(K > BLOCK_K, 2, 1)
        slot = asked_for
        phase = 1  # waiting for phase 1 of a fresh barrier returns at once: all stages are free
        for tile in range(first, end, by):
            start_m, start_n = place_of(tile, M, N, BLOCK_M, COLUMNS, GROUP_M, SINGLE)
            for start in range(gl.where(tile == first, asked_for * BLOCK_K, 0), K, BLOCK_K):
                mbarrier.wait(free.index(slot), phase)
                load(
                    a_desc, b_descs, a_stages, b_stages, ready, start_m, start_n, start, slot, BLOCK_M, BLOCK_N, BLOCK_K
                )
                slot, phase = next_stage(slot, phase, STAGES)

    @gluon.jit
    def multiply(
        WHO: gl.constexpr,
        a_stages,
        b_stages,
        ready,
        free,
        turn,
        own_turn,  # the phase of ``turn`` to wait for
        steps,
        total,  # steps of all tiles before this one
        BLOCK_N: gl.constexpr,
        STAGES: gl.constexpr,
        PINGPONG: gl.constexpr,
        SINGLE: gl.constexpr,
        THIRDS: gl.constexpr,
    ):
        """The product of a warpgroup's rows of a tile: two accumulators of 64 rows, of which THIRDS leaves one at 0."""
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
        FIRST_ROW: gl.constexpr = 0 if PINGPONG else WHO * 128
        if PINGPONG and not SINGLE:
            # Barriers tell phases apart by parity only, so no warpgroup may run a full round ahead.
            mbarrier.wait(turn.index(WHO), own_turn)
        slot = total % STAGES
        phase = (total // STAGES) & 1
        upper = gl.zeros((64, BLOCK_N), gl.int32, layout)
        lower = gl.zeros((64, BLOCK_N), gl.int32, layout)
        for step in range(steps):
            mbarrier.wait(ready.index(slot), phase)
            b = b_stages.index(slot).permute((1, 0))
            # the products of the previous step are done behind each wait
            if THIRDS:
                upper = warpgroup_mma(a_stages.index(slot * 3 + WHO), b, upper, is_async=True)
                upper = warpgroup_mma_wait(1, deps=(upper,))
            else:
                a = a_stages.index(slot)
                upper = warpgroup_mma(a.slice(FIRST_ROW, 64), b, upper, is_async=True)
                lower = warpgroup_mma(a.slice(FIRST_ROW + 64, 64), b, lower, is_async=True)
                upper, lower = warpgroup_mma_wait(2, deps=(upper, lower))
            if step > 0:
                mbarrier.arrive(free.index(gl.where(slot == 0, STAGES - 1, slot - 1)), count=1)
            slot, phase = next_stage(slot, phase, STAGES)
        if PINGPONG and not SINGLE:
            mbarrier.arrive(turn.index(1 - WHO), count=1)
        if THIRDS:
            upper = warpgroup_mma_wait(0, deps=(upper,))
        else:
            upper, lower = warpgroup_mma_wait(0, deps=(upper, lower))
        mbarrier.arrive(free.index(gl.where(slot == 0, STAGES - 1, slot - 1)), count=1)
        return upper, lower

    @gluon.jit
    def _consume(
        WHO: gl.constexpr,
        scales,  # pointers for load_columns and load_rows
        shared,
        sizes,
        A_SCALE: gl.constexpr,
        B_PER_CHANNEL: gl.constexpr,
        ACTIVATION: gl.constexpr,
        HAS_BIAS: gl.constexpr,
        HAS_RESIDUAL: gl.constexpr,
        OUT_SCALE: gl.constexpr,
        ZERO_POINT: gl.constexpr,
        BLOCK_M: gl.constexpr,
        BLOCK_N: gl.constexpr,
        BLOCK_K: gl.constexpr,
        GROUP_M: gl.constexpr,
        STAGES: gl.constexpr,
        PINGPONG: gl.constexpr,
        SINGLE: gl.constexpr,
    ):
        """Multiplying warpgroup 0, 1 or 2, with two accumulators of 64 rows, or one where there are three."""
        a_scale_ptr, b_scale_ptr, bias_ptr, out_scale_ptr, zero_point_ptr = scales
        residual_desc, out_desc, a_stages, b_stages, out_stages, ready, free, turn, landed = shared
        M, N, K, PA, PO = sizes
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
        of_rows: gl.constexpr = gl.SliceLayout(1, layout)
        of_columns: gl.constexpr = gl.SliceLayout(0, layout)
        THIRDS: gl.constexpr = parts(BLOCK_M) == 3
        HALVES: gl.constexpr = 1 if THIRDS else 2
        FIRST_ROW: gl.constexpr = 0 if PINGPONG else WHO * 64 * HALVES
        TURNS: gl.constexpr = 2 if PINGPONG else 1  # it takes every TURNS-th tile of the program
        BUFFERS: gl.constexpr = 1 if THIRDS else out_stages.shape[0] // 2
        # With many tiles, the registers of early loads cost more than late loads, unless those add up to three vectors.
        EARLY: gl.constexpr = SINGLE or OUT_SCALE == "channel"
        out_dtype: gl.constexpr = out_desc.dtype
        first, end, by = tiles_of_program(M, N, BLOCK_M, BLOCK_N, SINGLE)
        steps = gl.cdiv(K, BLOCK_K)
        arrived = 0  # the phase of ``landed``
        own_turn = 1 - WHO  # the phase to wait for; warpgroup 0 begins at once
        skipped = WHO if PINGPONG else 0
        total = skipped * steps  # steps of all tiles before the current one
        for tile in range(first + skipped * by, end, TURNS * by):
            start_m, start_n = place_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M, SINGLE)
            start_m += FIRST_ROW
            n = start_n + gl.arange(0, BLOCK_N, layout=of_columns)
            m_upper = start_m + gl.arange(0, 64, layout=of_rows)
            m_lower = m_upper + 64
            if EARLY:
                columns = load_columns(
                    a_scale_ptr, b_scale_ptr, bias_ptr, out_scale_ptr, zero_point_ptr, n, N,
                    A_SCALE, B_PER_CHANNEL, ACTIVATION, HAS_BIAS, HAS_RESIDUAL, OUT_SCALE, ZERO_POINT,
                )  # fmt: skip
                rows_upper = load_rows(a_scale_ptr, out_scale_ptr, m_upper, M, PA, PO, A_SCALE, OUT_SCALE)
                rows_lower = load_rows(a_scale_ptr, out_scale_ptr, m_lower, M, PA, PO, A_SCALE, OUT_SCALE)
            if HAS_RESIDUAL:  # into the buffers that later hold the result
                tma.store_wait(0)
                mbarrier.expect(landed.index(WHO), HALVES * 64 * BLOCK_N * (out_dtype.primitive_bitwidth // 8))
                for half in gl.static_range(HALVES):
                    stage = out_stages.index(WHO * BUFFERS + half)
                    tma_load(residual_desc, [start_m + half * 64, start_n], landed.index(WHO), stage)
            upper, lower = multiply(
                WHO,
                a_stages,
                b_stages,
                ready,
                free,
                turn,
                own_turn,
                steps,
                total,
                BLOCK_N,
                STAGES,
                PINGPONG,
                SINGLE,
                THIRDS,
            )
            own_turn ^= 1
            total += TURNS * steps

            if not EARLY:
                columns = load_columns(
                    a_scale_ptr, b_scale_ptr, bias_ptr, out_scale_ptr, zero_point_ptr, n, N,
                    A_SCALE, B_PER_CHANNEL, ACTIVATION, HAS_BIAS, HAS_RESIDUAL, OUT_SCALE, ZERO_POINT,
                )  # fmt: skip
            if HAS_RESIDUAL:
                mbarrier.wait(landed.index(WHO), arrived)
                arrived ^= 1
            for half in gl.static_range(HALVES):
                stage = out_stages.index(WHO * BUFFERS + half % BUFFERS)
                acc = upper if half == 0 else lower
                if EARLY:
                    rows = rows_upper if half == 0 else rows_lower
                else:
                    m = m_upper if half == 0 else m_lower
                    rows = load_rows(a_scale_ptr, out_scale_ptr, m, M, PA, PO, A_SCALE, OUT_SCALE)
                residual = stage.load(layout) if HAS_RESIDUAL else acc
                out = finish(
                    acc, columns, rows, residual,
                    out_dtype, A_SCALE, B_PER_CHANNEL, ACTIVATION, HAS_BIAS, HAS_RESIDUAL, OUT_SCALE, ZERO_POINT,
                )  # fmt: skip
                if not HAS_RESIDUAL:
                    tma.store_wait(BUFFERS - 1)
                stage.store(out)
                fence_async_shared()
                tma_store(out_desc, [start_m + half * 64, start_n], stage)
        tma.store_wait(0)

    @gluon.jit(do_not_specialize=["M", "PA", "PO"])
    def _int8_linear_specialized_kernel(
        a_desc,  # of (M, K) int8, like b
        a_scale_ptr,  # (PA,) fp32, PA is 1, M or the number of positions
        b_desc,  # of (N, K) int8
        b_scale_ptr,  # (N,) or (1,) fp32
        bias_ptr,  # (N,) float
        residual_desc,  # of (M, N), like out
        out_scale_ptr,  # (PO,) fp32, likewise; (N,) with OUT_SCALE "channel"
        zero_point_ptr,  # (1,) int32, with ZERO_POINT
        out_desc,  # of (M, N) 16 bit or int8
        M,
        N,
        K,
        PA,
        PO,
        A_SCALE: gl.constexpr,
        B_PER_CHANNEL: gl.constexpr,
        ACTIVATION: gl.constexpr,
        HAS_BIAS: gl.constexpr,
        HAS_RESIDUAL: gl.constexpr,
        OUT_SCALE: gl.constexpr,
        ZERO_POINT: gl.constexpr,
        BLOCK_M: gl.constexpr,
        BLOCK_N: gl.constexpr,
        BLOCK_K: gl.constexpr,
        GROUP_M: gl.constexpr,
        STAGES: gl.constexpr,
        PINGPONG: gl.constexpr,  # else cooperative
        SINGLE: gl.constexpr,  # a grid of two dimensions, one program per tile; else persistent programs
        OVERLAP: gl.constexpr = False,
    ):
        """out = epilogue(a @ b.T)."""
        PARTS: gl.constexpr = parts(BLOCK_M)
        WORKERS: gl.constexpr = 3 if PARTS == 3 else 2  # multiplying warpgroups
        a_stages = gl.allocate_shared_memory(gl.int8, [STAGES * PARTS, BLOCK_M // PARTS, BLOCK_K], a_desc.layout)
        b_stages = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_N, BLOCK_K], b_desc.layout)
        BUFFERS: gl.constexpr = 3 if PARTS == 3 else 4 if PINGPONG or HAS_RESIDUAL else 2  # for results on their way
        out_stages = gl.allocate_shared_memory(out_desc.dtype, [BUFFERS, 64, BLOCK_N], out_desc.layout)
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        landed = gl.allocate_shared_memory(gl.int64, [WORKERS, 1], mbarrier.MBarrierLayout())
        gl.static_assert(STAGES > 2)
        # Start the first loads before the rest of the setup, to hide their latency.
        mbarrier.init(ready.index(0), count=1)
        mbarrier.init(ready.index(1), count=1)
        fence_async_shared()
        wait_for_previous_kernel(OVERLAP)
        first, _, _ = tiles_of_program(M, N, BLOCK_M, BLOCK_N, SINGLE)
        start_m, start_n = place_of(first, M, N, BLOCK_M, BLOCK_N, GROUP_M, SINGLE)
        load(a_desc, (b_desc,), a_stages, b_stages, ready, start_m, start_n, 0, 0, BLOCK_M, BLOCK_N, BLOCK_K)
        if K > BLOCK_K:
            load(a_desc, (b_desc,), a_stages, b_stages, ready, start_m, start_n, BLOCK_K, 1, BLOCK_M, BLOCK_N, BLOCK_K)
        for i in gl.static_range(STAGES):
            if i > 1:
                mbarrier.init(ready.index(i), count=1)
            mbarrier.init(free.index(i), count=1 if PINGPONG else WORKERS)
        if PINGPONG and not SINGLE:
            for i in gl.static_range(2):
                mbarrier.init(turn.index(i), count=1)
        if HAS_RESIDUAL:
            for i in gl.static_range(WORKERS):
                mbarrier.init(landed.index(i), count=1)
        fence_async_shared()
        scales = (a_scale_ptr, b_scale_ptr, bias_ptr, out_scale_ptr, zero_point_ptr)
        shared = (residual_desc, out_desc, a_stages, b_stages, out_stages, ready, free, turn, landed)
        sizes = (M, N, K, PA, PO)
        if WORKERS == 2:
            gl.warp_specialize(
                [
                    (_consume, (
                        gl.constexpr(0), scales, shared, sizes,
                        A_SCALE, B_PER_CHANNEL, ACTIVATION, HAS_BIAS, HAS_RESIDUAL, OUT_SCALE, ZERO_POINT,
                        BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES, PINGPONG, SINGLE,
                    )),
                    (_consume, (
                        gl.constexpr(1), scales, shared, sizes,
                        A_SCALE, B_PER_CHANNEL, ACTIVATION, HAS_BIAS, HAS_RESIDUAL, OUT_SCALE, ZERO_POINT,
                        BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES, PINGPONG, SINGLE,
                    )),
                    (produce, (
                        a_desc, (b_desc,), a_stages, b_stages, ready, free, M, N, K,
                        BLOCK_M, BLOCK_N, BLOCK_N, BLOCK_K, GROUP_M, STAGES, SINGLE,
                    )),
                ],
                [4, 1],  # warps of all but the first
                [240, 24],  # their registers; the first gets the rest
            )  # fmt: skip
        else:
            gl.warp_specialize(
                [
                    (_consume, (
                        gl.constexpr(0), scales, shared, sizes,
                        A_SCALE, B_PER_CHANNEL, ACTIVATION, HAS_BIAS, HAS_RESIDUAL, OUT_SCALE, ZERO_POINT,
                        BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES, PINGPONG, SINGLE,
                    )),
                    (_consume, (
                        gl.constexpr(1), scales, shared, sizes,
                        A_SCALE, B_PER_CHANNEL, ACTIVATION, HAS_BIAS, HAS_RESIDUAL, OUT_SCALE, ZERO_POINT,
                        BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES, PINGPONG, SINGLE,
                    )),
                    (_consume, (
                        gl.constexpr(2), scales, shared, sizes,
                        A_SCALE, B_PER_CHANNEL, ACTIVATION, HAS_BIAS, HAS_RESIDUAL, OUT_SCALE, ZERO_POINT,
                        BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES, PINGPONG, SINGLE,
                    )),
                    (produce, (
                        a_desc, (b_desc,), a_stages, b_stages, ready, free, M, N, K,
                        BLOCK_M, BLOCK_N, BLOCK_N, BLOCK_K, GROUP_M, STAGES, SINGLE,
                    )),
                ],
                [4, 4, 1],  # warps of all but the first
                [160, 160, 24],  # their registers; the first gets the rest
            )  # fmt: skip

    kernel: Any = _int8_linear_specialized_kernel


def rows_of_a(block_m: int) -> int:
    """Rows of a that one TMA load reads."""
    return block_m // 3 if block_m == 192 else block_m


ROWS = 64  # of the part of the result that one TMA store writes
_GLUON_DTYPES = {torch.int8: "int8", torch.float16: "float16", torch.bfloat16: "bfloat16"}


@functools.cache
def layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    """Layout of a block in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], getattr(gl, _GLUON_DTYPES[dtype]))


def describe(x: Tensor, shape: tuple[int, int], row: int, block: tuple[int, int]) -> Any:
    """Gluon's tensor descriptor of ``x`` as a matrix of ``shape`` with row stride ``row``."""
    return TensorDescriptor(x, shape, (row, 1), list(block), layout(*block, x.dtype))
