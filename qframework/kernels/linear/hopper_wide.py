"""The multiplying warpgroups of int8_linear's tiles with more than 128 columns on Hopper, in Gluon.

A warpgroup has two accumulators of the same 64 rows: a left one of 128 columns, and a right one of 32, 64 or 128, since
the sizes of each must be powers of two. The warpgroups share a tile in one of two ways:

- tiles of 128 rows: each has 64 of them;
- tiles of 64 rows: each takes every second step over K. At the end they exchange partial sums in the stages, which
  nothing reads any more; the first finishes the left columns, the second the right ones. For problems that are too
  small to give every multiprocessor a larger tile.
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
        takes_turns_in_k,
        tiles_of_program,
    )
    from qframework.kernels.runtime.gluon import (
        barrier,
        fence_async_shared,
        gl,
        gluon,
        mbarrier,
        next_stage,
        parts_of_columns,
        reinterpret,
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
        residual_desc, out_desc, left_stages, right_stages, landed, done = results
        M, N, K, _, _ = sizes
        IN_TURNS: gl.constexpr = takes_turns_in_k(FORM.block_m)
        HAS_LEFT: gl.constexpr = not IN_TURNS or WHO == 0
        HAS_RIGHT: gl.constexpr = not IN_TURNS or WHO == 1
        FIRST_ROW: gl.constexpr = 0 if IN_TURNS else WHO * 64
        left_stage = left_stages.index(0 if IN_TURNS else WHO)
        right_stage = right_stages.index(0 if IN_TURNS else WHO)
        out_dtype: gl.constexpr = out_desc.dtype
        RIGHT: gl.constexpr = right_columns(FORM.columns)
        COLUMNS: gl.constexpr = (LEFT if HAS_LEFT else 0) + (RIGHT if HAS_RIGHT else 0)
        # Vectors of the columns are spread before the product, unless that takes more registers than there are.
        EARLY: gl.constexpr = RIGHT < LEFT
        first, end, by = tiles_of_program(M, N, FORM)
        steps = gl.cdiv(K, FORM.block_k)
        arrived = 0  # the phase of ``landed``
        total = 0  # steps of all tiles before the current one
        for tile in range(first, end, by):
            start_m, start_n = place_of(tile, M, N, FORM)
            start_m += FIRST_ROW
            if EPILOGUE.has_residual:  # into the buffers that later hold the result
                tma.store_wait(0)
                mbarrier.expect(landed.index(WHO), 64 * COLUMNS * (out_dtype.primitive_bitwidth // 8))
                if HAS_LEFT:
                    _load(residual_desc, start_m, start_n, landed.index(WHO), left_stage)
                if HAS_RIGHT:
                    _load(residual_desc, start_m, start_n + LEFT, landed.index(WHO), right_stage)
            if HAS_LEFT:
                of_left = _operands(start_m, start_n, LEFT, pointers, sizes, EARLY, EPILOGUE)
            if HAS_RIGHT:
                of_right = _operands(start_m, start_n + LEFT, RIGHT, pointers, sizes, EARLY, EPILOGUE)
            left, right = _multiply(WHO, ring, steps, total, FORM)
            total += steps
            if IN_TURNS:
                left, right = _exchange(WHO, left, right, ring, done, FORM)
            if EPILOGUE.has_residual:
                mbarrier.wait(landed.index(WHO), arrived)
                arrived ^= 1
            else:
                tma.store_wait(0)
            if HAS_LEFT:
                _finish(left, of_left, start_m, start_n, left_stage, out_desc, EARLY, EPILOGUE)
            if HAS_RIGHT:
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
        """The product of a warpgroup's rows, or of its steps: the left and the right accumulator."""
        STAGES: gl.constexpr = FORM.stages
        IN_TURNS: gl.constexpr = takes_turns_in_k(FORM.block_m)
        BY: gl.constexpr = 2 if IN_TURNS else 1
        FIRST_STEP: gl.constexpr = WHO if IN_TURNS else 0
        FIRST_ROW: gl.constexpr = 0 if IN_TURNS else WHO * 64
        # In the largest tile, rows of a in registers save a sixth of shared memory's reads, and leave no registers for
        # products in flight: the other warpgroup multiplies while this one waits.
        IN_FLIGHT: gl.constexpr = right_columns(FORM.columns) < LEFT
        left = gl.zeros((64, LEFT), gl.int32, accumulator(LEFT))
        right = gl.zeros((64, right_columns(FORM.columns)), gl.int32, accumulator(right_columns(FORM.columns)))
        slot = (total + FIRST_STEP) % STAGES
        phase = ((total + FIRST_STEP) // STAGES) & 1
        # A first product needs no registers of zeros; but a warpgroup that takes turns may have no product.
        if not IN_TURNS:
            mbarrier.wait(ring.ready.index(slot), phase)
            left, right = _add_products(ring, slot, left, right, FIRST_ROW, IN_FLIGHT)
            slot, phase = next_stage(slot, phase, STAGES)
        for step in range(FIRST_STEP if IN_TURNS else 1, steps, BY):
            mbarrier.wait(ring.ready.index(slot), phase)
            left, right = _add_products(ring, slot, left, right, FIRST_ROW, IN_FLIGHT)
            if IN_FLIGHT and step >= BY:
                mbarrier.arrive(ring.free.index(_before(slot, BY, STAGES)), count=1)
            for _ in gl.static_range(BY):
                slot, phase = next_stage(slot, phase, STAGES)
        if IN_FLIGHT:
            left, right = warpgroup_mma_wait(0, deps=(left, right))
            if not IN_TURNS:  # else nothing is loaded any more
                mbarrier.arrive(ring.free.index(_before(slot, BY, STAGES)), count=1)
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
    def _before(slot, BY: gl.constexpr, STAGES: gl.constexpr):
        """The stage ``BY`` steps before ``slot``."""
        return gl.where(slot < BY, slot + STAGES - BY, slot - BY)

    @gluon.jit
    def _exchange(WHO: gl.constexpr, left, right, ring, done, FORM: gl.constexpr):
        """The sums of both warpgroups: the first one's result has them on the left, the second one's on the right.

        The barriers ``done`` serve one tile.
        """
        mbarrier.arrive(done.index(0), count=1)
        mbarrier.wait(done.index(0), 0)  # both are done with the stages
        of_left: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        of_right: gl.constexpr = gl.SwizzledSharedLayout(8, 1, right_columns(FORM.columns) // 8, [1, 0])
        PAIRS: gl.constexpr = FORM.stages // 2  # two stages of b have room for the sums of as many columns
        left_sums = reinterpret(ring.b_stages, gl.int32, [PAIRS, 64, LEFT], of_left).index(0)
        right_sums = reinterpret(ring.b_right, gl.int32, [PAIRS, 64, right_columns(FORM.columns)], of_right).index(0)
        if WHO == 0:
            right_sums.store(right)
        else:
            left_sums.store(left)
        barrier()  # all warps have stored
        mbarrier.arrive(done.index(1 + WHO), count=1)
        mbarrier.wait(done.index(2 - WHO), 0)
        if WHO == 0:
            left += left_sums.load(accumulator(LEFT))
        else:
            right += right_sums.load(accumulator(right_columns(FORM.columns)))
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
