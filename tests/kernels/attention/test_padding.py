"""padding.py: keys that a mask hides from every query affect neither the mean of smoothing nor any scale."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qframework.kernels.attention import pipeline as module
from qframework.kernels.attention.variants import VARIANTS

QUERIES, KEYS, CHANNELS, HEADS = 16, 80, 16, 2
SEEN = (70, 25)  # visible tokens of each sequence; padding fills half of a block of 64 keys in the second one
SPECS = (*VARIANTS, "8-per_block-fp16-fp32", "8-per_tensor-fp16-fp32", "8-per_warp-fp8-fp32-smooth_v")
LOWEST = {dtype: torch.finfo(dtype).min for dtype in (torch.float32, torch.float16, torch.bfloat16)}


def attend(implementation: str, *args, variant="sage_b", smooth_k=True, causal=False, gqa=False, lse=False, **relative):
    call = {"cpu": torch.ops.qframework.sage_attention, "triton": module.SAGE_ATTENTION.cuda}[implementation]
    q, k, v, mask = args
    out, sums = call(q, k, v, mask, causal, None, gqa, variant, smooth_k, lse, **relative)
    return (out, sums) if lse else out


def operands(place: torch.device, heads: int = HEADS) -> list[Tensor]:
    """Keys and values with a bias per channel, which a mean that counts zeros would not remove."""
    q = torch.randn(2, heads, QUERIES, CHANNELS)
    k, v = (torch.randn(2, HEADS, KEYS, CHANNELS) + 3 * torch.randn(1, HEADS, 1, CHANNELS) for _ in range(2))
    return [x.half().to(place) for x in (q, k, v)]


def seen(place: torch.device) -> Tensor:
    return (torch.arange(KEYS) < torch.tensor(SEEN)[:, None]).view(2, 1, 1, KEYS).to(place)


def spoil(x: Tensor, by: float) -> Tensor:
    """``x`` with ``by`` and numbers of that size in the padding."""
    x = x.clone()
    for b, n in enumerate(SEEN):
        x[b, :, n:] = by * torch.randn_like(x[b, :, n:]).clamp(-3, 3) if math.isfinite(by) else by
    return x


def without_padding(implementation: str, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    one_by_one = [
        attend(implementation, q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n], None, **options)
        for b, n in enumerate(SEEN)
    ]
    return torch.cat(one_by_one)


def low(place: torch.device, dtype: torch.dtype = torch.float32, value: float | None = None) -> Tensor:
    value = LOWEST[dtype] if value is None else value
    return torch.zeros(2, 1, 1, KEYS, dtype=dtype, device=place).masked_fill(~seen(place), value)


MASKS = {
    "bool": seen,
    "bool, of each head": lambda place: seen(place).repeat(1, HEADS, 1, 1),
    "bool, expanded": lambda place: seen(place).expand(2, HEADS, QUERIES, KEYS),
    "bool, of each query": lambda place: seen(place).repeat(1, 1, QUERIES, 1),
    "-inf": lambda place: low(place, value=-math.inf),
    "-inf, of each head": lambda place: low(place, value=-math.inf).repeat(1, HEADS, 1, 1),
    "-inf, expanded": lambda place: low(place, value=-math.inf).expand(-1, -1, QUERIES, -1),
    "-1e4": lambda place: low(place, value=-1e4),
    "-1e4, bfloat16": lambda place: low(place, torch.bfloat16, -1e4),
    "-1e9": lambda place: low(place, value=-1e9),
    "lowest float32": low,
    "lowest float16": lambda place: low(place, torch.float16),
}


@pytest.mark.parametrize("smooth_k", [True, False])
@pytest.mark.parametrize("variant", [spec for spec in SPECS if "per_tensor" not in spec])
def test_padding_does_not_increase_the_error(implementation, place, variant, smooth_k):
    """The scales are the same up to rounding of the mean, and so are the errors."""
    q, k, v = operands(place)
    options = {"variant": variant, "smooth_k": smooth_k}
    out = attend(implementation, q, spoil(k, 1e4), spoil(v, 1e4), seen(place), **options)
    exact = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), seen(place))
    error = (out - exact).square().mean()
    assert error < 1.2**2 * (without_padding(implementation, q, k, v, **options) - exact).square().mean()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("variant", ["sage_b", "8-per_tensor-fp16-fp32", "8-per_warp-fp8-fp32-smooth_v"])
def test_the_content_of_padding_changes_no_bit(implementation, place, mask, variant):
    q, k, v = operands(place)
    mask = MASKS[mask](place)
    expected, sums = attend(implementation, q, k, v, mask, variant=variant, lse=True)
    for by in (1e4, math.nan):
        out, other = attend(implementation, q, spoil(k, by), spoil(v, by), mask, variant=variant, lse=True)
        assert torch.equal(out, expected), f"padding of {by}"
        assert torch.equal(other, sums), f"padding of {by}"


def test_grouped_heads_and_masks_of_windows(implementation, place):
    """A key that any head of its group attends to counts; masks repeat for each window of a batch of images."""
    q, k, v = operands(place, 2 * HEADS)
    mask = seen(place).repeat(1, 2 * HEADS, 1, 1)
    mask[0, 1, :, 75] = True
    spoiled_k, spoiled_v = spoil(k, 100.0), spoil(v, 100.0)
    for x, y in ((spoiled_k, k), (spoiled_v, v)):
        x[0, 0, 75] = y[0, 0, 75]
    out = attend(implementation, q, spoiled_k, spoiled_v, mask, gqa=True)
    assert torch.equal(out, attend(implementation, q, k, v, mask, gqa=True))
    mask[0, 1, :, 75] = False
    assert not torch.equal(out, attend(implementation, q, k, v, mask, gqa=True))

    images = [torch.stack([x, x]) for x in (q, k, v)]
    spoiled = [torch.stack([x, x]) for x in (q, spoil(k, 1e4), spoil(v, 1e4))]
    windows = seen(place)[None]
    out, expected = (attend(implementation, *x, windows, gqa=True) for x in (spoiled, images))
    assert torch.equal(out, expected)


@pytest.mark.parametrize("kind", ["no mask", "bool", "float"])
def test_keys_after_the_last_causal_query_change_no_bit(implementation, place, kind):
    q, k, v = operands(place)
    mask = {"bool": torch.rand(QUERIES, KEYS) > 0.2, "float": torch.randn(QUERIES, KEYS)}.get(kind)
    mask = mask.to(place) if mask is not None else None
    spoiled = [x.clone() for x in (k, v)]
    for x in spoiled:
        x[:, :, QUERIES:] = 1e4
    out = attend(implementation, q, *spoiled, mask, causal=True)
    assert torch.equal(out, attend(implementation, q, k, v, mask, causal=True))


def test_masks_that_hide_no_key_from_all_queries_change_nothing():
    """A mask that hides keys from some queries only, or that is a bias, leaves K and V unchanged."""
    k = torch.randn(2, HEADS, KEYS, CHANNELS)
    some = torch.ones(2, 1, QUERIES, KEYS, dtype=torch.bool).tril()
    bias = torch.randn(2, 1, 1, KEYS) - 1e4
    for mask in (some | True, bias):
        hidden = module.hidden_keys(mask, *k.shape[:3])
        assert hidden is None or not hidden.any()
    for mask in (None, torch.randn(2, HEADS, QUERIES, KEYS), some.expand(2, HEADS, QUERIES, KEYS).clone()):
        assert module.hidden_keys(mask, *k.shape[:3]) is None
