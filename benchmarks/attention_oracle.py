"""Float32 attention, and the error that rounding explains, which bounds the error of a correct result.

A bound relative to a row's norm is not sound: if one or two keys hold most of a row's P, the rounding error of a single
logit dominates the row. Among a million rows it can be five times the usual one, for INT4 as large as the row. So every
row is compared with its own prediction. To first order in the errors of the logits, with independent roundings that are
uniform in half a step, and values that are independent of keys::

    E |dO_i|^2 = s_i^2 sum_j p_ij^2 |v_j - o_i|^2                             the logits, through the softmax
               + sum_j var(dp_ij) |v_j|^2 + sum_j p_ij^2 E |dv_j|^2           P and V
    D s_i^2    = (a_i^2 |k|^2 + b^2 |q_i|^2) / 12 + D a_i^2 b^2 / 144         a, b: the steps of Q and of K

with ``|k|^2`` weighted by ``p_ij^2`` and ``b^2`` the mean over keys. A step is the largest magnitude among the tokens
that share a scale, over 127 or 7. E4M3 rounds to 3 bits: a step of 1/8 in a binade, where the mean of 1/x^2 is 1/2, so
``var = x^2 / 1536``.

``|dO_i|^2`` is a sum of squares of normal errors with weights ``w_j ~ p_ij^2``. Laurent and Massart's bound (2000,
lemma 1) for such a sum holds for all ``R`` rows at once, except in one run of ``1 / FALSE_ALARM``, with ``t = ln(R /
FALSE_ALARM)``::

    |dO_i|^2 <= E |dO_i|^2 (1 + 2 sqrt(t (sum w^2 / (sum w)^2 + 1 / D)) + 2 t c_i^2 max w / sum w)

The last term belongs to a single key with an error of ``x = sqrt(2 t) s_i``. For INT4, ``x`` is 1.2 and the first order
is not sufficient: P is multiplied by ``e^x`` and the row divided by its new sum, so ``c_i = expm1(x) / (x (1 + max p
expm1(x)))``, at least 1. ``1 / D`` covers the products of different keys' errors, since values are nearly orthogonal. A
row of many keys may be off by 2 to 4 times its prediction, a row of one key by 6 times. A row of zeros, or a row that
belongs elsewhere, is off by 80 times its prediction if Q and K are INT8 and P is FP16, by 26 times with FP8, and is
always detected. With INT4 it is off by 5 times, which rounding can explain for rows of few keys: 4 of 10 rows with 197
tokens could be zero undetected, so a fault must affect several rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.harness import ROUNDOFF, Check, WrongResultError, relative_error, require_shape
from qframework.kernels.attention.variants import QUERY_BLOCK, AttentionVariant, token_groups

ORACLE_BYTES = 2**29  # of logits at a time
TOTAL = 1.25  # measured over all rows of right results: 0.84 to 1.05 times the predicted error, also on an H100
FALSE_ALARM = 1e-3
E4M3_VARIANCE = 1 / 1536  # of x^2
# Of (1 + f) / 2^f for f from 0 to 1, around its mean and relative to it: the integer exponential's linear mantissa.
LINEAR_MANTISSA_VARIANCE = 3.134e-4
FP16 = ROUNDOFF[torch.float16]


@dataclass(frozen=True)
class Rows:
    """Float32 attention ``out (B, H, N, D)``, and per row, ``(B, H, N)``, sums that its rounding errors depend on."""

    out: Tensor
    p2: Tensor  # sum_j p^2
    p4: Tensor  # sum_j p^4
    top: Tensor  # max_j p
    key2: Tensor  # sum_j p^2 |k_j - mean(k)|^2 / sum_j p^2
    value2: Tensor  # sum_j p^2 |v_j|^2
    distance2: Tensor  # sum_j p^2 |v_j - o|^2
    int8_p: Tensor  # sum_j var(dp_j) |v_j|^2 with P in steps of max_j p / 127


def attention_rows(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Rows:
    """``Rows`` of ``(B, H, N, D)`` operands, computed a few heads at a time; TF32 must be off."""
    tokens = query.shape[-2]
    heads = max(ORACLE_BYTES // (4 * tokens * tokens), 1)
    future = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).triu(1) if causal else None
    groups = [tensor.flatten(0, 1).split(heads) for tensor in (query, key, value)]
    parts = [_rows_of_heads(q.float(), k.float(), v.float(), future) for q, k, v in zip(*groups, strict=True)]
    joined = [torch.cat(column) for column in zip(*parts, strict=True)]
    return Rows(*(tensor.unflatten(0, query.shape[:2]) for tensor in joined))


def _rows_of_heads(q: Tensor, k: Tensor, v: Tensor, future: Tensor | None) -> tuple[Tensor, ...]:
    """The fields of ``Rows`` for ``(heads, N, D)``."""
    p = (q * q.shape[-1] ** -0.5) @ k.mT
    if future is not None:
        p.masked_fill_(future, -math.inf)
    p = p.softmax(-1)
    out, top, square = p @ v, p.amax(-1), p.square()
    k2, v2 = ((x * x).sum(-1, keepdim=True) for x in (k - k.mean(1, keepdim=True), v))
    weighted = square @ torch.cat([torch.ones_like(v2), k2, v2, v], -1)
    p2, key2, value2 = weighted[..., :3].unbind(-1)
    distance2 = value2 + out.square().sum(-1) * p2 - 2 * (out * weighted[..., 3:]).sum(-1)
    p4 = torch.linalg.vector_norm(square, dim=-1).square()
    step = (top / 127)[..., None]
    small = p < step / 2
    int8_p = (torch.where(small, square, step.square() / 12) @ v2)[..., 0]
    return out, p2, p4, top, key2 / p2, value2, distance2.clamp(min=0), int8_p


def float32_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """softmax(Q K^T / sqrt(D)) V in float32, ``(B, H, N, D)``; TF32 must be off."""
    return attention_rows(query, key, value, causal).out


# The error predicted ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noise:
    """``(B, H, N)``: the roots of ``E |dO_i|^2`` and of ``s_i^2``."""

    rows: Tensor
    logits: Tensor


def float_noise(rows: Rows) -> Noise:
    """An upper bound of the error of rounding P and the output to float16; logits are float32."""
    return Noise(FP16 * (rows.value2 + rows.out.square().sum(-1)).sqrt(), torch.zeros_like(rows.p2))


def predicted_noise(query: Tensor, key: Tensor, value: Tensor, rows: Rows, variant: AttentionVariant) -> Noise:
    """The noise of a variant with smooth K, from float16 operands to float16."""
    q, k, v = query.float(), key.float(), value.float()
    k = k - k.mean(2, keepdim=True)
    if variant.smooth_q:
        q = torch.cat([block - block.mean(2, keepdim=True) for block in q.split(QUERY_BLOCK, 2)], 2)
    a2 = _steps(q, variant, "query").square()
    b2 = _steps(k, variant, "key").square().mean(-1, keepdim=True)
    head_dim = q.shape[-1]
    logits = ((a2 * rows.key2 + b2 * q.square().sum(-1)) / 12 + head_dim * a2 * b2 / 144) / head_dim
    square = logits * rows.distance2 + _rounding_of_p(rows, variant) + _rounding_of_v(v, rows, variant)
    accumulator = 2.0**-10 if variant.accumulator == "fp16" else 2.0**-12
    square += FP16**2 * rows.out.square().sum(-1) / 3 + accumulator**2 * rows.value2
    return Noise(square.sqrt(), logits.sqrt())


def _steps(x: Tensor, variant: AttentionVariant, role: str) -> Tensor:
    """The step of each token of ``x (B, H, N, D)``, ``(B, H, N)``; zeros where nothing is quantized."""
    if not variant.quantizes_qk:
        return x.new_zeros(x.shape[:3])
    groups = token_groups(variant.granularity, role)
    index = groups.index(x.shape[2], x.device).expand(x.shape[:3])
    largest = x.new_zeros(*x.shape[:2], groups.count(x.shape[2]))
    largest.scatter_reduce_(2, index, x.abs().amax(-1), "amax")
    if variant.granularity == "per_tensor":
        largest = largest.amax().expand_as(largest)
    return largest.gather(2, index) / (127 if variant.qk_bits == 8 else 7)


def _rounding_of_p(rows: Rows, variant: AttentionVariant) -> Tensor:
    if variant.pv == "int8":
        return rows.int8_p
    if variant.exponential == "integer":
        return rows.value2 * LINEAR_MANTISSA_VARIANCE
    return rows.value2 * (E4M3_VARIANCE if variant.pv == "fp8" else FP16**2 / 3)


def _rounding_of_v(value: Tensor, rows: Rows, variant: AttentionVariant) -> Tensor:
    if variant.pv == "fp8":
        return rows.value2 * E4M3_VARIANCE
    if variant.pv == "fp16":
        return torch.zeros_like(rows.p2)
    largest = value.abs().amax((2, 3) if variant.pv == "int8_dequantized" else 2, keepdim=True)
    steps = (largest / 127).square().expand(*value.shape[:2], 1, value.shape[3])
    return rows.p2 * steps.sum(-1) / 12


def largest_noise(rows: Rows, noise: Noise) -> Tensor:
    """``(B, H, N)``: the bound of each row's error (see above)."""
    t = math.log(rows.p2.numel() / FALSE_ALARM)
    spread = rows.p4 / rows.p2.square() + 1 / rows.out.shape[-1]
    x = (math.sqrt(2 * t) * noise.logits).clamp(min=1e-6)
    second_order = (x.expm1() / (x * (1 + rows.top * x.expm1()))).clamp(min=1)
    one_key = 2 * t * second_order.square() * rows.top.square() / rows.p2
    return noise.rows * (1 + 2 * (t * spread).sqrt() + one_key).sqrt()


def attention_within(rows: Callable[[], Rows], noise: Callable[[Rows], Noise]) -> Check:
    """Check that all rows together have at most ``TOTAL`` times the predicted error, and each ``largest_noise``."""

    def check(value: Tensor) -> float:
        exact = rows()
        require_shape(value, exact.out)
        predicted = noise(exact)
        error = (value.float() - exact.out).norm(dim=-1)
        total = float(error.norm() / predicted.rows.norm())
        worst = float((error / largest_noise(exact, predicted)).amax())
        relative = relative_error(value, exact.out)
        if not (total <= TOTAL and worst <= 1):  # also NaN
            message = (
                f"error must be at most {TOTAL:g} times what rounding explains, got {total:.3g} times; the worst row "
                f"must be within its bound, got {worst:.3g} times the bound; relative error {relative:.3g}"
            )
            raise WrongResultError(message, relative)
        return relative

    return check
