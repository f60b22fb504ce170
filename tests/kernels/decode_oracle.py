"""Attention to an INT8 cache in FP64, and how far a kernel may be from it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qframework.kernels.runtime.triton import INTERPRET

# One rounding of a result; of P to bf16, which the interpreter cuts off instead; of a query relative to its largest.
ROUNDOFF = {torch.float32: 2.0**-22, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
P_ERROR = 2.0 ** (-7 if INTERPRET else -9)
Q_ERROR = 2.0**-11


class Cache(NamedTuple):
    """Random integers with scales; behind each length scales are NaN."""

    key: Tensor
    value: Tensor
    scales: Tensor
    lengths: Tensor


def make_cache(batch: int, heads: int, capacity: int, d: int, dv: int, lengths: list[int], place: Any) -> Cache:
    def ints(width: int) -> Tensor:
        x = torch.randint(-127, 128, (batch, heads, capacity, width), dtype=torch.int8)
        x[..., 0], x[..., 1] = -127, 127
        return x.to(place)

    scales = (torch.rand(batch, heads, capacity, 2) + 0.2).div(60).bfloat16()
    for b in range(batch):
        scales[b, :, lengths[b % len(lengths)] :] = math.nan
    return Cache(ints(d), ints(dv), scales.to(place), torch.tensor(lengths, dtype=torch.int32, device=place))


def visible(cache: Cache, tokens: int, mask: Tensor | None, causal: bool, window: int | None) -> Tensor:
    """(B, 1 or H, tokens, capacity) bool, token by token."""
    batch, _, capacity, _ = cache.key.shape
    seen = torch.zeros(batch, 1, tokens, capacity, dtype=torch.bool)
    for b in range(batch):
        length = min(int(cache.lengths[b % len(cache.lengths)]), capacity if mask is None else mask.shape[-1])
        for i in range(tokens):
            position = length - tokens + i
            first = 0 if window is None else max(position - window + 1, 0)
            last = position + 1 if causal else length
            seen[b, 0, i, first : max(last, first)] = True
    seen = seen.to(cache.key.device)
    if mask is not None and mask.dtype == torch.bool:
        seen = seen[..., : mask.shape[-1]] & mask
        seen = torch.nn.functional.pad(seen, (0, capacity - mask.shape[-1]))
    return seen


def exact(
    query: Tensor, cache: Cache, mask: Tensor | None = None, causal: bool = False, window: int | None = None,
    scale: float | None = None, p_error: float = P_ERROR, q_error: float = Q_ERROR, softcap: float | None = None,
    key_mean: Tensor | None = None, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """FP64 attention, and what rounding Q, P and the result may change of it."""
    group = query.shape[1] // cache.key.shape[1]
    scales = cache.scales.double().nan_to_num(0.0)
    key = cache.key.double() * scales[..., :1]
    if key_mean is not None and not (softcap is None and sinks is None):
        key = key + key_mean.double()[:, :, None]
    key = key.repeat_interleave(group, 1)
    value = (cache.value.double() * scales[..., 1:]).repeat_interleave(group, 1)
    q = query.double() * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    logits = q @ key.mT
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if mask is not None and mask.dtype != torch.bool:
        added = mask.double().expand(*mask.shape[:-1], mask.shape[-1])
        added = torch.nn.functional.pad(added, (0, key.shape[2] - mask.shape[-1]), value=-math.inf)
        logits = logits + added
    logits = logits.masked_fill(~visible(cache, query.shape[2], mask, causal, window), -math.inf)
    dead = (logits == -math.inf).all(-1, keepdim=True)
    logits = logits.masked_fill(dead, 0.0)
    if sinks is None:
        p = logits.softmax(-1)
    else:
        last = (sinks.view(1, -1, 1) if sinks.ndim == 1 else sinks).double().expand(logits.shape[:-1])
        p = torch.cat([logits, last.unsqueeze(-1)], -1).softmax(-1)[..., :-1]
    p = p.masked_fill(dead, 0.0)
    out = p @ value
    # A query is off by `q_error` of its largest value, so a logit by that times |k|; float32 sums add a little.
    largest = (q.abs().amax(-1, keepdim=True) * q_error) @ key.abs().sum(-1, keepdim=True).mT + 2.0**-18
    shift = (2 * largest).expm1() * p
    moved = shift @ value.abs() + out.abs() * shift.sum(-1, keepdim=True)
    rounded = p_error * (p @ value.abs()) + 1.01 * ROUNDOFF[query.dtype] * out.abs() + 1e-6
    return out, moved + rounded


def assert_exact(got: Tensor, query: Tensor, cache: Cache, **options: Any) -> None:
    expected, allowed = exact(query, cache, **options)
    assert got.dtype == query.dtype
    assert got.shape == expected.shape
    assert ((got.double() - expected).abs() <= allowed).all()
