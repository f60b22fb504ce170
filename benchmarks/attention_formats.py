"""Attention with Q, K, P and V in any format, in plain PyTorch: also those that no kernel of this package has.

It streams over blocks of keys as the kernels do, so that P is relative to the largest logit so far, and is exact but
for the formats themselves: products and sums are float32, or float16 where asked for. Smoothing of K is the caller's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qframework.kernels.attention.variants import KEY_BLOCK, TokenGroups, token_groups

# The largest number of each format; INT8 is symmetric.
LARGEST = {"INT8": 127.0, "E4M3": 448.0, "E5M2": 57344.0}
_FLOAT8 = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
_MMA_KEYS = 32  # keys whose products one FP8 instruction adds


@dataclass(frozen=True)
class Formats:
    """What attention is multiplied in.

    Attributes:
        qk: of Q and K: a key of ``LARGEST``.
        pv: of P and V: a key of ``LARGEST``, or ``"FP16"``. P has a static scale, V one for each channel.
        granularity: which tokens of Q and of K share a scale, see ``AttentionVariant``.
        p_range: what 1 in P becomes, and ``v_range`` the largest magnitude of a channel of V; None for the format's.
        fp16_sums: keys whose products are added in float16 before a float32 sum; 0 for float32 alone.
    """

    qk: str
    pv: str
    granularity: str = "per_block"
    p_range: float | None = None
    v_range: float | None = None
    fp16_sums: int = 0


def attention_in(formats: Formats, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """``softmax(Q K^T / sqrt(D)) V`` for ``(B, H, N, D)`` of any float dtype; float32 ``(B, H, N, D)``."""
    q = _scaled(query.float() * query.shape[-1] ** -0.5, formats.qk, token_groups(formats.granularity, "query"))
    k = _scaled(key.float(), formats.qk, token_groups(formats.granularity, "key"))
    return _stream(q, k, *_values(value.float(), formats), formats)


def _rounded(x: Tensor, name: str) -> Tensor:
    """``x``, already in the format's range, rounded to it."""
    if name in _FLOAT8:
        return x.clamp(-LARGEST[name], LARGEST[name]).to(_FLOAT8[name]).float()
    return x.half().float() if name == "FP16" else x.round().clamp(-LARGEST[name], LARGEST[name])


def _scaled(x: Tensor, name: str, groups: TokenGroups) -> Tensor:
    """``x`` in a format with a scale for each group of tokens of a head."""
    index = groups.index(x.shape[2], x.device)
    largest = x.new_zeros(*x.shape[:2], groups.count(x.shape[2]))
    largest.scatter_reduce_(2, index.expand(x.shape[:3]), x.abs().amax(-1), "amax")
    scale = (largest / LARGEST[name]).clamp(min=1e-30)[:, :, index, None]
    return _rounded(x / scale, name) * scale


def _values(value: Tensor, formats: Formats) -> tuple[Tensor, Tensor]:
    """V in its range and format, and the scale of each channel."""
    if formats.pv == "FP16":
        return _rounded(value, "FP16"), value.new_ones(1)
    scale = (value.abs().amax(2, keepdim=True) / (formats.v_range or LARGEST[formats.pv])).clamp(min=1e-30)
    return _rounded(value / scale, formats.pv), scale


def _stream(q: Tensor, k: Tensor, v: Tensor, v_scale: Tensor, formats: Formats) -> Tensor:
    p_range = 1.0 if formats.pv == "FP16" else formats.p_range or LARGEST[formats.pv]
    top = q.new_full((*q.shape[:3], 1), -math.inf)
    total, out = torch.zeros_like(top), torch.zeros(*q.shape[:3], v.shape[-1], device=q.device)
    for start in range(0, k.shape[2], KEY_BLOCK):
        block = slice(start, start + KEY_BLOCK)
        logits = q @ k[:, :, block].mT
        higher = torch.maximum(top, logits.amax(-1, keepdim=True))
        shrink, p = (top - higher).exp(), (logits - higher).exp()
        product = _product(_rounded(p * p_range, formats.pv), v[:, :, block], formats.fp16_sums)
        total = total * shrink + p.sum(-1, keepdim=True)
        out, top = out * shrink + product, higher
    return out * v_scale / (total * p_range)


def _product(p: Tensor, v: Tensor, fp16_sums: int) -> Tensor:
    """``p @ v``; with ``fp16_sums``, sums of so many keys are rounded to float16 after each instruction."""
    if not fp16_sums:
        return p @ v
    result = p.new_zeros(*p.shape[:-1], v.shape[-1])
    for start in range(0, v.shape[2], fp16_sums):
        partial = torch.zeros_like(result)
        for first in range(start, min(start + fp16_sums, v.shape[2]), _MMA_KEYS):
            keys = slice(first, first + _MMA_KEYS)
            partial = (partial + p[..., keys] @ v[:, :, keys]).half().float()
        result = result + partial
    return result


def smoothed(key: Tensor) -> Tensor:
    """K without its mean over tokens, which the softmax does not see (SageAttention eq. 6), in float32."""
    return key.float() - key.float().mean(2, keepdim=True)


def figures(actual: Tensor, expected: Tensor) -> dict[str, float]:
    """``cosine``, ``relative_l1`` and ``rmse`` of two outputs, flattened (SageAttention section 4.3)."""
    a, b = actual.double().flatten(), expected.double().flatten()
    return {
        "cosine": float(a @ b / (a.norm() * b.norm())),
        "relative_l1": float((a - b).abs().sum() / b.abs().sum()),
        "rmse": float((a - b).square().mean().sqrt()),
    }
