"""The multiplying warpgroups of int8_linear's tiles with more than 128 columns on Hopper, in Gluon.

A warpgroup has 64 rows and two accumulators: a left one of 128 columns, and a right one of 32, 64 or 128, since the
sizes of each must be powers of two. Tiles of 128 rows have two warpgroups; tiles of 64 rows, for problems that are too
small to give every multiprocessor a larger tile, have one.
"""

from __future__ import annotations

from qframework.kernels.linear.epilogue import finish, load_rows
from qframework.kernels.runtime.gluon import HAS_GLUON

if HAS_GLUON:
    from qframework.kernels.linear.hopper_ring import (
        LEFT,
        accumulator,
        load_columns_once,
        place_of,
        right_columns,
        spread_columns,
        tiles_of_program,
    )
    from qframework.kernels.runtime.gluon import (
        fence_async_shared,
        gl,
        gluon,
        mbarrier,
        next_stage,
        parts_of_columns,
        tma,
        tma_load,
        tma_store,
        warpgroup_mma,
        warpgroup_mma_wait,
    )

    @gluon.jit
    def consume_wide(
        WHO: gl.constexpr,
        pointers,  # for load_columns and load_rows
        ring,
        results,
        sizes,
        EPILOGUE: gl.constexpr,
        FORM: gl.constexpr,
    ):
        """Multiplying warpgroup 0 or 1."""
        residual_desc, out_desc, left_stages, right_stages, landed = results
        M, N, K, _, _ = sizes
        left_stage = left_stages.index(WHO)
        right_stage = right_stages.index(WHO)
        out_dtype: gl.constexpr = out_desc.dtype
        RIGHT: gl.constexpr = right_columns(FORM.columns)
        # Vectors of the columns are spread before the product, unless that takes more registers than there are.
        EARLY: gl.constexpr = RIGHT < LEFT
        first, end, by = tiles_of_program(M, N, FORM)
        steps = gl.cdiv(K, FORM.block_k)
        arrived = 0  # the phase of ``landed``
        total = 0  # steps of all tiles before the current one
        for tile in range(first, end, by):
            start_m, start_n = place_of(tile, M, N, FORM)
            start_m += WHO * 64
            if EPILOGUE.has_residual:  # into the buffers that later hold the result
                tma.store_wait(0)
                mbarrier.expect(landed.index(WHO), 64 * FORM.columns * (out_dtype.primitive_bitwidth // 8))
                _load(residual_desc, start_m, start_n, landed.index(WHO), left_stage)
                _load(residual_desc, start_m, start_n + LEFT, landed.index(WHO), right_stage)
            of_left = _operands(start_m, start_n, LEFT, pointers, sizes, EARLY, EPILOGUE)
            of_right = _operands(start_m, start_n + LEFT, RIGHT, pointers, sizes, EARLY, EPILOGUE)
            left, right = _multiply(WHO, ring, steps, total, FORM)
            total += steps
            if EPILOGUE.has_residual:
                mbarrier.wait(landed.index(WHO), arrived)
                arrived ^= 1
            else:
                tma.store_wait(0)
            _finish(left, of_left, start_m, start_n, left_stage, out_desc, EARLY, EPILOGUE)
            _finish(right, of_right, start_m, start_n + LEFT, right_stage, out_desc, EARLY, EPILOGUE)
        tma.store_wait(0)

    @gluon.jit
    def _multiply(
        WHO: gl.constexpr,
        ring,
        steps,
        total,  # steps of all tiles before this one
        FORM: gl.constexpr,
    ):
        """The product of a warpgroup's rows: the left and the right accumulator."""
        STAGES: gl.constexpr = FORM.stages
        RIGHT: gl.constexpr = right_columns(FORM.columns)
        # In the largest tile, rows of a in registers save a sixth of shared memory's reads, and leave no registers for
        # products in flight: the other warpgroup multiplies while this one waits.
        IN_FLIGHT: gl.constexpr = RIGHT < LEFT
        left = gl.zeros((64, LEFT), gl.int32, accumulator(LEFT))
        right = gl.zeros((64, RIGHT), gl.int32, accumulator(RIGHT))
        slot = total % STAGES
        phase = (total // STAGES) & 1
        mbarrier.wait(ring.ready.index(slot), phase)
        # The first product needs no registers of zeros.
        left, right = _add_products(ring, slot, left, right, WHO * 64, IN_FLIGHT)
        for _ in range(1, steps):
            before = slot
            slot, phase = next_stage(slot, phase, STAGES)
            mbarrier.wait(ring.ready.index(slot), phase)
            left, right = _add_products(ring, slot, left, right, WHO * 64, IN_FLIGHT)
            if IN_FLIGHT:
                mbarrier.arrive(ring.free.index(before), count=1)
        if IN_FLIGHT:
            left, right = warpgroup_mma_wait(0, deps=(left, right))
            mbarrier.arrive(ring.free.index(slot), count=1)
        return left, right

    @gluon.jit
    def _add_products(ring, slot, left, right, FIRST_ROW: gl.constexpr, IN_FLIGHT: gl.constexpr):
        """Start adding the products of a step; those of the step before are done, or these if not IN_FLIGHT."""
        a = ring.a_stages.index(slot).slice(FIRST_ROW, 64)
        if not IN_FLIGHT:
            a = a.load(gl.DotOperandLayout(0, accumulator(LEFT), 4))
        left = warpgroup_mma(a, ring.b_stages.index(slot).permute((1, 0)), left, is_async=True)
        right = warpgroup_mma(a, ring.b_right.index(slot).permute((1, 0)), right, is_async=True)
        left, right = warpgroup_mma_wait(2 if IN_FLIGHT else 0, deps=(left, right))
        if not IN_FLIGHT:
            mbarrier.arrive(ring.free.index(slot), count=1)
        return left, right

    @gluon.jit
    def _load(desc, row, column, arrived, stage):
        """Start loading a block into shared memory, in parts of as many columns as the descriptor has."""
        PART: gl.constexpr = desc.block_type.shape[1]
        PARTS: gl.constexpr = stage.shape[1] // PART
        parts = parts_of_columns(stage, PARTS)
        for part in gl.static_range(PARTS):
            tma_load(desc, [row, column + part * PART], arrived, parts.index(part))

    @gluon.jit
    def _operands(
        row, column, COLUMNS: gl.constexpr, pointers, sizes, EARLY: gl.constexpr, EPILOGUE: gl.constexpr
    ):  # fmt: skip
        """What the epilogue of an accumulator reads for its columns and for its rows."""
        M, N, _, PA, PO = sizes
        columns = load_columns_once(pointers, column, N, COLUMNS, EPILOGUE)
        if EARLY:
            columns = spread_columns(columns, COLUMNS, EPILOGUE)
        m = row + gl.arange(0, 64, layout=gl.SliceLayout(1, accumulator(COLUMNS)))
        return columns, load_rows(pointers[0], pointers[3], m, M, PA, PO, EPILOGUE)

    @gluon.jit
    def _finish(acc, operands, row, column, stage, out_desc, EARLY: gl.constexpr, EPILOGUE: gl.constexpr):
        """Run the epilogue of an accumulator and start storing the result."""
        columns, rows = operands
        if not EARLY:
            columns = spread_columns(columns, acc.shape[1], EPILOGUE)
        residual = stage.load(accumulator(acc.shape[1])) if EPILOGUE.has_residual else acc
        stage.store(finish(acc, columns, rows, residual, out_desc.dtype, EPILOGUE))
        fence_async_shared()
        PART: gl.constexpr = out_desc.block_type.shape[1]
        PARTS: gl.constexpr = acc.shape[1] // PART
        parts = parts_of_columns(stage, PARTS)
        for part in gl.static_range(PARTS):
            tma_store(out_desc, [row, column + part * PART], parts.index(part))
