"""int8_gated_linear's kernel for Hopper: hopper.py's, with two weights whose products one epilogue multiplies.

A tile of b has rows of the gate's weight in its upper half and the same rows of the other weight in its lower half. So
a thread has both products of a result in its registers, and the tile's sizes and loads are those of a plain product.
"""

from __future__ import annotations

from typing import Any

from qframework.kernels.linear.epilogue import before_gate, finish_gated, load_rows
from qframework.kernels.runtime.gluon import HAS_GLUON

if HAS_GLUON:
    from qframework.kernels.linear.hopper_ring import (
        accumulator,
        begin,
        finish_product,
        load_columns_once,
        place_of,
        produce,
        spread_columns,
        start_product,
        tiles_of_program,
    )
    from qframework.kernels.runtime.gluon import fence_async_shared, gl, gluon, tma, tma_store

    @gluon.jit
    def _halves(acc, COLUMNS: gl.constexpr):
        """The left and right ``COLUMNS`` columns of a product; a thread has the same ones of both."""
        layout: gl.constexpr = accumulator(COLUMNS)
        left, right = acc.reshape((acc.shape[0], 2, COLUMNS)).permute((0, 2, 1)).split()
        return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(
            right, layout, assert_trivial=True
        )

    @gluon.jit
    def _consume(
        WHO: gl.constexpr,
        pointers,  # of scales and biases
        ring,
        results,
        sizes,
        EPILOGUE: gl.constexpr,
        FORM: gl.constexpr,
    ):
        """Multiplying warpgroup 0 or 1, with two accumulators of 64 rows."""
        a_scale_ptr, gate_scale_ptr, gate_bias_ptr, up_scale_ptr, up_bias_ptr, out_scale_ptr, zero_point_ptr = pointers
        of_gate = (a_scale_ptr, gate_scale_ptr, gate_bias_ptr, out_scale_ptr, zero_point_ptr)
        of_up = (a_scale_ptr, up_scale_ptr, up_bias_ptr, out_scale_ptr, zero_point_ptr)
        out_desc, out_stages = results
        M, N, K, PA = sizes
        COLUMNS: gl.constexpr = FORM.columns
        layout: gl.constexpr = accumulator(COLUMNS)
        of_rows: gl.constexpr = gl.SliceLayout(1, layout)
        PINGPONG: gl.constexpr = FORM.pingpong
        TURNS: gl.constexpr = 2 if PINGPONG else 1  # it takes every TURNS-th tile of the program
        BUFFERS: gl.constexpr = out_stages.shape[0] // 2
        EACH: gl.constexpr = before_gate(EPILOGUE)
        first, end, by = tiles_of_program(M, N, FORM)
        steps = gl.cdiv(K, FORM.block_k)
        own_turn = 1 - WHO  # the phase to wait for; warpgroup 0 begins at once
        skipped = WHO if PINGPONG else 0
        total = skipped * steps  # steps of all tiles before the current one
        for tile in range(first + skipped * by, end, TURNS * by):
            start_m, start_n = place_of(tile, M, N, FORM)
            start_m += 0 if PINGPONG else WHO * 128
            gate_columns = load_columns_once(of_gate, start_n, N, COLUMNS, EACH)
            up_columns = load_columns_once(of_up, start_n, N, COLUMNS, EACH)
            upper, lower, slot = start_product(WHO, ring, own_turn, steps, total, FORM)
            own_turn ^= 1
            total += TURNS * steps
            gate_columns = spread_columns(gate_columns, COLUMNS, EACH)
            up_columns = spread_columns(up_columns, COLUMNS, EACH)
            upper, lower = finish_product(upper, lower, slot, ring, FORM)

            for half in range(2):
                stage = out_stages.index(WHO * BUFFERS + half % BUFFERS)
                gate, up = _halves(upper, COLUMNS)
                m = start_m + half * 64 + gl.arange(0, 64, layout=of_rows)
                rows = load_rows(a_scale_ptr, out_scale_ptr, m, M, PA, 1, EACH)
                out = finish_gated(
                    gate, up, gate_columns, up_columns, rows, out_scale_ptr, zero_point_ptr, out_desc.dtype, EPILOGUE
                )
                tma.store_wait(BUFFERS - 1)
                stage.store(out)
                fence_async_shared()
                tma_store(out_desc, [start_m + half * 64, start_n], stage)
                upper = lower
        tma.store_wait(0)

    @gluon.jit(do_not_specialize=["M", "PA"])
    def _int8_gated_linear_kernel(
        a_desc,  # of (M, K) int8, like both weights
        a_scale_ptr,  # (PA,) fp32, PA is 1, M or the number of positions
        gate_desc,  # of (N, K) int8
        gate_scale_ptr,  # (N,) fp32; (1,) without b_per_channel
        gate_bias_ptr,  # (N,) float, with has_bias
        up_desc,  # likewise
        up_scale_ptr,
        up_bias_ptr,
        out_scale_ptr,  # (1,) fp32, with out_scale "tensor"
        zero_point_ptr,  # (1,) int32, with zero_point
        out_desc,  # of (M, N) 16 bit or int8
        M,
        N,
        K,
        PA,
        EPILOGUE: gl.constexpr,  # EpilogueForm
        FORM: gl.constexpr,  # LinearForm
        OVERLAP: gl.constexpr = False,
    ):
        """out = activation(a @ gate.T) * (a @ up.T)."""
        weights = (gate_desc, up_desc)
        ring = begin(a_desc, weights, M, N, K, FORM, OVERLAP)
        BUFFERS: gl.constexpr = 4 if FORM.pingpong else 2  # for results on their way
        out_stages = gl.allocate_shared_memory(out_desc.dtype, [BUFFERS, 64, FORM.columns], out_desc.layout)
        fence_async_shared()
        pointers = (
            a_scale_ptr, gate_scale_ptr, gate_bias_ptr, up_scale_ptr, up_bias_ptr, out_scale_ptr, zero_point_ptr,
        )  # fmt: skip
        results = (out_desc, out_stages)
        sizes = (M, N, K, PA)
        gl.warp_specialize(
            [
                (_consume, (gl.constexpr(0), pointers, ring, results, sizes, EPILOGUE, FORM)),
                (_consume, (gl.constexpr(1), pointers, ring, results, sizes, EPILOGUE, FORM)),
                (produce, (a_desc, weights, ring, M, N, K, FORM)),
            ],
            [4, 1],  # warps of all but the first
            [240, 24],  # their registers; the first gets the rest
        )

    kernel: Any = _int8_gated_linear_kernel
