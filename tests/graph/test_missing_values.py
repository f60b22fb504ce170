"""Values of nodes that PT2E added, without which in-place operators elsewhere keep exported layers in float."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import qframework
from qframework.compat.dynamo import recorded_value
from qframework.graph.rewrites.missing_values import record_missing_values
from qframework.graph.writes import written_between
from qframework.numerics import sqnr_db
from qframework.quantizer import (
    QFrameworkQuantizer,
    QuantizationConfig,
    calibrate,
    dynamic_int8,
    static_attention,
    static_int8,
)


class Biased(nn.Module):
    """Attention's scores get a bias in place, as DeBERTa's do, between the weights of other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x, bias):
        scores = self.q(x) @ self.k(x).transpose(-1, -2)
        scores += bias
        return self.out(scores.softmax(-1) @ self.v(x))


@pytest.mark.parametrize("config", [dynamic_int8(), static_int8()])
def test_layers_behind_an_operator_in_place(config) -> None:
    inputs = (torch.randn(4, 6, 16), torch.randn(4, 6, 6))
    data = None if config.activation.dynamic else [inputs]
    report = qframework.quantize(Biased().eval(), inputs, config, data).explain()
    assert report.lowered == report.total == 4, str(report)


def test_values_have_the_memory_and_sizes_of_what_they_stand_for() -> None:
    inputs = (torch.randn(4, 6, 16), torch.randn(4, 6, 6))
    quantized = qframework.quantize(Biased().eval(), inputs, dynamic_int8())
    record_missing_values(quantized)
    for node in quantized.graph.nodes:
        if node.op == "get_attr":
            held = getattr(quantized, node.target) if "." not in node.target else quantized.get_parameter(node.target)
            assert (recorded_value(node).shape, recorded_value(node).dtype) == (held.shape, held.dtype)
        elif "dynamic_quantize" in node.name:
            values, scale = recorded_value(node)
            batch = values.shape[0]
            assert isinstance(batch, torch.SymInt)
            assert (values.shape[1:], scale.shape[1:]) == ((6, 16), (6, 1))


def test_a_write_through_another_node_of_the_same_attribute_is_found() -> None:
    class Buffer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.ones(4))

        def forward(self, x):
            return x + self.kept

    gm = torch.export.export(Buffer(), (torch.randn(4),)).module()
    (first,) = (node for node in gm.graph.nodes if node.op == "get_attr")
    last = next(node for node in gm.graph.nodes if "add" in node.name)
    with gm.graph.inserting_before(last):
        again = gm.graph.get_attr("kept")
        again.meta.clear()
        write = gm.graph.call_function(torch.ops.aten.mul_.Tensor, (again, 2.0))
        other = gm.graph.call_function(torch.ops.aten.ones.default, ([4],))
        gm.graph.call_function(torch.ops.aten.mul_.Tensor, (other, 2.0))
    first.meta.pop("val", None)
    record_missing_values(gm)
    assert recorded_value(write) is None  # a write is not run
    assert written_between(first, last, [first]) is write
    gm.graph.erase_node(write)
    assert written_between(first, last, [first]) is None


def test_dropout_in_place_that_is_inactive() -> None:
    """As in TNT, whose dropout between the softmax and the values would write the weights in training."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)
            self.drop, self.drop_weights = nn.Dropout(0.1, inplace=True), nn.Dropout(0.1, inplace=True)

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
            weights = self.drop_weights((q @ k.transpose(-2, -1) * 0.25).softmax(-1))
            return x + self.drop(self.proj((weights @ v).transpose(1, 2).flatten(2)))

    model, x = Dropped().eval(), torch.randn(4, 9, 32)
    config = QuantizationConfig(linear=static_int8(), attention=static_attention())
    report = qframework.quantize(model, x, config, [x]).explain()
    assert report.lowered == report.total == 2, str(report)
    assert report.attention_lowered == report.attention_total == 1, str(report)
    assert any("residual" in layer.operator for layer in report.layers)


class WritesPart(nn.Module):
    """What is written through a view is read through its base."""

    def __init__(self) -> None:
        super().__init__()
        self.o, self.q = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        y = self.o(x)
        part = y[:, :4]
        part.mul_(3)
        return self.q(y)


class WritesWhole(WritesPart):
    """What is written is read through an older view."""

    def forward(self, x):
        y = self.o(x)
        part = y.view(-1, 64)
        y.mul_(3)
        return self.q(part)


@torch.no_grad()
@pytest.mark.parametrize("model", [WritesPart, WritesWhole])
def test_views_of_a_loaded_program_share_memory(model) -> None:
    model, x, file = model().eval(), torch.randn(2, 8, 64), io.BytesIO()
    expected = model(x)
    torch.export.save(torch.export.export(model, (x,)), file)
    file.seek(0)
    prepared = prepare_pt2e(torch.export.load(file).module(), QFrameworkQuantizer().set_global(static_int8()))
    calibrate(prepared, [x], progress=False)
    quantized = convert_pt2e(prepared)
    assert sqnr_db(expected, quantized(x)) > 25
    assert not torch.equal(expected, quantized(x))
