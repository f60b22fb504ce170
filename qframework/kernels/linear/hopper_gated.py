"""int8_gated_linear's kernel for Hopper: hopper.py's, with two weights whose products one epilogue multiplies.

A tile of b has rows of the gate's weight in its upper half and the same rows of the other weight in its lower half. So
a thread has both products of a result in its registers, and the tile's sizes and loads are those of a plain product.
"""

from __future__ import annotations

from typing import Any

from qframework.kernels.linear.epilogue import finish_gated, load_columns, load_rows
from qframework.kernels.runtime.gluon import HAS_GLUON
from qframework.kernels.runtime.overlap import wait_for_previous_kernel

if HAS_GLUON:
    from qframework.kernels.linear.hopper import load, multiply, place_of, produce, tiles_of_program
    from qframework.kernels.runtime.gluon import fence_async_shared, gl, gluon, halves_of_rows, mbarrier, tma, tma_store

    @gluon.jit
    def _halves(acc, COLUMNS: gl.constexpr):
        """The left and right ``COLUMNS`` columns of a product; a thread has the same ones of both."""
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
        left, right = acc.reshape((acc.shape[0], 2, COLUMNS)).permute((0, 2, 1)).split()
        return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(
            right, layout, assert_trivial=True
        )

    @gluon.jit
    def _consume(
        WHO: gl.constexpr,
        pointers,  # of scales and biases
        shared,
        sizes,
        A_SCALE: gl.constexpr,
        B_PER_CHANNEL: gl.constexpr,
        ACTIVATION: gl.constexpr,
        HAS_BIAS: gl.constexpr,
        QUANTIZES: gl.constexpr,
        ZERO_POINT: gl.constexpr,
        BLOCK_M: gl.constexpr,
        BLOCK_N: gl.constexpr,
        BLOCK_K: gl.constexpr,
        GROUP_M: gl.constexpr,
        STAGES: gl.constexpr,
        PINGPONG: gl.constexpr,
        SINGLE: gl.constexpr,
    ):
        """Multiplying warpgroup 0 or 1, with two accumulators of 64 rows."""
        a_scale_ptr, gate_scale_ptr, gate_bias_ptr, up_scale_ptr, up_bias_ptr, out_scale_ptr, zero_point_ptr = pointers
        out_desc, a_stages, b_stages, out_stages, ready, free, turn = shared
        M, N, K, PA = sizes
        COLUMNS: gl.constexpr = BLOCK_N // 2  # of the result
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
        of_rows: gl.constexpr = gl.SliceLayout(1, layout)
        of_columns: gl.constexpr = gl.SliceLayout(0, layout)
        TURNS: gl.constexpr = 2 if PINGPONG else 1  # it takes every TURNS-th tile of the program
        BUFFERS: gl.constexpr = out_stages.shape[0] // 2
        first, end, by = tiles_of_program(M, N, BLOCK_M, COLUMNS, SINGLE)
        steps = gl.cdiv(K, BLOCK_K)
        own_turn = 1 - WHO  # the phase to wait for; warpgroup 0 begins at once
        skipped = WHO if PINGPONG else 0
        total = skipped * steps  # steps of all tiles before the current one
        for tile in range(first + skipped * by, end, TURNS * by):
            start_m, start_n = place_of(tile, M, N, BLOCK_M, COLUMNS, GROUP_M, SINGLE)
            start_m += 0 if PINGPONG else WHO * 128
            upper, lower = multiply(
                WHO, a_stages, b_stages, ready, free, turn, own_turn, steps, total,
                BLOCK_N, STAGES, PINGPONG, SINGLE, THIRDS=False,
            )  # fmt: skip
            own_turn ^= 1
            total += TURNS * steps

            n = start_n + gl.arange(0, COLUMNS, layout=of_columns)
            gate_columns = load_columns(
                a_scale_ptr, gate_scale_ptr, gate_bias_ptr, out_scale_ptr, zero_point_ptr, n, N,
                A_SCALE, B_PER_CHANNEL, "none", HAS_BIAS, False, "none", False,
            )  # fmt: skip
            up_columns = load_columns(
                a_scale_ptr, up_scale_ptr, up_bias_ptr, out_scale_ptr, zero_point_ptr, n, N,
                A_SCALE, B_PER_CHANNEL, "none", HAS_BIAS, False, "none", False,
            )  # fmt: skip
            for half in gl.static_range(2):
                stage = out_stages.index(WHO * BUFFERS + half % BUFFERS)
                gate, up = _halves(upper if half == 0 else lower, COLUMNS)
                m = start_m + half * 64 + gl.arange(0, 64, layout=of_rows)
                rows = load_rows(a_scale_ptr, out_scale_ptr, m, M, PA, 1, A_SCALE, "none")
                out = finish_gated(
                    gate, up, gate_columns, up_columns, rows, out_scale_ptr, zero_point_ptr,
                    out_desc.dtype, A_SCALE, B_PER_CHANNEL, ACTIVATION, HAS_BIAS, QUANTIZES, ZERO_POINT,
                )  # fmt: skip
                tma.store_wait(BUFFERS - 1)
                stage.store(out)
                fence_async_shared()
                tma_store(out_desc, [start_m + half * 64, start_n], stage)
        tma.store_wait(0)

    @gluon.jit(do_not_specialize=["M", "PA"])
    def _int8_gated_linear_kernel(
        a_desc,  # of (M, K) int8, like both weights
        a_scale_ptr,  # (PA,) fp32, PA is 1, M or the number of positions
        gate_desc,  # of (N, K) int8
        gate_scale_ptr,  # (N,) fp32; (1,) without B_PER_CHANNEL
        gate_bias_ptr,  # (N,) float, with HAS_BIAS
        up_desc,  # likewise
        up_scale_ptr,
        up_bias_ptr,
        out_scale_ptr,  # (1,) fp32, with QUANTIZES
        zero_point_ptr,  # (1,) int32, with ZERO_POINT
        out_desc,  # of (M, N) 16 bit or int8
        M,
        N,
        K,
        PA,
        A_SCALE: gl.constexpr,
        B_PER_CHANNEL: gl.constexpr,
        ACTIVATION: gl.constexpr,
        HAS_BIAS: gl.constexpr,
        QUANTIZES: gl.constexpr,
        ZERO_POINT: gl.constexpr,
        BLOCK_M: gl.constexpr,
        BLOCK_N: gl.constexpr,  # rows of both weights in a tile, twice the columns of the result
        BLOCK_K: gl.constexpr,
        GROUP_M: gl.constexpr,
        STAGES: gl.constexpr,
        PINGPONG: gl.constexpr,  # else cooperative
        SINGLE: gl.constexpr,  # a grid of two dimensions, one program per tile; else persistent programs
        OVERLAP: gl.constexpr = False,
    ):
        """out = activation(a @ gate.T) * (a @ up.T)."""
        COLUMNS: gl.constexpr = BLOCK_N // 2
        a_stages = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_M, BLOCK_K], a_desc.layout)
        b_stages = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_N, BLOCK_K], gate_desc.layout)
        b_halves = halves_of_rows(b_stages)
        BUFFERS: gl.constexpr = 4 if PINGPONG else 2  # for results on their way
        out_stages = gl.allocate_shared_memory(out_desc.dtype, [BUFFERS, 64, COLUMNS], out_desc.layout)
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        gl.static_assert(STAGES > 2)
        # Start the first loads before the rest of the setup, to hide their latency.
        mbarrier.init(ready.index(0), count=1)
        mbarrier.init(ready.index(1), count=1)
        fence_async_shared()
        wait_for_previous_kernel(OVERLAP)
        first, _, _ = tiles_of_program(M, N, BLOCK_M, COLUMNS, SINGLE)
        start_m, start_n = place_of(first, M, N, BLOCK_M, COLUMNS, GROUP_M, SINGLE)
        weights = (gate_desc, up_desc)
        load(a_desc, weights, a_stages, b_halves, ready, start_m, start_n, 0, 0, BLOCK_M, BLOCK_N, BLOCK_K)
        if K > BLOCK_K:
            load(a_desc, weights, a_stages, b_halves, ready, start_m, start_n, BLOCK_K, 1, BLOCK_M, BLOCK_N, BLOCK_K)
        for i in gl.static_range(STAGES):
            if i > 1:
                mbarrier.init(ready.index(i), count=1)
            mbarrier.init(free.index(i), count=1 if PINGPONG else 2)
        if PINGPONG and not SINGLE:
            for i in gl.static_range(2):
                mbarrier.init(turn.index(i), count=1)
        fence_async_shared()
        pointers = (
            a_scale_ptr, gate_scale_ptr, gate_bias_ptr, up_scale_ptr, up_bias_ptr, out_scale_ptr, zero_point_ptr,
        )  # fmt: skip
        shared = (out_desc, a_stages, b_stages, out_stages, ready, free, turn)
        sizes = (M, N, K, PA)
        gl.warp_specialize(
            [
                (_consume, (
                    gl.constexpr(0), pointers, shared, sizes,
                    A_SCALE, B_PER_CHANNEL, ACTIVATION, HAS_BIAS, QUANTIZES, ZERO_POINT,
                    BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES, PINGPONG, SINGLE,
                )),
                (_consume, (
                    gl.constexpr(1), pointers, shared, sizes,
                    A_SCALE, B_PER_CHANNEL, ACTIVATION, HAS_BIAS, QUANTIZES, ZERO_POINT,
                    BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES, PINGPONG, SINGLE,
                )),
                (produce, (
                    a_desc, weights, a_stages, b_halves, ready, free, M, N, K,
                    BLOCK_M, BLOCK_N, COLUMNS, BLOCK_K, GROUP_M, STAGES, SINGLE,
                )),
            ],
            [4, 1],  # warps of all but the first
            [240, 24],  # their registers; the first gets the rest
        )  # fmt: skip

    kernel: Any = _int8_gated_linear_kernel
