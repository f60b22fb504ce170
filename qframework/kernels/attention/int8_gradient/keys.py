"""The pass over blocks of keys of the 8-bit gradient of attention: dK and dV.

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
    not_finite,
    rows_to_int8,
)
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import tl, triton


@triton.jit
def _key_block(
    dk,
    dv,
    start,
    n,
    k,
    v,
    k_scale,
    q_base,
    q_scale_base,
    grad_base,
    q_product_base,
    grad_product_base,
    grad_scale_base,
    lse_base,
    delta_base,
    stride_qn,
    stride_gn,
    stride_pn,
    stride_on,
    N,
    key_word,
    seed,
    head,
    threshold,
    factor,
    MASKED: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Add one block of queries to dK and dV (BLOCK_N, channels). S, P and dS are (BLOCK_N, BLOCK_M)."""
    m = start + tl.arange(0, BLOCK_M)
    d, dv_channels = tl.arange(0, LAYOUT.block_d), tl.arange(0, LAYOUT.block_dv)
    q = load_tokens(q_base, m, stride_qn, d, N, LAYOUT.d, LAYOUT.block_d)
    q_scale = tl.load(q_scale_base + start // QUERIES_OF_SCALE)
    lse = tl.load(lse_base + m, mask=m < N, other=NOWHERE)
    delta = tl.load(delta_base + m, mask=m < N, other=0.0)
    products = tl.dot(k, tl.trans(q), out_dtype=tl.int32)
    s = products.to(tl.float32) * (k_scale * q_scale)[:, None]
    p = tl.exp2(s - (lse * TO_BASE_2)[None, :])
    if MASKED:
        p = tl.where(n[:, None] <= m[None, :], p, 0.0)
    grad = load_tokens(grad_base, m, stride_gn, dv_channels, N, LAYOUT.dv, LAYOUT.block_dv)
    zero = tl.zeros(p.shape, tl.float32)
    dp = float_dot(v, tl.trans(grad), zero)
    weights = p
    if LAYOUT.dropout:
        keep = kept(query_words(seed, m, head)[None, :], key_word[:, None], threshold)
        weights, dp = tl.where(keep, p, p * 0.0), tl.where(keep, dp * factor, dp * 0.0)
    ds = p * (dp - delta[None, :])
    if MASKED:
        ds = tl.where(n[:, None] <= m[None, :], ds, 0.0)
    if LAYOUT.int8:
        poison = not_finite(lse, delta)
        grad8 = load_channels(grad_product_base, m, stride_on, dv_channels, LAYOUT.dv, LAYOUT.block_dv)
        p8, p_scale = rows_to_int8(weights, poison)
        scale = p_scale * tl.load(grad_scale_base + start // KEYS_OF_SCALE)
        dv += tl.dot(p8, tl.trans(grad8), out_dtype=tl.int32).to(tl.float32) * scale[:, None]
        q8 = load_channels(q_product_base, m, stride_pn, d, LAYOUT.d, LAYOUT.block_d)
        ds8, ds_scale = rows_to_int8(ds, poison)
        dk += tl.dot(ds8, tl.trans(q8), out_dtype=tl.int32).to(tl.float32) * (ds_scale * q_scale)[:, None]
    else:
        dv = float_dot(weights.to(grad.dtype), grad, dv)
        q16 = load_tokens(q_product_base, m, stride_pn, d, N, LAYOUT.d, LAYOUT.block_d)
        dk = float_dot(ds.to(q16.dtype), q16, dk)
    return dk, dv


@triton.jit
def _key_pass_kernel(
    Q,  # Heads of (B, H, N, D) int8
    K,  # Heads of (B, Hkv, Nk, D) int8
    V,  # Heads of (B, Hkv, Nk, Dv) 16 bit
    GRAD,  # Heads of (B, H, N, Dv) 16 bit
    Q_PRODUCT,  # Heads of Q as dS is multiplied by it: (B, H, N, D) 16 bit, or (B, H, D, P) int8
    GRAD_PRODUCT,  # Heads of dO as P is multiplied by it: unused in 16 bit, or (B, H, Dv, P) int8
    q_scale_ptr,  # (B, H, q_scales) fp32
    k_scale_ptr,  # (B, Hkv, k_scales) fp32
    grad_scale_ptr,  # (B, H, grad_scales) fp32
    lse_ptr,  # (B, H, N) fp32
    delta_ptr,  # (B, H, N) fp32
    dk_ptr,  # (B, Hkv, Nk, D) float
    dv_ptr,  # (B, Hkv, Nk, Dv) float
    seed_ptr,  # (1,) int64, for dropout
    threshold,
    factor,  # of weights that dropout keeps
    scale,  # of dK
    HKV,
    N,
    NK,
    q_scales,
    k_scales,
    grad_scales,
    LAYOUT: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Grid (cdiv(NK, BLOCK_N) * HKV * B,): dK and dV of one block of keys, over all queries of its heads."""
    wait_for_previous_kernel(OVERLAP)
    blocks = tl.cdiv(NK, BLOCK_N)
    pid = tl.program_id(0).to(tl.int64)
    block, hk, b = (pid % blocks).to(tl.int32), (pid // blocks) % HKV, pid // (blocks * HKV)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    d, dv_channels = tl.arange(0, LAYOUT.block_d), tl.arange(0, LAYOUT.block_dv)
    k = load_tokens(K.data + b * K.batch + hk * K.head, n, K.token, d, NK, LAYOUT.d, LAYOUT.block_d)
    v = load_tokens(V.data + b * V.batch + hk * V.head, n, V.token, dv_channels, NK, LAYOUT.dv, LAYOUT.block_dv)
    k_scale = tl.load(k_scale_ptr + (b * HKV + hk) * k_scales + n // KEYS_OF_SCALE, mask=n < NK, other=0.0)
    BLOCK_D: tl.constexpr = LAYOUT.block_d  # Triton 3.6 takes no shape from a group
    BLOCK_DV: tl.constexpr = LAYOUT.block_dv
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    first, whole = 0, 0
    # With masks of channels, two loops spill (216 bytes with Triton 3.8 and 80 channels): one masks every block.
    ONE_LOOP: tl.constexpr = CAUSAL and (LAYOUT.d != LAYOUT.block_d or LAYOUT.dv != LAYOUT.block_dv)
    if CAUSAL:
        first = block * BLOCK_N // BLOCK_M * BLOCK_M
        whole = tl.minimum(tl.cdiv((block + 1) * BLOCK_N - 1, BLOCK_M), tl.cdiv(N, BLOCK_M)) * BLOCK_M
    for member in range(LAYOUT.group):
        h = hk * LAYOUT.group + member
        head = b * HKV * LAYOUT.group + h
        q_base = Q.data + b * Q.batch + h * Q.head
        grad_base = GRAD.data + b * GRAD.batch + h * GRAD.head
        q_product_base = Q_PRODUCT.data + b * Q_PRODUCT.batch + h * Q_PRODUCT.head
        grad_product_base = GRAD_PRODUCT.data + b * GRAD_PRODUCT.batch + h * GRAD_PRODUCT.head
        q_scale_base, grad_scale_base = q_scale_ptr + head * q_scales, grad_scale_ptr + head * grad_scales
        lse_base, delta_base = lse_ptr + head * N, delta_ptr + head * N
        seed, key_word = head, n
        if LAYOUT.dropout:
            seed = tl.load(seed_ptr)
            key_word = key_words(seed, n, head)
        if CAUSAL:
            for start in range(first, N if ONE_LOOP else whole, BLOCK_M):
                dk, dv = _key_block(
                    dk, dv, start, n, k, v, k_scale, q_base, q_scale_base, grad_base, q_product_base,
                    grad_product_base, grad_scale_base, lse_base, delta_base, Q.token, GRAD.token, Q_PRODUCT.token,
                    GRAD_PRODUCT.token, N, key_word, seed, head, threshold, factor, True, LAYOUT, BLOCK_M,
                )  # fmt: skip
        if not ONE_LOOP:
            for start in range(whole, N, BLOCK_M):
                dk, dv = _key_block(
                    dk, dv, start, n, k, v, k_scale, q_base, q_scale_base, grad_base, q_product_base,
                    grad_product_base, grad_scale_base, lse_base, delta_base, Q.token, GRAD.token, Q_PRODUCT.token,
                    GRAD_PRODUCT.token, N, key_word, seed, head, threshold, factor, False, LAYOUT, BLOCK_M,
                )  # fmt: skip
    rows = (b * HKV + hk) * NK + n
    inside = (n < NK)[:, None]
    tl.store(
        dk_ptr + rows[:, None] * LAYOUT.d + d,
        (dk * scale).to(dk_ptr.dtype.element_ty),
        mask=inside & (d < LAYOUT.d)[None, :],
    )
    tl.store(
        dv_ptr + rows[:, None] * LAYOUT.dv + dv_channels,
        (dv * factor).to(dv_ptr.dtype.element_ty),
        mask=inside & (dv_channels < LAYOUT.dv)[None, :],
    )
