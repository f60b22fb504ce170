"""Linears whose weight is some rows of a parameter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

import qframework
from qframework.backend.compile import lower
from qframework.backend.options import BackendOptions
from qframework.graph.weight_rows import rows_of, separate_weights
from qframework.numerics import sqnr_db
from qframework.quantizer import static_int8

WAYS = {
    "slices": lambda w: (w[:16], w[16:40], w[-8:]),
    "split": lambda w: w.split([16, 24, 8]),
    "sections": lambda w: w.split(20),
    "chunk": lambda w: torch.chunk(w, 3),
    "negative_dim": lambda w: w.chunk(3, -w.ndim),
    "tensor_split": lambda w: w.tensor_split((16, 40)),
    "narrow": lambda w: (w.narrow(0, 0, 16), w.narrow(0, 16, 24), w[40:]),
    "twice": lambda w: (w[8:][:16], w[:24][8:], w.chunk(2)[1][3:]),
}


class Joined(nn.Module):
    """Linears that read the rows of one weight and, except for the last, of one bias."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(48, 32)), nn.Parameter(torch.randn(48))
        self.way = WAYS[way]

    def forward(self, x: Tensor) -> list[Tensor]:
        weights, biases = self.way(self.weight), self.way(self.bias)
        return [F.linear(x + i, w, biases[i] if i < 2 else None) for i, w in enumerate(weights)]


def exported(model: nn.Module, x: Tensor) -> GraphModule:
    return torch.export.export(model, (x,)).module()


def linears(gm: GraphModule) -> list:
    return [node for node in gm.graph.nodes if node.target is torch.ops.aten.linear.default]


@pytest.mark.parametrize("way", WAYS)
def test_separate_weights(way) -> None:
    model, x = Joined(way).eval(), torch.randn(4, 32)
    gm = exported(model, x)
    assert separate_weights(gm) == 3
    assert all(node.args[1].op == "get_attr" for node in linears(gm))
    assert "weight" not in gm.state_dict(), "nothing reads it, so it is freed"
    assert all(parameter.requires_grad for parameter in gm.parameters())
    for exact, found in zip(model(x), gm(x), strict=True):
        assert torch.equal(exact, found)


@pytest.mark.parametrize("way", WAYS)
def test_compiled_and_quantized(way) -> None:
    model, x = Joined(way).eval(), torch.randn(4, 32)
    quantized = qframework.quantize(model, x, static_int8(), [x])
    assert [layer.lowered for layer in quantized.explain().layers] == [True] * 3
    report = qframework.explain(model, x, options={"linear": "int8_dynamic", "freeze_weights": True})
    assert [layer.lowered for layer in report.layers] == [True] * 3
    with torch.no_grad():
        for exact, found in zip(model(x), quantized(x), strict=True):
            assert 30 < sqnr_db(exact, found) < 60


@pytest.mark.usefixtures("fresh_dynamo")
def test_frozen_weights_are_the_rows_of_the_parameter() -> None:
    def backend(gm, example_inputs):
        lower(gm, example_inputs, BackendOptions(linear="int8_dynamic", freeze_weights=True))
        return gm.forward

    model, x = Joined("slices").eval(), torch.randn(4, 32)
    with torch.no_grad():
        for exact, found in zip(model(x), torch.compile(model, backend=backend)(x), strict=True):
            assert 30 < sqnr_db(exact, found) < 60


def test_rows_that_are_returned_too() -> None:
    class Returning(Joined):
        def forward(self, x: Tensor) -> list[Tensor]:
            return [*super().forward(x), self.weight[:16], self.bias]

    model, x = Returning("slices").eval(), torch.randn(4, 32)
    gm = exported(model, x)
    assert separate_weights(gm) == 3
    assert "weight" in gm.state_dict()
    for exact, found in zip(model(x), gm(x), strict=True):
        assert torch.equal(exact, found)


def test_rows_that_are_written_stay_as_they_are() -> None:
    class Written(Joined):
        def forward(self, x: Tensor) -> list[Tensor]:
            with torch.no_grad():
                self.weight[0].mul_(2)
            return super().forward(x)

    model, x = Written("slices").eval(), torch.randn(4, 32)
    gm = exported(model, x)
    assert not any(node.args[1].op == "get_attr" for node in linears(gm))
    assert separate_weights(gm) == 0


OTHERS = {
    "columns": lambda w: w[:, :16],
    "chunk of columns": lambda w: w.chunk(2, 1)[0],
    "step": lambda w: w[::2],
    "computed": lambda w: w * 2,
    "vector": lambda w: w[0],
}


@pytest.mark.parametrize("select", OTHERS)
def test_what_is_more_than_rows(select) -> None:
    class Selecting(Joined):
        def forward(self, x: Tensor) -> Tensor:
            weight = OTHERS[select](self.weight)
            return F.linear(x[:, : weight.shape[-1]], weight)

    gm = exported(Selecting("slices").eval(), torch.randn(4, 32))
    assert rows_of(linears(gm)[0].args[1]) is None
    assert separate_weights(gm) == 0
