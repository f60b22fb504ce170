"""The Triton kernels of the 8-bit gradient of attention: one pass over blocks of keys, one over blocks of queries.

Formula and layout: see :mod:`~qframework.kernels.attention.int8_gradient`. The passes compute S and dP each, which is
two products of seven, so that neither dQ nor dK and dV need atomic additions: results repeat bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qframework.kernels.attention.dropout import factor_of, kept, key_words, query_words, threshold_of
from qframework.kernels.attention.int8_gradient_reference import GradientOperands, GradientTile
from qframework.kernels.attention.operands import LOG2_E, check_offsets, last_contiguous
from qframework.kernels.attention.quantize_v import padded_tokens
from qframework.kernels.attention.triton import Heads
from qframework.kernels.attention.variants import KEY_BLOCK, QUERY_BLOCK
from qframework.kernels.runtime.launch import cdiv, launch, power_of_2
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.rounding import round_to_int8
from qframework.kernels.runtime.triton import INTERPRET, tl, triton
from qframework.numerics import MIN_SCALE

INTERPRETED = tl.constexpr(INTERPRET)
LEAST_SCALE = tl.constexpr(MIN_SCALE)
KEYS_OF_SCALE = tl.constexpr(KEY_BLOCK)
QUERIES_OF_SCALE = tl.constexpr(QUERY_BLOCK)
TO_BASE_2 = tl.constexpr(LOG2_E)
# The log-sum-exp of queries that do not exist: every weight is zero, and zero times it is no NaN.
NOWHERE = tl.constexpr(2.0**100)


class PassLayout(NamedTuple):
    """Compile-time properties of both passes."""

    d: int  # channels of Q and K
    dv: int  # channels of V
    block_d: int
    block_dv: int
    group: int  # heads of Q for each head of K
    int8: bool  # dV, dK and dQ are products of integers
    dropout: bool


@triton.jit
def _delta_kernel(
    out_ptr,  # (B, H, N, Dv) float
    grad_ptr,  # like out_ptr
    grad_lse_ptr,  # (B, H, N) fp32, for HAS_LSE
    delta_ptr,  # (B, H, N) fp32
    H,
    N,
    stride_ob,
    stride_oh,
    stride_on,
    stride_gb,
    stride_gh,
    stride_gn,
    DV: tl.constexpr,
    HAS_LSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Grid (cdiv(N, BLOCK_M) * H * B,): rowsum(O * dO) - dL."""
    wait_for_previous_kernel(OVERLAP)
    blocks = tl.cdiv(N, BLOCK_M)
    pid = tl.program_id(0).to(tl.int64)
    head, b = (pid // blocks) % H, pid // (blocks * H)
    m = (pid % blocks).to(tl.int32) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_DV)
    inside = (m < N)[:, None] & (d < DV)[None, :]
    out = tl.load(out_ptr + b * stride_ob + head * stride_oh + m[:, None] * stride_on + d, mask=inside, other=0.0)
    grad = tl.load(grad_ptr + b * stride_gb + head * stride_gh + m[:, None] * stride_gn + d, mask=inside, other=0.0)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    rows = (b * H + head) * N + m
    if HAS_LSE:
        delta -= tl.load(grad_lse_ptr + rows, mask=m < N, other=0.0)
    tl.store(delta_ptr + rows, delta, mask=m < N)


def delta_triton(out: Tensor, grad: Tensor, grad_lse: Tensor | None) -> Tensor:
    """``delta_ref`` on a GPU."""
    out, grad = last_contiguous(out), last_contiguous(grad)
    batch, heads, tokens, channels = out.shape
    delta = torch.empty((batch, heads, tokens), dtype=torch.float32, device=out.device)
    block_m = 32
    launch(_delta_kernel, (cdiv(tokens, block_m) * heads * batch,))(
        out,
        grad,
        grad_lse.contiguous() if grad_lse is not None else delta,
        delta,
        heads,
        tokens,
        *out.stride()[:3],
        *grad.stride()[:3],
        DV=channels,
        HAS_LSE=grad_lse is not None,
        BLOCK_M=block_m,
        BLOCK_DV=max(power_of_2(channels), 16),
        num_warps=4,
    )
    return delta


@triton.jit
def float_dot(a, b, acc):
    """``acc + a b`` of 16-bit numbers."""
    # the interpreter multiplies the bits of bfloat16
    return acc + tl.dot(a.to(tl.float32), b.to(tl.float32)) if INTERPRETED else tl.dot(a, b, acc)


@triton.jit
def _rows_to_int8(x, poison):
    """Rows of ``x`` as int8, and their scales; NaN in ``poison`` becomes NaN in the scales."""
    scale = tl.maximum(tl.max(tl.abs(x), 1) * (1.0 / 127.0), LEAST_SCALE)
    return round_to_int8(x * (1.0 / scale)[:, None]), scale + poison


@triton.jit
def _poison(lse, delta):
    """Zero, or NaN where a log-sum-exp or delta is not finite: maxima would ignore NaN in a block."""
    return tl.sum(lse * 0.0 + delta * 0.0, 0)


@triton.jit
def load_tokens(base, tokens, stride, channels, count, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """(tokens, channels) of a head; zero outside."""
    inside = (tokens < count)[:, None]
    if D != BLOCK_D:
        inside = inside & (channels < D)[None, :]
    return tl.load(base + tokens[:, None] * stride + channels[None, :], mask=inside, other=0)


@triton.jit
def _load_channels(base, tokens, stride, channels, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """(channels, tokens) of a head that is stored with tokens contiguous and padded to whole blocks."""
    at = base + channels[:, None] * stride + tokens[None, :]
    return tl.load(at, mask=(channels < D)[:, None], other=0) if D != BLOCK_D else tl.load(at)


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
        poison = _poison(lse, delta)
        grad8 = _load_channels(grad_product_base, m, stride_on, dv_channels, LAYOUT.dv, LAYOUT.block_dv)
        p8, p_scale = _rows_to_int8(weights, poison)
        scale = p_scale * tl.load(grad_scale_base + start // KEYS_OF_SCALE)
        dv += tl.dot(p8, tl.trans(grad8), out_dtype=tl.int32).to(tl.float32) * scale[:, None]
        q8 = _load_channels(q_product_base, m, stride_pn, d, LAYOUT.d, LAYOUT.block_d)
        ds8, ds_scale = _rows_to_int8(ds, poison)
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
            for start in range(first, whole, BLOCK_M):
                dk, dv = _key_block(
                    dk, dv, start, n, k, v, k_scale, q_base, q_scale_base, grad_base, q_product_base,
                    grad_product_base, grad_scale_base, lse_base, delta_base, Q.token, GRAD.token, Q_PRODUCT.token,
                    GRAD_PRODUCT.token, N, key_word, seed, head, threshold, factor, True, LAYOUT, BLOCK_M,
                )  # fmt: skip
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
        k8 = _load_channels(k_product_base, n, stride_pn, d, LAYOUT.d, LAYOUT.block_d)
        ds8, ds_scale = _rows_to_int8(ds, poison)
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


_INTERPRETED = (GradientTile(32, 64, 4, 1), GradientTile(64, 32, 4, 1))


def choose_gradient_tiles(head_dim: int, int8: bool, capability: tuple[int, int]) -> tuple[GradientTile, GradientTile]:
    """Tiles of the pass over keys and of the pass over queries; ``capability`` is CUDA's.

    A block that is summed over must have one scale: it has at most 64 queries in the pass over keys and, with
    ``int8``, 64 keys in the pass over queries.
    """
    small = capability in ((8, 6), (8, 9), (12, 0), (12, 1))  # 99 KiB of shared memory
    if head_dim > 128:
        rows = 32 if small else 64
        # dK and dV of 64 keys do not fit Blackwell's tensor memory: Triton 3.8 silently compiles an empty kernel
        keys = GradientTile(32, 32, 4, 1) if capability[0] == 10 else GradientTile(32, rows, 8, 1)
        return keys, GradientTile(rows, 32, 8, 1)
    stages = 1 if small and head_dim > 64 else 2
    if head_dim > 64:
        return GradientTile(64, 64 if small else 128, 8, stages), GradientTile(64 if small else 128, 64, 8, stages)
    return GradientTile(64, 128, 8, stages), GradientTile(128, 64, 8, stages)


def _tiles(x: GradientOperands) -> tuple[GradientTile, GradientTile]:
    if x.q.device.type != "cuda":
        return _INTERPRETED
    head_dim = max(x.q.shape[3], x.v.shape[3])
    return choose_gradient_tiles(head_dim, x.int8, torch.cuda.get_device_capability(x.q.device))


def tokens_last(x: Tensor) -> Tensor:
    """``(B, H, N, D)`` int8 as ``(B, H, D, P)``, P a multiple of 64, padded with zeros."""
    batch, heads, tokens, channels = x.shape
    out = x.new_zeros((batch, heads, channels, padded_tokens(tokens)))
    out[..., :tokens] = x.mT
    return out


def _heads(x: Tensor) -> Heads:
    return Heads(x, x.stride(0), x.stride(1), x.stride(2))


def low_precision(x: Tensor) -> Tensor:
    """In 16 bit, with contiguous channels."""
    return last_contiguous(x.bfloat16() if x.dtype == torch.float32 else x)


def gradients_triton(
    x: GradientOperands, tiles: tuple[GradientTile, GradientTile] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """``gradients_ref`` on a GPU, in V's dtype; float32 is multiplied in BF16."""
    key_tile, query_tile = tiles or _tiles(x)
    batch, heads, queries, channels = x.q.shape
    key_heads, keys, value_channels = x.k.shape[1], x.k.shape[2], x.v.shape[3]
    value, grad = low_precision(x.v), low_precision(x.grad)
    check_offsets("int8_gradient_attention", query=x.q, key=x.k, value=value, grad_out=grad)
    layout = PassLayout(
        channels,
        value_channels,
        max(power_of_2(channels), 32),
        max(power_of_2(value_channels), 32),
        heads // key_heads,
        x.int8,
        x.seed is not None,
    )
    dropout = (x.seed if x.seed is not None else x.lse, threshold_of(x.dropout_p), factor_of(x.dropout_p))
    if x.q_float is not None and x.k_float is not None:
        q_product, k_product, grad_product, grad_scale = (
            low_precision(x.q_float),
            low_precision(x.k_float),
            grad,
            x.q_scale,
        )
    else:
        assert x.grad_int8 is not None
        assert x.grad_scale is not None
        q_product, k_product, grad_product = tokens_last(x.q), tokens_last(x.k), tokens_last(x.grad_int8)
        grad_scale = x.grad_scale
    dq = torch.empty(x.q.shape, dtype=x.v.dtype, device=x.q.device)
    dk = torch.empty(x.k.shape, dtype=x.v.dtype, device=x.q.device)
    dv = torch.empty(x.v.shape, dtype=x.v.dtype, device=x.q.device)
    q, k, v, g = _heads(x.q), _heads(x.k), _heads(value), _heads(grad)
    launch(_key_pass_kernel, (cdiv(keys, key_tile.block_n) * key_heads * batch,))(
        *(q, k, v, g, _heads(q_product), _heads(grad_product)),
        *(x.q_scale, x.k_scale, grad_scale, x.lse, x.delta, dk, dv, *dropout),
        *(1.0 / LOG2_E if x.int8 else x.scale, key_heads, queries, keys),
        *(x.q_scale.shape[2], x.k_scale.shape[2], grad_scale.shape[2]),
        LAYOUT=layout,
        CAUSAL=x.causal,
        BLOCK_M=key_tile.block_m,
        BLOCK_N=key_tile.block_n,
        num_warps=key_tile.num_warps,
        num_stages=key_tile.num_stages,
    )
    launch(_query_pass_kernel, (cdiv(queries, query_tile.block_m) * heads * batch,))(
        *(q, k, v, g, _heads(k_product)),
        *(x.q_scale, x.k_scale, x.lse, x.delta, dq, *dropout),
        *(x.scale, heads, queries, keys, x.q_scale.shape[2], x.k_scale.shape[2]),
        LAYOUT=layout,
        CAUSAL=x.causal,
        BLOCK_M=query_tile.block_m,
        BLOCK_N=query_tile.block_n,
        num_warps=query_tile.num_warps,
        num_stages=query_tile.num_stages,
    )
    return dq, dk, dv
