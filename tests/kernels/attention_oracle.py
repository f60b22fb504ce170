"""Attention in float64, sharing no code with the package, and the error that quantizing its operands must cause.

Rounding errors of independent values are independent, so their effect is predicted as a variance, not bounded as a
worst case that no data reaches. With group scales ``a_i`` (queries) and ``b_j`` (keys), rounding is uniform in half a
scale, and to first order in the logits' errors ``dS_ij``::

    var dS_ij = (a_i^2 |k_j|^2 + b_j^2 |q_i|^2) / 12 + D a_i^2 b_j^2 / 144
    E |dO_i|^2 = sum_j p_ij^2 var dS_ij |v_j - o_i|^2     the logits, through the softmax
               + sum_j var(dp_ij) |v_j|^2                 rounding P
               + sum_j p_ij^2 E |dv_j|^2                  rounding V

for values that are independent of the keys. The error of a right kernel has this size: over many rows it is 0.8 to 1.1
times the prediction, so ``TOTAL`` is accepted; one row is a sum of few terms, and 4 times its own has been seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

TOTAL, ROW, ENOUGH_ROWS = 1.25, 6.0, 64
TF32 = 2.0**-10  # what float32 operands are multiplied in on a GPU, which drops their last bits instead of rounding
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# Which tokens share a scale, as the papers say: blocks of 128 queries and 64 keys, warps of 32 queries, and what one
# thread of an mma instruction holds: queries equal modulo 8, keys equal in their pair modulo 8.
GROUPS = {
    ("per_tensor", "query"): lambda n: n * 0, ("per_tensor", "key"): lambda n: n * 0,
    ("per_head", "query"): lambda n: n * 0, ("per_head", "key"): lambda n: n * 0,
    ("per_token", "query"): lambda n: n, ("per_token", "key"): lambda n: n,
    ("per_block", "query"): lambda n: n // 128, ("per_block", "key"): lambda n: n // 64,
    ("per_warp", "query"): lambda n: n // 32, ("per_warp", "key"): lambda n: n // 64,
    ("per_thread", "query"): lambda n: n // 32 * 8 + n % 8, ("per_thread", "key"): lambda n: n // 64 * 4 + n % 8 // 2,
}  # fmt: skip


@dataclass(frozen=True)
class Exact:
    """Attention of ``(B, H, N, D)`` operands in float64, heads of keys and values repeated to those of queries."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    p: Tensor  # (B, H, N, Nk), rows of zeros where nothing is attended
    out: Tensor  # (B, H, N, Dv)
    lse: Tensor  # (B, H, N)
    slope: Tensor  # (B, H, N, Nk): of capped logits in those below the cap; 1 without one


def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    rel_h: Tensor | None = None,
    rel_w: Tensor | None = None,
    softcap: float | None = None,
) -> Exact:
    """``(B, H, N, D)`` in, float64 out; causal aligned top left; a fully masked row gives zeros and lse -inf."""
    group = query.shape[1] // max(key.shape[1], 1)
    q, k, v = query.double(), *(x.double().repeat_interleave(group, 1) for x in (key, value))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = scale * (q @ k.mT)
    slope = torch.ones_like(s)
    if softcap is not None:
        slope = torch.cosh((s / softcap).clamp(-300, 300)) ** -2
        s = softcap * torch.tanh(s / softcap)
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else s + attn_mask.double()
    if rel_h is not None and rel_w is not None:
        s = s + (rel_h.double()[..., :, None] + rel_w.double()[..., None, :]).flatten(-2)
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -math.inf)
    p = s.softmax(-1).nan_to_num(0.0)
    return Exact(q, k, v, scale, p, p @ v, s.logsumexp(-1), slope)


def group_scales(x: Tensor, granularity: str, role: str, bits: int) -> Tensor:
    """The scale of every token of ``x (B, H, N, D)``, ``(B, H, N)``; zeros where 16 bits need none."""
    if bits == 16:
        return x.new_zeros(x.shape[:3])
    index = GROUPS[granularity, role](torch.arange(x.shape[2], device=x.device))
    tokens = x.abs().amax(-1)
    amax = torch.zeros(*x.shape[:2], int(index.max()) + 1, dtype=x.dtype, device=x.device)
    amax = amax.scatter_reduce(2, index.expand_as(tokens), tokens, "amax")
    if granularity == "per_tensor":
        amax = amax.amax().expand_as(amax)
    return (amax / (127 if bits == 8 else 7))[:, :, index]


def block_means(x: Tensor) -> Tensor:
    """The mean of each block of 128 tokens, at every token."""
    return torch.cat([block.mean(2, keepdim=True).expand_as(block) for block in x.split(128, 2)], 2)


@dataclass(frozen=True)
class Predicted:
    """Root mean squares of the errors that rounding causes."""

    rows: Tensor  # (B, H, N): of |dO_i|
    lse: Tensor  # (B, H, N): of its error, plus its bias


def predicted_error(exact: Exact, variant, smooth_k: bool, dtype: torch.dtype) -> Predicted:
    """What ``variant`` must cost on the operands of ``exact``, its output rounded to ``dtype``."""
    q, k, v, p = exact.query, exact.key, exact.value, exact.p
    q = (q - block_means(q) if variant.smooth_q else q) * exact.scale
    k = k - k.mean(2, keepdim=True) if smooth_k else k
    a = group_scales(q, variant.granularity, "query", variant.qk_bits).square()[..., :, None]
    b = group_scales(k, variant.granularity, "key", variant.qk_bits).square()[..., None, :]
    q2, k2 = q.square().sum(-1)[..., :, None], k.square().sum(-1)[..., None, :]
    logits = ((a * k2 + b * q2) / 12 + q.shape[-1] * a * b / 144) * exact.slope.square()
    v2, o2 = v.square().sum(-1)[..., None, :], exact.out.square().sum(-1)[..., :, None]
    distance = (v2 + o2 - 2 * exact.out @ v.mT).clamp(min=0)
    weights = rounding_of_p(p, variant, dtype)
    square = (p.square() * (logits * distance + rounding_of_v(v, variant, dtype)[..., None, :])).sum(-1)
    square = square + (weights * v2).sum(-1) + _accumulation(exact, variant, dtype)
    mean_key = (p * exact.slope) @ k
    pulled = mean_key.square().sum(-1) * a[..., 0] / 12  # one query's rounding moves all its logits together
    lse = (pulled + (p.square() * logits).sum(-1)).sqrt() + (p * logits).sum(-1) / 2
    return Predicted(square.sqrt(), lse)


def rounding_of_p(p: Tensor, variant, dtype: torch.dtype) -> Tensor:
    """Variance of P's rounding, in units of the normalized P: steps are relative to the largest P of a row."""
    top = p.amax(-1, keepdim=True)
    if variant.pv == "int8":
        step = top / 127
        return torch.where(p < step / 2, p.square(), step.square() / 12)
    if variant.pv == "fp8":
        return e4m3_variance(p, top / (448 if variant.accumulator == "fp32" else 224))
    rounding = (p * _low_precision(variant, dtype)).square() / 3
    if variant.exponential == "integer":
        rounding += (p * linear_mantissa_error()).square()
    return rounding


def linear_mantissa_error() -> float:
    """Relative deviation of ``(1 + f) / 2^f`` for f between 0 and 1 around its mean, which normalization removes."""
    f = (torch.arange(4096, dtype=torch.float64) + 0.5) / 4096
    ratio = (1 + f) / torch.exp2(f)
    return float(ratio.std() / ratio.mean())


def rounding_of_v(v: Tensor, variant, dtype: torch.dtype) -> Tensor:
    """``E |dv_j|^2`` of each token, ``(B, H, Nk)``."""
    if variant.smooth_v:
        v = v - v.mean(2, keepdim=True)
    if variant.pv == "int8_dequantized":
        per_head = v.abs().amax((-2, -1), keepdim=True) / 127
        return (per_head.square() / 12).expand_as(v).sum(-1)
    amax = v.abs().amax(2, keepdim=True)
    if variant.pv == "int8":
        return (amax / 127).square().expand_as(v).sum(-1) / 12
    if variant.pv == "fp8":
        return e4m3_variance(v, amax / (448 if variant.accumulator == "fp32" else 4.5)).sum(-1)
    if dtype == torch.float32:
        return (v * TF32).square().sum(-1) / 3
    return torch.zeros_like(v[..., 0])


def e4m3_variance(x: Tensor, scale: Tensor) -> Tensor:
    """Variance of rounding ``x / scale`` to E4M3: 3 bits after the leading one, steps of 2**-9 below 2**-6."""
    units = x.abs() / scale.clamp(min=1e-300)
    step = torch.exp2(units.clamp(min=2.0**-6).log2().floor() - 3)
    uniform = step.square() / 12
    return torch.where(units < step / 2, units.square(), uniform) * scale.square()


def _low_precision(variant, dtype: torch.dtype) -> float:
    """Largest relative error of P where it stays in 16 bit, or beside float32 values."""
    if variant.pv == "int8_dequantized":
        return 2.0**-11
    return {torch.bfloat16: 2.0**-8, torch.float32: TF32}.get(dtype, 2.0**-11)


def _accumulation(exact: Exact, variant, dtype: torch.dtype) -> Tensor:
    """Squares of what rounding the output and narrow accumulators add."""
    rounding = UNIT[dtype] ** 2 * exact.out.square().sum(-1) / 3
    accumulator = 2.0**-10 if variant.accumulator == "fp16" else 2.0**-12 if variant.pv == "fp8" else 2.0**-20
    return rounding + accumulator**2 * (exact.p.square() @ exact.value.square()).sum(-1)


def assert_within_prediction(got: Tensor, exact: Exact, predicted: Predicted, quantized: bool = True) -> None:
    """Every row, and all of them together, have the error that quantization predicts."""
    assert got.shape == exact.out.shape
    assert not got.isnan().any()
    error = (got.double() - exact.out).norm(dim=-1)
    attended = predicted.rows > 0
    assert (error[~attended] == 0).all(), "rows that attend nothing are not zero"
    rows = error[attended] / predicted.rows[attended]
    assert rows.numel() == 0 or rows.max() <= ROW, f"a row's error is {rows.max():.2f} times what rounding explains"
    if rows.numel() >= ENOUGH_ROWS:
        total = float(error.norm() / predicted.rows.norm())
        assert total <= TOTAL, f"the tensor's error is {total:.2f} times what rounding explains"
        # One key's P is 1, and values of few keys hold their largest magnitudes: both are exact in any format.
        small = exact.p.shape[-1] < 16 or not quantized  # then rounding may cancel
        assert small or total >= 1 / 2, f"{total:.2f} times what rounding costs: was it quantized?"


def assert_lse_close(got: Tensor, exact: Exact, predicted: Predicted) -> None:
    """Natural logarithms of the sums of exponentials, of the logits before any smoothing."""
    attended = exact.lse.isfinite()
    assert got.dtype == torch.float32
    assert (got[~attended] == -math.inf).all(), "rows that attend nothing have a sum of 0"
    largest = exact.scale * (exact.query @ exact.key.mT).abs().amax()
    allowed = ROW * predicted.lse + 2.0**-18 * (1 + largest)  # float32 sums of products as large as the logits
    off = (got.double() - exact.lse).abs()[attended] / allowed[attended]
    assert off.numel() == 0 or off.max() <= 1, f"{off.max():.2f} times what rounding explains"


def assert_kernel_close(got: Tensor, reference: Tensor, exact: Exact, rounding: float, flips: float) -> None:
    """``got`` is ``reference`` (the same quantized operands in float64) but for arithmetic.

    Measured against ``sqrt(sum_j p_ij^2 |v_j|^2)``, the size of a sum of independent values. ``rounding`` is what every
    row may be off by; ``flips`` what a P that lies next to a tie, and is rounded to the other side, may add to a row.
    """
    size = (exact.p.square() @ exact.value.square()).sum(-1).sqrt()
    error = (got.double() - reference).norm(dim=-1)
    attended = size > 0
    rows = error[attended] / size[attended]
    assert rows.numel() == 0 or rows.max() <= 2 * rounding + flips, f"a row is {rows.max():.2e} off"
    if rows.numel() >= ENOUGH_ROWS:
        assert error.norm() <= (rounding + flips / 16) * size.norm(), f"{float(error.norm() / size.norm()):.2e} off"
