"""Quantization of values per channel, against NumPy in float64, and their conversion to float16."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from oracle import numpy64

from qframework.errors import UnsupportedError
from qframework.kernels import value_quantize
from qframework.kernels.attention.variants import resolve, values_dtype
from qframework.kernels.runtime.chip import capability_of

v_module = sys.modules["qframework.kernels.attention.quantize_v"]
sage_module = sys.modules["qframework.kernels.attention.pipeline"]


@pytest.mark.parametrize(("kind", "v_range"), [("int8", 127.0), ("fp8", 448.0), ("fp8", 4.5)])
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize(("tokens", "channels"), [(1, 72), (50, 40), (197, 64)])
def test_values_are_quantized_per_channel(implementation, place, kind, v_range, smooth, tokens, channels):
    v = torch.randn(2, 2, tokens, channels, device=place) + 3
    call = {"cpu": value_quantize, "triton": v_module.VALUE_QUANTIZE.cuda}[implementation]
    q, scale, mean = call(v, kind, v_range, smooth)
    exact = numpy64(v) - (numpy64(v).mean(2, keepdims=True) if smooth else 0)
    np.testing.assert_allclose(numpy64(mean), numpy64(v).mean(2) if smooth else 0 * numpy64(mean), atol=1e-5)
    amax = np.abs(exact).max(2)
    np.testing.assert_allclose(numpy64(scale), np.maximum(amax / v_range, 2.0**-60), rtol=1e-5, atol=2e-6 / v_range)
    assert q.shape == (2, 2, channels, -(-tokens // 64) * 64)
    assert (q[..., tokens:].float() == 0).all(), "padding is not zero"
    got = numpy64(q.float())[..., :tokens].swapaxes(2, 3) * numpy64(scale)[:, :, None]
    step = 0.5 * numpy64(scale)[:, :, None]
    allowed = step if kind == "int8" else np.maximum(np.abs(exact) * 2.0**-4, step * 2.0**-9)
    assert (np.abs(got - exact) <= 1.001 * allowed + 1e-5).all()


@pytest.mark.parametrize("packed", [False, True])
def test_bfloat16_values_fit_float16(packed):
    """Every bfloat16 comes back as it was, though float16 reaches from 2**-24 to 65504 alone."""
    v = torch.randn(2, 3, 50, 8).bfloat16()
    v *= torch.tensor([1.0, 1e5, 1e30, 3.3e38 / 8, 1e-12, 1e-35, 0.0, 65504.0], dtype=torch.bfloat16)
    v = v[0].transpose(0, 1) if packed else v
    low, scale = v_module.values_in_fp16(v, packed)
    assert low.dtype == torch.float16
    assert scale.shape == ((1, 3, 8) if packed else (2, 3, 8))
    assert torch.equal(low.double() * (scale if packed else scale[:, :, None]).double(), v.double())
    assert low.abs().max() < 2**15  # the largest sum of 64 products with P of 1/64


def test_nan_reaches_the_scale_of_its_channel():
    v = torch.ones(1, 1, 50, 2, dtype=torch.bfloat16)
    v[0, 0, 7, 1] = torch.nan
    _, scale = v_module.values_in_fp16(v)
    assert scale.isnan().tolist() == [[[False, True]]]


@pytest.mark.parametrize("size", [1.0, 1e6, 1e-20])
@pytest.mark.parametrize("variant", ["sage_t", "sage_b"])
def test_bfloat16_attention_multiplies_in_float16(implementation, place, variant, size):
    """P has 11 bits: rounded to 8, weights of 1/3 would be off by 2**-9, and so would their sum."""
    q, k = (torch.zeros(1, 1, n, 16, dtype=torch.bfloat16, device=place) for n in (2, 3))
    v = torch.full((1, 1, 3, 16), size, dtype=torch.bfloat16, device=place)
    mask = torch.tensor([[0.0, -1.0986123, -1.0986123], [0.0, -0.6931472, -0.6931472]], device=place)  # 1, 1/3, 1/2
    call = {"cpu": torch.ops.qframework.sage_attention, "triton": sage_module.SAGE_ATTENTION.cuda}[implementation]
    v[0, 0, 1:] *= -1
    out = call(q, k, v, mask, variant=variant)[0].double() / v[0, 0, 0].double()
    expected = torch.tensor([(1 - 2 / 3) / (5 / 3), 0.0], dtype=torch.float64, device=place)
    bits = {torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}  # and the result's own rounding
    dtype = values_dtype(resolve(variant), v.dtype, capability_of(v.device))
    assert (out[0, 0, :, 0] - expected).abs().max() <= bits[dtype]


def test_an_unknown_kind_is_named():
    with pytest.raises(UnsupportedError, match="kind must be int8 or fp8, got 'int4'"):
        value_quantize(torch.zeros(1, 1, 4, 8), "int4", 7.0)


def test_opcheck(device):
    x = torch.randn(1, 2, 70, 16, device=device)
    torch.library.opcheck(torch.ops.qframework.value_quantize.default, (x, "fp8", 448.0, True))
