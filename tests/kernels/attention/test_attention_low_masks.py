"""Float masks with rows of low numbers, as transformers builds them, against softmax in float32.

Adding the lowest float rounds all logits of a row away: softmax gives all keys that -inf does not mask equal weights.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from qframework.kernels import mixed_attention
from qframework.kernels.attention import pipeline as module
from qframework.kernels.attention.mixed import MIXED_ATTENTION
from qframework.kernels.attention.variants import VARIANTS

TOKENS, CHANNELS = 70, 32  # two blocks of keys
SCALE = CHANNELS**-0.5
LOWEST = {dtype: torch.finfo(dtype).min for dtype in (torch.float32, torch.bfloat16)}
ROWS = {"lowest": None, "-1e38": -1e38, "-1e9": -1e9, "lowest but one -inf": None}  # rows with equal weights
# Equal weights P are exact. V is rounded to a step of its largest magnitude / 127 (INT8), to E4M3, or to 16 bit.
ROUNDING = {"int8": 2.0**-7, "fp8": 2.0**-4, "fp16": 2.0**-8, "int8_dequantized": 2.0**-7}
# Logits in base e and in base 2 differ by four float32 roundings of up to 30, 2**-17; means of values by twice that.
FLOAT32 = 2.0**-16
# A P next to a tie may then round to the other side: how far that moves a row, relative to the largest value, and
# in which share of rows. P moves by 1/127 in INT8 and by 2**-10 of itself in 16 bit or TF32, as does a sum.
FLIPS = {"int8": (1 / 127, 1 / 50), "fp8": (2.0**-6, 1 / 50), "fp16": (2.0**-9, 1 / 4)}


def operands(dtype: torch.dtype, place: torch.device) -> list[Tensor]:
    """Values with a mean of 2 and logits up to 20, so that zeros and unequal weights show."""
    q, k, v = (torch.randn(2, 1, TOKENS, CHANNELS) for _ in range(3))
    return [x.to(dtype).to(place) for x in (2 * q, 2 * k, v + 2)]


def low_rows(dtype: torch.dtype, place: torch.device) -> Tensor:
    """The rows of ROWS, then one of -inf, one that masks half of the keys, and rows of zeros."""
    mask = torch.zeros(1, 1, TOKENS, TOKENS)
    for row, value in enumerate(ROWS.values()):
        mask[..., row, :] = LOWEST[dtype] if value is None else value
    mask[..., list(ROWS).index("lowest but one -inf"), 3] = -math.inf
    mask[..., len(ROWS), :] = -math.inf
    mask[..., len(ROWS) + 1, : TOKENS // 2] = LOWEST[dtype]
    return mask.to(dtype).to(place)


def softmax_in_float32(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, is_causal: bool = False) -> tuple[Tensor, Tensor]:
    """``(out, lse)``; rows of -inf give zeros."""
    logits = (q.float().cpu().double() @ k.float().cpu().double().mT * SCALE).float() + bias.float().cpu()
    if is_causal:
        logits = logits.masked_fill(torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1), -math.inf)
    return logits.softmax(-1).nan_to_num(0.0) @ v.float().cpu(), logits.logsumexp(-1)


def attend(implementation: str, q, k, v, mask, variant: str, is_causal=False, lse=True, **relative):
    call = {"cpu": torch.ops.qframework.sage_attention, "triton": module.SAGE_ATTENTION.cuda}[implementation]
    out, sums = call(q, k, v, mask, is_causal, None, False, variant, True, lse, **relative)
    return out.float().cpu(), sums.cpu()


def assert_low_rows(out: Tensor, v: Tensor, expected: Tensor, pv: str) -> None:
    allowed = ROUNDING[pv] * float(v.abs().max())
    rows = slice(0, len(ROWS) + 1)
    assert (out[:, :, rows] - expected[:, :, rows]).abs().max() <= allowed
    assert (out[:, :, len(ROWS)] == 0).all(), "a row of -inf"


DTYPES = [(torch.float32, torch.float32), (torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)]
SPECS = (*VARIANTS, "8-per_block-fp16-fp32", "8-per_warp-fp8-fp32-smooth_v")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("variant", "dtypes"), [(spec, DTYPES[i % 3]) for i, spec in enumerate(SPECS)])
def test_rows_of_low_numbers_give_equal_weights(implementation, place, variant, dtypes, causal):
    dtype, mask_dtype = dtypes
    q, k, v = operands(dtype, place)
    mask = low_rows(mask_dtype, place)
    expected, sums = softmax_in_float32(q, k, v, mask, causal)
    out, lse = attend(implementation, q, k, v, mask, variant, causal)
    pv = module.resolve(variant).pv
    assert_low_rows(out, v, expected, pv)
    low = sums < -1e7
    torch.testing.assert_close(lse[low], sums[low], rtol=2.0**-20, atol=0)
    assert (lse[:, :, len(ROWS)] == -math.inf).all()
    fused, _ = attend(implementation, q, k, v, mask, variant, causal, lse=False)  # queries quantized in the kernel
    assert_low_rows(fused, v, expected, pv)


@pytest.mark.parametrize("variant", ["sage_b", "sage_vb", "sage2_int8"])
def test_a_low_number_masks_like_false(implementation, place, variant):
    q, k, v = operands(torch.float32, place)
    padding = (torch.arange(TOKENS) < 40).view(1, 1, 1, -1).to(place)
    low = torch.zeros(1, 1, 1, TOKENS, device=place).masked_fill(~padding, LOWEST[torch.float32])
    (out, lse), (expected, sums) = (attend(implementation, q, k, v, mask, variant) for mask in (low, padding))
    torch.testing.assert_close(lse, sums, rtol=2.0**-18, atol=2.0**-18)
    rows = ((out - expected).abs().amax(-1) / v.abs().max().cpu()).flatten()
    size, share = FLIPS[module.resolve(variant).pv]
    assert rows.max() <= size
    assert (rows > FLOAT32).float().mean() <= share


@pytest.mark.parametrize("variant", ["sage_b", "sage2_int8"])
def test_padding_that_hides_a_whole_sequence(implementation, place, variant):
    """``(B, 1, 1, Nk)``: all keys of the second sequence are padding."""
    q, k, v = operands(torch.float32, place)
    mask = torch.zeros(2, 1, 1, TOKENS, device=place)
    mask[1] = LOWEST[torch.float32]
    out, _ = attend(implementation, q, k, v, mask, variant)
    mean = v[1].mean(1, keepdim=True).cpu()
    assert (out[1] - mean).abs().max() <= ROUNDING[module.resolve(variant).pv] * float(v.abs().max())


@pytest.mark.parametrize("low", [-65504.0, -1e4])
@pytest.mark.parametrize("variant", ["sage_b", "sage_vb", "sage2_int8", "sage2pp_int8"])
def test_a_row_of_equal_numbers_changes_no_weight(implementation, place, variant, low):
    """For example float16's lowest number, with which logits are rounded to multiples of 2**-8, as in PyTorch."""
    step = 2.0 ** (math.floor(math.log2(-low)) - 23)  # of float32 numbers of this size
    q, k, v = operands(torch.float32, place)
    mask = torch.full((1, 1, TOKENS, TOKENS), low, device=place)
    (out, lse), (expected, sums) = (attend(implementation, q, k, v, x, variant) for x in (mask, mask * 0))
    spread = float((v - v.mean()).abs().max())
    # Each logit is off by up to step / 2, and so is their mean: weights are off by at most a factor of 1 + step.
    assert (out - expected).abs().max() <= (step + ROUNDING[module.resolve(variant).pv]) * spread
    # Three roundings of up to step / 2: the logits, their log-sum-exp, and the expected sum.
    torch.testing.assert_close(lse, sums + low, rtol=0, atol=1.5 * step)


@pytest.mark.parametrize("height", [1, 7])
def test_low_rows_with_relative_positions(implementation, place, height):
    q, k, v = operands(torch.float32, place)
    rel_h, rel_w = (torch.randn(2, 1, TOKENS, n).to(place) for n in (height, TOKENS // height))
    mask = low_rows(torch.float32, place)
    bias = (rel_h[..., None] + rel_w[..., None, :]).flatten(-2)
    expected, _ = softmax_in_float32(q, k, v, bias + mask)
    out, _ = attend(implementation, q, k, v, mask, "sage_b", rel_h=rel_h, rel_w=rel_w)
    assert_low_rows(out, v, expected, "fp16")


@pytest.mark.parametrize("causal", [False, True])
def test_static_attention(implementation, place, causal):
    call = {"cpu": mixed_attention, "triton": MIXED_ATTENTION.cuda}[implementation]
    q, k, v = (torch.randint(-127, 128, (2, 1, TOKENS, CHANNELS), dtype=torch.int8).to(place) for _ in range(3))
    scale = torch.tensor([1 / 64], device=place)
    mask = low_rows(torch.float32, place)
    expected, _ = softmax_in_float32(q / 64, k / 64, v / 64, mask, causal)
    out = call(q, k, v, scale, scale, scale, attn_mask=mask, is_causal=causal, out_dtype=torch.float32).cpu()
    assert_low_rows(out, v / 64, expected, "int8_dequantized")


def test_fp16_sums_of_equal_weights_do_not_overflow(implementation, place):
    """64 values of 2000 are more than float16 holds, their mean is not."""
    q, k, v = operands(torch.float16, place)
    out, _ = attend(implementation, q, k, 1000 * v, low_rows(torch.float32, place), "sage_b")
    assert (out[:, :, 0] - 1000 * v.float().mean(2).cpu()).abs().max() <= 2.0**-9 * 1000 * float(v.abs().max())
