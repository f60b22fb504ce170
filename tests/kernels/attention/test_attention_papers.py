"""What the papers print about accuracy, and the bounds they derive, hold for these kernels.

SageAttention gives no shape with its table 9; CogVideoX's 1776 tokens of 64 channels (its table 7) fit the printed
figures: RMSE / relative L1 is the size of an output of normal operands, sqrt(e / N) * sqrt(2 / pi), at N of about 1800.
"""

from __future__ import annotations

import pytest
import torch
from attention_oracle import exact_attention, predicted_error
from oracle import INTERPRETED
from torch import Tensor

from qframework.errors import UnsupportedError
from qframework.kernels.attention import pipeline as module
from qframework.kernels.attention import variants as attention_variants
from qframework.kernels.attention.operands import LOG2_E, Bias, QuantizedQK, Values
from qframework.kernels.attention.quantize_qk import unpack_int4
from qframework.kernels.attention.variants import (
    E4M3_MAX,
    FP16_MAX,
    KEYS_PER_FP16_SUM,
    AttentionVariant,
    check_fp16_ranges,
    fp8_ranges,
    resolve,
)

SHAPE = (1, 4, 1776, 64)
# Cosine similarity, relative L1 and RMSE, as printed in SageAttention's table 9.
TABLE_9 = {
    "sage_t": (1.0, 0.019, 6.8e-4),
    "sage_b": (1.0, 0.021, 7.3e-4),
    "sage_vt": (0.999, 0.064, 0.065),
    "sage_vb": (0.989, 0.138, 0.067),
}


@pytest.fixture
def attend(implementation):
    """``(query, key, value, variant, **options) -> out`` of the implementation."""
    call = {"cpu": torch.ops.qframework.sage_attention, "triton": module.SAGE_ATTENTION.cuda}[implementation]

    def run(query: Tensor, key: Tensor, value: Tensor, variant: str, **options) -> Tensor:
        return call(query, key, value, variant=variant, **options)[0]

    return run


@pytest.fixture
def normal(place):
    """Normal float16 operands; short where they are interpreted."""

    def make(tokens: int = 0) -> Tensor:
        tokens = tokens or (130 if INTERPRETED else SHAPE[2])
        return torch.randn(1, 2 if INTERPRETED else SHAPE[1], tokens, SHAPE[3], dtype=torch.float16).to(place)

    return make


def metrics(out: Tensor, exact: Tensor) -> tuple[float, float, float]:
    """Cosine similarity, relative L1 and RMSE of the flattened tensors (SageAttention 4.3)."""
    out = out.double()
    cosine = (out * exact).sum() / (out.norm() * exact.norm())
    l1 = (out - exact).abs().sum() / exact.abs().sum()
    return float(cosine), float(l1), float((out - exact).square().mean().sqrt())


# SageAttention --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(INTERPRETED, reason="the figures belong to 1776 tokens")
@pytest.mark.parametrize("variant", TABLE_9)
def test_table_9(attend, normal, variant):
    """No worse than printed, in the digits printed."""
    query, key, value = normal(), normal(), normal()
    cosine, l1, rmse = metrics(attend(query, key, value, variant), exact_attention(query, key, value).out)
    printed = TABLE_9[variant]
    assert round(cosine, 3) >= printed[0]
    assert l1 <= printed[1]
    assert rmse <= printed[2]


@pytest.mark.skipif(INTERPRETED, reason="the figures belong to 1776 tokens")
def test_accuracy_falls_in_the_order_of_the_paper(attend, normal):
    """Section 4.5: T is more accurate than B, B than vT, vT than vB."""
    query, key, value = normal(), normal(), normal()
    exact = exact_attention(query, key, value).out
    errors = [metrics(attend(query, key, value, variant), exact)[1] for variant in TABLE_9]
    assert errors == sorted(errors)


@pytest.mark.parametrize("variant", ["sage_t", "sage2_int4", "8-per_thread-fp16-fp32"])
def test_smooth_k_cuts_the_error_of_a_bias_by_five(attend, normal, variant):
    """K's bias per channel is 10 times its signal: scales follow the bias unless it is subtracted."""
    query, key, value = normal(), normal(), normal()
    biased = key + 10 * torch.randn(1, key.shape[1], 1, key.shape[3], dtype=key.dtype).to(key.device)
    exact = exact_attention(query, biased, value).out
    smooth, rough = (metrics(attend(query, biased, value, variant, smooth_k=on), exact)[1] for on in (True, False))
    assert rough >= 5 * smooth
    unbiased = metrics(attend(query, key, value, variant), exact_attention(query, key, value).out)[1]
    assert smooth <= 1.15 * unbiased  # nothing of the bias is left


# SageAttention2 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", ["per_thread", "per_warp", "per_block"])
def test_smooth_q_helps_int4(attend, normal, granularity):
    """Q with a bias per channel 3 times its signal, which half of a row of INT4 could not hold."""
    query, key, value = normal(), normal(), normal()
    query = query + 3 * torch.randn(1, query.shape[1], 1, query.shape[3], dtype=query.dtype).to(query.device)
    exact = exact_attention(query, key, value).out
    rough = metrics(attend(query, key, value, f"4-{granularity}-fp8-fp32"), exact)[1]
    smooth = metrics(attend(query, key, value, f"4-{granularity}-fp8-fp32-smooth_q"), exact)[1]
    assert smooth <= rough / 2


def test_smooth_v_helps_fp8(attend, normal):
    """V with a mean 8 times its signal: E4M3 has 3 bits for both together, or for the signal alone."""
    query, key, value = normal(), normal(), normal() + 8
    exact = exact_attention(query, key, value).out
    spread = (exact - exact.mean(2, keepdim=True)).abs().sum() / exact.abs().sum()
    rough, smooth = (
        metrics(attend(query, key, value, f"8-per_thread-fp8-fp32{flag}"), exact)[1] for flag in ("", "-smooth_v")
    )
    assert smooth <= rough / 2
    assert smooth <= 0.2 * float(spread)


def quantized(implementation: str, query: Tensor, key: Tensor, variant: AttentionVariant) -> QuantizedQK:
    steps = {"cpu": module.TORCH_STEPS, "triton": module.TRITON_STEPS}[implementation]
    return module.quantized_qk(query, key, variant, query.shape[-1] ** -0.5, True, steps, None)[0]


@pytest.mark.parametrize("channels", [64, 72, 17])
def test_packed_int4_equals_unpacked_scores(implementation, place, channels):
    """Two integers to a byte multiply as the same integers do one to a byte: the results are equal bit for bit."""
    query, key, value = (torch.randn(1, 2, 70, channels, dtype=torch.float16).to(place) for _ in range(3))
    packed_variant = AttentionVariant(4, "per_thread", "fp16", smooth_q=True)
    packed = quantized(implementation, query, key, packed_variant)
    assert packed.q.shape[-1] == -(-channels // 2)
    q, k = unpack_int4(packed.q, channels), unpack_int4(packed.k, channels)
    assert int(q.abs().max()) == int(k.abs().max()) == 7
    attend = {"cpu": module.TORCH_STEPS, "triton": module.TRITON_STEPS}[implementation].attend
    plain_variant = AttentionVariant(8, "per_thread", "fp16", smooth_q=True)
    results = [
        attend(qk, Values(value), Bias(), variant, torch.float32, True, None)
        for qk, variant in ((packed, packed_variant), (packed._replace(q=q, k=k), plain_variant))
    ]
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_scores_are_exact_products_of_integers(implementation, place):
    """The logarithm of the sum over one key is that key's logit: integers times two scales, nothing else."""
    query, key = (torch.randn(1, 1, n, 64, dtype=torch.float16).to(place) for n in (40, 1))
    variant = AttentionVariant(8, "per_thread", "fp16")
    steps = {"cpu": module.TORCH_STEPS, "triton": module.TRITON_STEPS}[implementation]
    qk = module.quantized_qk(query, key, variant, 0.125, False, steps, None)[0]
    _, lse = steps.attend(qk, Values(key), Bias(), variant, torch.float32, True, None)
    tokens = torch.arange(40)
    scale = qk.q_scale[0, 0, tokens // 32 * 8 + tokens % 8].double() * qk.k_scale[0, 0, 0].double()
    logits = (qk.q.double() @ qk.k.double().mT)[0, 0, :, 0] * scale / LOG2_E
    torch.testing.assert_close(lse[0, 0].double(), logits, rtol=2.0**-21, atol=2.0**-22)


# SageAttention2++ -----------------------------------------------------------------------------------------------------

PAIRS = {(112.0, 4.5): 32256, (56.0, 9.0): 32256, (224.0, 4.5): 64512, (448.0, 2.25): 64512}  # largest sum of 64


def set_ranges(monkeypatch: pytest.MonkeyPatch, p_range: float, v_range: float) -> None:
    monkeypatch.setattr(attention_variants, "NARROW_P_RANGE", p_range)
    monkeypatch.setattr(attention_variants, "NARROW_V_RANGE", v_range)


@pytest.mark.skipif(INTERPRETED, reason="digits of an average over many values")
@pytest.mark.parametrize(("p_range", "v_range"), PAIRS)
def test_table_2(attend, normal, monkeypatch, p_range, v_range):
    """Narrow ranges with an FP16 accumulator cost nothing that the table could print.

    The printed cosine has 4 digits. Relative L1 moves by up to 1 percent in either direction, because 448 and V_range
    put a channel's values elsewhere between two powers of two; the test below shows that nothing else does.
    """
    query, key, value = normal(), normal(), normal()
    exact = exact_attention(query, key, value).out
    wide = metrics(attend(query, key, value, "sage2_int8"), exact)
    set_ranges(monkeypatch, p_range, v_range)
    narrow = metrics(attend(query, key, value, "sage2pp_int8"), exact)
    assert narrow[0] >= wide[0] - 1e-4
    assert narrow[1] <= 1.01 * wide[1]


@pytest.mark.skipif(INTERPRETED, reason="digits of an average over many values")
def test_narrowing_by_powers_of_two_costs_less_than_a_printed_digit(attend, normal, monkeypatch):
    """P_range 224 = 448 / 2 and V_range 3.5 = 448 / 2^7: the same mantissas, so only the accumulator differs."""
    query, key, value = normal(), normal(), normal()
    exact = exact_attention(query, key, value).out
    wide = metrics(attend(query, key, value, "sage2_int8"), exact)
    set_ranges(monkeypatch, 224.0, 3.5)
    narrow = metrics(attend(query, key, value, "sage2pp_int8"), exact)
    assert abs(narrow[0] - wide[0]) <= 1e-5
    assert abs(narrow[1] - wide[1]) <= 1e-5


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("variant", ["sage2pp_int8", "sage2pp_int4"])
@pytest.mark.parametrize(("p_range", "v_range"), PAIRS)
def test_the_largest_sums_do_not_overflow(attend, place, monkeypatch, variant, p_range, v_range, sign):
    """Equal logits make every P 1, a constant V is at its range everywhere: eq. 1 and 3 at their edge."""
    set_ranges(monkeypatch, p_range, v_range)
    query = torch.zeros(1, 1, 3, 64, dtype=torch.float16, device=place)
    key, value = torch.randn(2, 1, 1, 256, 64).half().to(place)
    value = torch.full_like(value, sign * 1.75)
    out = attend(query, key, value, variant)
    torch.testing.assert_close(out, value[:, :, :3], rtol=2.0**-10, atol=0)


@pytest.mark.parametrize(("p_range", "v_range"), PAIRS)
def test_ranges_at_their_edge_are_accepted(p_range, v_range):
    check_fp16_ranges(KEYS_PER_FP16_SUM, p_range, v_range)
    assert KEYS_PER_FP16_SUM * p_range * v_range == PAIRS[p_range, v_range] <= FP16_MAX


@pytest.mark.parametrize(
    ("keys", "p_range", "v_range"),
    [(64, E4M3_MAX, 4.5), (32, E4M3_MAX, E4M3_MAX), (32, E4M3_MAX, 4.75), (128, 224.0, 4.5), (64, 256.0, 4.5)],
)
def test_ranges_past_their_edge_are_refused(keys, p_range, v_range):
    """Each would reach infinity in float16."""
    assert torch.tensor(keys * p_range * v_range).half().isinf()
    with pytest.raises(UnsupportedError, match=f"sums of {keys} products must be at most 65504 for FP16 accumulation"):
        check_fp16_ranges(keys, p_range, v_range)


def test_the_shipped_ranges_use_the_room_there_is():
    """Within 2 percent of the largest float16: more could not be had by an E4M3 number."""
    p_range, v_range = fp8_ranges("fp16")
    assert 0.98 * FP16_MAX <= KEYS_PER_FP16_SUM * p_range * v_range <= FP16_MAX
    assert torch.tensor([p_range, v_range]).to(torch.float8_e4m3fn).float().tolist() == [p_range, v_range]


# All of them ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(INTERPRETED, reason="an average over many values")
@pytest.mark.parametrize("variant", attention_variants.VARIANTS)
def test_errors_are_the_predicted_ones(attend, normal, variant):
    """Of 3552 rows: between 0.8 and 1.1 times what independent roundings of this variant add up to.

    Without quantized Q and K only roundings to 16 bit are left, whose prediction is their bound for the worst mantissa.
    """
    query, key, value = (normal(SHAPE[2] // 2) for _ in range(3))
    exact = exact_attention(query, key, value)
    predicted = predicted_error(exact, resolve(variant), True, torch.float16)
    error = (attend(query, key, value, variant).double() - exact.out).norm()
    assert (0.8 if resolve(variant).quantizes_qk else 0.4) <= float(error / predicted.rows.norm()) <= 1.1
