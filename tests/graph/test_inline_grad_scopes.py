"""Bodies of ``with torch.no_grad():`` in exported graphs become part of the graph (inline_grad_scopes.py)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from qframework import explain, quantize
from qframework.compat.dispatch import set_grad_enabled
from qframework.graph.inline_grad_scopes import inline_grad_scopes


class Positions(nn.Module):
    """Layers around and between blocks without gradients, and inside one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(16, 24), nn.Linear(24, 24), nn.Linear(24, 16)
        self.hidden = nn.Linear(24, 24)
        self.register_buffer("factor", torch.linspace(0.5, 1.5, 24))

    def forward(self, x):
        hidden = self.first(x)
        with torch.no_grad():
            angle = torch.cos(self.hidden(hidden) * self.factor)
            with torch.enable_grad():
                angle = self.inner(angle) + 1
            rest = angle.sin(), angle * 2
        return self.last(hidden + rest[0] * rest[1])


@pytest.fixture
def case():
    torch.manual_seed(0)
    return Positions().eval(), torch.randn(4, 5, 16)


def scopes(graph):
    return [node for node in graph.graph.nodes if "wrap_with_set_grad_enabled" in str(node.target)]


@pytest.mark.parametrize("grad", [True, False])
def test_the_graph_computes_the_same_without_scopes(case, grad):
    model, x = case
    graph = torch.export.export(model, (x,)).module()
    assert scopes(graph)  # else the test tests nothing
    with torch.set_grad_enabled(grad):
        assert inline_grad_scopes(graph) == 2
        graph.recompile()
        assert not scopes(graph)
        expected, found = model(x), graph(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert found.requires_grad == expected.requires_grad == grad
    modes = [node.args[0] for node in graph.graph.nodes if node.target is set_grad_enabled]
    assert modes == [False, grad, False, grad]
    if grad:
        given = torch.autograd.grad(found.sum(), [graph.get_parameter("first.weight")])
        torch.testing.assert_close(given, torch.autograd.grad(expected.sum(), [model.first.weight]))


def test_a_graph_without_scopes_is_left_alone(case):
    graph = torch.export.export(nn.Linear(16, 4), (case[1],)).module()
    before = str(graph.graph)
    assert inline_grad_scopes(graph) == 0
    assert str(graph.graph) == before


def test_layers_beside_and_inside_scopes_are_lowered(case):
    """A scope was taken for a write to every weight: no layer of a Llama was lowered."""
    model, x = case
    with torch.no_grad():
        quantized = quantize(model, (x,), "static_int8", calibration_data=[(x,)])
        expected = quantized(x)
    for context in (torch.no_grad(), torch.enable_grad(), torch.inference_mode()):
        torch._dynamo.reset()
        compiled = torch.compile(quantized, backend="qframework")
        with context:
            found = compiled(x)
            report = explain(compiled, (x,))
        assert [(layer.name, layer.lowered) for layer in report.layers] == [
            ("first", True),
            ("hidden", True),
            ("inner", True),
            ("last", True),
        ]
        assert (found - expected).abs().max() < 0.05 * expected.abs().max()
