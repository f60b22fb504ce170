"""Attention in a captured graph: which forms are recognised, and why others are left in float."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F
from attention_models import Capture, compiled, error_bound, exported, product, qkv, sage
from torch import nn

from qframework.backend.compile import fallbacks
from qframework.numerics import sqnr_db

SCALE = 16**-0.5
BIAS, PADDING = torch.randn(2, 17, 17), torch.randn(1, 1, 1, 17) > -1
CAUSAL = torch.ones(17, 17, dtype=torch.bool).tril()
LOW = torch.finfo(torch.float32).min


# name: (attention written as products, the operator's arguments)
def masked_in_place(q, k, v):
    """As XLM does."""
    scores = product(q, k) * SCALE
    scores.masked_fill_((~PADDING).expand_as(scores), LOW)
    return F.softmax(scores.float(), dim=-1).type_as(scores) @ v


def added_in_place(q, k, v):
    scores = product(q, k) * SCALE
    scores += BIAS
    return scores.softmax(-1) @ v


FORMS = {
    "query scaled": (lambda q, k, v: product(q * SCALE, k).softmax(-1) @ v, {}),
    "both scaled": (lambda q, k, v: product(q * SCALE**0.5, k * SCALE**0.5).softmax(-1) @ v, {}),
    "logits divided": (lambda q, k, v: torch.softmax(torch.matmul(q, k.mT) / math.sqrt(16), dim=-1) @ v, {}),
    "not scaled": (lambda q, k, v: F.softmax(product(q, k), dim=3) @ v, {"scale": 1.0}),
    "permuted key": (lambda q, k, v: (q @ k.permute(0, 1, 3, 2) * SCALE).softmax(-1) @ v, {}),
    "bias": (lambda q, k, v: (product(q, k) * SCALE + BIAS).softmax(-1) @ v, {"attn_mask": BIAS}),
    "bias on the left": (lambda q, k, v: (BIAS + product(q, k) * SCALE).softmax(-1) @ v, {"attn_mask": BIAS}),
    "bias before scale": (
        lambda q, k, v: ((product(q, k) + BIAS) * SCALE).softmax(-1) @ v,
        {"attn_mask": BIAS * SCALE},
    ),
    "bias and mask": (
        lambda q, k, v: (product(q, k) * SCALE + BIAS + torch.where(PADDING, 0.0, LOW)).softmax(-1) @ v,
        {"attn_mask": BIAS + torch.where(PADDING, 0.0, LOW)},
    ),
    "in place": (lambda q, k, v: product(q, k).mul_(SCALE).add_(BIAS).softmax(-1) @ v, {"attn_mask": BIAS}),
    "added in place, without a result": (added_in_place, {"attn_mask": BIAS}),
    "masked in place, without a result": (masked_in_place, {"attn_mask": PADDING}),
    "penalty subtracted": (
        lambda q, k, v: ((product(q, k) - BIAS) * SCALE - 1e6 * (1 - PADDING.float()) - 2).softmax(-1) @ v,
        {"attn_mask": -BIAS * SCALE - 1e6 * (1 - PADDING.float())},
    ),
    "filled": (
        lambda q, k, v: (product(q, k) * SCALE).masked_fill(~CAUSAL, -math.inf).softmax(-1) @ v,
        {"attn_mask": CAUSAL},
    ),
    "hidden weights set to zero": (
        lambda q, k, v: (product(q, k) * SCALE).masked_fill(~CAUSAL, LOW).softmax(-1).masked_fill(~CAUSAL, 0.0) @ v,
        {"attn_mask": CAUSAL},
    ),
    "filled with a number": (
        lambda q, k, v: (product(q, k) * SCALE).masked_fill(~PADDING, LOW).softmax(-1) @ v,
        {"attn_mask": PADDING},
    ),
    "where": (
        lambda q, k, v: torch.where(CAUSAL, product(q, k) * SCALE, LOW).softmax(-1) @ v,
        {"attn_mask": CAUSAL},
    ),
    "where, the other way round": (
        lambda q, k, v: torch.where(~CAUSAL, LOW, product(q, k) * SCALE).softmax(-1) @ v,
        {"attn_mask": CAUSAL},
    ),
    "einsum": (
        lambda q, k, v: torch.einsum(
            "b h i j, b h j d -> b h i d", (torch.einsum("bhid,bhjd->bhij", q, k) * SCALE).softmax(-1), v
        ),
        {},
    ),
    "einsum with tokens before heads": (
        lambda q, k, v: torch.einsum(
            "bhnm,bmhd->bnhd",
            (torch.einsum("bnhd,bmhd->bhnm", q.transpose(1, 2), k.transpose(1, 2)) * SCALE).softmax(-1),
            v.transpose(1, 2),
        ).transpose(1, 2),
        {},
    ),
    "a number added": (lambda q, k, v: ((1.0 + product(q, k)) * SCALE + 1e-6).softmax(-1) @ v, {}),
    "filled, then biased": (
        lambda q, k, v: ((product(q, k) * SCALE).masked_fill(~CAUSAL, -math.inf) + BIAS).softmax(-1) @ v,
        {"attn_mask": BIAS.masked_fill(~CAUSAL, -math.inf)},
    ),
    "softmax in float32": (
        lambda q, k, v: (
            F.dropout(F.softmax(product(q, k) * SCALE, -1, dtype=torch.float32).to(q.dtype), 0.1, training=False) @ v
        ),
        {},
    ),
    "heads merged": (
        lambda q, k, v: torch.bmm(
            (torch.bmm(q.flatten(0, 1) * SCALE, k.flatten(0, 1).transpose(1, 2)).view(-1, 2, 17, 17) + BIAS)
            .view(-1, 17, 17)
            .softmax(-1),
            v.flatten(0, 1),
        ).view(-1, 2, 17, 16),
        {"attn_mask": BIAS},
    ),
    "baddbmm": (
        lambda q, k, v: (
            torch.baddbmm(
                BIAS.repeat(q.shape[0], 1, 1), q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), beta=2, alpha=SCALE
            ).softmax(-1)
            @ v.flatten(0, 1)
        ).view(-1, 2, 17, 16),
        {"attn_mask": 2 * BIAS},
    ),
}


class SpelledOut(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, q, k, v):
        return self.form(q, k, v)


@pytest.mark.parametrize("dialect", ["functional", "aten"])
@pytest.mark.parametrize("name", FORMS)
def test_attention_written_as_products_becomes_one_call(name, dialect):
    form, arguments = FORMS[name]
    q, k, v = qkv()
    model = SpelledOut(form)
    expected, plain = sage(q, k, v, **{"scale": SCALE, **arguments}), form(q, k, v)
    out, capture = compiled(exported(model, q, k, v) if dialect == "aten" else model, q, k, v)
    assert len(capture.calls) == 1, capture.attention
    assert "softmax" not in capture.names()
    assert "matmul" not in capture.names()
    scale = arguments.get("scale", SCALE)
    bound = error_bound(q, k, v, scale)
    assert (expected - plain).abs().max() < bound
    # Scales differ in their last bit, which may change how a tie is rounded: far below the bound.
    assert (out - expected).abs().max() < bound / 20
    assert all(report.lowered for report in capture.attention)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("fill", [LOW, -math.inf])
def test_rows_whose_hidden_weights_are_set_to_zero(fill, biased):
    """ESPnet and NeMo: a row without keys is zero, not the mean of all values."""
    hidden = torch.rand(2, 1, 17, 17, generator=torch.Generator().manual_seed(0)) < 0.3
    hidden[:, :, 5] = True

    def attend(q, k, v, hidden):
        scores = product(q, k) * SCALE + (BIAS if biased else 0.0)
        weights = scores.masked_fill(hidden, fill).softmax(-1)
        weights.masked_fill_(hidden, 0.0)
        return weights @ v

    q, k, v = qkv()
    expected = attend(q, k, v, hidden)
    out, capture = compiled(attend, q, k, v, hidden)
    assert len(capture.calls) == 1, capture.attention
    assert torch.equal(expected[:, :, 5], torch.zeros(2, 2, 16))
    assert torch.equal(out[:, :, 5], torch.zeros(2, 2, 16))
    assert (out - expected).abs().max() < error_bound(q, k, v, SCALE)


@pytest.mark.parametrize("factor", [20 + 20 * torch.rand(2, 1, 1), torch.tensor(30.0)], ids=["per head", "one"])
@pytest.mark.parametrize("divide", [False, True])
def test_logits_scaled_by_a_tensor(factor, divide):
    """Swin V2 scales the logits of each head."""
    q, k, v = (F.normalize(x, dim=-1) for x in qkv())

    def attend(q, k, v, factor=factor):
        logits = product(q, k)
        return (logits / (1 / factor) if divide else logits * factor).softmax(-1) @ v

    out, capture = compiled(attend, q, k, v)
    assert len(capture.calls) == 1
    assert sqnr_db(attend(q, k, v), out) > 25
    assert sqnr_db(attend(q, k, v), attend(q, k, v, factor / 2)) < 20


# Forms that are left in float


def active_dropout(q, k, v):
    return F.dropout(product(q, k).softmax(-1), 0.1, training=True) @ v


def weights_returned(q, k, v):
    weights = product(q, k).softmax(-1)
    return weights @ v, weights


def logits_returned(q, k, v):
    logits = product(q, k)
    return logits.softmax(-1) @ v, logits


def operand_overwritten(q, k, v):
    q = q + 1
    logits = product(q, k)
    q.view(-1).zero_()
    return logits.softmax(-1) @ v + q


def scaled_per_key(q, k, v):
    return (product(q, k) * torch.rand(17)).softmax(-1) @ v


def filled_with_zero(q, k, v):
    return product(q, k).masked_fill(~CAUSAL, 0.0).softmax(-1) @ v


def softmax_over_all_pairs(q, k, v):
    return product(q, k).flatten(-2).softmax(-1).view(2, 2, 17, 17) @ v


def softmax_over_groups_of_keys(q, k, v):
    q, k, v = q[:, :, :16], k[:, :, :16], v[:, :, :16]
    return product(q, k).view(2, 2, 16, 4, 4).softmax(-1).view(2, 2, 16, 16) @ v


def attend_all(convert):
    return lambda q, k, v: F.scaled_dot_product_attention(*map(convert, (q, k, v)))


def scaled_operand_overwritten(q, k, v):
    q = q + 1
    scaled = q * SCALE
    q.zero_()
    return product(scaled, k).softmax(-1) @ v + q


def logits_written_for_others(q, k, v):
    logits = torch.zeros(2, 2, 17, 17)
    return torch.mul(product(q, k), SCALE, out=logits).softmax(-1) @ v + logits.mean()


def result_written_for_others(q, k, v):
    result = torch.zeros_like(q)
    return torch.matmul(product(q, k).softmax(-1), v, out=result) * 2 + result.mean()


def bias_written_for_others(q, k, v):
    bias = BIAS.expand(2, 2, 17, 17).clone().flatten(0, 1)
    logits = bias.baddbmm_(q.flatten(0, 1), k.flatten(0, 1).mT)
    return logits.softmax(-1) @ v.flatten(0, 1) + bias.mean()


LEFT_ALONE = {
    "dropout": (active_dropout, "dropout of its attention weights must be inactive"),
    "SDPA's dropout": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1), "must be 0, got 0.1"),
    "weights returned": (weights_returned, "has other readers too: "),
    "logits returned": (logits_returned, "has other readers too: "),
    "sigmoid": (lambda q, k, v: torch.sigmoid(product(q, k)).softmax(-1) @ v, "logits pass through sigmoid"),
    "talking heads": (lambda q, k, v: product(q, k).transpose(0, 1).softmax(-1) @ v, "logits pass through transpose"),
    "other weights set to zero": (
        lambda q, k, v: product(q, k).masked_fill(~CAUSAL, LOW).softmax(-1).masked_fill(CAUSAL, 0.0) @ v,
        "weights pass through masked_fill",
    ),
    "weights of one of two masks set to zero": (
        lambda q, k, v: (
            product(q, k).masked_fill(~CAUSAL, LOW).masked_fill(~PADDING, LOW).softmax(-1).masked_fill(~CAUSAL, 0.0) @ v
        ),
        "weights pass through masked_fill",
    ),
    "random factor per key": (scaled_per_key, "must be scaled by one factor per row, got"),
    "softmax over all pairs": (softmax_over_all_pairs, "softmax must be over the 17 logits of a row, got 289"),
    "softmax over groups": (softmax_over_groups_of_keys, "softmax must be over the 16 logits of a row, got 4"),
    "logits cast to int": (lambda q, k, v: product(q, k).to(torch.int8).float().softmax(-1) @ v, "pass through to"),
    "filled with 0": (filled_with_zero, "must be filled with a number below"),
    "double": (attend_all(torch.Tensor.double), "torch.float64"),
    "2-D": (attend_all(lambda x: x[0, 0]), r"3 dimensions \(B, N, D\)"),
    "broadcasting batch": (lambda q, k, v: product(q, k[0, 0]).softmax(-1) @ v, "operand has shape"),
    "overwritten": (operand_overwritten, "changes one of its operands in place"),
    "scaled, then overwritten": (scaled_operand_overwritten, "changes one of its operands in place"),
    "logits written for others": (logits_written_for_others, "its mul writes into logits"),
    "result written for others": (result_written_for_others, "writes into .*, which others may read"),
    "bias written for others": (bias_written_for_others, "its logits writes into"),
    "wide heads": (attend_all(lambda x: torch.cat([x] * 17, -1)), r"head dimension .*272"),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_other_forms_stay_in_float_with_a_reason(name):
    form, reason = LEFT_ALONE[name]
    q, k, v = qkv()
    before = sum(fallbacks.values())
    torch.manual_seed(0)
    out, capture = compiled(form, q, k, v)
    assert not capture.calls
    assert sum(fallbacks.values()) == before + 1
    (report,) = capture.attention
    assert not report.lowered
    assert report.fallback
    assert re.search(reason, report.reason)
    if "dropout" not in name and "random" not in name:
        torch.testing.assert_close(out, form(q, k, v))


def linear_attention(q, k, v):
    return q.softmax(-1) @ (k.transpose(-2, -1) @ v)


def classifier(q, k, v):
    return (q @ k.transpose(-2, -1)).softmax(-1).sum(-1) + v.sum()


@pytest.mark.parametrize("form", [linear_attention, classifier, lambda q, k, v: product(q, k).softmax(-2) @ v])
def test_other_softmaxes_are_not_attention(form):
    q, k, v = qkv()
    out, capture = compiled(form, q, k, v)
    assert capture.attention == []
    torch.testing.assert_close(out, form(q, k, v))


def test_a_scale_that_varies_from_call_to_call_is_reported():
    def attend(q, k, v):
        return (product(q, k) / math.sqrt(q.shape[-2])).softmax(-1) @ v

    capture = Capture()
    run = torch.compile(attend, backend=capture, dynamic=True)
    q, k, v = qkv()
    torch.testing.assert_close(run(q, k, v), attend(q, k, v))
    (report,) = capture.attention
    assert "a number from the graph" in report.reason


def test_sizes_may_depend_on_data():
    q, k, v = qkv()

    def attend_to_some(q, k, v, kept):
        return (q @ k[:, :, kept].transpose(-2, -1) * SCALE).softmax(-1) @ v[:, :, kept]

    kept = torch.arange(17) != 3
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        out, capture = compiled(attend_to_some, q, k, v, kept, attention="unquantized")
    assert len(capture.calls) == 1
    torch.testing.assert_close(out, attend_to_some(q, k, v, kept))
