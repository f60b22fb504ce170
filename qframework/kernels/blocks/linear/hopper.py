"""block_linear's kernel for Hopper, in Gluon: one warp loads, warpgroups alternate between MMA and dequantization.

Written in Gluon and with a ring of stages and barriers like that of linear/hopper_ring.py. A warpgroup owns two
halves of 64 rows and 128 columns of a tile as float32 sums in registers. It multiplies one half of one block along K at
a time into INT32 registers, which its CUDA cores then scale and add: a conversion and a multiply-add per element.
Meanwhile the other warpgroup uses the tensor cores:

    warpgroup 0   multiply upper | dequantize upper | multiply lower | dequantize lower | ...
    warpgroup 1                  | multiply upper   | dequantize ... | multiply lower   | ...

- two consumers: a tile of 256 x 128, whose rows of b both warpgroups read; ``turn`` barriers make them alternate.
- two consumers and blocks of 256 columns: a tile of 128 x 256, whose halves lie side by side, so that a warpgroup has
  whole blocks of the result. A stage holds half of a block's columns; products of both add up in the same registers.
- one consumer: a tile of 128 x 128 and two programs per multiprocessor, which come to alternate without barriers; one
  also stores its tile while the other multiplies.

It needs operands that TMA can read; triton.py computes all other products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from qframework.kernels.linear.triton import place
from qframework.kernels.runtime.gluon import HAS_GLUON
from qframework.kernels.runtime.overlap import wait_for_previous_kernel

ROWS = 64  # of a part of the result, which is stored at once
COLUMNS = 128


class BlockLinearForm(NamedTuple):
    """What the kernels are compiled for."""

    block: tuple[int, int]  # of a and the result
    block_b: tuple[int, int]  # with as many columns
    has_bias: bool
    block_m: int
    block_n: int
    group_m: int
    stages: int
    consumers: int
    tma_store: bool
    early: bool  # the upper half is dequantized before the lower one is multiplied
    pairs: int = 1  # of operands, whose products are added


if HAS_GLUON:
    from qframework.kernels.blocks.linear.hopper_store import store_half, store_int8, store_wide
    from qframework.kernels.runtime.gluon import (
        fence_async_shared,
        gl,
        gluon,
        mbarrier,
        next_stage,
        tma,
        tma_load,
        warpgroup_mma,
        warpgroup_mma_wait,
    )

    @gluon.jit
    def _count_tiles(M, N, FORM: gl.constexpr):
        return gl.cdiv(M, FORM.block_m) * gl.cdiv(N, FORM.block_n)

    @gluon.jit
    def _place(index, M, N, FORM: gl.constexpr):
        """Part of K, and first row and column, of the ``index``-th tile."""
        TMA_STORE: gl.constexpr = FORM.tma_store
        part = 0
        # Those stored by TMA have one part, and so have sums of pairs, which would spill without the division.
        if not TMA_STORE or FORM.pairs > 1:
            tiles = _count_tiles(M, N, FORM)
            part = index // tiles
            index = index % tiles
        start_m, start_n = place(index, M, N, FORM.block_m, FORM.block_n, FORM.group_m)
        return part, start_m, start_n

    @gluon.jit
    def _steps(part, K, STEPS, BLOCK: gl.constexpr):
        """First step and end of a part of K."""
        first = part * STEPS
        return first, gl.minimum(first + STEPS, gl.cdiv(K, BLOCK[1]))

    @gluon.jit
    def _of_pair(values, pair, PAIRS: gl.constexpr):
        """The ``pair``-th of a tuple of scalars."""
        value = values[0]
        for i in gl.static_range(1, PAIRS):
            value = gl.where(pair == i, values[i], value)
        return value

    @gluon.jit
    def _produce(
        a_descs,
        b_descs,
        a_stages,
        b_stages,
        ready,
        free,
        sizes,
        FORM: gl.constexpr,
    ):
        """The loading warp."""
        BLOCK: gl.constexpr = FORM.block
        PAIRS: gl.constexpr = FORM.pairs
        WIDTH: gl.constexpr = a_stages.shape[2]
        M, N, KS, STEPS, PARTS = sizes
        slot = 0
        phase = 1  # waiting for phase 1 of a new barrier returns at once: all stages are free
        end = _count_tiles(M, N, FORM) * PARTS
        for index in range(gl.program_id(0), end, gl.num_programs(0)):
            part, start_m, start_n = _place(index, M, N, FORM)
            for pair in range(PAIRS):
                first, last = _steps(part, _of_pair(KS, pair, PAIRS), STEPS, BLOCK)
                for step in range(first * (BLOCK[1] // WIDTH), last * (BLOCK[1] // WIDTH)):
                    mbarrier.wait(free.index(slot), phase)
                    mbarrier.expect(ready.index(slot), (FORM.block_m + FORM.block_n) * WIDTH)
                    for i in gl.static_range(PAIRS):
                        if pair == i:
                            tma_load(a_descs[i], [start_m, step * WIDTH], ready.index(slot), a_stages.index(slot))
                            tma_load(b_descs[i], [start_n, step * WIDTH], ready.index(slot), b_stages.index(slot))
                    slot, phase = next_stage(slot, phase, FORM.stages)

    @gluon.jit
    def _spread(
        scale_ptr, start, SIZE, block, across, LENGTH: gl.constexpr, HEIGHT: gl.constexpr, layout: gl.constexpr
    ):
        """Scales of LENGTH rows, HEIGHT > 1 of which share one: see spread_scales in triton.py."""
        row = gl.arange(0, LENGTH, layout=layout)
        first = start // HEIGHT
        last = (SIZE - 1) // HEIGHT
        first_scale = gl.load(scale_ptr + gl.minimum(first, last) * across + block)
        scale = gl.full([LENGTH], first_scale, gl.float32, layout)
        for i in gl.static_range(1, LENGTH // HEIGHT):
            other = gl.load(scale_ptr + gl.minimum(first + i, last) * across + block)
            scale = gl.where(row >= i * HEIGHT, other, scale)
        return scale

    @gluon.jit
    def _scales_of_rows(scale_ptr, start, SIZE, block, across, BELOW: gl.constexpr, layout: gl.constexpr):
        """Scales of 64 rows and of those BELOW them, one per row; ``block`` is clamped to the last one along K."""
        row = start + gl.arange(0, 64, layout=layout)
        block = gl.minimum(block, across - 1)
        # Offsets are summed before they become addresses: addresses kept across steps would spill.
        upper = gl.load(scale_ptr + (gl.minimum(row, SIZE - 1) * across + block))
        lower = upper
        if BELOW > 0:
            lower = gl.load(scale_ptr + (gl.minimum(row + BELOW, SIZE - 1) * across + block))
        return upper, lower

    @gluon.jit
    def _stage(a_stages, b_stages, slot):
        return a_stages.index(slot), b_stages.index(slot).permute((1, 0))

    @gluon.jit
    def _columns(b, COLUMN: gl.constexpr):
        if b.shape[1] > 128:
            b = b.slice(COLUMN, 128, dim=1)
        return b

    @gluon.jit
    def _multiply(
        first,
        second,
        turn,
        own_turn,
        ROW: gl.constexpr,
        COLUMN: gl.constexpr,
        STAGES: gl.constexpr,
        WHO: gl.constexpr,
        CONSUMERS: gl.constexpr,
        layout: gl.constexpr,
    ):
        """64 rows of a by 128 of b, of one or two stages, as INT32; then the other's turn begins."""
        acc = gl.zeros((64, 128), gl.int32, layout)
        if CONSUMERS == 2:
            mbarrier.wait(turn.index(WHO), own_turn)
        acc = warpgroup_mma(first[0].slice(ROW, 64), _columns(first[1], COLUMN), acc, use_acc=False, is_async=True)
        if STAGES == 2:
            acc = warpgroup_mma(second[0].slice(ROW, 64), _columns(second[1], COLUMN), acc, is_async=True)
        if CONSUMERS == 2:
            mbarrier.arrive(turn.index(1 - WHO), count=1)
        return warpgroup_mma_wait(0, deps=(acc,))

    @gluon.jit
    def _dequantize(acc, of_rows, of_columns, total):
        return gl.fma(acc.to(gl.float32), of_rows[:, None] * of_columns[None, :], total)

    @gluon.jit
    def _computed_here(x):
        """``x``, computed here: otherwise the compiler moves its computation behind the wait for the next turn."""
        return gl.inline_asm_elementwise("mov.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)

    @gluon.jit
    def _consume(
        WHO: gl.constexpr,
        pointers,
        shared,
        sizes,
        FORM: gl.constexpr,
    ):
        """Multiplying warpgroup 0 or 1, which computes two halves: one BELOW the other, or to the RIGHT of it."""
        a_scale_ptrs, b_scale_ptrs, bias_ptr, out_ptr, out_scale_ptr = pointers
        out_desc, a_stages, b_stages, out_stages, ready, free, turn = shared
        M, N, KS, STEPS, PARTS = sizes
        BLOCK: gl.constexpr = FORM.block
        BLOCK_B: gl.constexpr = FORM.block_b
        PAIRS: gl.constexpr = FORM.pairs
        TMA_STORE: gl.constexpr = FORM.tma_store
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
        of_rows: gl.constexpr = gl.SliceLayout(1, layout)
        of_columns: gl.constexpr = gl.SliceLayout(0, layout)
        BELOW: gl.constexpr = 128 - FORM.block_n // 2
        RIGHT: gl.constexpr = FORM.block_n - 128
        FIRST_ROW: gl.constexpr = WHO * (64 + BELOW)
        OF_BLOCK: gl.constexpr = BLOCK[1] // a_stages.shape[2]  # stages
        own_turn = 1 - WHO  # the phase to wait for: the first warpgroup begins at once
        slot = 0
        phase = 0
        end = _count_tiles(M, N, FORM) * PARTS
        for index in range(gl.program_id(0), end, gl.num_programs(0)):
            part, start_m, start_n = _place(index, M, N, FORM)
            start_m += FIRST_ROW
            upper = gl.zeros((64, 128), gl.float32, layout)
            lower = gl.zeros((64, 128), gl.float32, layout)
            for pair in range(PAIRS):  # not unrolled: two loops over K would spill
                a_scale_ptr, b_scale_ptr = _of_pair(a_scale_ptrs, pair, PAIRS), _of_pair(b_scale_ptrs, pair, PAIRS)
                K = _of_pair(KS, pair, PAIRS)
                first, last = _steps(part, K, STEPS, BLOCK)
                across = gl.cdiv(K, BLOCK[1])
                if BLOCK[0] == 1:
                    ahead = _scales_of_rows(a_scale_ptr, start_m, M, first, across, BELOW, of_rows)
                for step in range(first, last):
                    for i in gl.static_range(OF_BLOCK):  # stages are a multiple of it, so the phase is the same
                        mbarrier.wait(ready.index(slot + i), phase)
                    a_and_b = _stage(a_stages, b_stages, slot)
                    next_a_and_b = _stage(a_stages, b_stages, slot + OF_BLOCK - 1)
                    # Scales are loaded before the product and used after it, so that the load overlaps with it.
                    columns = _spread(b_scale_ptr, start_n, N, step, across, 128, BLOCK_B[0], of_columns)
                    if BLOCK[0] == 1:
                        # One step ahead: each row's scale lies in a cache line of its own, too many for the L1 cache.
                        rows, rows_below = ahead
                        ahead = _scales_of_rows(a_scale_ptr, start_m, M, step + 1, across, BELOW, of_rows)
                    else:
                        rows = _spread(a_scale_ptr, start_m, M, step, across, 64, BLOCK[0], of_rows)
                    acc = _multiply(
                        a_and_b, next_a_and_b, turn, own_turn, FIRST_ROW, 0, OF_BLOCK, WHO, FORM.consumers, layout
                    )
                    own_turn ^= 1
                    upper = _dequantize(acc, rows, columns, upper)
                    if FORM.early:
                        upper = _computed_here(upper)
                    if RIGHT > 0:
                        columns = _spread(b_scale_ptr, start_n + RIGHT, N, step, across, 128, BLOCK_B[0], of_columns)
                    elif BLOCK[0] == 1:
                        rows = rows_below
                    elif BLOCK[0] < 128:
                        rows = _spread(a_scale_ptr, start_m + BELOW, M, step, across, 64, BLOCK[0], of_rows)
                    acc = _multiply(
                        a_and_b,
                        next_a_and_b,
                        turn,
                        own_turn,
                        FIRST_ROW + BELOW,
                        RIGHT,
                        OF_BLOCK,
                        WHO,
                        FORM.consumers,
                        layout,
                    )
                    own_turn ^= 1
                    for i in gl.static_range(OF_BLOCK):
                        mbarrier.arrive(free.index(slot + i), count=1)
                    lower = _dequantize(acc, rows, columns, lower)
                    for _ in gl.static_range(OF_BLOCK):
                        slot, phase = next_stage(slot, phase, FORM.stages)

            m = start_m + gl.arange(0, 64, layout=of_rows)
            n = start_n + gl.arange(0, 128, layout=of_columns)
            # Also loaded without a bias, fully masked: otherwise ptxas spills registers in the loop over K.
            biased = N if FORM.has_bias else 0
            bias = gl.load(bias_ptr + n, mask=n < biased, other=0.0).to(gl.float32)[None, :]
            upper += bias
            if RIGHT > 0:
                bias = gl.load(bias_ptr + n + RIGHT, mask=n + RIGHT < biased, other=0.0).to(gl.float32)[None, :]
            lower += bias
            inside, below = (m < M)[:, None] & (n < N)[None, :], (m + BELOW < M)[:, None] & (n + RIGHT < N)[None, :]
            if out_desc.dtype == gl.int8 and TMA_STORE:
                if BLOCK[0] > 1:  # rows behind the last would be part of its block
                    upper = gl.where(inside, upper, 0.0)
                    lower = gl.where(below, lower, 0.0)
                stage = out_stages.index(WHO)
                if RIGHT > 0:
                    store_wide(upper, lower, out_scale_ptr, out_desc, stage, start_m, start_n, M, N, BLOCK)
                else:
                    store_int8(upper, lower, out_scale_ptr, out_desc, stage, start_m, start_n, M, N, BLOCK)
            elif TMA_STORE:
                stage = out_stages.index(WHO)
                store_half(upper.to(out_desc.dtype), out_desc, stage, start_m, start_n)
                store_half(lower.to(out_desc.dtype), out_desc, stage, start_m + BELOW, start_n + RIGHT)
            else:
                out_dtype: gl.constexpr = out_ptr.dtype.element_ty
                rows = (part * M + m).to(gl.int64)[:, None]
                gl.store(out_ptr + rows * N + n[None, :], upper.to(out_dtype), mask=inside)
                rows += BELOW
                gl.store(out_ptr + rows * N + (n + RIGHT)[None, :], lower.to(out_dtype), mask=below)
        if TMA_STORE:
            tma.store_wait(0)

    @gluon.jit
    def _compute(
        a_scale_ptrs,
        b_scale_ptrs,
        a_descs,
        b_descs,
        bias_ptr,
        out_desc,
        out_ptr,
        out_scale_ptr,
        sizes,
        FORM: gl.constexpr,
        OVERLAP: gl.constexpr,
    ):
        """The sum of the products of pairs of operands, one after the other in the same float32 sums."""
        BLOCK: gl.constexpr = FORM.block
        STAGES: gl.constexpr = FORM.stages
        CONSUMERS: gl.constexpr = FORM.consumers
        WIDTH: gl.constexpr = 128 if BLOCK[1] > 128 else BLOCK[1]
        a_stages = gl.allocate_shared_memory(gl.int8, [STAGES, FORM.block_m, WIDTH], a_descs[0].layout)
        b_stages = gl.allocate_shared_memory(gl.int8, [STAGES, FORM.block_n, WIDTH], b_descs[0].layout)
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        out_stages = b_stages
        if FORM.tma_store:
            out_stages = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS, 64, 128], out_desc.layout)
        for i in gl.static_range(STAGES):
            mbarrier.init(ready.index(i), count=1)
            mbarrier.init(free.index(i), count=CONSUMERS)
        if CONSUMERS == 2:  # unused but initialized barriers would overlap Triton's shared memory for reductions
            for i in gl.static_range(2):
                mbarrier.init(turn.index(i), count=1)
        fence_async_shared()
        wait_for_previous_kernel(OVERLAP)
        pointers = (a_scale_ptrs, b_scale_ptrs, bias_ptr, out_ptr, out_scale_ptr)
        shared = (out_desc, a_stages, b_stages, out_stages, ready, free, turn)
        if CONSUMERS == 2:
            gl.warp_specialize(
                [
                    (_consume, (gl.constexpr(0), pointers, shared, sizes, FORM)),
                    (_consume, (gl.constexpr(1), pointers, shared, sizes, FORM)),
                    (_produce, (a_descs, b_descs, a_stages, b_stages, ready, free, sizes, FORM)),
                ],
                [4, 1],  # warps of the second and third
                [240, 24],  # their registers; the first one gets the rest
            )
        else:
            gl.warp_specialize(
                [
                    (_consume, (gl.constexpr(0), pointers, shared, sizes, FORM)),
                    (_produce, (a_descs, b_descs, a_stages, b_stages, ready, free, sizes, FORM)),
                ],
                [1],
                [24],
            )

    @gluon.jit(do_not_specialize=["M", "STEPS", "PARTS"])
    def _block_linear_specialized_kernel(
        a_scale_ptr,  # (cdiv(M, block[0]), cdiv(K, block[1])) fp32, block is FORM.block
        b_scale_ptr,  # (cdiv(N, block_b[0]), cdiv(K, block_b[1])) fp32
        a_desc,  # of (M, K) int8
        b_desc,  # of (N, K) int8
        bias_ptr,  # (N,) float
        out_desc,  # of (M, N) 16 bit or int8; unused without tma_store
        out_ptr,  # (PARTS, M, N) float
        out_scale_ptr,  # (cdiv(M, block[0]), cdiv(N, block[1])) fp32, for an int8 result
        M,
        N,
        K,
        STEPS,  # blocks along K in a part
        PARTS,  # of K, each with a result of its own
        FORM: gl.constexpr,
        OVERLAP: gl.constexpr = False,
    ):
        """out = a @ b.T + bias. Persistent: each of n programs computes every n-th tile of every part."""
        _compute(
            (a_scale_ptr,), (b_scale_ptr,), (a_desc,), (b_desc,),
            bias_ptr, out_desc, out_ptr, out_scale_ptr, (M, N, (K,), STEPS, PARTS),
            FORM, OVERLAP,
        )  # fmt: skip

    @gluon.jit(do_not_specialize=["M", "STEPS"])
    def _block_linear_sum_specialized_kernel(
        a_scale_ptr,  # as above, of the first pair of operands
        b_scale_ptr,
        a_desc,
        b_desc,
        a2_scale_ptr,  # of the second pair, whose inner size is K2
        b2_scale_ptr,
        a2_desc,
        b2_desc,
        a3_scale_ptr,  # of the third pair, used if FORM.pairs is 3
        b3_scale_ptr,
        a3_desc,
        b3_desc,
        out_desc,
        out_ptr,  # (M, N)
        out_scale_ptr,
        M,
        N,
        K,
        K2,
        K3,
        STEPS,  # blocks along the longest K
        FORM: gl.constexpr,
        OVERLAP: gl.constexpr = False,
    ):
        """out = a @ b.T + a2 @ b2.T + a3 @ b3.T. Persistent, as above."""
        _compute(
            (a_scale_ptr, a2_scale_ptr, a3_scale_ptr), (b_scale_ptr, b2_scale_ptr, b3_scale_ptr),
            (a_desc, a2_desc, a3_desc), (b_desc, b2_desc, b3_desc),
            b_scale_ptr, out_desc, out_ptr, out_scale_ptr, (M, N, (K, K2, K3), STEPS, 1),
            FORM, OVERLAP,
        )  # fmt: skip

    kernel: Any = _block_linear_specialized_kernel
    sum_kernel: Any = _block_linear_sum_specialized_kernel
