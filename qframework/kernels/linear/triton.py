"""int8_linear's Triton kernel. The operator, its formula and its checks are in int8_linear.py."""

from __future__ import annotations

from qframework.kernels.linear.epilogue import finish, fold_columns, load_columns, load_rows
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import tl, triton


@triton.jit(do_not_specialize=["M", "PA", "PO"])
def _int8_linear_kernel(
    a_ptr,  # (M, K) int8; a descriptor with TMA, like b
    a_scale_ptr,  # (PA,) fp32, PA is 1, M or the number of positions
    b_ptr,  # (N, K) int8
    b_scale_ptr,  # (N,) or (1,) fp32
    bias_ptr,  # (N,) float
    residual_ptr,  # (M, N) float
    out_scale_ptr,  # (PO,) fp32, likewise; (N,) with out_scale "channel"
    zero_point_ptr,  # (1,) int32, with zero_point
    out_ptr,  # (M, N) float or int8; a descriptor with TMA_STORE
    M,
    N,
    K,
    PA,
    PO,
    stride_am,
    stride_bn,
    stride_rm,
    stride_om,
    EPILOGUE: tl.constexpr,  # EpilogueForm
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    WALK: tl.constexpr,  # "grid", "line" or "persistent"
    SUBTILES: tl.constexpr,
    TMA: tl.constexpr,
    TMA_STORE: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """out = epilogue(a @ b.T), tile by tile.

    WALK assigns tiles to programs. "grid": one tile per program, in a grid of two dimensions. "line": one tile per
    program, ordered in groups (see ``place``). "persistent": program p of P takes tiles p, p + P, ... of that order;
    its loops over tiles and over K are one pipeline, so it loads the next tile during the epilogue of this one.
    """
    wait_for_previous_kernel(OVERLAP)
    if WALK == "grid":
        tile_of_out(
            tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N,
            a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, bias_ptr, residual_ptr, out_scale_ptr, zero_point_ptr, out_ptr,
            M, N, K, PA, PO, stride_am, stride_bn, stride_rm, stride_om,
            EPILOGUE, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, SUBTILES, TMA, TMA_STORE, EARLY=SUBTILES == 1,
        )  # fmt: skip
    else:
        tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=WALK == "persistent"):
            start_m, start_n = place(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
            tile_of_out(
                start_m, start_n,
                a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, bias_ptr, residual_ptr, out_scale_ptr, zero_point_ptr, out_ptr,
                M, N, K, PA, PO, stride_am, stride_bn, stride_rm, stride_om,
                EPILOGUE, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, SUBTILES, TMA, TMA_STORE,
                EARLY=WALK == "line" and SUBTILES == 1,
            )  # fmt: skip


@triton.jit
def place(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """First row and column of tile number ``tile``.

    The order goes through GROUP_M rows of tiles before the next column of tiles, so that tiles of b stay in L2.
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    group = tile // (GROUP_M * tiles_n)
    rows_in_group = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    return (group * GROUP_M + within % rows_in_group) * BLOCK_M, (within // rows_in_group) * BLOCK_N


@triton.jit
def first_inside(start, size, block: tl.constexpr):
    """The first row or column of a tile, moved back where the tile would end past the matrix.

    That tile computes some results of the one before it again. Rows past the end would cost more: TMA fills them with
    zeros, which slows down the whole chip (``other/2026-11-30-h200-rows-past-the-end.json``).
    """
    return tl.minimum(start, tl.maximum(size - block, 0))


@triton.jit
def tile_of_out(
    start_m,
    start_n,
    a_ptr,
    a_scale_ptr,
    b_ptr,
    b_scale_ptr,
    bias_ptr,
    residual_ptr,
    out_scale_ptr,
    zero_point_ptr,
    out_ptr,
    M,
    N,
    K,
    PA,
    PO,
    stride_am,
    stride_bn,
    stride_rm,
    stride_om,
    EPILOGUE: tl.constexpr,  # EpilogueForm
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUBTILES: tl.constexpr,
    TMA: tl.constexpr,
    TMA_STORE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Multiply one tile, then run the epilogue and store it in SUBTILES parts.

    Smaller parts leave shared memory to the operands of the next tile. With EARLY, scales and bias are loaded before
    the product to hide the latency of memory.
    """
    out_dtype: tl.constexpr = out_ptr.dtype if TMA_STORE else out_ptr.dtype.element_ty
    width: tl.constexpr = BLOCK_N // SUBTILES
    if TMA:
        start_m = first_inside(start_m, M, BLOCK_M)
        start_n = first_inside(start_n, N, BLOCK_N)
    m = start_m + tl.arange(0, BLOCK_M)
    n = start_n + tl.arange(0, BLOCK_N)
    if EARLY:
        rows = load_rows(a_scale_ptr, out_scale_ptr, m, M, PA, PO, EPILOGUE)
        each = tl.arange(0, BLOCK_N)
        columns = load_columns(
            a_scale_ptr, b_scale_ptr, bias_ptr, out_scale_ptr, zero_point_ptr, start_n, each, N, EPILOGUE
        )
        columns = fold_columns(columns, EPILOGUE)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    if TMA:
        for start in range(0, K, BLOCK_K):
            acc = tl.dot(a_ptr.load([start_m, start]), b_ptr.load([start_n, start]).T, acc, out_dtype=tl.int32)
    else:
        # Rows past the edge wrap around instead of being masked; their results are not stored.
        k = tl.arange(0, BLOCK_K)
        a_ptrs = a_ptr + (m % M).to(tl.int64)[:, None] * stride_am + k[None, :]
        b_ptrs = b_ptr + (n % N).to(tl.int64)[None, :] * stride_bn + k[:, None]
        for start in range(0, K, BLOCK_K):
            if EVEN_K:
                a = tl.load(a_ptrs)
                b = tl.load(b_ptrs)
            else:
                a = tl.load(a_ptrs, mask=k[None, :] < K - start, other=0)
                b = tl.load(b_ptrs, mask=k[:, None] < K - start, other=0)
            acc = tl.dot(a, b, acc, out_dtype=tl.int32)
            a_ptrs += BLOCK_K
            b_ptrs += BLOCK_K

    if SUBTILES == 1:
        parts = (acc,)
    elif SUBTILES == 2:
        parts = _halves(acc)
    else:
        left, right = _halves(acc)
        parts = _halves(left) + _halves(right)
    if not EARLY:
        rows = load_rows(a_scale_ptr, out_scale_ptr, m, M, PA, PO, EPILOGUE)
    for part in tl.static_range(SUBTILES):
        start = start_n + part * width
        each = tl.arange(0, width)
        n = start + each
        if not EARLY:
            columns = load_columns(
                a_scale_ptr, b_scale_ptr, bias_ptr, out_scale_ptr, zero_point_ptr, start, each, N, EPILOGUE
            )
            columns = fold_columns(columns, EPILOGUE)
        inside = (m < M)[:, None] & (n < N)[None, :]
        residual = columns[0]
        if EPILOGUE.has_residual:
            pointers = residual_ptr + m.to(tl.int64)[:, None] * stride_rm + n[None, :]
            residual = tl.load(pointers, mask=inside, other=0.0)
        out = finish(parts[part], columns, rows, residual, out_dtype, EPILOGUE)
        if TMA_STORE:
            out_ptr.store([start_m, start_n + part * width], out)
        else:
            tl.store(out_ptr + m.to(tl.int64)[:, None] * stride_om + n[None, :], out, mask=inside)


@triton.jit
def _halves(x):
    """The left and right halves of the columns."""
    return x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()
