"""The forward pass of attention with dropout whose gradient is computed in 8 bit, in Triton and in plain torch.

Formula: ``O = (m P / (1 - p)) V`` with ``P = softmax(S)`` of INT8 products and the mask m of
:mod:`~qframework.kernels.attention.dropout`; the log-sum-exp is that of all logits. P and V are multiplied in 16 bit.
Layout: see :mod:`~qframework.kernels.attention.int8_gradient.int8_gradient`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qframework.kernels.attention.dropout import factor_of, keep_ref, kept, key_words, query_words, threshold_of
from qframework.kernels.attention.int8_gradient.reference import GradientTile, logits_ref, repeat_heads
from qframework.kernels.attention.int8_gradient.steps import (
    KEYS_OF_SCALE,
    QUERIES_OF_SCALE,
    TO_BASE_2,
    float_dot,
    load_tokens,
)
from qframework.kernels.attention.int8_gradient.triton import low_precision
from qframework.kernels.attention.operands import LOG2_E, QuantizedQK, query_memory_order
from qframework.kernels.attention.triton import Heads
from qframework.kernels.runtime.launch import cdiv, launch, power_of_2
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import tl, triton
from qframework.numerics import exact_matmul

_ROWS = 128  # queries of a step of the reference


class Dropout(NamedTuple):
    """Dropout of one call: the probability, and the seed, one int64 on the operands' device."""

    p: float
    seed: Tensor


def forward_ref(qk: QuantizedQK, v: Tensor, causal: bool, dropout: Dropout) -> tuple[Tensor, Tensor]:
    """``(out (B, H, N, Dv) in v's dtype, lse (B, H, N) fp32)``."""
    assert qk.q_scale is not None
    assert qk.k_scale is not None
    batch, heads, tokens, _ = qk.q.shape
    group = heads // v.shape[1]
    k, k_scale, values = (repeat_heads(x, group) for x in (qk.k, qk.k_scale, v))
    out = query_memory_order(batch, heads, tokens, v.shape[-1], v, v.dtype)
    lse = qk.q_scale.new_empty((batch, heads, tokens))
    for start in range(0, tokens, _ROWS):
        m = slice(start, min(start + _ROWS, tokens))
        s = logits_ref(qk.q, qk.q_scale, k, k_scale, m, causal, torch.float32)
        rows = torch.arange(m.start, m.stop, device=v.device)
        keep = keep_ref(dropout.seed, batch * heads, rows, k.shape[2], dropout.p).view(s.shape)
        lse[:, :, m] = torch.logsumexp(s * (1 / LOG2_E), -1)
        p = torch.where(keep, torch.softmax(s * (1 / LOG2_E), -1), 0.0).to(v.dtype).float()
        out[:, :, m] = (exact_matmul(p, values.float()) * factor_of(dropout.p)).to(v.dtype)
    return out, lse


@triton.jit
def _dropout_attention_kernel(
    Q,  # Heads of (B, H, N, D) int8
    K,  # Heads of (B, Hkv, Nk, D) int8
    V,  # Heads of (B, Hkv, Nk, Dv) 16 bit
    OUT,  # Heads of (B, H, N, Dv) float
    q_scale_ptr,  # (B, H, q_scales) fp32
    k_scale_ptr,  # (B, Hkv, k_scales) fp32
    seed_ptr,  # (1,) int64
    lse_ptr,  # (B, H, N) fp32
    threshold,
    factor,
    H,
    N,
    NK,
    q_scales,
    k_scales,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Grid (cdiv(N, BLOCK_M) * H * B,): one block of queries over all keys, with an online softmax in base 2."""
    wait_for_previous_kernel(OVERLAP)
    blocks = tl.cdiv(N, BLOCK_M)
    pid = tl.program_id(0).to(tl.int64)
    block, h, b = blocks - 1 - (pid % blocks).to(tl.int32), (pid // blocks) % H, pid // (blocks * H)
    hk, HKV = h // GROUP, H // GROUP
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    q = load_tokens(Q.data + b * Q.batch + h * Q.head, m, Q.token, d, N, D, BLOCK_D)
    q_scale = tl.load(q_scale_ptr + (b * H + h) * q_scales + block * BLOCK_M // QUERIES_OF_SCALE)
    marked = tl.min(q.to(tl.int32), 1) < -127  # rows that hold NaN or infinity
    q_scales_of_rows = tl.where(marked, float("nan"), q_scale)
    seed = tl.load(seed_ptr)
    words = query_words(seed, m, b * H + h)
    k_base, v_base = K.data + b * K.batch + hk * K.head, V.data + b * V.batch + hk * V.head
    k_scale_base = k_scale_ptr + (b * HKV + hk) * k_scales
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    end = tl.minimum((block + 1) * BLOCK_M, NK) if CAUSAL else NK
    for start in range(0, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        k = load_tokens(k_base, n, K.token, d, NK, D, BLOCK_D)
        k_scale = tl.load(k_scale_base + start // KEYS_OF_SCALE)
        s = tl.dot(q, tl.trans(k), out_dtype=tl.int32).to(tl.float32) * (q_scales_of_rows * k_scale)[:, None]
        seen = (n < NK)[None, :]
        if CAUSAL:
            seen = seen & (n[None, :] <= m[:, None])
        s = tl.where(seen, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new_top[:, None])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(p, 1)
        p = tl.where(kept(words[:, None], key_words(seed, n, b * H + h)[None, :], threshold), p, p * 0.0)
        v = load_tokens(v_base, n, V.token, dv, NK, DV, BLOCK_DV)
        acc = float_dot(p.to(v.dtype), v, acc * rescale[:, None])
        top = new_top
    rows = (b * H + h) * N + m
    tl.store(lse_ptr + rows, (top + tl.log2(total)) / TO_BASE_2, mask=m < N)
    at = OUT.data + b * OUT.batch + h * OUT.head + m[:, None] * OUT.token + dv[None, :]
    out = (acc * (factor / total)[:, None]).to(OUT.data.dtype.element_ty)
    tl.store(at, out, mask=(m < N)[:, None] & (dv < DV)[None, :])


_INTERPRETED = GradientTile(32, 64, 4, 1)


def choose_forward_tile(head_dim: int) -> GradientTile:
    """Tile of the kernel; blocks of keys have one scale, so at most 64 keys."""
    return GradientTile(64, 32, 4, 2) if head_dim > 128 else GradientTile(128, 64, 8, 2)


def forward_triton(qk: QuantizedQK, v: Tensor, causal: bool, dropout: Dropout) -> tuple[Tensor, Tensor]:
    """``forward_ref`` on a GPU; float32 values are multiplied in BF16."""
    assert qk.q_scale is not None
    assert qk.k_scale is not None
    batch, heads, tokens, channels = qk.q.shape
    value = low_precision(v)
    out = query_memory_order(batch, heads, tokens, v.shape[-1], v, v.dtype)
    lse = torch.empty((batch, heads, tokens), dtype=torch.float32, device=v.device)
    tile = choose_forward_tile(max(channels, v.shape[-1])) if v.device.type == "cuda" else _INTERPRETED
    launch(_dropout_attention_kernel, (cdiv(tokens, tile.block_m) * heads * batch,))(
        *(Heads(x, x.stride(0), x.stride(1), x.stride(2)) for x in (qk.q, qk.k, value, out)),
        *(qk.q_scale, qk.k_scale, dropout.seed, lse, threshold_of(dropout.p), factor_of(dropout.p)),
        *(heads, tokens, qk.k.shape[2], qk.q_scale.shape[2], qk.k_scale.shape[2]),
        GROUP=heads // qk.k.shape[1],
        D=channels,
        DV=v.shape[-1],
        BLOCK_D=max(power_of_2(channels), 32),
        BLOCK_DV=max(power_of_2(v.shape[-1]), 32),
        CAUSAL=causal,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out, lse
