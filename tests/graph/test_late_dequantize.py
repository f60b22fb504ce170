"""Static models that ``torch.compile`` captures in several graphs."""

from __future__ import annotations

import pytest
import torch
from lowered_models import converted
from torch import Tensor, nn

import qframework
from qframework.backend import fallbacks
from qframework.backend.compile import lower
from qframework.backend.options import BackendOptions
from qframework.graph.rewrites.late_dequantize import dequantize_late
from qframework.numerics import sqnr_db
from qframework.quantizer import static_int8

READS = {
    "a number": lambda x: (x > 0).sum().item(),
    "a tensor whose size depends on values": lambda x: (x > 0).nonzero().float().mean(),
}


class Counting(nn.Module):
    """Values are read from a tensor between two layers."""

    def __init__(self, reads: str = "a number") -> None:
        super().__init__()
        self.first, self.last, self.reads = nn.Linear(32, 32), nn.Linear(32, 16), reads

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        number = READS[self.reads](x)
        return self.last(hidden * number) + self.last(hidden)


@pytest.mark.parametrize("reads", READS)
def test_layers_behind_the_end_of_a_graph(tmp_path, reads) -> None:
    torch.manual_seed(0)
    model, x = Counting(reads).eval(), torch.randn(4, 32)
    quantized = qframework.quantize(model, x, static_int8(), [x, torch.randn(9, 32)])
    quantized.save(tmp_path / "counting.pt2")
    for each in (quantized, qframework.load(tmp_path / "counting.pt2")):
        assert qframework.explain(each, x).lowered == 3
        fallbacks.clear()
        compiled = torch.compile(each, backend="qframework")
        with torch.no_grad():
            for rows in (4, 7):
                other = torch.randn(rows, 32)
                torch.testing.assert_close(compiled(other), each(other))
                assert sqnr_db(model(other), compiled(other)) > 20
        assert not fallbacks


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_converted_model_that_is_loaded(tmp_path) -> None:
    x = torch.randn(4, 32)
    qframework.save(converted(Counting().eval(), x, static_int8()), tmp_path / "counting.pt2", (x,))
    layers = 0

    def backend(gm, example_inputs):
        nonlocal layers
        lower(gm, example_inputs, BackendOptions())
        layers += sum(node.target is torch.ops.qframework.int8_linear.default for node in gm.graph.nodes)
        return gm.forward

    with torch.no_grad():
        torch.compile(qframework.load(tmp_path / "counting.pt2"), backend=backend)(x)
    assert layers == 3


def test_nothing_is_dequantized_that_no_layer_reads() -> None:
    model, x = Counting().eval(), torch.randn(4, 32)
    quantized = qframework.quantize(model, x, static_int8(), [x])
    found = [node for node in quantized.graph.nodes if ".dequantize_" in str(node.target)]
    assert [len(node.users) for node in found] == [1] * 6, "an input and a weight for each of three calls"


def test_a_graph_that_is_captured_whole_stays_as_it_is() -> None:
    model, x = nn.Sequential(nn.Linear(32, 32)).eval(), torch.randn(4, 32)
    quantized = qframework.quantize(model, x, static_int8(), [x])
    assert not dequantize_late(quantized)
