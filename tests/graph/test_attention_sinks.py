"""Attention with sinks (GPT-OSS), a row's maximum subtracted, and weights that pass through unknown operations."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from attention_models import Capture, compiled, error_bound, exported, product, qkv
from torch import Tensor, nn

from qframework.backend import lower_attention
from qframework.backend.lower_attention import SOFTCAP
from qframework.backend.report import LayerReport
from qframework.graph.nodes import fake_value
from qframework.kernels.attention.auto import Hopper
from qframework.kernels.attention.hopper import specialized
from qframework.numerics import sqnr_db
from qframework.quantizer import (
    AttentionConfig,
    QFrameworkQuantizer,
    QuantizationConfig,
    fallbacks,
    static_attention,
)

SCALE = 16**-0.5
SINKS = torch.tensor([2.0, -1.0])
MASK = torch.where(torch.ones(17, 17, dtype=torch.bool).tril(), 0.0, torch.finfo(torch.float32).min)


def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor = SINKS) -> Tensor:
    """As transformers writes it."""
    logits = product(q, k) * SCALE + MASK
    sinks = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    combined = torch.cat([logits, sinks], dim=-1)
    combined = combined - combined.max(dim=-1, keepdim=True).values
    weights = F.softmax(combined, dim=-1, dtype=combined.dtype)[..., :-1]
    return F.dropout(weights, 0.1, training=False).to(v.dtype) @ v


class Sinks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(SINKS.clone())

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return with_sinks(q, k, v, self.sinks)


@pytest.mark.parametrize("dialect", ["functional", "aten"])
def test_sinks_are_a_factor_behind_the_operator(dialect: str) -> None:
    q, k, v = qkv()
    expected = with_sinks(q, k, v)
    out, capture = compiled(exported(Sinks(), q, k, v) if dialect == "aten" else Sinks(), q, k, v)
    assert len(capture.calls) == 1, capture.attention
    assert not {"softmax", "cat", "matmul"} & set(re.findall(r"\w+", capture.names()))
    assert (out - expected).abs().max() < error_bound(q, k, v, SCALE)
    # The sinks matter: without them, and with those of the other head, the output is another.
    assert sqnr_db(expected, out) > 30
    assert sqnr_db(expected, with_sinks(q, k, v, SINKS.flip(0))) < 15
    assert sqnr_db(expected, with_sinks(q, k, v, SINKS - 100)) < 15


def test_rows_that_see_only_the_sink_are_zero() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = product(q, k).masked_fill(torch.arange(17)[:, None] < 3, -torch.inf)
        sinks = SINKS.view(1, 2, 1, 1).expand(2, 2, 17, 1)
        return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1] @ v

    q, k, v = qkv()
    out, capture = compiled(attend, q, k, v)
    assert len(capture.calls) == 1, capture.attention
    assert torch.equal(out[:, :, :3], torch.zeros(2, 2, 3, 16))
    assert (out - attend(q, k, v)).abs().max() < error_bound(q, k, v, 1.0)


@pytest.mark.parametrize("maximum", [lambda x: x.amax(-1, keepdim=True), lambda x: x.max(-1, keepdim=True)[0]])
def test_a_maximum_that_is_subtracted(maximum) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = product(q, k) * SCALE
        return (logits - maximum(logits)).softmax(-1) @ v

    q, k, v = qkv()
    out, capture = compiled(attend, q, k, v)
    assert len(capture.calls) == 1, capture.attention
    assert (out - attend(q, k, v)).abs().max() < error_bound(q, k, v, SCALE)


def concatenated(q: Tensor, k: Tensor) -> Tensor:
    return torch.cat([product(q, k), SINKS.view(1, 2, 1, 1).expand(2, 2, 17, 1)], -1)


def before_sinks(logits: Tensor, v: Tensor) -> Tensor:
    sinks = SINKS.view(1, 2, 1, 1).expand(2, 2, 17, 1)
    return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1] @ v


LEFT_ALONE = {
    "maximum subtracted before the sinks": (
        lambda q, k, v: before_sinks((x := product(q, k)) - x.amax(-1, keepdim=True), v),
        "shifted before their sinks",
    ),
    "number added before the sinks": (lambda q, k, v: before_sinks(product(q, k) + 3.0, v), "shifted before"),
    "number subtracted before the sinks": (lambda q, k, v: before_sinks(product(q, k) - 3.0, v), "shifted before"),
    "twice a tensor subtracted": (
        lambda q, k, v: torch.sub(product(q, k), MASK, alpha=-2).softmax(-1) @ v,
        "pass through sub",
    ),
    "sinks scaled": (lambda q, k, v: (concatenated(q, k) * 2).softmax(-1)[..., :-1] @ v, "behind their sinks"),
    "weights of a sink kept": (lambda q, k, v: concatenated(q, k).softmax(-1)[..., 1:] @ v, "must be the last"),
    "sinks among keys": (
        lambda q, k, v: concatenated(q, k).softmax(-1) @ torch.cat([v, v[:, :, :1]], -2),
        "of all keys, and of no sinks",
    ),
    "keys dropped": (
        lambda q, k, v: product(q, k).softmax(-1)[..., :-1] @ v[:, :, :-1],
        "of all keys, and of no sinks",
    ),
    "weights scaled": (lambda q, k, v: (product(q, k).softmax(-1) * 2) @ v, "weights pass through mul"),
    "weights mixed": (
        lambda q, k, v: torch.sigmoid(product(q, k).softmax(-1) + 1) @ v,
        "weights pass through add, which",
    ),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_other_forms_are_listed_with_a_reason(name: str) -> None:
    form, reason = LEFT_ALONE[name]
    q, k, v = qkv()
    out, capture = compiled(form, q, k, v)
    (report,) = capture.attention
    assert not report.lowered
    assert report.fallback
    assert reason in report.reason
    torch.testing.assert_close(out, form(q, k, v))


def transformed(model: nn.Module, config: AttentionConfig) -> str:
    """The operations of an exported model whose attention a quantizer has rewritten."""
    quantizer = QFrameworkQuantizer().set_global(QuantizationConfig(linear=None, attention=config))
    graph = quantizer.transform_for_annotation(torch.export.export(model.eval(), qkv()).module()).graph
    return " ".join(str(node.target) for node in graph.nodes)


def test_static_attention_leaves_sinks_in_float() -> None:
    fallbacks.clear()
    assert "softmax" in transformed(Sinks(), static_attention())
    ((reason, times),) = fallbacks.items()
    assert "it has sinks, which scaled_dot_product_attention does not take. Use a variant" in reason
    assert times == 1


def test_the_quantizer_writes_a_variant_with_sinks() -> None:
    names = transformed(Sinks(), AttentionConfig("sage_b"))
    assert "qframework.sage_attention" in names
    assert "softmax" not in names
    assert "aten.matmul" not in names


def test_the_quantizer_leaves_softmaxes_whose_weights_are_changed() -> None:
    class Scaled(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return (product(q, k).softmax(-1) * 2) @ v

    assert "softmax" in transformed(Scaled(), static_attention())


class Capped(Sinks):
    """With a soft cap on the logits, whose mask is bool or a number that is added."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = torch.tanh(product(q, k) * SCALE / 5.0) * 5.0
        hidden = self.mask.dtype == torch.bool
        logits = logits.masked_fill(~self.mask, -torch.inf) if hidden else logits + self.mask
        sinks = self.sinks.to(q.dtype).view(1, 2, 1, 1).expand(*logits.shape[:-1], 1)
        return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1] @ v


def reports(model: nn.Module, *operands: Tensor) -> list[LayerReport]:
    capture = Capture("auto")
    with torch.no_grad():
        torch.compile(model, backend=capture)(*operands)
    return capture.attention


@pytest.mark.parametrize("chip", [None, Hopper(132, True)])
def test_the_default_option_takes_sinks(chip: Hopper | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if on a GPU."""
    monkeypatch.setattr(lower_attention, "_why_not", lambda option, device: None)
    monkeypatch.setattr(lower_attention, "hopper_of", lambda device: chip)
    (report,) = reports(Sinks(), *qkv())
    assert (report.lowered, report.fallback) == (True, False), report.reason


@pytest.mark.parametrize(("processors", "added", "taken"), [(4, False, True), (160, False, False), (4, True, False)])
def test_beside_a_soft_cap_the_rule_is_the_caps(
    processors: int, added: bool, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Hopper's kernel computes it, which stores no log-sum-exp of logits with numbers added."""
    monkeypatch.setattr(lower_attention, "_why_not", lambda option, device: None)
    monkeypatch.setattr(lower_attention, "hopper_of", lambda device: Hopper(processors, True))
    monkeypatch.setattr(specialized, "HAS_GLUON", True)
    mask = torch.ones(1100, 1100, dtype=torch.bool).tril()
    model = Capped(torch.zeros(1100, 1100).masked_fill(~mask, -1e4).half() if added else mask)
    (report,) = reports(model, *torch.randn(3, 2, 2, 1100, 64, dtype=torch.half))
    assert (report.lowered, report.fallback, report.reason) == (taken, False, "" if taken else SOFTCAP)


class Masked(nn.Module):
    """A bool mask is made one of numbers, as transformers does for its eager form."""

    def __init__(self, lowest: float, ones: bool = False, sinks: bool = True) -> None:
        super().__init__()
        self.lowest, self.sinks = lowest, sinks
        self.kept = 1.0 if ones else 0.0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        mask = torch.where(seen, torch.tensor(self.kept, dtype=q.dtype), self.lowest)
        logits = product(q, k) * SCALE + mask
        if not self.sinks:
            return logits.softmax(-1) @ v
        sinks = SINKS.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
        return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1] @ v


def seen_keys() -> Tensor:
    """A window, with rows that see no key, which get the weight 0 beside a sink."""
    distance = torch.arange(17)[:, None] - torch.arange(17)
    seen = (distance >= 0) & (distance < 5)
    seen[3] = False
    return seen[None, None]


@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, -1e4])
def test_a_float_mask_that_only_hides_keys_is_a_bool_one(lowest: float) -> None:
    """Not in exports, whose constant zero is an input of what Dynamo captures."""
    (q, k, v), seen, model = qkv(), seen_keys(), Masked(lowest)
    expected = model(q, k, v, seen)
    assert not expected[:, :, 3].any()
    out, capture = compiled(model, q, k, v, seen)
    (call,) = capture.calls
    assert fake_value(call["attn_mask"]).dtype == torch.bool
    assert (out - expected).abs().max() < error_bound(q, k, v, SCALE)


@pytest.mark.parametrize("model", [Masked(-100.0), Masked(-1e9, ones=True), Masked(-1e9, sinks=False)])
def test_other_float_masks_stay(model: nn.Module) -> None:
    """One that leaves weights, one that shifts the logits beside the sink, and one without a sink."""
    (q, k, v), seen = qkv(), seen_keys()
    out, capture = compiled(model, q, k, v, seen)
    (call,) = capture.calls
    assert fake_value(call["attn_mask"]).dtype == torch.float32
    assert (out - model(q, k, v, seen)).abs().max() < error_bound(q, k, v, SCALE)


def test_a_float_mask_whose_bool_one_is_written_stays() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        seen = seen.clone()
        mask = torch.where(seen, torch.tensor(0.0), -1e9)
        seen.fill_(False)
        sinks = SINKS.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
        return torch.cat([product(q, k) * SCALE + mask, sinks], -1).softmax(-1)[..., :-1] @ v

    (q, k, v), seen = qkv(), seen_keys()
    out, capture = compiled(attend, q, k, v, seen)
    (call,) = capture.calls
    assert fake_value(call["attn_mask"]).dtype == torch.float32
    assert (out - attend(q, k, v, seen)).abs().max() < error_bound(q, k, v, SCALE)
