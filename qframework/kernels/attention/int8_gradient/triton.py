"""Launches of the kernels of the 8-bit gradient of attention: one pass over blocks of keys, one over blocks of queries.

Formula and layout: see :mod:`~qframework.kernels.attention.int8_gradient.int8_gradient`. The passes compute S and dP
each, two products of seven, so that neither dQ nor dK and dV need atomic additions: results repeat bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qframework.kernels.attention.dropout import factor_of, threshold_of
from qframework.kernels.attention.int8_gradient.keys import _key_pass_kernel
from qframework.kernels.attention.int8_gradient.queries import _query_pass_kernel
from qframework.kernels.attention.int8_gradient.reference import GradientOperands, GradientTile
from qframework.kernels.attention.int8_gradient.steps import PassLayout, load_tokens
from qframework.kernels.attention.operands import LOG2_E, check_offsets, last_contiguous
from qframework.kernels.attention.quantize_v import padded_tokens
from qframework.kernels.attention.triton import Heads
from qframework.kernels.runtime.launch import cdiv, launch, power_of_2
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import tl, triton


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


_TILE = 64  # tokens of a program that transposes
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
    if capability == (9, 0):
        narrow = GradientTile(64, 64, 4, 3)  # more programs on a multiprocessor, which overlap
        if head_dim > 64:
            return GradientTile(64, 128, 8, 3), GradientTile(128, 64, 8, 3)
        return narrow, narrow if int8 else GradientTile(128, 64, 8, 3)
    stages = 1 if small and head_dim > 64 else 2
    if head_dim > 64:
        return GradientTile(64, 64 if small else 128, 8, stages), GradientTile(64 if small else 128, 64, 8, stages)
    return GradientTile(64, 128, 8, stages), GradientTile(128, 64, 8, stages)


def _tiles(x: GradientOperands) -> tuple[GradientTile, GradientTile]:
    if x.q.device.type != "cuda":
        return _INTERPRETED
    head_dim = max(x.q.shape[3], x.v.shape[3])
    return choose_gradient_tiles(head_dim, x.int8, torch.cuda.get_device_capability(x.q.device))


@triton.jit
def _tokens_last_kernel(
    X,  # Heads of (B, H, N, D) int8
    OUT,  # Heads of (B, H, D, P) int8
    H,
    N,
    P,
    D: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Grid (P // TILE * H * B,): one tile of tokens of a head transposed; zeros after the last token."""
    wait_for_previous_kernel(OVERLAP)
    tiles = P // TILE
    pid = tl.program_id(0).to(tl.int64)
    tile, head = (pid % tiles).to(tl.int32), pid // tiles
    n, d = tile * TILE + tl.arange(0, TILE), tl.arange(0, BLOCK_D)
    x = load_tokens(X.data + head // H * X.batch + head % H * X.head, n, X.token, d, N, D, BLOCK_D)
    at = OUT.data + head // H * OUT.batch + head % H * OUT.head + d[:, None] * OUT.token + n[None, :]
    tl.store(at, tl.trans(x), mask=(d < D)[:, None] & (n < P)[None, :])


def tokens_last(x: Tensor) -> Tensor:
    """``(B, H, N, D)`` int8 as ``(B, H, D, P)``, P a multiple of 64, padded with zeros."""
    batch, heads, tokens, channels = x.shape
    x = last_contiguous(x)
    out = x.new_empty((batch, heads, channels, padded_tokens(tokens)))
    launch(_tokens_last_kernel, (out.shape[3] // _TILE * heads * batch,))(
        *(_heads(x), _heads(out), heads, tokens, out.shape[3]),
        D=channels,
        TILE=_TILE,
        BLOCK_D=max(power_of_2(channels), 16),
        num_warps=4,
    )
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
