"""Static models that ``torch.compile`` captures in several graphs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import qframework
from qframework.backend import fallbacks
from qframework.graph.late_dequantize import dequantize_late
from qframework.numerics import sqnr_db
from qframework.quantizer import static_int8


class Counting(nn.Module):
    """A number is read from a tensor between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        number = (x > 0).sum().item()
        return self.last(hidden * number) + self.last(hidden)


def test_layers_behind_the_end_of_a_graph(tmp_path) -> None:
    torch.manual_seed(0)
    model, x = Counting().eval(), torch.randn(4, 32)
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


def test_a_graph_that_is_captured_whole_stays_as_it_is() -> None:
    model, x = nn.Sequential(nn.Linear(32, 32)).eval(), torch.randn(4, 32)
    quantized = qframework.quantize(model, x, static_int8(), [x])
    assert not dequantize_late(quantized)
