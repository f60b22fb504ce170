"""One attention at a time: SDPA and its arguments, and the forms it is spelled out in."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from attention_models import SAGE, VARIANT, Attention, Capture, compiled, error_bound, exported, product, qkv, randomize
from torch import nn

import qframework
from qframework.backend import lower_attention
from qframework.numerics import sqnr_db

SCALE = 16**-0.5


def sage(q, k, v, **kwargs):
    return SAGE(q, k, v, **{"variant": VARIANT, **kwargs})[0]


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
    def test_arguments_are_handed_on(self, arguments):
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

    def test_a_row_that_sees_nothing_gives_zeros_as_in_pytorch(self):
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


BIAS, PADDING = torch.randn(2, 17, 17), torch.randn(1, 1, 1, 17) > -1
CAUSAL = torch.ones(17, 17, dtype=torch.bool).tril()
LOW = torch.finfo(torch.float32).min

# name: (spelled out, the operator's arguments, query scaled by)
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
    "filled": (
        lambda q, k, v: (product(q, k) * SCALE).masked_fill(~CAUSAL, -math.inf).softmax(-1) @ v,
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
def test_spelled_out(name, dialect):
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
    # Scales differ in their last bit, which may turn a tie in rounding: less than all the rounding there is.
    assert (out - expected).abs().max() < bound / 20
    assert all(report.lowered for report in capture.attention)


LAST = torch.arange(17) < 3  # rows that see nothing
# Every key of the last rows is filled: softmax weighs them equally, whatever their logits were and the number is.
FILLS = {
    "lowest": lambda s: s.masked_fill(~LAST[:, None], LOW),
    "lowest of float16": lambda s: s.masked_fill(~LAST[:, None], -65504.0),
    "-1e4": lambda s: s.masked_fill(~LAST[:, None], -1e4),
    "biased": lambda s: (s + BIAS.to(s.dtype)).masked_fill(~LAST[:, None], -1e9),
    "twice": lambda s: s.masked_fill(~LAST[:, None], LOW).masked_fill(~CAUSAL, LOW),
    "where": lambda s: torch.where(LAST[:, None], s, torch.finfo(s.dtype).min),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FILLS)
def test_rows_that_are_filled_everywhere(name, dtype):
    if dtype == torch.float16 and name == "biased":
        name = "-1e4"  # float16 has no -1e9
    fill = FILLS[name] if dtype != torch.float16 or name != "lowest" else FILLS["where"]
    q, k, v = (x.to(dtype) for x in qkv())

    def attend(q, k, v):
        return fill(product(q, k) * SCALE).softmax(-1) @ v

    out, capture = compiled(attend, q, k, v)
    assert len(capture.calls) == 1, capture.attention
    rounding = {torch.float32: 2.0**-12, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[dtype]
    expected = v.float().mean(2, keepdim=True)
    assert (out[:, :, 3:].float() - expected).abs().max() <= 2 * rounding * v.abs().max()


@pytest.mark.parametrize(
    ("capability", "variant", "said"),
    [
        ((9, 0), "sage_b", "sage_b, P and V in bfloat16, FP32 accumulator"),
        ((8, 9), "sage_b", "sage_b"),
        (None, "sage_t", "sage_t"),
        ((9, 0), "sage_vb", "sage_vb"),
    ],
)
def test_explain_says_where_the_accumulator_is_another(monkeypatch, capability, variant, said):
    monkeypatch.setattr(lower_attention, "capability_of", lambda device: capability)
    q, k, v = (x.bfloat16() for x in qkv())
    _, capture = compiled(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), q, k, v, attention=variant)
    assert [report.operator for report in capture.attention] == [f"qframework::sage_attention ({said})"]


@pytest.mark.parametrize("batch", [1, 4])
def test_windows_keep_their_masks(batch):
    """Swin: the mask of each window is added in a view of the logits."""
    windows = 3
    q, k, v = qkv(batch * windows)
    mask = torch.randn(windows, 17, 17)

    def attend(q, k, v):
        logits = product(q * SCALE, k) + BIAS.unsqueeze(0)
        logits = logits.view(-1, windows, 2, 17, 17) + mask.unsqueeze(1).unsqueeze(0)
        return logits.view(-1, 2, 17, 17).softmax(-1) @ v

    out, capture = compiled(attend, q, k, v)
    assert capture.calls[0]["attn_mask"].meta["example_value"].shape == (1, windows, 2, 17, 17)
    assert (out - attend(q, k, v)).abs().max() < error_bound(q, k, v, SCALE)


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


def test_half_precision_with_softmax_in_float32():
    q, k, v = (x.half() for x in qkv())
    out, capture = compiled(lambda q, k, v: (product(q, k) * SCALE).float().softmax(-1).to(v.dtype) @ v, q, k, v)
    assert out.dtype == torch.float16
    assert (out - sage(q, k, v)).abs().max() < 2**-9 * v.abs().max()
    assert len(capture.calls) == 1


def test_views_of_the_result_that_need_its_old_strides():
    q, k, v = qkv()
    out, capture = compiled(lambda q, k, v: (product(q, k).softmax(-1) @ v).view(-1, 17 * 16), q, k, v)
    assert len(capture.calls) == 1
    torch.testing.assert_close(out, sage(q, k, v, scale=1.0).reshape(-1, 17 * 16))


def test_no_copy_where_the_heads_are_merged():
    q, k, v = qkv()
    _, capture = compiled(lambda q, k, v: (product(q, k).softmax(-1) @ v).transpose(1, 2).reshape(-1, 17, 32), q, k, v)
    assert "contiguous" not in capture.names()


class TestMultiheadAttention:
    def check(self, run, model, *inputs, linears=2):
        out, capture = compiled(run, *inputs)
        assert len(capture.calls) == 1
        assert "multi_head_attention_forward" not in capture.names()
        with torch.no_grad():
            assert sqnr_db(run(*inputs), out) > 35
        names = [report.name for report in capture.reports[-1]]
        assert len(names) == len(set(names)) == linears + 1
        assert {name.rpartition(".")[2] for name in names} > {"in_proj", "out_proj"}
        return capture

    @pytest.mark.parametrize("need_weights", [True, False])
    @pytest.mark.parametrize("batch_first", [True, False])
    def test_module(self, need_weights, batch_first):
        model = randomize(nn.MultiheadAttention(32, 2, batch_first=batch_first))
        self.check(lambda x: model(x, x, x, need_weights=need_weights)[0], model, torch.randn(3, 17, 32))

    def test_function_with_positional_arguments(self):
        model, x = randomize(nn.MultiheadAttention(32, 2)), torch.randn(17, 3, 32)
        weights = (model.in_proj_weight, model.in_proj_bias, None, None, False, 0.0)
        out_proj = (model.out_proj.weight, model.out_proj.bias)

        def run(x):
            need_weights = False
            return F.multi_head_attention_forward(x, x, x, 32, 2, *weights, *out_proj, False, None, need_weights)[0]

        out, capture = compiled(run, x)
        assert len(capture.calls) == 1
        with torch.no_grad():
            assert sqnr_db(run(x), out) > 35

    def test_padding_mask(self):
        model, x = randomize(nn.MultiheadAttention(32, 2, batch_first=True)), torch.randn(3, 17, 32)
        padding = torch.zeros(3, 17, dtype=torch.bool)
        padding[1, 9:] = True
        capture = self.check(lambda x, p: model(x, x, x, key_padding_mask=p)[0], model, x, padding)
        assert capture.calls[0]["attn_mask"] is not None

    def test_any_batch_size_and_int8_linears(self):
        model = randomize(nn.MultiheadAttention(32, 2, batch_first=True))
        options = {"attention": VARIANT, "linear": "int8_dynamic"}
        run = torch.compile(lambda x: model(x, x, x)[0], backend="qframework", options=options, fullgraph=True)
        with torch.no_grad():
            for batch in (2, 3, 5):
                x = torch.randn(batch, 17, 32)
                assert sqnr_db(model(x, x, x)[0], run(x)) > 25

    def test_weights_that_are_read_are_computed(self):
        model, x = randomize(nn.MultiheadAttention(32, 2, batch_first=True)), torch.randn(3, 17, 32)
        out, capture = compiled(lambda x: model(x, x, x), x)
        assert not capture.calls
        with torch.no_grad():
            torch.testing.assert_close(out, model(x, x, x))

    @pytest.mark.parametrize("fast_path", [True, False])
    def test_encoder_layer(self, fast_path):
        model, x = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval(), torch.randn(3, 17, 32)
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(fast_path)
        try:
            _, capture = compiled(lambda x: model(x), x)
        finally:
            torch.backends.mha.set_fastpath_enabled(before)
        (report,) = capture.attention
        assert report.lowered is not fast_path
        assert ("set_fastpath_enabled(False) takes it apart" in report.reason) is fast_path

    def test_gradients(self):
        model, x = randomize(nn.MultiheadAttention(32, 2, batch_first=True)), torch.randn(3, 17, 32)
        gradients = []
        for run in (model, torch.compile(model, backend="qframework", options={"attention": "off"})):
            model.zero_grad()
            run(x, x, x)[0].square().sum().backward()
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-4)


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


class TestExplain:
    def test_rows_of_attention_stand_between_their_linears(self):
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
