"""The pass over blocks of queries of the 8-bit gradient of attention: dQ.

Formula and layout: see :mod:`~qframework.kernels.attention.int8_gradient.int8_gradient`.
"""

from __future__ import annotations

from qframework.kernels.attention.dropout import kept, key_words, query_words
from qframework.kernels.attention.int8_gradient.steps import (
    KEYS_OF_SCALE,
    NOWHERE,
    QUERIES_OF_SCALE,
    TO_BASE_2,
    float_dot,
    load_channels,
    load_tokens,
    rows_to_int8,
)
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import tl, triton


@triton.jit
def _query_block(
    dq,
    start,
    m,
    q,
    grad,
    q_scale,
    lse,
    delta,
    poison,
    k_base,
    k_scale_base,
    v_base,
    k_product_base,
    stride_kn,
    stride_vn,
    stride_pn,
    NK,
    query_word,
    seed,
    head,
    threshold,
    factor,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add one block of keys to dQ (BLOCK_M, channels). S, P and dS are (BLOCK_M, BLOCK_N)."""
    n = start + tl.arange(0, BLOCK_N)
    d, dv_channels = tl.arange(0, LAYOUT.block_d), tl.arange(0, LAYOUT.block_dv)
    k = load_tokens(k_base, n, stride_kn, d, NK, LAYOUT.d, LAYOUT.block_d)
    products = tl.dot(q, tl.trans(k), out_dtype=tl.int32)
    if BLOCK_N <= KEYS_OF_SCALE:
        k_scale = tl.load(k_scale_base + start // KEYS_OF_SCALE)
        s = products.to(tl.float32) * (q_scale * k_scale)
    else:
        k_scale = tl.load(k_scale_base + n // KEYS_OF_SCALE, mask=n < NK, other=0.0)
        s = products.to(tl.float32) * (q_scale * k_scale)[None, :]
    p = tl.exp2(s - lse[:, None])
    v = load_tokens(v_base, n, stride_vn, dv_channels, NK, LAYOUT.dv, LAYOUT.block_dv)
    zero = tl.zeros(p.shape, tl.float32)
    dp = float_dot(grad, tl.trans(v), zero)
    if LAYOUT.dropout:
        keep = kept(query_word[:, None], key_words(seed, n, head)[None, :], threshold)
        dp = tl.where(keep, dp * factor, dp * 0.0)
    ds = p * (dp - delta[:, None])
    if MASKED:
        seen = (n < NK)[None, :]
        if CAUSAL:
            seen = seen & (n[None, :] <= m[:, None])
        ds = tl.where(seen, ds, 0.0)
    if LAYOUT.int8:
        k8 = load_channels(k_product_base, n, stride_pn, d, LAYOUT.d, LAYOUT.block_d)
        ds8, ds_scale = rows_to_int8(ds, poison)
        dq += tl.dot(ds8, tl.trans(k8), out_dtype=tl.int32).to(tl.float32) * (ds_scale * k_scale)[:, None]
    else:
        k16 = load_tokens(k_product_base, n, stride_pn, d, NK, LAYOUT.d, LAYOUT.block_d)
        dq = float_dot(ds.to(k16.dtype), k16, dq)
    return dq


@triton.jit
def _query_pass_kernel(
    Q,  # Heads of (B, H, N, D) int8
    K,  # Heads of (B, Hkv, Nk, D) int8
    V,  # Heads of (B, Hkv, Nk, Dv) 16 bit
    GRAD,  # Heads of (B, H, N, Dv) 16 bit
    K_PRODUCT,  # Heads of K as dS is multiplied by it: (B, Hkv, Nk, D) 16 bit, or (B, Hkv, D, P) int8
    q_scale_ptr,  # (B, H, q_scales) fp32
    k_scale_ptr,  # (B, Hkv, k_scales) fp32
    lse_ptr,  # (B, H, N) fp32
    delta_ptr,  # (B, H, N) fp32
    dq_ptr,  # (B, H, N, D) float
    seed_ptr,  # (1,) int64, for dropout
    threshold,
    factor,  # of weights that dropout keeps
    scale,  # of dQ
    H,
    N,
    NK,
    q_scales,
    k_scales,
    LAYOUT: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Grid (cdiv(N, BLOCK_M) * H * B,): dQ of one block of queries, over all keys. Long rows of causal heads first."""
    wait_for_previous_kernel(OVERLAP)
    blocks = tl.cdiv(N, BLOCK_M)
    pid = tl.program_id(0).to(tl.int64)
    block, h, b = (pid % blocks).to(tl.int32), (pid // blocks) % H, pid // (blocks * H)
    if CAUSAL:
        block = blocks - 1 - block
    hk, HKV = h // LAYOUT.group, H // LAYOUT.group
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    d, dv_channels = tl.arange(0, LAYOUT.block_d), tl.arange(0, LAYOUT.block_dv)
    q = load_tokens(Q.data + b * Q.batch + h * Q.head, m, Q.token, d, N, LAYOUT.d, LAYOUT.block_d)
    grad_base = GRAD.data + b * GRAD.batch + h * GRAD.head
    grad = load_tokens(grad_base, m, GRAD.token, dv_channels, N, LAYOUT.dv, LAYOUT.block_dv)
    q_scale = tl.load(q_scale_ptr + (b * H + h) * q_scales + block * BLOCK_M // QUERIES_OF_SCALE)
    rows = (b * H + h) * N + m
    lse = tl.load(lse_ptr + rows, mask=m < N, other=NOWHERE)
    delta = tl.load(delta_ptr + rows, mask=m < N, other=0.0)
    poison = lse * 0.0 + delta * 0.0
    lse = lse * TO_BASE_2
    k_base = K.data + b * K.batch + hk * K.head
    v_base = V.data + b * V.batch + hk * V.head
    k_product_base = K_PRODUCT.data + b * K_PRODUCT.batch + hk * K_PRODUCT.head
    k_scale_base = k_scale_ptr + (b * HKV + hk) * k_scales
    head = b * H + h
    seed, query_word = head, m
    if LAYOUT.dropout:
        seed = tl.load(seed_ptr)
        query_word = query_words(seed, m, head)
    BLOCK_D: tl.constexpr = LAYOUT.block_d  # Triton 3.6 takes no shape from a group
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end, whole = NK, NK // BLOCK_N * BLOCK_N
    if CAUSAL:
        end = tl.minimum((block + 1) * BLOCK_M, NK)
        whole = tl.minimum(block * BLOCK_M, NK) // BLOCK_N * BLOCK_N
    for start in range(0, whole, BLOCK_N):
        dq = _query_block(
            dq, start, m, q, grad, q_scale, lse, delta, poison, k_base, k_scale_base, v_base, k_product_base,
            K.token, V.token, K_PRODUCT.token, NK, query_word, seed, head, threshold, factor, False, CAUSAL,
            LAYOUT, BLOCK_N,
        )  # fmt: skip
    for start in range(whole, end, BLOCK_N):
        dq = _query_block(
            dq, start, m, q, grad, q_scale, lse, delta, poison, k_base, k_scale_base, v_base, k_product_base,
            K.token, V.token, K_PRODUCT.token, NK, query_word, seed, head, threshold, factor, True, CAUSAL,
            LAYOUT, BLOCK_N,
        )  # fmt: skip
    tl.store(
        dq_ptr + rows[:, None] * LAYOUT.d + d,
        (dq * scale).to(dq_ptr.dtype.element_ty),
        mask=(m < N)[:, None] & (d < LAYOUT.d)[None, :],
    )
