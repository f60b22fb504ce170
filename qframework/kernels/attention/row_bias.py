"""Smooth Q (SageAttention2): exact logits of the means of query blocks, which quantization subtracts.

Formula::

    out[m, n] = q_mean[m] (k[n] - k_mean)^T        in float32, never in TF32

The mean of K is subtracted first to keep precision. Layout: ``q_mean (B, H, M, D)`` float32, ``k (B, Hkv, Nk, D)``
float of any strides, ``k_mean (B, Hkv, 1, D)`` float32 or None; ``out (B, H, M, Nk)`` float32. Reference:
``row_bias_ref``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qframework.kernels.attention.operands import AttentionShape, last_contiguous, sequence_of
from qframework.kernels.runtime.launch import cdiv, launch
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import tl, triton
from qframework.numerics import exact_matmul


def row_bias_ref(q_mean: Tensor, k: Tensor, k_mean: Tensor | None) -> Tensor:
    """Reference, and the CPU implementation."""
    keys = k.float() if k_mean is None else k.float() - k_mean
    grouped = q_mean.unflatten(1, (k.shape[1], -1))
    return exact_matmul(grouped, keys.unsqueeze(2).mT).flatten(1, 2).contiguous()


@triton.jit(do_not_specialize=["M", "NK", "TOTAL"])
def _row_bias_kernel(
    q_mean_ptr,  # (B, H, M, D) fp32
    k_ptr,  # (B, Hkv, Nk, D) float, or (total, Hkv, D) with starts_ptr
    k_mean_ptr,  # (B, Hkv, 1, D) fp32
    starts_ptr,  # (B + 1,) int32, for VARLEN
    out_ptr,  # (B, H, M, Nk) fp32
    H,
    M,
    NK,
    TOTAL,
    stride_kb,
    stride_kh,
    stride_kn,
    D: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of one key head
    MEAN: tl.constexpr,
    VARLEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Grid (cdiv(Nk, BLOCK_N) * cdiv(M, BLOCK_M) * H * B,); a program computes BLOCK_M x BLOCK_N logits of one head."""
    wait_for_previous_kernel(OVERLAP)
    columns, rows = tl.cdiv(NK, BLOCK_N), tl.cdiv(M, BLOCK_M)
    pid = tl.program_id(0).to(tl.int64)
    column, row, head = (pid % columns).to(tl.int32), ((pid // columns) % rows).to(tl.int32), pid // (columns * rows)
    b, h = head // H, head % H
    kv = h // GROUP
    k_base, keys = k_ptr + b * stride_kb + kv * stride_kh, NK
    if VARLEN:
        start, keys = sequence_of(starts_ptr, b, TOTAL, NK)
        k_base = k_ptr + start * stride_kn + kv * stride_kh
    m = row * BLOCK_M + tl.arange(0, BLOCK_M)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    k_mean_base = k_mean_ptr + (b * (H // GROUP) + kv) * D
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in tl.static_range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        q_mask, k_mask = (m < M)[:, None] & (d < D)[None, :], (n < keys)[None, :] & (d < D)[:, None]
        q = tl.load(q_mean_ptr + (head * M + m)[:, None] * D + d[None, :], mask=q_mask, other=0.0)
        k = tl.load(k_base + n[None, :] * stride_kn + d[:, None], mask=k_mask, other=0.0).to(tl.float32)
        if MEAN:
            k = tl.where(k_mask, k - tl.load(k_mean_base + d, mask=d < D, other=0.0)[:, None], 0.0)
        acc = tl.dot(q, k, acc, input_precision="ieee")
    out_ptrs = out_ptr + (head * M + m)[:, None] * NK + n[None, :]
    tl.store(out_ptrs, acc, mask=(m < M)[:, None] & (n < NK)[None, :])


def row_bias_triton(
    q_mean: Tensor, k: Tensor, k_mean: Tensor | None, starts: Tensor | None = None, longest: int = 0
) -> Tensor:
    """``row_bias_ref`` on a GPU. With ``starts`` keys are packed ``(total, Hkv, D)``; past a sequence's end it is 0."""
    k = last_contiguous(k)
    shape = AttentionShape.of(k, starts, longest)
    batch, heads, blocks, channels = q_mean.shape
    out = torch.empty((batch, heads, blocks, shape.tokens), dtype=torch.float32, device=k.device)
    block_m = 16 if blocks <= 16 else 32
    launch(_row_bias_kernel, (cdiv(shape.tokens, 64) * cdiv(blocks, block_m) * heads * batch,))(
        q_mean,
        k,
        k_mean if k_mean is not None else q_mean,
        starts if starts is not None else k,
        out,
        heads,
        blocks,
        shape.tokens,
        shape.total,
        *shape.strides(k),
        D=channels,
        GROUP=heads // shape.heads,
        MEAN=k_mean is not None,
        VARLEN=starts is not None,
        BLOCK_M=block_m,
        BLOCK_N=64,
        BLOCK_D=32,
        num_warps=4,
    )
    return out
