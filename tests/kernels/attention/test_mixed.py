"""mixed_attention against float64: integers in, integers or floats out."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import Tensor

from qframework.errors import QFrameworkError
from qframework.kernels import mixed_attention

module = sys.modules["qframework.kernels.attention.mixed"]
SHAPES = [(2, 3, 3, 50, 77, 64, 64), (1, 4, 2, 33, 130, 72, 40), (2, 2, 1, 1, 1, 16, 16), (1, 2, 2, 130, 7, 128, 8)]


def integers(*shape: int) -> Tensor:
    """Full range, with -127 and 127."""
    x = torch.randint(-127, 128, shape, dtype=torch.int8)
    x.view(-1)[0], x.view(-1)[-1] = -127, 127
    return x


def operands(shape, place, per_head: bool = False):
    batch, heads, kv_heads, queries, keys, channels, width = shape
    q, k, v = integers(batch, heads, queries, channels), integers(batch, kv_heads, keys, channels), None
    v = integers(batch, kv_heads, keys, width)
    sizes = [(heads, 1, 1), (kv_heads, 1, 1), (kv_heads, 1, 1)] if per_head else [(1,), (), (1,)]
    scales = [torch.rand(size) * 0.02 + 0.01 for size in sizes]
    return [x.to(place) for x in (q, k, v)], [scale.to(place) for scale in scales]


def exact(tensors, scales, bias=0.0, scale=None) -> tuple[Tensor, Tensor]:
    """``(out, sum_j p_j |v_j|)`` in float64."""
    q, k, v = (x.cpu().double() * s.cpu().double() for x, s in zip(tensors, scales, strict=True))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = q @ k.mT * (scale if scale is not None else 1 / math.sqrt(q.shape[-1])) + bias
    p = torch.softmax(logits, -1).nan_to_num(0.0)
    return p @ v, p @ v.abs()


def run(implementation, tensors, scales, **kwargs) -> Tensor:
    call = {"cpu": torch.ops.qframework.mixed_attention, "triton": module.MIXED_ATTENTION.cuda}[implementation]
    return call(*tensors, *scales, **kwargs)


# P is rounded to float16 before the second product; logits of +-60 are sums in float32.
TOLERANCE = 2.0**-11 + 2.0**-16


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(implementation, place, shape, per_head):
    tensors, scales = operands(shape, place, per_head)
    out = run(implementation, tensors, scales, enable_gqa=True, out_dtype=torch.float32)
    expected, size = exact(tensors, scales)
    assert out.dtype == torch.float32
    assert out.transpose(1, 2).is_contiguous()
    assert ((out.cpu().double() - expected).abs() <= TOLERANCE * size + 1e-9).all()


@pytest.mark.parametrize("form", ["bool", "float", "causal", "both", "relative"])
def test_masks_and_relative_positions(implementation, place, form):
    tensors, scales = operands((2, 2, 2, 40, 70, 32, 32), place)
    keep = torch.rand(40, 70) < 0.6
    keep[3] = False
    causal = torch.ones(40, 70, dtype=torch.bool).tril()
    added, height, width = torch.randn(2, 1, 40, 70), torch.randn(2, 2, 40, 7), torch.randn(2, 2, 40, 10)
    kwargs, bias = {
        "bool": ({"attn_mask": keep}, torch.zeros(40, 70).masked_fill(~keep, -math.inf)),
        "float": ({"attn_mask": added}, added),
        "causal": ({"is_causal": True}, torch.zeros(40, 70).masked_fill(~causal, -math.inf)),
        "both": ({"is_causal": True, "attn_mask": keep}, torch.zeros(40, 70).masked_fill(~(keep & causal), -math.inf)),
        "relative": (
            {"rel_h": height, "rel_w": width},
            (height[..., :, None] + width[..., None, :]).flatten(-2),
        ),
    }[form]
    kwargs = {name: x.to(place) if isinstance(x, Tensor) else x for name, x in kwargs.items()}
    out = run(implementation, tensors, scales, out_dtype=torch.float32, **kwargs).cpu().double()
    expected, size = exact(tensors, scales, bias.double())
    assert ((out - expected).abs() <= TOLERANCE * size + 1e-9).all()
    if form in ("bool", "both"):
        assert (out[:, :, 3] == 0).all(), "a row without keys is not zero"


@pytest.mark.parametrize("width", [64, 32])
def test_rows_of_an_image_as_wide_as_a_block(implementation, place, width):
    tensors, scales = operands((1, 2, 2, 70, 192, 32, 32), place)
    rel_h, rel_w = torch.randn(1, 2, 70, 192 // width), torch.randn(1, 2, 70, width)
    parts = {"rel_h": rel_h.to(place), "rel_w": rel_w.to(place)}
    out = run(implementation, tensors, scales, out_dtype=torch.float32, **parts)
    expected, size = exact(tensors, scales, (rel_h[..., :, None] + rel_w[..., None, :]).flatten(-2).double())
    assert ((out.cpu().double() - expected).abs() <= TOLERANCE * size + 1e-9).all()


@pytest.mark.parametrize("width", [64, 24])
def test_factors_with_any_strides(implementation, place, width):
    """Results of einsum may have any memory order."""
    tensors, scales = operands((1, 2, 2, 30, 3 * width, 32, 32), place)
    rel_h, rel_w = torch.randn(1, 2, 3, 30).mT, torch.randn(1, 2, width, 30).mT
    parts = {"rel_h": rel_h.to(place), "rel_w": rel_w.to(place)}
    assert parts["rel_h"].stride(-1) != 1 != parts["rel_w"].stride(-1)
    out = run(implementation, tensors, scales, out_dtype=torch.float32, **parts)
    expected, size = exact(tensors, scales, (rel_h[..., :, None] + rel_w[..., None, :]).flatten(-2).double())
    assert ((out.cpu().double() - expected).abs() <= TOLERANCE * size + 1e-9).all()


def test_a_mask_for_each_window_of_every_image(implementation, place):
    """5-D (images, windows, heads, N, D) with a mask (1, windows, 1, N, N), as Swin's shifted windows have it."""
    tensors, scales = operands((6, 2, 2, 20, 20, 16, 16), place)
    mask = torch.randn(3, 1, 20, 20)
    windows = [x.unflatten(0, (2, 3)) for x in tensors]
    out = run(implementation, windows, scales, attn_mask=mask[None].to(place), out_dtype=torch.float32)
    expected, size = exact(tensors, scales, mask.repeat(2, 1, 1, 1).double())
    assert ((out.flatten(0, 1).cpu().double() - expected).abs() <= TOLERANCE * size + 1e-9).all()


@pytest.mark.parametrize("per_head", [False, True])
def test_int8_out(implementation, place, per_head):
    tensors, scales = operands((2, 3, 3, 50, 77, 64, 64), place, per_head)
    out_scale = (torch.rand(3, 1, 1) * 0.002 + 0.001 if per_head else torch.tensor(0.0015)).to(place)
    out = run(implementation, tensors, scales, out_scale=out_scale)
    expected, size = exact(tensors, scales)
    quotient = expected / out_scale.cpu().double()
    assert out.dtype == torch.int8
    assert (out.cpu().double() - quotient.clamp(-127, 127)).abs().max() <= 0.5 + float(
        (TOLERANCE * size / out_scale.cpu()).max()
    )
    assert (out.abs() == 127).any(), "nothing saturates: the test does not look at the edge"


def test_three_and_five_dimensions(implementation, place):
    tensors, scales = operands((6, 1, 1, 20, 30, 16, 16), place)
    four = run(implementation, tensors, scales, out_dtype=torch.float32)
    three = run(implementation, [x[:, 0] for x in tensors], scales, out_dtype=torch.float32)
    five = run(implementation, [x.unflatten(0, (2, 3)) for x in tensors], scales, out_dtype=torch.float32)
    assert torch.equal(three, four[:, 0])
    assert torch.equal(five.flatten(0, 1), four)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(1, 2, 4, 8)}, "query must have dtype int8, got torch.float32"),
        (
            {"query_scale": torch.ones(3, 1, 1)},
            r"query_scale must have shape .* or \(2, 1, 1\), got \(3, 1, 1\)",
        ),
        ({"value_scale": torch.ones(1, dtype=torch.float64)}, "value_scale must have dtype float32, got torch.float64"),
        (
            {"out_scale": torch.ones(1), "out_dtype": torch.float16},
            "out_dtype must be int8 or None.*, got torch.float16",
        ),
        ({"out_dtype": torch.int32}, "out_dtype must be float32, .*, got torch.int32"),
        ({"key": torch.zeros(1, 2, 4, 6, dtype=torch.int8)}, "key must have query's head dimension 8, got 6"),
        ({"attn_mask": torch.zeros(3, 3)}, r"attn_mask must have a shape that broadcasts to .*, got \(3, 3\)"),
    ],
)
def test_bad_arguments_are_named(change, message):
    x, one = torch.zeros(1, 2, 4, 8, dtype=torch.int8), torch.ones(1)
    arguments = {"query": x, "key": x, "value": x, "query_scale": one, "key_scale": one, "value_scale": one} | change
    with pytest.raises(QFrameworkError, match=message):
        mixed_attention(**arguments)


@pytest.mark.parametrize("variant", ["sage_t", "sage_b"])
def test_large_values_do_not_overflow_float16_sums(implementation, place, variant):
    """64 keys of equal weight with V at a quarter of float16's range, whose sum is 16 times the range."""
    sage = sys.modules["qframework.kernels.attention.pipeline"]
    call = {"cpu": torch.ops.qframework.sage_attention, "triton": sage.SAGE_ATTENTION.cuda}[implementation]
    x = torch.zeros(1, 1, 128, 32, dtype=torch.float16, device=place)
    out, _ = call(x, x, torch.full_like(x, 16384.0), variant=variant)
    assert ((out.float() - 16384.0).abs() <= 16384 * 2.0**-10).all()


def test_opcheck(device):
    tensors, scales = operands((1, 4, 2, 9, 11, 16, 24), device)
    for kwargs in ({}, {"out_scale": torch.tensor(0.01, device=device)}, {"is_causal": True, "scale": 0.3}):
        torch.library.opcheck(
            torch.ops.qframework.mixed_attention.default, (*tensors, *scales), {"enable_gqa": True, **kwargs}
        )
