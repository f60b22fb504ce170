"""Attention that is not lowered: each form is left whole, computes what it did, and says why."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F
from attention_models import Capture, compiled, product, qkv

from qframework.backend.compile import fallbacks

SCALE = 16**-0.5
CAUSAL = torch.ones(17, 17, dtype=torch.bool).tril()


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


LEFT_ALONE = {
    "dropout": (active_dropout, "dropout of its attention weights is active"),
    "SDPA's dropout": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1), "dropout_p=0.1"),
    "weights returned": (weights_returned, "is read elsewhere too, by"),
    "logits returned": (logits_returned, "is read elsewhere too, by"),
    "softcap": (lambda q, k, v: torch.tanh(product(q, k)).softmax(-1) @ v, "logits pass through tanh"),
    "talking heads": (lambda q, k, v: product(q, k).transpose(0, 1).softmax(-1) @ v, "logits pass through transpose"),
    "random factor per key": (scaled_per_key, "accepted: one factor per row"),
    "softmax over all pairs": (softmax_over_all_pairs, "softmax is over 289 logits; accepted: the 17 of a row"),
    "softmax over groups": (softmax_over_groups_of_keys, "softmax is over 4 logits; accepted: the 16 of a row"),
    "logits cast to int": (lambda q, k, v: product(q, k).to(torch.int8).float().softmax(-1) @ v, "pass through to"),
    "filled with 0": (filled_with_zero, "accepted: a number below"),
    "double": (attend_all(torch.Tensor.double), "torch.float64"),
    "2-D": (attend_all(lambda x: x[0, 0]), r"accepted: .*3 \(B, N, D\) to 5"),
    "broadcasting batch": (lambda q, k, v: product(q, k[0, 0]).softmax(-1) @ v, "operand has shape"),
    "overwritten": (operand_overwritten, "changes one of its operands in place"),
    "scaled, then overwritten": (scaled_operand_overwritten, "changes one of its operands in place"),
    "wide heads": (attend_all(lambda x: torch.cat([x] * 17, -1)), "head dimension 272; accepted: 1 to 256"),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_whole_with_a_reason(name):
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
def test_other_softmaxes_are_no_attention(form):
    q, k, v = qkv()
    out, capture = compiled(form, q, k, v)
    assert capture.attention == []
    torch.testing.assert_close(out, form(q, k, v))


@pytest.mark.parametrize("equation", ["bhid,bhjd->bij", "bhid,bhje->bhij", "bhid,bhjd->bhi", "...id,...jd->...ij"])
def test_einsums_that_are_no_product_of_matrices_stay(equation):
    q, k, _ = qkv()
    out, capture = compiled(lambda q, k: torch.einsum(equation, q, k), q, k)
    assert "einsum" in capture.names()
    torch.testing.assert_close(out, torch.einsum(equation, q, k))


def test_an_einsum_that_broadcasts_stays():
    q, k, _ = qkv()
    _, capture = compiled(lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k[:1]), q, k)
    assert "einsum" in capture.names()


def test_a_scale_that_varies_from_call_to_call_is_reported():
    def attend(q, k, v):
        return (product(q, k) / math.sqrt(q.shape[-2])).softmax(-1) @ v

    capture = Capture()
    run = torch.compile(attend, backend=capture, dynamic=True)
    q, k, v = qkv()
    torch.testing.assert_close(run(q, k, v), attend(q, k, v))
    (report,) = capture.attention
    assert "a number from the graph" in report.reason
