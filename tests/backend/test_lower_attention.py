"""Lowering of attention: the arguments of SDPA, the report, and the whole backend; its forms are in tests/graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from attention_models import SAGE, VARIANT, Attention, Capture, compiled, error_bound, exported, qkv, sage
from torch import nn

import qframework
from qframework.backend import lower_attention
from qframework.numerics import sqnr_db

SCALE = 16**-0.5


class TestSdpa:
    @pytest.mark.parametrize("dialect", ["functional", "aten"])
    def test_one_call_of_the_operator(self, dialect):
        class Attention(nn.Module):
            def forward(self, q, k, v):
                return F.scaled_dot_product_attention(q, k, v)

        model, (q, k, v) = Attention(), qkv()
        out, capture = compiled(exported(model, q, k, v) if dialect == "aten" else model, q, k, v)
        assert len(capture.calls) == 1
        assert "scaled_dot_product_attention" not in capture.names()
        assert torch.equal(out, sage(q, k, v))
        assert (out - model(q, k, v)).abs().max() < error_bound(q, k, v, SCALE)
        assert [(r.lowered, r.operator) for r in capture.attention] == [
            (True, f"qframework::sage_attention ({VARIANT})")
        ]

    @pytest.mark.parametrize(
        "arguments",
        [
            {"is_causal": True},
            {"scale": 0.1},
            {"attn_mask": torch.randn(17, 17)},
            {"attn_mask": torch.randn(2, 1, 1, 17) > 0},
            {"attn_mask": torch.ones(17, 17, dtype=torch.bool).tril(), "scale": 0.2},
        ],
        ids=["causal", "scale", "bias", "bool mask", "bool mask and scale"],
    )
    def test_arguments_are_passed_on(self, arguments):
        q, k, v = qkv()
        out, capture = compiled(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **arguments), q, k, v)
        assert torch.equal(out, sage(q, k, v, **arguments))
        assert len(capture.calls) == 1

    def test_grouped_heads(self):
        q, k, v = qkv(heads=4)
        k, v = k[:, :2], v[:, :2]
        out, _ = compiled(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), q, k, v)
        assert torch.equal(out, sage(q, k, v, enable_gqa=True))

    def test_positional_arguments(self):
        q, k, v = qkv()
        mask = torch.randn(17, 17)
        out, _ = compiled(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask, 0.0, False), q, k, v)
        assert torch.equal(out, sage(q, k, v, attn_mask=mask))

    def test_a_fully_masked_row_is_zero_as_in_pytorch(self):
        q, k, v = qkv()
        mask = torch.ones(17, 17, dtype=torch.bool)
        mask[3] = False
        out, _ = compiled(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask), q, k, v)
        assert torch.equal(out[:, :, 3], torch.zeros_like(out[:, :, 3]))

    def test_autocast_casts_as_pytorch_does(self):
        q, k, v = qkv()

        def run(q, k, v):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return F.scaled_dot_product_attention(q, k.bfloat16(), v)

        out, capture = compiled(run, q, k, v)
        assert out.dtype == torch.bfloat16
        assert len(capture.calls) == 1
        assert (out - run(q, k, v)).abs().max() < error_bound(q, k, v, SCALE) + 2**-7 * v.abs().max()

    def test_one_compilation_serves_every_batch_size(self):
        capture = Capture()
        run = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), backend=capture)
        for batch in (2, 3, 5, 6):
            q, k, v = qkv(batch)
            assert torch.equal(run(q, k, v), sage(q, k, v))
        assert len(capture.graphs) == 2


@pytest.mark.parametrize(
    ("capability", "variant", "said"),
    [
        ((9, 0), "sage_b", "sage_b, P and V in bfloat16, FP32 accumulator"),
        ((8, 9), "sage_b", "sage_b"),
        (None, "sage_t", "sage_t"),
        ((9, 0), "sage_vb", "sage_vb"),
    ],
)
def test_explain_names_a_different_accumulator(monkeypatch, capability, variant, said):
    monkeypatch.setattr(lower_attention, "capability_of", lambda device: capability)
    q, k, v = (x.bfloat16() for x in qkv())
    _, capture = compiled(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), q, k, v, attention=variant)
    assert [report.operator for report in capture.attention] == [f"qframework::sage_attention ({said})"]


def test_attention_outside_of_any_module_is_named_as_calibration_names_it():
    """The graph names a node after the variable that a model keeps it in."""

    class Model(nn.Module):
        def forward(self, q, k, v):
            first = F.scaled_dot_product_attention(q, k, v)
            second = F.scaled_dot_product_attention(first, k, v)
            return F.scaled_dot_product_attention(second, k, v)

    root = "scaled_dot_product_attention"
    _, capture = compiled(Model(), *qkv(), attention={root: VARIANT, f"{root}#1": "off"})
    assert [report.lowered for report in capture.attention] == [True, False, True]


class Scaled(nn.Module):
    """Attention whose scale is an attribute, as in transformers."""

    def __init__(self, form: str = "sdpa") -> None:
        super().__init__()
        self.scale = 0.3
        self.form = form

    def forward(self, q, k, v):
        if self.form == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        if self.form == "query":
            return F.softmax((q * self.scale) @ k.transpose(-2, -1), dim=-1) @ v
        if self.form == "inverse":
            return F.softmax(q @ k.transpose(-2, -1) / (1 / self.scale), dim=-1) @ v
        return F.softmax(q @ k.transpose(-2, -1) * self.scale, dim=-1) @ v


@pytest.mark.parametrize("form", ["sdpa", "logits", "query", "inverse"])
def test_a_scale_that_dynamic_shapes_make_an_input(form):
    """The operator fixes the number, as PyTorch's attention does, so that another one compiles the model again."""
    model, operands, capture = Scaled(form).eval(), qkv(), Capture()
    run = torch.compile(model, backend=capture, dynamic=True)
    for scale in (0.3, 0.1):
        model.scale = scale
        with torch.no_grad():
            out = run(*operands)
        assert [(report.lowered, report.reason) for report in capture.attention] == [(True, "")]
        assert float((out - model(*operands)).abs().max()) <= error_bound(*operands, scale)
    assert [call["scale"] for call in capture.calls] == [pytest.approx(0.1)]
    assert len(capture.graphs) == 2


def test_a_scale_that_is_an_argument_is_not_fixed():
    def attend(q, k, v, scale):
        return F.softmax(q @ k.transpose(-2, -1) * scale, dim=-1) @ v

    operands, capture = qkv(), Capture()
    run = torch.compile(attend, backend=capture, dynamic=True)
    for scale in (0.3, 0.1):
        assert torch.equal(run(*operands, scale), attend(*operands, scale))
    assert len(capture.graphs) == 1
    assert "must be scaled by a constant" in capture.attention[0].reason


def test_a_scale_of_attention_that_stays_is_not_fixed():
    model, operands, capture = Scaled("logits").eval(), qkv(), Capture(attention="off")
    run = torch.compile(model, backend=capture, dynamic=True)
    for scale in (0.3, 0.1):
        model.scale = scale
        with torch.no_grad():
            assert torch.equal(run(*operands), model(*operands))
    assert len(capture.graphs) == 1


class TestExplain:
    def test_reports_are_in_graph_order(self):
        model, x = Attention().eval(), torch.randn(2, 17, 32)
        compiled_model = torch.compile(model, backend="qframework", options={"attention": "sage_t"})
        report = qframework.explain(compiled_model, x)
        assert [layer.kind for layer in report.layers] == ["linear", "attention", "linear"]
        assert (report.attention_lowered, report.attention_total) == (1, 1)
        assert (report.lowered, report.total) == (0, 2)
        assert "0 of 2 linear layers lowered, 1 of 1 attentions" in str(report)
        assert "sage_attention (sage_t)" in str(report)

    def test_a_model_that_calls_the_operator_itself(self):
        q, k, v = qkv()
        _, capture = compiled(lambda q, k, v: SAGE(q, k, v, variant="sage_b")[0], q, k, v)
        assert [(r.lowered, r.operator) for r in capture.attention] == [(True, "qframework::sage_attention (sage_b)")]


def test_the_whole_backend():
    """Inductor included: any batch size, fused with int8 linears, one graph."""
    torch.manual_seed(0)
    model, options = Attention().eval(), {"attention": VARIANT, "linear": "int8_dynamic"}
    with torch.no_grad():
        run = torch.compile(model, backend="qframework", options=options, fullgraph=True)
        for batch in (2, 3, 5):
            x = torch.randn(batch, 17, 32)
            assert sqnr_db(model(x), run(x)) > 30
