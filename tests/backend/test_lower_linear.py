"""Lowering of a converted graph: which nodes are replaced (lower_linear.py, quantized_linear.py, lower_quantize.py)."""

from __future__ import annotations

import copy

import pytest
import torch
from lowered_models import Block, converted, count, example, lowered, targets
from torch import nn
from torch.nn import functional as F

from qframework import numerics
from qframework.backend.compile import fallbacks
from qframework.errors import QFrameworkError
from qframework.quantizer import annotate_linear, dynamic_int8, qattn_paper, static_int8

INT8_LINEAR = torch.ops.qframework.int8_linear.default
LINEAR = torch.ops.aten.linear.default
CONFIGS = {
    "static": static_int8(),
    "static per token": static_int8(activation="per_token"),
    "static, one weight scale": static_int8(weight="per_tensor"),
    "dynamic": dynamic_int8(),
    "dynamic per tensor": dynamic_int8(activation="per_tensor"),
    "paper": qattn_paper(),
    "paper per token": qattn_paper(activation="per_token"),
}


def dequantizes(gm):
    return [target for target in targets(gm) if "dequantize" in str(target)]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_linear_becomes_one_call(name):
    x = example()
    model = Block()
    gm = converted(model, x, CONFIGS[name])
    reference = gm(x)
    gm, reports = lowered(gm)
    assert count(gm, INT8_LINEAR) == 2
    assert count(gm, LINEAR) == 0
    assert [report.lowered for report in reports] == [True, True]
    assert [report.name for report in reports] == ["fc1", "fc2"]
    assert numerics.sqnr_db(reference, gm(x)) > 60  # the same quantized values but for a few ties
    assert numerics.sqnr_db(model(x), gm(x)) > 25


def test_static_block_has_nothing_between_its_linears():
    x = example()
    gm, reports = lowered(converted(Block(), x))
    assert dequantizes(gm) == []
    assert count(gm, torch.ops.aten.gelu.default) == 0
    assert count(gm, torch.ops.aten.add.Tensor) == 0
    assert count(gm, torch.ops.qframework.quantize.default) == 1  # of LayerNorm's output
    first, second = (node for node in gm.graph.nodes if node.target is INT8_LINEAR)
    assert first.args[5] == "gelu"
    assert first.args[7] is not None
    assert second.args[0] is first, "the second linear reads the int8 that the first one wrote"
    assert second.args[6] is not None, "the residual sum belongs to the epilogue"
    assert [report.operator for report in reports] == [
        "qframework::int8_linear (gelu, int8 out)",
        "qframework::int8_linear (residual)",
    ]


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        (nn.GELU(), "gelu"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
        (nn.ReLU(), "relu"),
        (nn.ReLU(inplace=True), "relu"),
        (nn.SiLU(), "silu"),
        (nn.Tanh(), "none"),
    ],
)
def test_activations_in_the_epilogue(activation, name):
    x = example()
    gm = converted(Block(activation), x)
    reference = gm(x)
    gm, _ = lowered(gm)
    first = next(node for node in gm.graph.nodes if node.target is INT8_LINEAR)
    assert first.args[5] == name
    assert (first.args[7] is None) == (name == "none")
    assert numerics.sqnr_db(reference, gm(x)) > 60


@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_whose_sums_may_overflow_stays_in_float(name, monkeypatch):
    """Another quantizer's graph may hold one: ours refuses it, unless told otherwise."""
    monkeypatch.setattr(annotate_linear, "MAX_INT8_PRODUCTS", 200_000)
    model, x = nn.Sequential(nn.Linear(140_000, 2), nn.GELU(), nn.Linear(2, 2)), torch.ones(2, 1, 140_000)
    nn.init.ones_(model[0].weight)
    gm = converted(model, x, CONFIGS[name])
    reference = gm(x)
    before = sum(fallbacks.values())
    gm, reports = lowered(gm)
    assert [(report.lowered, report.fallback) for report in reports] == [(False, True), (True, False)]
    assert reports[0].reason == "it must have at most 131071 input features, got 140000: its INT32 sums could overflow"
    assert sum(fallbacks.values()) == before + 1
    assert (count(gm, INT8_LINEAR), count(gm, LINEAR)) == (1, 1)
    torch.testing.assert_close(gm(x), reference)


class Shared(nn.Module):
    """A linear whose value is read twice: before and after its activation."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(32, 32)

    def forward(self, x):
        y = self.fc(x)
        return F.gelu(y) + y.mean()


def test_values_with_other_readers_stay_in_the_graph():
    x = example()
    gm = converted(Shared(), x)
    reference = gm(x)
    gm, _ = lowered(gm)
    linear = next(node for node in gm.graph.nodes if node.target is INT8_LINEAR)
    assert linear.args[5] == "none"
    assert count(gm, torch.ops.aten.gelu.default) == 1
    torch.testing.assert_close(gm(x), reference)


class Broadcast(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(32, 32)
        self.offset = nn.Parameter(torch.randn(32))

    def forward(self, x):
        return self.fc(x) + self.offset


def test_a_broadcast_sum_is_no_residual():
    x = example()
    gm = converted(Broadcast(), x)
    reference = gm(x)
    gm, _ = lowered(gm)
    assert count(gm, torch.ops.aten.add.Tensor) == 1
    torch.testing.assert_close(gm(x), reference)


def test_float_parts_stay_whole():
    x = example()
    gm, reports = lowered(converted(Block(), x, fc1=None))
    assert count(gm, LINEAR) == 1
    assert count(gm, INT8_LINEAR) == 1
    assert [(r.name, r.lowered, r.fallback) for r in reports] == [("fc1", False, False), ("fc2", True, False)]
    assert "not quantized" in reports[0].reason


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("config", [static_int8(), dynamic_int8()], ids=["static", "dynamic"])
def test_half_precision(dtype, config):
    x = example().to(dtype)
    model = Block().to(dtype)
    gm, _ = lowered(converted(model, x, config))
    assert count(gm, INT8_LINEAR) == 2
    y = gm(x)
    assert y.dtype == dtype
    assert numerics.sqnr_db(model(x), y) > 25


def test_dynamic_batch_and_other_sizes():
    x = example()
    model = Block()
    gm, _ = lowered(converted(model, x))
    for batch in (1, 3, 9):
        other = torch.randn(batch, 7, 32)
        assert numerics.sqnr_db(model(other), gm(other)) > 20


class QKV(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32, bias=bias) for bias in (True, False, True))

    def forward(self, x):
        return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))


@pytest.mark.parametrize("config", [static_int8(), dynamic_int8()], ids=["static", "dynamic"])
def test_linears_of_one_input_read_one_quantized_value(config):
    x = example()
    gm, reports = lowered(converted(QKV(), x, config))
    linears = [node for node in gm.graph.nodes if node.target is INT8_LINEAR]
    assert len(linears) == 3
    assert len({node.args[0] for node in linears}) == 1
    assert [report.name for report in reports if report.kind == "linear"] == ["q", "k", "v"]


def rewrite_scales(gm, change):
    for node in gm.graph.nodes:
        if node.target is torch.ops.quantized_decomposed.dequantize_per_tensor.default:
            node.args = change(node.args)
    gm.recompile()
    return gm


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_an_invalid_scale_is_an_error_that_names_the_layer(scale):
    gm = rewrite_scales(converted(Block(), example()), lambda args: (args[0], scale, *args[2:]))
    with pytest.raises(QFrameworkError, match=r"layer 'fc1': the scale of its input must be positive"):
        lowered(gm)


def test_a_weight_scale_of_zero_is_an_error_that_names_the_layer():
    gm = converted(Block(), example())
    scale = next(
        node.args[1]
        for node in gm.graph.nodes
        if node.target is torch.ops.quantized_decomposed.dequantize_per_channel.default
    )
    getattr(gm, scale.target)[3] = 0
    with pytest.raises(QFrameworkError, match=r"layer 'fc.': the scale of its weight must be .*, got 0.0"):
        lowered(gm)


def test_weights_with_zero_points_are_left_whole_and_explained():
    """All zero points of the graph are 3: those of weights too, which have one scale."""
    gm = converted(Block(), example(), static_int8(weight="per_tensor"))
    gm = rewrite_scales(gm, lambda args: (args[0], args[1], 3, *args[3:]))
    x = example()
    reference = copy.deepcopy(gm)(x)
    gm, reports = lowered(gm)
    assert count(gm, LINEAR) == 2
    assert all(report.fallback and "its weight must have zero point 0" in report.reason for report in reports)
    assert numerics.sqnr_db(reference, gm(x)) > 100


def test_inputs_are_lowered_with_their_zero_points():
    """Also where a value is dequantized with another zero point than it was quantized with."""
    gm = rewrite_scales(converted(Block(), example()), lambda args: (args[0], args[1], 3, *args[3:]))
    x = example()
    reference = copy.deepcopy(gm)(x)
    gm, reports = lowered(gm)
    assert [report.lowered for report in reports] == [True, True]
    assert numerics.sqnr_db(reference, gm(x)) > 60


def test_models_of_another_quantizer_are_left_whole():
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    x = example()
    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    # It finds layers by metadata that torch 2.11 records in a strict export alone.
    prepared = prepare_pt2e(torch.export.export(Block().eval(), (x,), strict=True).module(), quantizer)
    prepared(x)
    gm = convert_pt2e(prepared)
    reference = copy.deepcopy(gm)(x)
    gm, reports = lowered(gm)
    assert all("torch.uint8" in report.reason for report in reports)
    assert torch.equal(gm(x), reference)


def test_lowering_twice_changes_nothing():
    x = example()
    gm, _ = lowered(converted(Block(), x))
    once = targets(gm)
    gm, reports = lowered(gm)
    assert targets(gm) == once
    assert all(report.lowered for report in reports)
