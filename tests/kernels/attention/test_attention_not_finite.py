"""NaN and infinity give NaN in the rows where float attention does, and in rows that share their scale."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qframework.kernels import attention_quantize, mixed_attention, quantized_attention, rope_quantize
from qframework.kernels.attention import pipeline as module
from qframework.kernels.attention.mixed import MIXED_ATTENTION
from qframework.kernels.attention.variants import VARIANTS, resolve, token_groups

TOKENS, CHANNELS, ROW = 150, 17, 140
SPECS = (*VARIANTS, "8-per_block-fp16-fp32", "8-per_tensor-fp16-fp32", "8-per_warp-fp8-fp32-smooth_v")


def attend(implementation: str, q: Tensor, k: Tensor, v: Tensor, variant: str, causal=False, mask=None, lse=False):
    call = {"cpu": torch.ops.qframework.sage_attention, "triton": module.SAGE_ATTENTION.cuda}[implementation]
    return call(q, k, v, mask, causal, None, False, variant, True, lse)


def operands(place: torch.device, channels: int = CHANNELS) -> list[Tensor]:
    return [torch.randn(1, 1, TOKENS, channels, dtype=torch.float16).to(place) for _ in range(3)]


def nan_rows(out: Tensor) -> list[int]:
    """Which rows hold NaN; those that do hold nothing else."""
    rows = out[0, 0].isnan()
    assert torch.equal(rows.any(-1), rows.all(-1))
    return rows.any(-1).nonzero().flatten().tolist()


@pytest.mark.parametrize("lse", [False, True])  # attention quantizes queries itself, or reads quantized ones
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("variant", SPECS)
def test_nan_in_a_query_affects_only_its_row(implementation, place, variant, bad, lse):
    """The other rows equal those of a query of zeros: the scale of its group ignores it."""
    q, k, v = operands(place)
    if resolve(variant).smooth_q:  # block means include its finite channels
        q[..., ROW, :] = 0.0
    q[..., ROW, 3] = bad
    out, sums = attend(implementation, q, k, v, variant, lse=lse)
    assert nan_rows(out) == [ROW]
    q[..., ROW, :] = 0.0
    expected, expected_sums = attend(implementation, q, k, v, variant, lse=lse)
    others = torch.arange(TOKENS, device=place) != ROW
    assert torch.equal(out[:, :, others], expected[:, :, others])
    if lse:
        assert sums.isnan()[0, 0].nonzero().flatten().tolist() == [ROW]
        assert torch.equal(sums[..., others], expected_sums[..., others])


def test_nan_in_a_query_with_wide_heads(implementation, place):
    """Above 128 channels attention reads quantized queries."""
    q, k, v = operands(place, 136)
    q[..., ROW, 130] = math.nan
    assert nan_rows(attend(implementation, q, k, v, "auto")[0]) == [ROW]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("variant", SPECS)
def test_nan_in_a_key_affects_the_rows_that_attend_to_its_group(implementation, place, variant, bad):
    """NaN in a key gives its group a NaN scale, but does not spread through the mean of all keys."""
    q, k, v = operands(place)
    k[..., ROW, 3] = bad
    if not resolve(variant).quantizes_qk:  # as float attention: infinity spoils the rows whose logit is not -inf
        for causal in (False, True):
            exact = F.scaled_dot_product_attention(*(x.float().cpu() for x in (q, k, v)), is_causal=causal)
            assert nan_rows(attend(implementation, q, k, v, variant, causal=causal)[0]) == nan_rows(exact)
        return
    groups = token_groups(resolve(variant).granularity, "key").index(TOKENS)
    first = int((groups == groups[ROW]).nonzero()[0])
    assert nan_rows(attend(implementation, q, k, v, variant, causal=True)[0]) == list(range(first, TOKENS))
    assert nan_rows(attend(implementation, q, k, v, variant)[0]) == list(range(TOKENS))
    # On a CPU: PyTorch's fused kernels on GPUs add -inf to the NaN of masked keys, and spoil every row.
    exact = F.scaled_dot_product_attention(*(x.float().cpu() for x in (q, k, v)), is_causal=True)
    assert set(nan_rows(exact)) <= set(range(first, TOKENS)), "float attention spoils more"


@pytest.mark.parametrize("variant", SPECS)
def test_nan_in_a_value_affects_its_channel(implementation, place, variant):
    q, k, v = operands(place)
    v[..., ROW, 3] = math.nan
    out, _ = attend(implementation, q, k, v, variant)
    channels = torch.arange(CHANNELS, device=place) == 3
    if resolve(variant).pv == "int8_dequantized":  # one scale for the head
        channels[:] = True
    assert torch.equal(out.isnan(), channels.expand_as(out))


@pytest.mark.interpreter
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("granularity", ["per_block", "per_head", "per_thread"])
@pytest.mark.parametrize("channels", [17, 32])
def test_triton_marks_as_the_reference_does(bits, granularity, channels):
    from qframework.kernels.attention.quantize_qk import ATTENTION_QUANTIZE

    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.randn(1, 2, 140, channels)
    x[0, 0, 5, 2], x[0, 1, 130, channels - 1] = math.nan, math.inf
    q, scale = ATTENTION_QUANTIZE.cuda(x.to(place), None, 1.0, granularity, "query", bits)
    expected, expected_scale = attention_quantize(x, None, 1.0, granularity, "query", bits)
    assert torch.equal(q[0, 0, 5].cpu(), expected[0, 0, 5])
    assert torch.equal(q[0, 1, 130].cpu(), expected[0, 1, 130])
    assert (expected[0, 0, 5] == (-128 if bits == 8 else expected[0, 0, 5])).all()
    torch.testing.assert_close(scale.cpu(), expected_scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rotary_dim", [32, 20])
@pytest.mark.parametrize("granularity", ["per_block", "per_head"])
def test_nan_in_rotated_queries_and_keys(implementation, place, granularity, rotary_dim):
    """A rotation spreads NaN to the other channel of the pair; the row is marked, and K's mean stays finite."""
    from qframework.kernels.attention.rope import ROPE_MEAN, ROPE_QUANTIZE

    quantize, mean_of = {
        "cpu": (rope_quantize, torch.ops.qframework.rope_mean),
        "triton": (ROPE_QUANTIZE.cuda, ROPE_MEAN.cuda),
    }[implementation]
    q, k, v = operands(place, 32)
    angles = torch.rand(TOKENS, rotary_dim // 2, device=place)
    tables = angles.cos(), angles.sin()
    q[..., ROW, 31] = k[..., ROW, 3] = math.nan
    mean = mean_of(k, *tables, False, rotary_dim)
    assert mean.isfinite().all()
    q8, q_scale = quantize(q, *tables, False, 0.3, granularity, "query", None, rotary_dim)
    assert (q8[..., ROW, :] == -128).all()
    assert q_scale.isfinite().all()
    k8, k_scale = attention_quantize(operands(torch.device("cpu"), 32)[1], None, 1.0, granularity, "key")
    out, _ = quantized_attention(q8.cpu(), q_scale.cpu(), k8, k_scale, v.cpu(), variant=f"8-{granularity}-fp16-fp32")
    assert nan_rows(out) == [ROW]


@pytest.mark.parametrize("relative", [False, True])
def test_minus_128_of_another_quantizer_is_a_number(implementation, place, relative):
    """In static attention -128 is a value, not the marker of NaN."""
    q, k, v = (torch.randint(-128, 128, (1, 1, 20, 16), dtype=torch.int8).to(place) for _ in range(3))
    q[..., 7, :] = -128
    scale = torch.full((1,), 0.01, device=place)
    parts = {"rel_h": torch.zeros(1, 1, 20, 4), "rel_w": torch.zeros(1, 1, 20, 5)} if relative else {}
    parts = {name: part.to(place) for name, part in parts.items()}
    call = {"cpu": mixed_attention, "triton": MIXED_ATTENTION.cuda}[implementation]
    out = call(q, k, v, scale, scale, scale, **parts).double()
    q, k, v = (x.double() * scale.double() for x in (q, k, v))
    exact, size = (F.scaled_dot_product_attention(q, k, x) for x in (v, v.abs()))
    # Two roundings to float16, of P and of the result; logits of up to 8 and their exponentials are float32.
    assert ((out - exact).abs() <= 2.0**-11 * (size + exact.abs()) + 2.0**-18).all()
