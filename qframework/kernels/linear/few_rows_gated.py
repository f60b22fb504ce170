"""int8_gated_linear's kernel for few rows: few_rows.py's, with two weights whose products one epilogue multiplies.

A program reads the same rows of both weights and holds both products of its results, so that neither is written to
memory, and the rows of ``a`` are read once for both.
"""

from __future__ import annotations

from typing import Any

from qframework.kernels.linear.epilogue import (
    before_gate,
    finish_gated,
    fold_columns,
    load_columns,
    load_rows,
)
from qframework.kernels.linear.few_rows import prefetch
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import tl, triton


@triton.jit(do_not_specialize=["M", "PA"])
def _int8_gated_few_rows_kernel(
    a_ptr,  # (M, K) int8
    a_scale_ptr,  # (PA,) fp32, PA is 1, M or the number of positions
    gate_ptr,  # (N, K) int8
    gate_scale_ptr,  # (N,) or (1,) fp32
    gate_bias_ptr,  # (N,) float
    up_ptr,  # like the gate's
    up_scale_ptr,
    up_bias_ptr,
    out_scale_ptr,  # (1,) fp32, with out_scale "tensor"
    zero_point_ptr,  # (1,) int32, with zero_point
    out_ptr,  # (M, N) 16 bit or int8
    M,
    N,
    K,
    PA,
    stride_am,
    stride_gate,
    stride_up,
    EPILOGUE: tl.constexpr,  # EpilogueForm
    ALIGNED: tl.constexpr,  # divides K and all strides
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,  # at least M
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,  # channels of both weights to prefetch, a multiple of CHUNK
    OVERLAP: tl.constexpr = False,
):
    """out = activation(a @ gate.T) * (a @ up.T).

    Grid (cdiv(N, BLOCK_N),): a program computes all rows of BLOCK_N columns.
    """
    # Triton knows by itself of multiples of 16 only, and would load others byte by byte.
    K = K // ALIGNED * ALIGNED
    stride_am = stride_am // ALIGNED * ALIGNED
    stride_gate = stride_gate // ALIGNED * ALIGNED
    stride_up = stride_up // ALIGNED * ALIGNED
    start_n = tl.program_id(0) * BLOCK_N
    each = tl.arange(0, BLOCK_N)
    n = ((start_n + each) % N).to(tl.int64)  # columns past the edge wrap around; their results are not stored
    gate_rows = gate_ptr + n * stride_gate
    up_rows = up_ptr + n * stride_up
    if OVERLAP and AHEAD > 0:
        prefetch(gate_rows, 0, K, AHEAD)
        prefetch(up_rows, 0, K, AHEAD)
    wait_for_previous_kernel(OVERLAP)
    m = tl.arange(0, BLOCK_M)
    EACH: tl.constexpr = before_gate(EPILOGUE)
    rows = load_rows(a_scale_ptr, out_scale_ptr, m, M, PA, 1, EACH)  # all of these before the product: it hides them
    of_gate = load_columns(
        a_scale_ptr, gate_scale_ptr, gate_bias_ptr, out_scale_ptr, zero_point_ptr, start_n, each, N, EACH
    )
    of_up = load_columns(a_scale_ptr, up_scale_ptr, up_bias_ptr, out_scale_ptr, zero_point_ptr, start_n, each, N, EACH)
    of_gate = fold_columns(of_gate, EACH)
    of_up = fold_columns(of_up, EACH)
    k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + m.to(tl.int64)[:, None] * stride_am + k[None, :]
    gate_ptrs = gate_rows[None, :] + k[:, None]
    up_ptrs = up_rows[None, :] + k[:, None]
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=(m < M)[:, None], other=0)
            gate_k = tl.load(gate_ptrs)
            up_k = tl.load(up_ptrs)
        else:
            inside = k < K - start
            a = tl.load(a_ptrs, mask=(m < M)[:, None] & inside[None, :], other=0)
            gate_k = tl.load(gate_ptrs, mask=inside[:, None], other=0)
            up_k = tl.load(up_ptrs, mask=inside[:, None], other=0)
        gate = tl.dot(a, gate_k, gate, out_dtype=tl.int32)
        up = tl.dot(a, up_k, up, out_dtype=tl.int32)
        a_ptrs += BLOCK_K
        gate_ptrs += BLOCK_K
        up_ptrs += BLOCK_K
    out = finish_gated(
        gate, up, of_gate, of_up, rows, out_scale_ptr, zero_point_ptr, out_ptr.dtype.element_ty, EPILOGUE
    )
    columns = start_n + each
    to = out_ptr + m.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(to, out, mask=(m < M)[:, None] & (columns < N)[None, :])


kernel: Any = _int8_gated_few_rows_kernel
