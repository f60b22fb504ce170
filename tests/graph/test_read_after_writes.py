"""Quantized layers see what is written to their inputs in place (read_after_writes.py)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

import qframework
from qframework import numerics
from qframework.graph.rewrites.read_after_writes import read_after_writes
from qframework.quantizer import (
    QFrameworkQuantizer,
    QuantizationConfig,
    Recipe,
    Smooth,
    calibrate,
    static_attention,
    static_int8,
)

aten = torch.ops.aten


class Writes(nn.Module):
    """An input of two layers, changed between them and behind its product; an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        y = x * 1
        early = self.first(y)
        y.mul_(3)
        y[:, 0] = 5
        late = self.second(y) + self.third(y)
        return early + F.relu(late, inplace=True)


class WritesQueries(nn.Module):
    def forward(self, x):
        query = x * 2
        query[..., :8, :] = 0
        return F.scaled_dot_product_attention(query, x, x)


class WritesWeight(nn.Module):
    """A weight that changes at each call, behind the layer that reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        y = self.second(self.first(x))
        with torch.no_grad():
            self.first.weight.mul_(-1)
        return y


def quantized(model, x, config):
    return qframework.quantize(copy.deepcopy(model).eval(), (x,), config, [(x,)])


def test_layers_read_behind_the_writes():
    torch.manual_seed(0)
    model, x = Writes().eval(), torch.randn(4, 10, 16)
    graph = torch.export.export(model, (x,)).module()
    assert read_after_writes(graph) == 1  # both late layers share it
    assert read_after_writes(graph) == 0
    torch.testing.assert_close(graph(x), model(x))
    with torch.no_grad():
        assert numerics.sqnr_db(model(x), quantized(model, x, static_int8())(x)) > 30


class WritesNorm(nn.Module):
    """A norm with outlier channels, whose result is changed before the layer reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(16), nn.Linear(16, 16)
        nn.init.constant_(self.norm.weight[:2], 30.0)

    def forward(self, x):
        y = self.norm(x)
        y[:, 0] = 5
        return self.layer(y)


def test_a_recipe_looks_behind_the_writes():
    """Its steps judge what the layer will read, and fold no scale into the norm, which would not reach the write."""
    torch.manual_seed(0)
    model, x = WritesNorm().eval(), torch.randn(4, 10, 16)
    graph = torch.export.export(model, (x,)).module()
    quantizer = QFrameworkQuantizer().set_global(static_int8())
    Recipe(smooth=Smooth(), channel_scales=True, guard=False).before_prepare(graph, quantizer, [x])
    assert [node.target for node in graph.graph.nodes].count(aten.alias.default) == 1
    torch.testing.assert_close(graph(x), model(x))


def test_attention_reads_behind_the_writes():
    torch.manual_seed(0)
    model, x = WritesQueries().eval(), torch.randn(2, 2, 32, 16)
    config = QuantizationConfig(attention=static_attention())
    with torch.no_grad():
        assert numerics.sqnr_db(model(x), quantized(model, x, config)(x)) > 25


def test_a_weight_that_the_model_changes_stays_in_float():
    torch.manual_seed(0)
    model, x = WritesWeight().eval(), torch.randn(4, 16)
    graph = quantized(model, x, static_int8())
    assert [(layer.name, layer.lowered) for layer in graph.explain().layers] == [("first", False), ("second", True)]
    with torch.no_grad():
        for _ in range(3):  # the calls of calibration do not count
            assert numerics.sqnr_db(model(x), graph(x)) > 30


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.layer(x) * self.calls


def test_calibration_leaves_the_state_of_the_model():
    """Also that of the given model, whose buffers an exported graph shares."""
    model, x = Counts().eval(), torch.randn(4, 16)
    prepared = prepare_pt2e(torch.export.export(model, (x,)).module(), QFrameworkQuantizer().set_global(static_int8()))
    assert calibrate(prepared, [x] * 3) == 3
    assert model.calls == 0
    graph = quantized(model, x, static_int8())
    with torch.no_grad():
        for _ in range(3):
            assert numerics.sqnr_db(model(x), graph(x)) > 30


def test_models_without_writes_are_unchanged():
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 16)).eval()
    assert read_after_writes(torch.export.export(model, (torch.randn(4, 16),)).module()) == 0


@pytest.mark.usefixtures("fresh_dynamo")
def test_the_compiled_model_agrees():
    torch.manual_seed(0)
    model, x = Writes().eval(), torch.randn(4, 10, 16)
    graph = quantized(model, x, static_int8())
    assert graph.explain().lowered == 3
    with torch.no_grad():
        assert numerics.sqnr_db(graph(x), torch.compile(graph, backend="qframework")(x)) > 40


class OptionalInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, shift=None):
        y = self.second(F.relu(self.first(x)))
        return y if shift is None else y + shift


@pytest.mark.parametrize("example", [{"x": torch.randn(4, 16), "shift": None}, (torch.randn(4, 16), None)])
def test_an_input_that_is_none_keeps_no_layer_in_float(example):
    """The export checks that it is None, which writes nothing, and records no value of it."""
    quantized = qframework.quantize(OptionalInput().eval(), example, static_int8(), [example])
    report = quantized.explain()
    assert (report.lowered, report.total) == (2, 2), str(report)
