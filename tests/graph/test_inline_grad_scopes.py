"""Bodies of ``with torch.no_grad():`` in exported graphs become part of the graph (inline_grad_scopes.py)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from qframework import explain, load, quantize
from qframework.graph.rewrites.inline_grad_scopes import inline_grad_scopes, inline_scopes_of_layers


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


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("called", [True, False])
def test_the_graph_computes_the_same_without_scopes(case, prepared, called):
    """It leaves the mode of the call behind, whatever the mode was when the scopes were inlined."""
    model, x = case
    graph = torch.export.export(model, (x,)).module()
    assert len(scopes(graph)) == 2  # else the test tests nothing
    with torch.set_grad_enabled(prepared):
        assert inline_grad_scopes(graph) == 2
        graph.recompile()
    assert not scopes(graph)
    with torch.set_grad_enabled(called):
        expected, found = model(x), graph(x)
        assert torch.is_grad_enabled() is called
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert found.requires_grad == expected.requires_grad == called
    if called:
        given = torch.autograd.grad(found.sum(), [graph.get_parameter("first.weight")])
        torch.testing.assert_close(given, torch.autograd.grad(expected.sum(), [model.first.weight]))


def test_scopes_without_layers_are_kept_in_an_exported_graph(case):
    model, x = case
    graph = torch.export.export(model, (x,)).module()
    inline_scopes_of_layers(graph)
    assert len(scopes(graph)) == 1
    torch.testing.assert_close(graph(x), model(x), rtol=0, atol=0)


class Sinusoidal(nn.Module):
    """Positions of as many tokens as there are, computed without gradients, as in M2M100 and SpeechT5."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 24), nn.Linear(24, 16)
        self.register_buffer("table", torch.randn(40, 24))

    def forward(self, x):
        places = x.sum(-1).ge(0).long()
        with torch.no_grad():
            positions = self.table.index_select(0, places.view(-1)).view(x.shape[0], x.shape[1], -1).detach()
        return self.last(self.first(x) + positions)


def test_sizes_that_vary_inside_a_scope():
    """``torch.compile`` broke the graph at the scope, and the layers behind stayed in float."""
    torch.manual_seed(0)
    model, x = Sinusoidal().eval(), torch.randn(4, 5, 16)
    quantized = quantize(model, (x,), "static_int8", calibration_data=[(x,)])
    compiled = torch.compile(quantized, backend="qframework", fullgraph=True)
    with torch.no_grad():
        for size in (4, 6, 9):
            other = torch.randn(size, 5, 16)
            torch.testing.assert_close(compiled(other), quantized(other))


@pytest.mark.parametrize("prepared", [True, False])
def test_a_quantized_model_leaves_the_gradient_mode_as_it_is(case, prepared, tmp_path):
    model, x = case
    with torch.set_grad_enabled(prepared):
        quantized = quantize(model, (x,), "static_int8", calibration_data=[(x,)])
    quantized.save(tmp_path / "model.pt2")
    for each in (quantized, load(tmp_path / "model.pt2"), torch.compile(quantized, backend="qframework")):
        for called in (True, False):
            with torch.set_grad_enabled(called):
                each(x)
                assert torch.is_grad_enabled() is called


@pytest.mark.parametrize("grad", [True, False])
def test_a_float_model_keeps_its_gradients_through_the_backend(case, grad):
    model, x = case
    graph = torch.export.export(model, (x,)).module()
    torch._dynamo.reset()
    with torch.set_grad_enabled(grad):
        found = torch.compile(graph, backend="qframework")(x)
    expected = model(x)
    torch.testing.assert_close(found, expected)
    assert found.requires_grad is grad
    if grad:
        (given,) = torch.autograd.grad(found.sum(), [graph.get_parameter("first.weight")])
        torch.testing.assert_close(given, torch.autograd.grad(expected.sum(), [model.first.weight])[0])


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


def test_every_linear_of_a_static_llama_is_lowered():
    """Its rotary embedding is computed without gradients, in torch 2.11 in a graph of its own."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=50, use_cache=False)).eval()
    inputs = {"input_ids": torch.arange(12).view(2, 6)}
    quantized = quantize(model, inputs, "static_int8", calibration_data=[inputs], skip=())
    report = quantized.explain()
    assert report.total == 2 * 7 + 1
    assert report.lowered == report.total, report
