"""Attention whose logits pass through a tanh (Gemma 2): the operator's soft cap, and forms that are none."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from attention_models import Capture, compiled, error_bound, exported, product, qkv, sage
from torch import nn

from qframework.backend import lower_attention
from qframework.backend.lower_attention import SOFTCAP
from qframework.kernels.attention.auto import Hopper
from qframework.kernels.attention.hopper import specialized
from qframework.numerics import sqnr_db
from qframework.quantizer import QFrameworkQuantizer, QuantizationConfig, fallbacks, static_attention
from qframework.quantizer.attention_config import AttentionConfig

SCALE = 16**-0.5
BIAS = torch.randn(2, 17, 17)
CAUSAL = torch.ones(17, 17, dtype=torch.bool).tril()
LOW = torch.finfo(torch.float32).min

CAPPED = {  # of logits with a standard deviation of 4 times 16 ** 0.5 * SCALE
    "Gemma 2": (lambda q, k, v, cap: (torch.tanh(product(q, k) * SCALE / cap) * cap + BIAS).softmax(-1) @ v, BIAS),
    "no mask": (lambda q, k, v, cap: (cap * torch.tanh(product(q, k) * SCALE / cap)).softmax(-1) @ v, None),
    "causal": (
        lambda q, k, v, cap: (torch.tanh(product(q, k) * SCALE / cap) * cap).masked_fill(~CAUSAL, LOW).softmax(-1) @ v,
        CAUSAL,
    ),
    "query scaled": (
        lambda q, k, v, cap: (torch.tanh(product(q * SCALE, k).div(cap)).mul(cap) + BIAS).softmax(-1) @ v,
        BIAS,
    ),
    "scale and cap in one": (lambda q, k, v, cap: (product(q * (SCALE / cap), k).tanh() * cap).softmax(-1) @ v, None),
    "in place": (lambda q, k, v, cap: product(q, k).mul_(SCALE / cap).tanh_().mul_(cap).softmax(-1) @ v, None),
    "in float32": (
        lambda q, k, v, cap: (
            (F.tanh((product(q, k) * SCALE).float() / cap) * cap + BIAS).softmax(-1, dtype=torch.float32).type_as(v) @ v
        ),
        BIAS,
    ),
    "negative twice": (lambda q, k, v, cap: (-cap * torch.tanh(product(q, k) * -SCALE / cap)).softmax(-1) @ v, None),
    "heads merged": (
        lambda q, k, v, cap: torch.bmm(
            ((torch.bmm(q.flatten(0, 1) * SCALE, k.flatten(0, 1).mT) / cap).tanh().view(-1, 2, 17, 17) * cap + BIAS)
            .view(-1, 17, 17)
            .softmax(-1),
            v.flatten(0, 1),
        ).view(-1, 2, 17, 16),
        BIAS,
    ),
    "a number added behind it": (
        lambda q, k, v, cap: (torch.tanh(product(q, k) * SCALE / cap) * cap + 7).softmax(-1) @ v,
        None,
    ),
}


class Written(nn.Module):
    """Attention as a form writes it."""

    def __init__(self, form, *settings):
        super().__init__()
        self.form, self.settings = form, settings

    def forward(self, q, k, v):
        return self.form(q, k, v, *self.settings)


@pytest.mark.parametrize("cap", [2.0, 50.0])
@pytest.mark.parametrize("dialect", ["functional", "aten"])
@pytest.mark.parametrize("name", CAPPED)
def test_a_soft_cap_is_the_operators(name, dialect, cap):
    """Whatever the order of the factors around the tanh; that of the operator is in units of the scaled logits."""
    form, mask = CAPPED[name]
    q, k, v = qkv()
    q = 4 * q
    model = Written(form, cap)
    plain = model(q, k, v)
    out, capture = compiled(exported(model, q, k, v) if dialect == "aten" else model, q, k, v)
    assert len(capture.calls) == 1, capture.attention
    assert math.isclose(capture.calls[0]["softcap"], cap, rel_tol=1e-6)
    assert math.isclose(abs(capture.calls[0]["scale"]), SCALE, rel_tol=1e-6)
    assert "tanh" not in capture.names()
    assert all(report.lowered for report in capture.attention)
    expected = sage(q, k, v, scale=SCALE, softcap=cap, attn_mask=mask)
    bound = error_bound(q, k, v, SCALE)
    assert (expected - plain).abs().max() < bound
    # Scales differ in their last bit, which may change how a tie is rounded: far below the bound.
    assert (out - expected).abs().max() < bound / 20
    assert sqnr_db(plain, out) > 35
    uncapped = sage(q, k, v, scale=SCALE, attn_mask=mask)
    assert cap > 10 or sqnr_db(plain, uncapped) < 15


def test_a_cap_that_is_an_attribute_with_dynamic_shapes():
    """As Gemma 2 has it: Dynamo makes inputs of the graph of such numbers."""

    class Capped(nn.Module):
        softcap, scaling = 2.0, 0.5

        def forward(self, q, k, v):
            weights = product(q, k) * self.scaling
            weights = torch.tanh(weights / self.softcap) * self.softcap
            return weights.softmax(-1) @ v

    model, capture = Capped(), Capture()
    run = torch.compile(model, backend=capture, dynamic=True)
    q, k, v = qkv()
    with torch.no_grad():
        assert sqnr_db(model(q, k, v), run(q, k, v)) > 30
        assert [(call["softcap"], call["scale"]) for call in capture.calls] == [(2.0, 0.5)]
        model.softcap = 1.0
        assert sqnr_db(model(q, k, v), run(q, k, v)) > 30


LEFT_ALONE = {
    "mask below a cap": (
        lambda q, k, v: (torch.tanh((product(q, k) + BIAS) / 5) * 5).softmax(-1) @ v,
        "nothing must be added to them before it",
    ),
    "number added below a cap": (
        lambda q, k, v: (torch.tanh((product(q, k) + 1) / 5) * 5).softmax(-1) @ v,
        "nothing must be added to them before it",
    ),
    "maximum subtracted below a cap": (
        lambda q, k, v: (torch.tanh((x := product(q, k)) - x.amax(-1, keepdim=True)) * 5).softmax(-1) @ v,
        "nothing must be added to them before it",
    ),
    "filled below a cap": (
        lambda q, k, v: (torch.tanh(product(q, k).masked_fill(~CAUSAL, LOW)) * 5).softmax(-1) @ v,
        "nothing must be added to them before it",
    ),
    "two caps": (
        lambda q, k, v: (torch.tanh(torch.tanh(product(q, k)) / 5) * 5).softmax(-1) @ v,
        "pass through one tanh",
    ),
    "cap for each head": (
        lambda q, k, v: (torch.tanh(product(q, k)) * (1 + BIAS[:, :1, :1].abs())).softmax(-1) @ v,
        "must be capped by a number, got",
    ),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_other_forms_stay_in_float_with_their_reason(name):
    form, reason = LEFT_ALONE[name]
    q, k, v = qkv()
    out, capture = compiled(form, q, k, v)
    assert not capture.calls
    (report,) = capture.attention
    assert report.fallback
    assert reason in report.reason
    torch.testing.assert_close(out, form(q, k, v))


class TestOptions:
    """As if on a GPU, where the options apply that leave a CPU alone."""

    @pytest.fixture(autouse=True)
    def on_a_gpu(self, monkeypatch):
        monkeypatch.setattr(lower_attention, "_why_not", lambda option, device: None)
        monkeypatch.setattr(lower_attention, "hopper_of", lambda device: Hopper(132, True))

    def run(self, option, tokens: int = 17, dtype: torch.dtype = torch.half):
        operands = torch.randn(3, 2, 2, tokens, 64, dtype=dtype)
        return compiled(Written(CAPPED["no mask"][0], 2.0), *operands, attention=option)[1]

    @pytest.mark.parametrize(
        ("tokens", "dtype", "processors", "taken"),
        [
            (1100, torch.half, 4, True),
            (1100, torch.half, 160, False),  # 36 tiles of queries
            (17, torch.half, 4, False),
            (1100, torch.float32, 4, False),
        ],
    )
    def test_the_default_takes_what_hoppers_kernel_computes(self, tokens, dtype, processors, taken, monkeypatch):
        monkeypatch.setattr(lower_attention, "hopper_of", lambda device: Hopper(processors, True))
        monkeypatch.setattr(specialized, "HAS_GLUON", True)
        capture = self.run("auto", tokens, dtype)
        (report,) = capture.attention
        assert (report.lowered, report.fallback, report.reason) == (taken, False, "" if taken else SOFTCAP)
        assert [call["variant"] for call in capture.calls] == ["auto"] * taken

    def test_the_default_leaves_sizes_that_follow_from_data(self, monkeypatch):
        """Whether Hopper's kernel takes them is unknown."""
        monkeypatch.setattr(specialized, "HAS_GLUON", True)
        operands = torch.randn(3, 64, 2, 140, 64, dtype=torch.half).unbind()
        for x in operands:
            torch._dynamo.decorators.mark_unbacked(x, 2)
        form = Written(CAPPED["no mask"][0], 2.0)
        out, capture = compiled(form, *operands, attention="auto")
        (report,) = capture.attention
        assert (report.lowered, report.fallback, report.reason) == (False, False, SOFTCAP)
        assert out.shape == operands[0].shape

    def test_the_default_leaves_it_in_float_on_other_chips(self, monkeypatch):
        monkeypatch.setattr(lower_attention, "hopper_of", lambda device: None)
        (report,) = self.run("auto", 1100).attention
        assert (report.lowered, report.fallback, report.reason) == (False, False, SOFTCAP)

    def test_sage_takes_it(self):
        (call,) = self.run("sage").calls
        assert (call["variant"], call["softcap"]) == ("auto", 2.0)


def transformed(config: AttentionConfig) -> str:
    """The operations of an exported model whose attention a quantizer has rewritten."""
    quantizer = QFrameworkQuantizer().set_global(QuantizationConfig(linear=None, attention=config))
    model = torch.export.export(Written(CAPPED["Gemma 2"][0], 2.0).eval(), qkv()).module()
    return " ".join(str(node) for node in quantizer.transform_for_annotation(model).graph.nodes)


def test_static_attention_leaves_it_in_float() -> None:
    fallbacks.clear()
    assert "tanh" in transformed(static_attention())
    (reason,) = fallbacks
    assert "its logits have a soft cap of 2, which neither static INT8 attention nor" in reason


def test_the_quantizer_writes_a_variant_with_its_cap() -> None:
    names = transformed(AttentionConfig("sage_b"))
    assert "sage_attention" in names
    assert "tanh" not in names
    assert "softmax" not in names
    assert "matmul" not in names
