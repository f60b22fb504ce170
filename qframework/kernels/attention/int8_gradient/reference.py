"""The reference of the 8-bit gradient of attention in plain torch: the kernels' arithmetic, in any float dtype.

Formula: see :mod:`~qframework.kernels.attention.int8_gradient.int8_gradient`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qframework.kernels.attention.dropout import factor_of, keep_ref
from qframework.kernels.attention.operands import LOG2_E
from qframework.kernels.attention.quantize_qk import is_marked
from qframework.kernels.attention.variants import KEY_BLOCK, token_groups
from qframework.numerics import MIN_SCALE, exact_matmul


class GradientOperands(NamedTuple):
    """What the gradient of attention is computed from, dense."""

    q: Tensor  # (B, H, N, D) int8; times q_scale: Q * scale * log2(e)
    q_scale: Tensor  # (B, H, ceil(N / 128)) fp32
    k: Tensor  # (B, Hkv, Nk, D) int8; times k_scale: K - mean(K)
    k_scale: Tensor  # (B, Hkv, ceil(Nk / 64)) fp32
    v: Tensor  # (B, Hkv, Nk, Dv) float
    grad: Tensor  # (B, H, N, Dv) float, of the output
    lse: Tensor  # (B, H, N) fp32, natural, of the logits of Q and K - mean(K)
    delta: Tensor  # (B, H, N) fp32, rowsum(O * dO) minus the gradient of lse
    scale: float  # of the logits
    causal: bool
    grad_int8: Tensor | None = None  # like grad, int8, with grad_scale (B, H, ceil(N / 64)) fp32; None in 16 bit
    grad_scale: Tensor | None = None
    q_float: Tensor | None = None  # (B, H, N, D) float: Q from its integers, where its products are in 16 bit
    k_float: Tensor | None = None  # (B, Hkv, Nk, D) float: K - mean(K), likewise
    dropout_p: float = 0.0
    seed: Tensor | None = None  # one int64, with dropout

    @property
    def int8(self) -> bool:
        """Whether dV, dK and dQ are products of integers."""
        return self.grad_int8 is not None


class GradientTile(NamedTuple):
    """Queries and keys of one step, warps and pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


REFERENCE_TILE = GradientTile(64, 64, 4, 1)


def delta_ref(out: Tensor, grad: Tensor, grad_lse: Tensor | None) -> Tensor:
    """``rowsum(out * grad) - grad_lse``, ``(B, H, N)`` float32."""
    delta = (out.float() * grad.float()).sum(-1)
    return delta if grad_lse is None else delta - grad_lse


def gradients_ref(
    x: GradientOperands,
    tiles: tuple[GradientTile, GradientTile] = (REFERENCE_TILE, REFERENCE_TILE),
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` in ``dtype``, for blocks of queries one after another.

    ``tiles`` are those of the pass over blocks of keys and of the pass over blocks of queries, whose integers P and dS
    share a scale.
    """
    key_tile, query_tile = tiles
    heads, queries, keys = x.q.shape[1], x.q.shape[2], x.k.shape[2]
    group = heads // x.k.shape[1]
    exact = x._replace(k=repeat_heads(x.k, group), k_scale=repeat_heads(x.k_scale, group), v=repeat_heads(x.v, group))
    dq = x.q.new_zeros(x.q.shape, dtype=dtype)
    dk = x.q.new_zeros((*x.q.shape[:2], keys, x.q.shape[3]), dtype=dtype)
    dv = x.q.new_zeros((*x.q.shape[:2], keys, x.v.shape[3]), dtype=dtype)
    queries_of_keys, keys_of_queries = _factors(exact, group, dtype)
    for start in range(0, queries, key_tile.block_m):
        m = slice(start, start + key_tile.block_m)
        p, ds = weights_and_gradient(exact, m, dtype)
        weights = _rounded(p, x, -2, key_tile.block_m)
        dv += _matmul(weights.mT, _gradient_operand(x, m, dtype)) * factor_of(x.dropout_p)
        dk += _matmul(_rounded(ds, x, -2, key_tile.block_m).mT, queries_of_keys[:, :, m])
        dq[:, :, m] = _matmul(_rounded(ds, x, -1, query_tile.block_n), keys_of_queries)
    if group > 1:
        dk, dv = (t.unflatten(1, (-1, group)).sum(2) for t in (dk, dv))
    return dq, dk, dv


def weights_and_gradient(x: GradientOperands, m: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """P, without what dropout drops, and dS ``(B, H, M, Nk)`` of the queries in ``m``.

    Keys and values have as many heads as queries.
    """
    s = logits_ref(x.q, x.q_scale, x.k, x.k_scale, m, x.causal, dtype)
    p = torch.exp2(s - x.lse[:, :, m, None].to(dtype) * LOG2_E)
    dp = _matmul(x.grad[:, :, m].to(dtype), x.v.to(dtype).mT)
    kept = p
    if x.seed is not None:
        queries = torch.arange(x.q.shape[2], device=p.device)[m]
        keep = keep_ref(x.seed, p.shape[0] * p.shape[1], queries, p.shape[3], x.dropout_p).view(p.shape)
        kept, dp = torch.where(keep, p, p * 0.0), torch.where(keep, dp * factor_of(x.dropout_p), dp * 0.0)
    ds = p * (dp - x.delta[:, :, m, None].to(dtype))
    return kept, ds.masked_fill(p == 0, 0.0)


def logits_ref(
    q: Tensor, q_scale: Tensor, k: Tensor, k_scale: Tensor, m: slice, causal: bool, dtype: torch.dtype
) -> Tensor:
    """Base-2 logits ``(B, H, M, Nk)`` of the queries in ``m``: -inf after the diagonal, NaN for marked queries."""
    keys, tokens = k.shape[2], q.shape[2]
    k_scale = k_scale[:, :, token_groups("per_block", "key").index(keys, k.device)]
    q_scale = q_scale[:, :, token_groups("per_block", "query").index(tokens, q.device)][:, :, m]
    s = (q[:, :, m].to(dtype) @ k.to(dtype).mT) * (q_scale[..., None].to(dtype) * k_scale[:, :, None].to(dtype))
    if causal:
        query = torch.arange(tokens, device=s.device)[m, None]
        s = s.masked_fill(torch.arange(keys, device=s.device) > query, -torch.inf)
    return s.masked_fill(is_marked(q[:, :, m], 8)[..., None], torch.nan)


def products_of_dq(x: GradientOperands) -> Tensor:
    """dS ``(B, H, N, Nk)`` float32 as the product for dQ reads it; as many heads of K as of Q."""
    step, keys = REFERENCE_TILE.block_m, REFERENCE_TILE.block_n
    blocks = [slice(start, start + step) for start in range(0, x.q.shape[2], step)]
    return torch.cat([_rounded(weights_and_gradient(x, m, torch.float32)[1], x, -1, keys) for m in blocks], 2)


def _factors(x: GradientOperands, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Q and K that dS is multiplied by, with the scale of the logits."""
    if x.q_float is not None and x.k_float is not None:
        return x.q_float.to(dtype) * x.scale, repeat_heads(x.k_float, group).to(dtype) * x.scale
    q_scale = x.q_scale[:, :, token_groups("per_block", "query").index(x.q.shape[2], x.q.device)]
    k_scale = x.k_scale[:, :, token_groups("per_block", "key").index(x.k.shape[2], x.k.device)]
    q = x.q.to(dtype) * (q_scale[..., None].to(dtype) / LOG2_E)
    return q, x.k.to(dtype) * (k_scale[..., None].to(dtype) * x.scale)


def _gradient_operand(x: GradientOperands, m: slice, dtype: torch.dtype) -> Tensor:
    """dO of the queries in ``m``, as P is multiplied by it."""
    if x.grad_int8 is None or x.grad_scale is None:
        return x.grad[:, :, m].to(dtype)
    scale = x.grad_scale[:, :, token_groups("per_block", "key").index(x.grad.shape[2], x.grad.device)]
    return x.grad_int8[:, :, m].to(dtype) * scale[:, :, m, None].to(dtype)


def _rounded(p: Tensor, x: GradientOperands, dim: int, block: int) -> Tensor:
    """P or dS as the products read it: INT8 with a scale for each ``block`` along ``dim``, or in 16 bit."""
    if not x.int8:
        return p.to(x.v.dtype).to(p.dtype)
    amax = torch.cat([part.abs().amax(dim, keepdim=True).expand_as(part) for part in p.split(block, dim)], dim)
    scale = (amax / 127).clamp(min=MIN_SCALE)
    return torch.round(p / scale) * scale


def repeat_heads(x: Tensor, group: int) -> Tensor:
    """``(B, Hkv, ...)`` to ``(B, group Hkv, ...)``: each head for all heads of queries that share it."""
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    return exact_matmul(a, b) if a.dtype == torch.float32 else a @ b


assert KEY_BLOCK % REFERENCE_TILE.block_m == 0, "a tile's queries must share one scale of dO"
