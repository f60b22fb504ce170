"""The log-sum-exp of Hopper's kernel with a loading warp beside a bool mask: which calls, and results natively."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_oracle import assert_kernel_close, exact_attention
from oracle import UNIT
from test_attention_hopper import PLAIN, SPEC, WIDE, Problem

from qframework.kernels.attention import quantized_attention as module
from qframework.kernels.attention.hopper import dense as hopper_dense
from qframework.kernels.attention.hopper import specialized
from qframework.kernels.attention.operands import Bias, QuantizedQK, Values
from qframework.kernels.attention.quantize_qk import attention_quantize
from qframework.kernels.attention.quantized_attention import quantized_attention_triton
from qframework.kernels.attention.reference import quantized_attention_ref
from qframework.kernels.attention.variants import resolve

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
LOG2_E = math.log2(math.e)


@pytest.mark.parametrize(
    ("mask", "variant", "taken"),
    [
        *((mask, "unquantized", True) for mask in ("none", "bool")),
        *((mask, SPEC, True) for mask in ("none", "bool")),
        *((mask, "unquantized", False) for mask in ("float", "positions")),
        *((mask, "8-per_block-fp8-fp32", False) for mask in ("none", "bool")),
        *((mask, "integer_exp", mask == "none") for mask in ("none", "bool")),
    ],
)
def test_which_calls_have_one(mask: str, variant: str, taken: bool, monkeypatch) -> None:
    """Without a GPU: with a float mask maxima are not in base 2, as those that it stores are."""
    given: list[bool] = []

    def attend(qk, values, variant, logit_scale, bias, dtype, lse):
        given.append(lse)
        return values.v, torch.zeros(qk.q.shape[:3])

    monkeypatch.setattr(specialized, "fits", lambda *call: True)
    monkeypatch.setattr(specialized, "attention_hopper", attend)
    monkeypatch.setattr(module, "launch", lambda kernel, grid: lambda *call, **named: None)
    q = torch.zeros(1, 4, 300, 80, dtype=torch.float16)
    kept = torch.ones(1, 1, 300, 300, dtype=torch.bool)
    factors = torch.zeros(1, 4, 300, 30), torch.zeros(1, 4, 300, 10)
    biases = {"none": Bias(), "bool": Bias(kept), "float": Bias(kept.half()), "positions": Bias(None, *factors)}
    assert specialized.has_lse(resolve(variant), biases[mask]) == taken
    if variant == "unquantized":
        qk = QuantizedQK(q, None, q, None, 80, marked=False)
        quantized_attention_triton(qk, Values(q), biases[mask], resolve(variant), 1.0, torch.float16, lse=True)
        assert given == [True] * taken


NARROW = PLAIN._replace(head_dim=80, value_dim=80)
PROBLEMS = [
    NARROW._replace(mask="band", queries=1000, keys=1000),
    NARROW._replace(mask="late", queries=700, keys=700, dtype=torch.bfloat16),
    NARROW._replace(mask="heads", keys=500, head_dim=96, value_dim=96, key_heads=20),
    NARROW._replace(mask="padding", queries=500, keys=700, causal=True),
    NARROW._replace(mask="late", queries=500, keys=200, head_dim=128, value_dim=128),
    PLAIN._replace(mask="heads", keys=450, dtype=torch.bfloat16),
    WIDE._replace(mask="late", queries=900, keys=1000),
    WIDE._replace(mask="band", queries=1000, keys=1000, dtype=torch.bfloat16, softcap=5.0),
    NARROW._replace(mask="late", queries=700, keys=700, softcap=5.0),
    NARROW._replace(mask="late", queries=700, keys=700, variant=SPEC),
    NARROW._replace(mask="heads", queries=600, keys=600, head_dim=128, value_dim=128, variant=SPEC),
]


def mask_of(problem: Problem) -> torch.Tensor:
    """That of the problem; with "late", tiles of queries without a key, and one that has some in part."""
    if problem.mask != "late":
        mask = problem.masked("cuda")
        assert mask is not None
        return mask
    row, key = torch.arange(problem.queries)[:, None], torch.arange(problem.keys)[None, :]
    return ((key <= row) & (row >= 300) & (row % 5 != 1))[None, None].cuda()


def operands(problem: Problem) -> tuple[QuantizedQK, torch.Tensor, float, tuple[Any, ...]]:
    """Q and K as the variant has them, V, the factor of their products, and what they are in floats."""
    q, k, v = problem.operands("cuda")
    scale, variant = problem.head_dim**-0.5 * LOG2_E, resolve(problem.variant)
    if not variant.quantizes_qk:
        return QuantizedQK(q, None, k, None, problem.head_dim, marked=False), v, scale, (q, k, v)
    quantized = attention_quantize(q, None, scale, variant.granularity, "query")
    quantized += attention_quantize(k, None, 1.0, variant.granularity, "key")
    return QuantizedQK(*quantized, problem.head_dim), v, 1.0, (q, k, v)


@pytest.mark.gpu
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_agrees_with_the_reference(problem: Problem, monkeypatch) -> None:
    """Rows without keys have -inf and zeros. The result is that of a call without the log-sum-exp, to the bit."""
    monkeypatch.setattr(specialized, "LEAST_TOKENS", 1)
    monkeypatch.setattr(hopper_dense, "fits", lambda *call, **options: False)  # the kernels of hopper/dense.py
    calls = []
    launch = specialized.attention_hopper
    monkeypatch.setattr(specialized, "attention_hopper", lambda *given: calls.append(given[-1]) or launch(*given))
    qk, v, factor, floats = operands(problem)
    mask, variant = mask_of(problem), resolve(problem.variant)
    bias = Bias(mask, causal=problem.causal, softcap=problem.softcap)
    call = (qk, Values(v), bias, variant, factor, problem.dtype)
    out, lse = quantized_attention_triton(*call, lse=True)
    plain, none = quantized_attention_triton(*call)
    assert calls == [True, False] * ON_HOPPER, "the wrong kernel"
    assert none is None
    assert lse is not None
    assert torch.equal(out, plain)
    expected, sums = quantized_attention_ref(qk, Values(v), bias, variant, factor, dtype=torch.float64)
    assert torch.equal(lse.isneginf(), sums.isneginf())
    assert bool(lse.isneginf().any()) == (problem.mask in ("late", "heads"))
    assert (out[lse.isneginf()] == 0).all()
    # Weights are rounded to 16 bit, and eight of them summed in it; those below float16's smallest number are lost.
    unit = UNIT[problem.dtype]
    rounding = -4 * math.log1p(-unit) + (problem.keys * 2.0**-25 if problem.dtype == torch.float16 else 0.0)
    torch.testing.assert_close(lse.double(), sums.double(), rtol=2e-6, atol=rounding)
    exact = exact_attention(*floats, mask, problem.causal, softcap=problem.softcap)
    assert_kernel_close(out, expected, exact, unit * 3 + 2.0**-18, 0.0)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_HOPPER, reason="its kernel reads by TMA")
@pytest.mark.parametrize("channels", [80, 96])
def test_attention_beside_sinks_skips_what_a_window_hides(channels: int) -> None:
    """With heads that hopper/dense.py does not take beside a mask."""
    q, k, v = (torch.randn(4, 12, 1000, channels, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    at = torch.arange(1000, device="cuda")
    mask = (at <= at[:, None]) & (at > at[:, None] - 128)
    with torch.profiler.profile() as profile:
        torch.ops.qframework.sage_attention(q, k, v, mask, return_lse=True)
    names = [event.key for event in profile.key_averages()]
    assert any("_specialized_attention_kernel" in name for name in names)
    assert not any("_quantized_attention_kernel" in name for name in names)
