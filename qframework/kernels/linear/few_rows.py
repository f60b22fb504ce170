"""int8_linear's kernels for few rows, as in decoding, where reading the weight takes all of the time.

A product of up to 64 rows does a few operations for each byte of the weight, so its time is that of reading the weight
from memory, once. Three things keep memory busy:

- Tiles of few columns, so that every multiprocessor has a part of the weight, and of many channels, so that much of it
  is under way at a time.
- Where the rows outweigh a tile's part of the weight, which each program reads from L2, tiles are wider, and PARTS
  programs share the channels of a tile. They store their INT32 sums, and a second kernel adds them and runs the
  epilogue. Integer sums do not depend on their order, so the result is that of a single program.
- On sm_90 and newer, a program starts while the kernel before it runs, and prefetches the first AHEAD channels of its
  part of the weight before it waits for that kernel. That is safe for a weight which an earlier kernel still writes:
  all writes arrive in L2, so nothing stale is read from there.
"""

from __future__ import annotations

from qframework.kernels.linear.epilogue import finish, fold_columns, load_columns, load_rows
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import tl, triton

CHUNK = 256  # bytes of one prefetch


@triton.jit(do_not_specialize=["M", "PA", "PO"])
def _int8_linear_few_rows_kernel(
    a_ptr,  # (M, K) int8
    a_scale_ptr,  # (PA,) fp32, PA is 1, M or the number of positions
    b_ptr,  # (N, K) int8
    b_scale_ptr,  # (N,) or (1,) fp32
    bias_ptr,  # (N,) float
    residual_ptr,  # (M, N) float
    out_scale_ptr,  # (PO,) fp32, likewise; (N,) with out_scale "channel"
    zero_point_ptr,  # (1,) int32, with zero_point
    out_ptr,  # (M, N) float or int8; (PARTS, M, N) int32 with several parts
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
    ALIGNED: tl.constexpr,  # divides K and the strides of a and b
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,  # at least M
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    AHEAD: tl.constexpr,  # channels of b to prefetch, a multiple of CHUNK
    OVERLAP: tl.constexpr = False,
):
    """out = epilogue(a @ b.T), or INT32 sums of a part of K.

    Grid (cdiv(N, BLOCK_N), PARTS): a program computes all rows of BLOCK_N columns from one part of K.
    """
    # Triton knows by itself of multiples of 16 only, and would load others byte by byte.
    K = K // ALIGNED * ALIGNED
    stride_am = stride_am // ALIGNED * ALIGNED
    stride_bn = stride_bn // ALIGNED * ALIGNED
    start_n = tl.program_id(0) * BLOCK_N
    steps = tl.cdiv(K, BLOCK_K)
    first = tl.program_id(1) * tl.cdiv(steps, PARTS) * BLOCK_K
    last = tl.minimum(first + tl.cdiv(steps, PARTS) * BLOCK_K, K)
    n = start_n + tl.arange(0, BLOCK_N)
    b_rows = b_ptr + (n % N).to(tl.int64) * stride_bn  # rows past the edge wrap around; their results are not stored
    if OVERLAP and AHEAD > 0:
        prefetch(b_rows, first, K, AHEAD)
    wait_for_previous_kernel(OVERLAP)
    m = tl.arange(0, BLOCK_M)
    if PARTS == 1:  # hides the latency of these loads
        rows = load_rows(a_scale_ptr, out_scale_ptr, m, M, PA, PO, EPILOGUE)
        each = tl.arange(0, BLOCK_N)
        columns = load_columns(
            a_scale_ptr, b_scale_ptr, bias_ptr, out_scale_ptr, zero_point_ptr, start_n, each, N, EPILOGUE
        )
        columns = fold_columns(columns, EPILOGUE)
    k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + first + m.to(tl.int64)[:, None] * stride_am + k[None, :]
    b_ptrs = b_rows[None, :] + first + k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for start in range(first, last, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=(m < M)[:, None], other=0)
            b = tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs, mask=(m < M)[:, None] & (k[None, :] < K - start), other=0)
            b = tl.load(b_ptrs, mask=k[:, None] < K - start, other=0)
        acc = tl.dot(a, b, acc, out_dtype=tl.int32)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K
    if PARTS == 1:
        _finish_and_store(
            acc, m, n, rows, columns, residual_ptr, out_ptr, M, N, stride_rm, stride_om, EPILOGUE
        )  # fmt: skip
    else:
        sums = out_ptr + (tl.program_id(1) * M + m).to(tl.int64)[:, None] * stride_om + n[None, :]
        tl.store(sums, acc, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["M", "PA", "PO"])
def _add_parts_kernel(
    parts_ptr,  # (PARTS, M, N) int32
    a_scale_ptr,  # this and the following as above
    b_scale_ptr,
    bias_ptr,
    residual_ptr,
    out_scale_ptr,
    zero_point_ptr,
    out_ptr,  # (M, N) float or int8
    M,
    N,
    PA,
    PO,
    stride_rm,
    stride_om,
    EPILOGUE: tl.constexpr,  # EpilogueForm
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """out = epilogue(sum of the parts). Grid (cdiv(M, BLOCK_M), cdiv(N, BLOCK_N)), one tile per program."""
    wait_for_previous_kernel(OVERLAP)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    start_n = tl.program_id(1) * BLOCK_N
    each = tl.arange(0, BLOCK_N)
    n = start_n + each
    rows = load_rows(a_scale_ptr, out_scale_ptr, m, M, PA, PO, EPILOGUE)
    columns = load_columns(
        a_scale_ptr, b_scale_ptr, bias_ptr, out_scale_ptr, zero_point_ptr, start_n, each, N, EPILOGUE
    )
    columns = fold_columns(columns, EPILOGUE)
    sums = parts_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for part in tl.static_range(PARTS):
        acc += tl.load(sums + part * M.to(tl.int64) * N, mask=inside, other=0)
    _finish_and_store(acc, m, n, rows, columns, residual_ptr, out_ptr, M, N, stride_rm, stride_om, EPILOGUE)


@triton.jit
def _finish_and_store(
    acc, m, n, rows, columns, residual_ptr, out_ptr, M, N, stride_rm, stride_om, EPILOGUE: tl.constexpr
):  # fmt: skip
    """The epilogue of rows ``m`` and columns ``n``."""
    inside = (m < M)[:, None] & (n < N)[None, :]
    residual = columns[0]
    if EPILOGUE.has_residual:
        pointers = residual_ptr + m.to(tl.int64)[:, None] * stride_rm + n[None, :]
        residual = tl.load(pointers, mask=inside, other=0.0)
    out = finish(acc, columns, rows, residual, out_ptr.dtype.element_ty, EPILOGUE)
    tl.store(out_ptr + m.to(tl.int64)[:, None] * stride_om + n[None, :], out, mask=inside)


@triton.jit
def prefetch(rows, first, K, AHEAD: tl.constexpr):
    """Prefetch ``rows[first : first + AHEAD]`` into L2; the pointers are multiples of 16 bytes, K is at least 256."""
    columns = tl.minimum(first + tl.arange(0, AHEAD // 256) * 256, K - 256)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 256; mov.b32 $0, 0;",
        "=r,l", [rows[:, None] + columns[None, :]], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
