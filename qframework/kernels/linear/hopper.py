"""int8_linear's kernel for Hopper, in Gluon: one warp loads, up to three warpgroups multiply and run the epilogue.

Gluon is Triton's dialect with explicit layouts, shared memory and barriers. hopper_ring.py has the loads and products,
this module the epilogue and the start of all warps. Warpgroups share the work in one of two ways, as in CUTLASS's
"pingpong" and "cooperative" kernels:

- pingpong: they alternate between whole tiles, so that one multiplies while the other runs its epilogue. For small K,
  where the epilogue takes as long as the product.
- cooperative: each computes half of the rows of every tile, which can thus be twice as large and loads fewer bytes per
  product. For large K. Tiles of 192 rows have three warpgroups with 64 rows each. In tiles of more than 128 columns,
  warpgroups are those of hopper_wide.py.

Used where TMA can address operands and result; triton.py handles all other problems.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from qframework.kernels.linear.epilogue import finish, is_long, load_rows
from qframework.kernels.linear.hopper_ring import LEFT, accumulator, parts, right_columns, workers
from qframework.kernels.runtime.gluon import HAS_GLUON
from qframework.kernels.runtime.triton import triton


@triton.constexpr_function
def _buffers(form, has_residual):
    """Blocks of 64 rows in shared memory for results on their way."""
    if right_columns(form.columns) > 0 or workers(form.block_m) == 3:
        return workers(form.block_m)
    return 4 if form.pingpong or has_residual else 2


if HAS_GLUON:
    from qframework.kernels.linear.hopper_ring import (
        begin,
        finish_product,
        load_columns_once,
        place_of,
        produce,
        spread_columns,
        start_product,
        tiles_of_program,
    )
    from qframework.kernels.linear.hopper_wide import consume_wide
    from qframework.kernels.runtime.gluon import (
        TensorDescriptor,
        fence_async_shared,
        gl,
        gluon,
        mbarrier,
        tma,
        tma_load,
        tma_store,
    )

    @gluon.jit
    def _finish(
        WHO: gl.constexpr, half, acc, columns, rows, start_m, start_n, out_desc, out_stages, EPILOGUE: gl.constexpr,
        FORM: gl.constexpr,
    ):  # fmt: skip
        """Run the epilogue of a warpgroup's upper or lower half and start storing the result."""
        BUFFERS: gl.constexpr = out_stages.shape[0] // workers(FORM.block_m)
        stage = out_stages.index(WHO * BUFFERS + half % BUFFERS)
        residual = stage.load(acc.type.layout) if EPILOGUE.has_residual else acc
        out = finish(acc, columns, rows, residual, out_desc.dtype, EPILOGUE)
        if not EPILOGUE.has_residual:
            tma.store_wait(BUFFERS - 1)
        stage.store(out)
        fence_async_shared()
        tma_store(out_desc, [start_m + half * 64, start_n], stage)

    @gluon.jit
    def _consume(
        WHO: gl.constexpr,
        pointers,  # for load_columns and load_rows
        ring,
        results,
        sizes,
        EPILOGUE: gl.constexpr,
        FORM: gl.constexpr,
    ):
        """Multiplying warpgroup 0, 1 or 2, with two accumulators of 64 rows, or one where there are three."""
        a_scale_ptr, _, _, out_scale_ptr, _ = pointers
        residual_desc, out_desc, out_stages, landed = results
        M, N, K, PA, PO = sizes
        COLUMNS: gl.constexpr = FORM.block_n
        layout: gl.constexpr = accumulator(COLUMNS)
        of_rows: gl.constexpr = gl.SliceLayout(1, layout)
        PINGPONG: gl.constexpr = FORM.pingpong
        HAS_RESIDUAL: gl.constexpr = EPILOGUE.has_residual
        HALVES: gl.constexpr = 1 if workers(FORM.block_m) == 3 else 2
        BUFFERS: gl.constexpr = out_stages.shape[0] // workers(FORM.block_m)
        FIRST_ROW: gl.constexpr = 0 if PINGPONG else WHO * 64 * HALVES
        TURNS: gl.constexpr = 2 if PINGPONG else 1  # it takes every TURNS-th tile of the program
        # Half of a long epilogue's code, run twice, leaves room for the other warpgroup's in the cache of instructions.
        REPEATED: gl.constexpr = HALVES == 2 and is_long(EPILOGUE.activation)
        # When the vectors of the columns are spread: before the only tile's product, whose first loads take longer;
        # before the last step ends; or behind it, which leaves more registers to the product.
        SPREAD: gl.constexpr = "before" if FORM.single else ("during" if REPEATED else "behind")
        out_dtype: gl.constexpr = out_desc.dtype
        first, end, by = tiles_of_program(M, N, FORM)
        steps = gl.cdiv(K, FORM.block_k)
        arrived = 0  # the phase of ``landed``
        own_turn = 1 - WHO  # the phase to wait for; warpgroup 0 begins at once
        skipped = WHO if PINGPONG else 0
        total = skipped * steps  # steps of all tiles before the current one
        first += skipped * by
        start_m, start_n = place_of(first, M, N, FORM)
        for tile in range(first, end, TURNS * by):
            columns = load_columns_once(pointers, start_n, N, COLUMNS, EPILOGUE)
            start_m += FIRST_ROW
            m = start_m + gl.arange(0, 64, layout=of_rows)
            rows = load_rows(a_scale_ptr, out_scale_ptr, m, M, PA, PO, EPILOGUE)
            rows_lower = load_rows(a_scale_ptr, out_scale_ptr, m + 64, M, PA, PO, EPILOGUE)
            if HAS_RESIDUAL:  # into the buffers that later hold the result
                tma.store_wait(0)
                mbarrier.expect(landed.index(WHO), HALVES * 64 * COLUMNS * (out_dtype.primitive_bitwidth // 8))
                for half in gl.static_range(HALVES):
                    stage = out_stages.index(WHO * BUFFERS + half)
                    tma_load(residual_desc, [start_m + half * 64, start_n], landed.index(WHO), stage)
            if SPREAD == "before":
                columns = spread_columns(columns, COLUMNS, EPILOGUE)
            upper, lower, slot = start_product(WHO, ring, own_turn, steps, total, FORM)
            own_turn ^= 1
            total += TURNS * steps
            if SPREAD == "during":
                columns = spread_columns(columns, COLUMNS, EPILOGUE)
            next_m, next_n = place_of(tile + TURNS * by, M, N, FORM)
            upper, lower = finish_product(upper, lower, slot, ring, FORM)
            if SPREAD == "behind":
                columns = spread_columns(columns, COLUMNS, EPILOGUE)
            if HAS_RESIDUAL:
                mbarrier.wait(landed.index(WHO), arrived)
                arrived ^= 1
            if REPEATED:
                for half in range(HALVES):
                    _finish(WHO, half, upper, columns, rows, start_m, start_n, out_desc, out_stages, EPILOGUE, FORM)
                    upper = lower
                    rows = rows_lower
            else:
                for half in gl.static_range(HALVES):
                    _finish(WHO, half, upper, columns, rows, start_m, start_n, out_desc, out_stages, EPILOGUE, FORM)
                    upper = lower
                    rows = rows_lower
            start_m = next_m
            start_n = next_n
        tma.store_wait(0)

    @gluon.jit(do_not_specialize=["M", "PA", "PO"])
    def _int8_linear_specialized_kernel(
        a_desc,  # of (M, K) int8, like b
        a_scale_ptr,  # (PA,) fp32, PA is 1, M or the number of positions
        b_desc,  # of (N, K) int8
        b_scale_ptr,  # (N,) or (1,) fp32
        bias_ptr,  # (N,) float
        residual_desc,  # of (M, N), like out
        out_scale_ptr,  # (PO,) fp32, likewise; (N,) with out_scale "channel"
        zero_point_ptr,  # (1,) int32, with zero_point
        out_desc,  # of (M, N) 16 bit or int8
        M,
        N,
        K,
        PA,
        PO,
        EPILOGUE: gl.constexpr,  # EpilogueForm
        FORM: gl.constexpr,  # LinearForm
        OVERLAP: gl.constexpr = False,
    ):
        """out = epilogue(a @ b.T)."""
        ring = begin(a_desc, (b_desc,), M, N, K, FORM, OVERLAP)
        WORKERS: gl.constexpr = workers(FORM.block_m)
        RIGHT: gl.constexpr = right_columns(FORM.columns)
        WIDTH: gl.constexpr = FORM.block_n - RIGHT  # of an accumulator
        BUFFERS: gl.constexpr = _buffers(FORM, EPILOGUE.has_residual)
        out_stages = gl.allocate_shared_memory(out_desc.dtype, [BUFFERS, 64, WIDTH], out_desc.layout)
        landed = gl.allocate_shared_memory(gl.int64, [WORKERS, 1], mbarrier.MBarrierLayout())
        if EPILOGUE.has_residual:
            for i in gl.static_range(WORKERS):
                mbarrier.init(landed.index(i), count=1)
        if RIGHT > 0:
            right_stages = gl.allocate_shared_memory(out_desc.dtype, [BUFFERS, 64, RIGHT], out_desc.layout)
        fence_async_shared()
        pointers = (a_scale_ptr, b_scale_ptr, bias_ptr, out_scale_ptr, zero_point_ptr)
        results = (residual_desc, out_desc, out_stages, landed)
        sizes = (M, N, K, PA, PO)
        # Behind the functions: warps of all but the first, and their registers; the first gets the rest.
        if RIGHT > 0:
            both = (residual_desc, out_desc, out_stages, right_stages, landed)
        if WORKERS == 1:
            gl.warp_specialize(
                [
                    (consume_wide, (gl.constexpr(0), pointers, ring, both, sizes, EPILOGUE, FORM)),
                    (produce, (a_desc, (b_desc,), ring, M, N, K, FORM)),
                ],
                [1],
                [24],
            )
        elif RIGHT > 0:
            gl.warp_specialize(
                [
                    (consume_wide, (gl.constexpr(0), pointers, ring, both, sizes, EPILOGUE, FORM)),
                    (consume_wide, (gl.constexpr(1), pointers, ring, both, sizes, EPILOGUE, FORM)),
                    (produce, (a_desc, (b_desc,), ring, M, N, K, FORM)),
                ],
                [4, 1],
                [240, 24],
            )
        elif WORKERS == 2:
            gl.warp_specialize(
                [
                    (_consume, (gl.constexpr(0), pointers, ring, results, sizes, EPILOGUE, FORM)),
                    (_consume, (gl.constexpr(1), pointers, ring, results, sizes, EPILOGUE, FORM)),
                    (produce, (a_desc, (b_desc,), ring, M, N, K, FORM)),
                ],
                [4, 1],
                [240, 24],
            )
        else:
            gl.warp_specialize(
                [
                    (_consume, (gl.constexpr(0), pointers, ring, results, sizes, EPILOGUE, FORM)),
                    (_consume, (gl.constexpr(1), pointers, ring, results, sizes, EPILOGUE, FORM)),
                    (_consume, (gl.constexpr(2), pointers, ring, results, sizes, EPILOGUE, FORM)),
                    (produce, (a_desc, (b_desc,), ring, M, N, K, FORM)),
                ],
                [4, 4, 1],
                [160, 160, 24],
            )

    kernel: Any = _int8_linear_specialized_kernel


def rows_of_a(block_m: int) -> int:
    """Rows of a that one TMA load reads."""
    return block_m // parts(block_m)


ROWS = 64  # of the part of the result that one TMA store writes


def width_of_block(block_n: int) -> int:
    """Rows of b that one load reads, and columns of the result that one store writes."""
    return block_n if block_n <= LEFT.value else block_n - LEFT.value


_GLUON_DTYPES = {torch.int8: "int8", torch.float16: "float16", torch.bfloat16: "bfloat16"}


@functools.cache
def layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    """Layout of a block in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], getattr(gl, _GLUON_DTYPES[dtype]))


def describe(x: Tensor, shape: tuple[int, int], row: int, block: tuple[int, int]) -> Any:
    """Gluon's tensor descriptor of ``x`` as a matrix of ``shape`` with row stride ``row``."""
    return TensorDescriptor(x, shape, (row, 1), list(block), layout(*block, x.dtype))
