"""block_linear's Triton kernels, for every size and chip. The operators and their formulas are in block_linear.py."""

from __future__ import annotations

from qframework.kernels.blocks.primitives import quantize_tile, store_tile
from qframework.kernels.linear.triton import place
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import tl, triton


@triton.jit(do_not_specialize=["M", "DEPTH"])
def _block_linear_kernel(
    a_scale_ptr,  # (cdiv(M, BLOCK[0]), cdiv(K, BLOCK[1])) fp32
    b_scale_ptr,  # (cdiv(N, BLOCK_B[0]), cdiv(K, BLOCK_B[1])) fp32
    a_ptr,  # (M, K) int8; a descriptor with TMA, like b
    b_ptr,  # (N, K) int8
    bias_ptr,  # (N,) float
    out_ptr,  # (parts, M, N) float, or (M, N) int8
    out_scale_ptr,  # (cdiv(M, BLOCK[0]), cdiv(N, BLOCK[1])) fp32, of an int8 result
    M,
    N,
    K,
    DEPTH,  # blocks along K in a part
    BLOCK: tl.constexpr,  # of a and the result
    BLOCK_B: tl.constexpr,  # with as many columns
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    STEP: tl.constexpr,  # columns of a block that are loaded at a time
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    TMA: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """out = a @ b.T + bias. Grid (tiles, parts): a program computes one tile, or one part of K of it."""
    wait_for_previous_kernel(OVERLAP)
    start_m, start_n = place(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    part = tl.program_id(1)
    y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    y = _add_product(
        y, a_scale_ptr, b_scale_ptr, a_ptr, b_ptr, start_m, start_n, M, N, K, part * DEPTH, part * DEPTH + DEPTH,
        BLOCK, BLOCK_B, EVEN_K, STEP, BLOCK_M, BLOCK_N, TMA,
    )  # fmt: skip
    if HAS_BIAS:
        n = start_n + tl.arange(0, BLOCK_N)
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    _store(y, out_ptr, out_scale_ptr, start_m, start_n, part, M, N, BLOCK)


@triton.jit(do_not_specialize=["M"])
def _block_linear_sum_kernel(
    a_scale_ptr,  # as above, of the first pair of operands
    b_scale_ptr,
    a_ptr,
    b_ptr,
    a2_scale_ptr,  # of the second pair, whose inner size is K2
    b2_scale_ptr,
    a2_ptr,
    b2_ptr,
    a3_scale_ptr,  # of the third pair, used if PAIRS is 3
    b3_scale_ptr,
    a3_ptr,
    b3_ptr,
    out_ptr,  # (M, N) float or int8
    out_scale_ptr,
    M,
    N,
    K,
    K2,
    K3,
    PAIRS: tl.constexpr,  # 2 or 3
    BLOCK: tl.constexpr,
    BLOCK_B: tl.constexpr,
    EVEN_K: tl.constexpr,  # of all pairs
    STEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    TMA: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """out = a @ b.T + a2 @ b2.T + a3 @ b3.T. Grid (tiles,): a program computes one tile."""
    wait_for_previous_kernel(OVERLAP)
    start_m, start_n = place(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    y = _add_product(
        y, a_scale_ptr, b_scale_ptr, a_ptr, b_ptr, start_m, start_n, M, N, K, 0, tl.cdiv(K, BLOCK[1]),
        BLOCK, BLOCK_B, EVEN_K, STEP, BLOCK_M, BLOCK_N, TMA,
    )  # fmt: skip
    y = _add_product(
        y, a2_scale_ptr, b2_scale_ptr, a2_ptr, b2_ptr, start_m, start_n, M, N, K2, 0, tl.cdiv(K2, BLOCK[1]),
        BLOCK, BLOCK_B, EVEN_K, STEP, BLOCK_M, BLOCK_N, TMA,
    )  # fmt: skip
    if PAIRS == 3:
        y = _add_product(
            y, a3_scale_ptr, b3_scale_ptr, a3_ptr, b3_ptr, start_m, start_n, M, N, K3, 0, tl.cdiv(K3, BLOCK[1]),
            BLOCK, BLOCK_B, EVEN_K, STEP, BLOCK_M, BLOCK_N, TMA,
        )  # fmt: skip
    _store(y, out_ptr, out_scale_ptr, start_m, start_n, tl.program_id(1), M, N, BLOCK)


@triton.jit
def _add_product(
    y,
    a_scale_ptr,
    b_scale_ptr,
    a_ptr,
    b_ptr,
    start_m,
    start_n,
    M,
    N,
    K,
    first,
    last,
    BLOCK: tl.constexpr,
    BLOCK_B: tl.constexpr,
    EVEN_K: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TMA: tl.constexpr,
):
    """A tile ``y`` plus the product of the blocks ``first`` to ``last`` along K."""
    across = tl.cdiv(K, BLOCK[1])
    m = start_m + tl.arange(0, BLOCK_M)
    n = start_n + tl.arange(0, BLOCK_N)
    # Rows past the edge wrap around instead of being masked. Their results are not stored.
    k = tl.arange(0, STEP)
    a_rows = (m % M).to(tl.int64)[:, None] * K + k[None, :]
    b_rows = (n % N).to(tl.int64)[None, :] * K + k[:, None]
    STEPS: tl.constexpr = BLOCK[1] // STEP
    for step in range(first * STEPS, tl.minimum(last, across) * STEPS):
        block = step // STEPS
        # Scales are loaded before the product and used after it, so that the load overlaps with the tensor cores.
        of_rows = spread_scales(a_scale_ptr, start_m, M, block, across, BLOCK_M, BLOCK[0])
        of_columns = spread_scales(b_scale_ptr, start_n, N, block, across, BLOCK_N, BLOCK_B[0])
        start = step * STEP
        if TMA:
            acc = tl.dot(a_ptr.load([start_m, start]), b_ptr.load([start_n, start]).T, out_dtype=tl.int32)
        elif EVEN_K:
            acc = tl.dot(tl.load(a_ptr + a_rows + start), tl.load(b_ptr + b_rows + start), out_dtype=tl.int32)
        else:
            a = tl.load(a_ptr + a_rows + start, mask=k[None, :] < K - start, other=0)
            b = tl.load(b_ptr + b_rows + start, mask=k[:, None] < K - start, other=0)
            acc = tl.dot(a, b, out_dtype=tl.int32)
        y = tl.fma(acc.to(tl.float32), of_rows[:, None] * of_columns[None, :], y)
    return y


@triton.jit
def _store(y, out_ptr, out_scale_ptr, start_m, start_n, part, M, N, BLOCK: tl.constexpr):
    """Round a tile and store it: in blocks, or as float in the result of its part of K."""
    m = start_m + tl.arange(0, y.shape[0])
    n = start_n + tl.arange(0, y.shape[1])
    inside = (m < M)[:, None] & (n < N)[None, :]
    if out_ptr.dtype.element_ty == tl.int8:
        q, scale = quantize_tile(tl.where(inside, y, 0.0), BLOCK)
        store_tile(out_ptr, out_scale_ptr, q, scale, start_m, start_n, M, N, BLOCK)
    else:
        rows = part.to(tl.int64) * M + m
        tl.store(out_ptr + rows[:, None] * N + n[None, :], y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def spread_scales(scale_ptr, start, SIZE, block, across, LENGTH: tl.constexpr, HEIGHT: tl.constexpr):
    """Scales of the LENGTH rows from ``start``, of SIZE rows, in block ``block`` along K: fp32 (LENGTH,).

    HEIGHT rows share a scale. Shared scales are loaded once each, as scalars, and selected by comparisons, which the
    compiler resolves for columns since a thread's columns are known. A vector of addresses would be a load per column.
    """
    row = tl.arange(0, LENGTH)
    if HEIGHT == 1:
        scale = tl.load(scale_ptr + tl.minimum(start + row, SIZE - 1) * across + block)
    else:
        first = start // HEIGHT
        last = (SIZE - 1) // HEIGHT
        scale = tl.load(scale_ptr + tl.minimum(first, last) * across + block) + tl.zeros((LENGTH,), tl.float32)
        for i in tl.static_range(1, LENGTH // HEIGHT):
            other = tl.load(scale_ptr + tl.minimum(first + i, last) * across + block)
            scale = tl.where(row >= i * HEIGHT, other, scale)
    return scale
