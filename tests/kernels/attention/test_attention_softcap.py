"""Attention whose logits s become ``softcap * tanh(s / softcap)`` before masks are added, against float64.

Caps of 5 saturate here and those of 50, as Gemma 2 has, bend the largest logits. The cases hold every pair of values.
"""

from __future__ import annotations

import math

import pytest
import torch
from attention_oracle import (
    assert_kernel_close,
    assert_lse_close,
    assert_within_prediction,
    exact_attention,
    predicted_error,
)
from covering import covering_set
from oracle import INTERPRETED
from test_attention_matrix import kernel_error, name_of
from torch import Tensor

from qframework.errors import QFrameworkError
from qframework.kernels.attention import pipeline as module
from qframework.kernels.attention.hopper import dense as hopper_dense
from qframework.kernels.attention.hopper import packed as hopper_packed
from qframework.kernels.attention.hopper import specialized
from qframework.kernels.attention.operands import Bias
from qframework.kernels.attention.reference import quantized_attention_ref
from qframework.kernels.attention.tiles import attention_tile
from qframework.kernels.attention.variants import KEY_BLOCK, resolve

LENGTHS = (1, 50, 70, 130) if INTERPRETED else (1, 50, 197, 785)
FACTORS = {
    "variant": (
        *("unquantized", "sage_b", "sage_t", "sage_vb", "sage2_int8", "sage2_int4", "integer_exp"),
        "8-per_block-fp16-fp32",  # "auto" where it quantizes
        "8-per_warp-fp8-fp32-smooth_v",
    ),
    "softcap": (0.5, 5.0, 50.0),
    "size": (1.0, 4.0),  # of the logits' standard deviation
    "mask": ("none", "bool", "float", "causal"),
    "heads": ((2, 2), (4, 2), (3, 1)),
    "queries": LENGTHS,
    "keys": LENGTHS,
    "head_dim": (64, 80, 128, 256),
    "dtype": (torch.float16, torch.bfloat16, torch.float32),
    "smooth_k": (True, False),
    "lse": (True, False),
}
# INT4 rounds large logits by more than the prediction, which is of first order, is good for.
CASES = covering_set(FACTORS, lambda case: case["variant"] != "sage2_int4" or case["size"] == 1.0)


def made(case, place) -> tuple[list[Tensor], Tensor | None]:
    """Query, key and value with a bias in K, as real keys have, and the mask, which leaves the first row nothing."""
    generator = torch.Generator().manual_seed(case["queries"] * 1000 + case["keys"] + case["head_dim"])
    heads, kv_heads = case["heads"]
    queries, keys, dim = case["queries"], case["keys"], case["head_dim"]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q = normal(1, heads, queries, dim) * case["size"]
    k = normal(1, kv_heads, keys, dim) + 0.5 * normal(1, kv_heads, 1, dim)
    mask = None
    if case["mask"] == "bool":
        mask = torch.rand(queries, keys, generator=generator) < 0.7
        mask[0] = queries == 1
    if case["mask"] == "float":
        mask = normal(heads, queries, keys)
        mask[:, 0] = 0.0 if queries == 1 else -torch.inf
    operands = [x.to(case["dtype"]).to(place) for x in (q, k, normal(1, kv_heads, keys, dim))]
    return operands, None if mask is None else mask.to(place)


def attend(implementation: str, operands, variant="unquantized", softcap: float | None = 5.0, **settings):
    call = {"cpu": torch.ops.qframework.sage_attention, "triton": module.SAGE_ATTENTION.cuda}[implementation]
    grouped = operands[0].shape[1] != operands[1].shape[1]
    return call(*operands, variant=variant, softcap=softcap, enable_gqa=grouped, **settings)


def reference_of(implementation: str, operands, mask, case, variant) -> Tensor:
    """The reference in float64 on what this implementation quantized, in the kernel's blocks of keys."""
    steps = {"cpu": module.TORCH_STEPS, "triton": module.TRITON_STEPS}[implementation]
    causal = case["mask"] == "causal"
    q, k, v = operands
    if causal:
        k, v = (x[:, :, : q.shape[2]] for x in (k, v))
    mask = mask if mask is None else mask[(None,) * (4 - mask.ndim)]
    k, v = module._without_hidden(k, v, mask, variant, case["smooth_k"])
    scale = q.shape[-1] ** -0.5
    qk, k_mean = module.quantized_qk(q, k, variant, scale, case["smooth_k"], steps, None)
    qk = qk._replace(offsets=module.offsets_of(q, k_mean, scale, steps, None))
    values = module.quantized_values(v, variant, steps, None)
    block_n = KEY_BLOCK
    if implementation == "triton":
        mode = "fp32" if variant.pv == "fp16" and v.dtype == torch.float32 else variant.pv
        block_n = attention_tile(q.device, q.shape[2], q.shape[-1], mode).block_n
    bias = Bias(mask, causal=causal, softcap=case["softcap"])
    return quantized_attention_ref(qk, values, bias, variant, qk.factor, block_n=block_n, dtype=torch.float64)[0]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_close_to_float64(implementation, place, case):
    variant, dtype = resolve(case["variant"]), case["dtype"]
    if case["lse"] and variant.exponential == "integer":
        variant = resolve("8-per_block-fp16-fp32")
    operands, mask = made(case, place)
    settings = {"is_causal": case["mask"] == "causal", "smooth_k": case["smooth_k"], "return_lse": case["lse"]}
    out, lse = attend(implementation, operands, case["variant"], case["softcap"], attn_mask=mask, **settings)
    exact = exact_attention(*operands, mask, case["mask"] == "causal", softcap=case["softcap"])
    predicted = predicted_error(exact, variant, case["smooth_k"], dtype)
    assert out.dtype == dtype
    reference = reference_of(implementation, operands, mask, case, variant)
    assert_kernel_close(out, reference, exact, *kernel_error(variant, dtype))
    if not (INTERPRETED and dtype == torch.bfloat16 and not variant.quantizes_qk):  # truncates, see kernel_error
        assert_within_prediction(out, exact, predicted, quantized=False)
    if case["lse"]:
        assert_lse_close(lse, exact, predicted)


def test_some_logits_saturate_and_others_do_not():
    """The premise of the test above: in some cases the cap matters, and in those of 5 its slope falls to nothing."""
    slopes = {}
    for case in CASES:
        if case["keys"] > 1:
            operands, _ = made(case, "cpu")
            slopes.setdefault(case["softcap"], []).append(exact_attention(*operands, softcap=case["softcap"]).slope)
    assert min(slope.min() for slope in slopes[5.0]) < 0.01
    assert min(slope.min() for slope in slopes[50.0]) < 0.95
    assert max(slope.mean() for slope in slopes[0.5]) < 0.6


@pytest.mark.parametrize("softcap", [5.0, 50.0])
def test_unquantized_logits_are_as_accurate_as_float32(implementation, place, softcap):
    """A weight's relative error is that of its logit: of one next to the cap, and of one so small that tanh(x) is x.

    On a GPU the exponential and the division are off by 2 units in the last place, of which the cap is a multiple.
    """
    sizes = torch.tensor([1e-3, 0.1, 1.0, 10.0, 100.0, 1000.0, 1e4, 1e30])
    logits = torch.cat([sizes, -sizes]) * softcap / 50
    query, key = torch.zeros(1, 1, 1, 64, device=place), torch.zeros(1, 1, len(logits), 64, device=place)
    query[..., 0], key[..., 0] = 1.0, logits.to(place)
    eye = torch.zeros(1, 1, len(logits), 64, device=place)
    eye[0, 0, :, : len(logits)] = torch.eye(len(logits))
    _, lse = attend(implementation, (query, key, eye), softcap=softcap, scale=1.0, return_lse=True)
    expected = (softcap * torch.tanh(logits.double() / softcap)).logsumexp(-1)
    assert abs(float(lse) - float(expected)) <= 2.0**-21 * (1 + softcap)
    for i in range(len(logits)):  # one by one: the log-sum-exp of one key is its logit
        pick = torch.arange(len(logits), device=place) == i
        _, lse = attend(
            implementation, (query, key, eye), softcap=softcap, scale=1.0, return_lse=True, attn_mask=pick[None]
        )
        expected = softcap * math.tanh(float(logits[i]) / softcap)
        assert abs(float(lse) - expected) <= 2.0**-21 * softcap


@pytest.mark.parametrize("softcap", [1.0, 5.0, 50.0])
@pytest.mark.parametrize("variant", ["unquantized", "sage_b", "sage2_int8", "sage2_int4"])
def test_packed_sequences(implementation, place, variant, softcap):
    lengths_q, lengths_k = [5, 0, 40, 33], [9, 3, 70, 33]
    q, k, v = (torch.randn(sum(n), heads, 80) for n, heads in ((lengths_q, 4), (lengths_k, 2), (lengths_k, 2)))
    q, k, v = (x.half().to(place) for x in (2 * q, k + 1, v))
    starts = [torch.tensor([0, *n], device=place).cumsum(0).int() for n in (lengths_q, lengths_k)]
    call = {"cpu": torch.ops.qframework.sage_attention_varlen, "triton": module.SAGE_ATTENTION_VARLEN.cuda}
    for causal in (False, True):
        out = call[implementation](q, k, v, *starts, 40, 70, is_causal=causal, variant=variant, softcap=softcap)
        for i in (0, 2, 3):
            rows, *dense = (
                x.split(n)[i].transpose(0, 1)[None]
                for x, n in ((out, lengths_q), (q, lengths_q), (k, lengths_k), (v, lengths_k))
            )
            if causal:  # keys behind the last query affect no scale
                dense = [x[:, :, : rows.shape[2]] for x in dense]
            exact = exact_attention(*dense, is_causal=causal, softcap=softcap)
            predicted = predicted_error(exact, resolve(variant), True, torch.float16)
            assert_within_prediction(rows, exact, predicted, quantized=False)


@pytest.mark.parametrize("smooth_k", [True, False])
def test_a_bias_of_keys_is_smoothed_away_and_comes_back(implementation, place, smooth_k):
    """Behind a cap the softmax depends on K's mean: it is subtracted before rounding, and its logits are added."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 100, 64) for _ in range(3))
    k = k + 3.0 * torch.randn(1, 2, 1, 64)
    operands = [x.to(place) for x in (q, k, v)]
    out, _ = attend(implementation, operands, "8-per_block-fp16-fp32", softcap=5.0, smooth_k=smooth_k)
    exact = exact_attention(*operands, softcap=5.0)
    predicted = predicted_error(exact, resolve("8-per_block-fp16-fp32"), smooth_k, torch.float32)
    assert_within_prediction(out, exact, predicted)
    uncapped = exact_attention(*operands)
    assert float((exact.out - uncapped.out).norm() / exact.out.norm()) > 0.3


@pytest.mark.parametrize("softcap", [0.0, -1.0, 2.0**14 + 1, math.inf, math.nan])
def test_a_cap_must_be_positive_and_at_most_16384(softcap):
    x = torch.randn(1, 2, 9, 16)
    starts = torch.tensor([0, 9], dtype=torch.int32)
    with pytest.raises(QFrameworkError, match=r"sage_attention: softcap must be .*positive number up to 16384, got"):
        torch.ops.qframework.sage_attention(x, x, x, softcap=softcap)
    with pytest.raises(QFrameworkError, match=r"sage_attention_varlen: softcap must be .*up to 16384, got"):
        torch.ops.qframework.sage_attention_varlen(x[0], x[0], x[0], starts, starts, 9, 9, softcap=softcap)


def test_a_cap_of_16384_is_accepted():
    x = torch.randn(1, 2, 9, 16)
    out, _ = torch.ops.qframework.sage_attention(x, x, x, softcap=2.0**14)
    assert out.isfinite().all()


@pytest.mark.interpreter
def test_which_of_hoppers_kernels_are_asked(monkeypatch):
    """One caps logits of floats. Another that took such a call would be wrong without a sign of it."""
    asked = []
    hoppers = (
        (specialized, "fits"),
        (hopper_packed, "fits_packed"),
        (hopper_dense, "fits"),
        (hopper_dense, "fits_mask"),
    )
    for owner, name in hoppers:

        def ask(q, *call, asks=(owner, name), **named):
            asked.append((*asks, q.dtype == torch.int8))
            return False

        monkeypatch.setattr(owner, name, ask)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.randn(1, 2, 40, 64, dtype=torch.float16, device=device)
    starts = torch.tensor([0, 40], dtype=torch.int32, device=device)
    mask = torch.ones(40, 40, dtype=torch.bool, device=device).tril()

    def run(softcap: float | None) -> None:
        for variant in ("unquantized", "integer_exp", "sage2_int8"):
            module.SAGE_ATTENTION.cuda(x, x, x, variant=variant, softcap=softcap)
            module.SAGE_ATTENTION.cuda(x, x, x, mask, variant=variant, softcap=softcap)
            packed = (x[0], x[0], x[0])
            module.SAGE_ATTENTION_VARLEN.cuda(*packed, starts, starts, 40, 40, variant=variant, softcap=softcap)

    run(None)
    assert {asks[:2] for asks in asked} == set(hoppers)
    asked.clear()
    run(50.0)
    assert set(asked) == {(specialized, "fits", False)}


@pytest.mark.parametrize(
    ("variant", "tiles", "taken"), [("unquantized", 33, True), ("unquantized", 32, False), ("sage_b", 528, False)]
)
def test_what_hoppers_kernel_takes(variant, tiles, taken, monkeypatch):
    """Floats, from a fourth of the multiprocessors on."""
    monkeypatch.setattr(specialized, "HAS_GLUON", True)
    sizes = (1, tiles, 100, 1000, 128, 128)
    assert specialized.takes(*sizes, resolve(variant), False, 132, capped=True) == taken
    assert not specialized.takes(*sizes[:1], 131, *sizes[2:], resolve(variant), False, 132)


def test_hoppers_kernel_caps_no_integers(monkeypatch):
    """Smoothed keys lack a part of their logits, which the kernel would have to add before the cap."""
    monkeypatch.setattr(specialized, "HAS_GLUON", True)
    sizes = (1, 64, 1000, 1000, 128, 128)
    taken = [specialized.takes(*sizes, resolve("sage_b"), False, 132, capped=capped) for capped in (False, True)]
    assert taken == [True, False]
