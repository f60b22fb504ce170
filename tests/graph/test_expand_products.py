"""Products with a parameter become linears, as transformers' Conv1D; what is none is reported (expand_products.py)."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from qframework import numerics
from qframework.backend import explain, float_linear, qframework_backend
from qframework.graph.rewrites.expand_products import expand_exported_products
from qframework.quantizer import QFrameworkQuantizer, Recipe, Smooth, calibrate, static_int8

aten = torch.ops.aten


class Conv1D(nn.Module):
    """As transformers has it."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * inputs**-0.5)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        flat = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], -1)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Conv1D(24, 16), Conv1D(16, 24)
        self.again = self.second

    def forward(self, x):
        hidden = self.first(x)
        return self.second(hidden) + self.again(hidden * 2)


@pytest.fixture
def case():
    torch.manual_seed(0)
    return Two().eval(), torch.randn(3, 5, 16)


def exported(model, x):
    return torch.export.export(model, (x,)).module()


def test_an_exported_graph_computes_the_same_with_linears(case):
    model, x = case
    graph = exported(model, x)
    assert expand_exported_products(graph) == 3
    assert not any(node.target is aten.addmm.default for node in graph.graph.nodes)
    torch.testing.assert_close(graph(x), model(x))
    assert graph.state_dict()["first.weight"].shape == (24, 16)
    assert model.first.weight.shape == (16, 24)  # the original is not touched


def test_products_that_are_no_linears_stay():
    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6))
            self.square = nn.Parameter(torch.randn(3, 6))

        def forward(self, x, bias):
            scaled = torch.addmm(bias, x, self.weight, alpha=2.0)
            with_matrix = torch.addmm(self.square, x, self.weight)
            return scaled + with_matrix + torch.addmm(bias, x, x.t() @ scaled)

    arguments = torch.randn(3, 4), torch.randn(6)
    graph = torch.export.export(Products(), arguments).module()
    assert expand_exported_products(graph) == 0


def test_pt2e_quantizes_them_with_and_without_a_recipe(case):
    model, x = case
    quantizer = QFrameworkQuantizer().set_global(static_int8())
    errors = []
    for recipe in (None, Recipe(smooth=Smooth(), bias_correction=True)):
        graph = exported(model, x)
        if recipe is not None:
            assert recipe.before_prepare(graph, quantizer, [x])["smooth"]
        prepared = prepare_pt2e(graph, quantizer)
        calibrate(prepared, [x])
        if recipe is not None:
            recipe.after_calibrate(prepared, [x])
        converted = convert_pt2e(prepared)
        linears = [node for node in converted.graph.nodes if node.target is aten.linear.default]
        assert len(linears) == 3
        assert all("dequantize" in str(node.args[1].target) for node in linears)
        errors.append(numerics.sqnr_db(model(x), converted(x)))
    assert min(errors) > 30


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("frozen", [False, True])
def test_the_backend_quantizes_them(case, frozen):
    model, x = case
    options = {"linear": "int8_dynamic", "freeze_weights": frozen}
    compiled = torch.compile(model, backend=qframework_backend, options=options, fullgraph=True)
    with torch.no_grad():
        expected = model(x)
        assert 30 < numerics.sqnr_db(expected, compiled(x)) < 60
        model.first.weight.copy_(model.first.weight * 2)
        changed = numerics.sqnr_db(model(x), compiled(x)) > 30
        assert changed is not frozen
        model.first.weight = nn.Parameter(model.first.weight * 3)  # another parameter compiles again
        assert numerics.sqnr_db(model(x), compiled(x)) > 30


class Projections(nn.Module):
    """Products of an input and a parameter in every spelling; ``transform`` is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.randn(16, 24) / 4), nn.Parameter(torch.randn(24, 16) / 4)
        self.register_buffer("transform", torch.randn(24, 24) / 5)

    def forward(self, x):
        right = x @ self.weight + torch.matmul(x, self.weight) + x.flatten(0, 1).mm(self.weight).view(3, 5, 24)
        transposed = x @ self.other.T + x @ self.other.t() + x @ self.other.mT + x @ self.other.transpose(-1, 0)
        permuted = x @ self.other.permute(1, 0)
        return (right + transposed) @ self.transform + permuted


def test_exported_products_in_every_spelling():
    torch.manual_seed(0)
    model, x = Projections().eval(), torch.randn(3, 5, 16)
    graph = exported(model, x)
    assert expand_exported_products(graph) == 8
    names = [str(node.target) for node in graph.graph.nodes]
    assert names.count("aten.linear.default") == 8
    assert names.count("aten.matmul.default") == 1
    assert not [name for name in names if "transpose" in name or "permute" in name or "aten.t." in name]
    torch.testing.assert_close(graph(x), model(x))


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_products_in_every_spelling():
    torch.manual_seed(0)
    model, x = Projections().eval(), torch.randn(3, 5, 16)
    options = {"linear": "int8_dynamic"}
    with torch.no_grad():
        assert explain(model, x, options=options).lowered == 8
        compiled = torch.compile(model, backend=qframework_backend, options=options)
        assert 30 < numerics.sqnr_db(model(x), compiled(x)) < 60


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_product_of_a_product():
    """Low-rank adapters written by hand: x @ a @ b."""

    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Parameter(torch.randn(16, 8) / 4), nn.Parameter(torch.randn(16, 8) / 4)
            self.bias = nn.Parameter(torch.randn(8))

        def forward(self, x):
            return torch.addmm(self.bias, x @ self.down @ self.up.T, self.down)

    torch.manual_seed(0)
    model, x = Adapter().eval(), torch.randn(5, 16)
    graph = exported(model, x)
    assert expand_exported_products(graph) == 3
    torch.testing.assert_close(graph(x), model(x))
    with torch.no_grad():
        assert explain(model, x, options={"linear": "int8_dynamic"}).lowered == 3
        compiled = torch.compile(model, backend=qframework_backend, options={"linear": "int8_dynamic"})
        assert 30 < numerics.sqnr_db(model(x), compiled(x)) < 60


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_matrix_for_each_head_is_no_linear():
    """Funnel's token types. F.linear would not help."""

    class PerHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.types = nn.Parameter(torch.randn(2, 3, 5))

        def forward(self, x):
            return torch.einsum("bind,snd->bnis", x, self.types)

    with torch.no_grad():
        (layer,) = explain(PerHead().eval(), torch.randn(4, 6, 3, 5), options={"linear": "int8_dynamic"}).layers
    assert layer.reason == (
        "einsum('bind,snd->bnis') is no linear layer: it multiplies by another matrix for each index 'n'"
    )


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_products_of_experts_are_reported(transposed):
    """Mixtures of experts of transformers were not listed."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 16, 8).bfloat16())

        def forward(self, x, ends):
            weight = self.weight if transposed else self.weight.transpose(-2, -1)
            return F.grouped_mm(x, weight, offs=ends), F.grouped_mm(x, x.new_zeros(4, x.shape[1], 8), offs=ends)

    ends = torch.tensor([2, 4, 4, 6], dtype=torch.int32)
    x = torch.randn(6, 16 if transposed else 8).bfloat16()
    with torch.no_grad():
        (layer,) = explain(Experts().eval(), (x, ends), options={"linear": "int8_dynamic"}).layers
    assert (layer.operator, layer.lowered, layer.fallback) == ("float grouped_mm", False, False)
    assert "the tokens of each expert by a matrix of its own" in layer.reason
    assert "options={'experts': 'int8_dynamic', 'freeze_weights': True}" in layer.reason


class TakenExperts(nn.Module):
    """Takes the matrices of each token's expert, as ``batched_mm`` of transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 16, 8)), nn.Parameter(torch.randn(4, 16, 8))

    def forward(self, x, experts):
        x = torch.bmm(self.up[experts], x.unsqueeze(-1)).squeeze(-1)
        return (x.unsqueeze(1) @ self.down.index_select(0, experts)).squeeze(1) + x.mean(-1, keepdim=True)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("exported", [False, True])
def test_matrices_that_are_taken_for_each_token_are_reported(exported):
    model, inputs = TakenExperts().eval(), (torch.randn(6, 8), torch.tensor([0, 3, 1, 1, 2, 0]))
    if exported:
        model = torch.export.export(model, inputs).module()
    with torch.no_grad():
        layers = explain(model, inputs, options={"linear": "int8_dynamic"}).layers
    assert len(layers) == 2
    for layer in layers:
        assert "the tokens of each expert by a matrix of its own" in layer.reason
        assert (layer.lowered, layer.fallback) == (False, True)


@pytest.mark.usefixtures("fresh_dynamo")
def test_products_that_stay_in_float_are_reported():
    """Experts with a weight each, an einsum, factors and matrices instead of a bias."""

    class Others(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts, self.heads = nn.Parameter(torch.randn(4, 6, 8)), nn.Parameter(torch.randn(2, 6, 3))
            self.weight, self.rows = nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(3, 5))

        def forward(self, x):
            return (
                torch.bmm(x, self.experts),
                torch.einsum("bnc,hcd->bhnd", x, self.heads),
                torch.addmm(self.rows, x[0], self.weight),
                torch.addmm(self.rows[0], x[1], self.weight, alpha=2),
                x @ x.mT,
                self.rows @ self.weight.mT @ x.mT,
            )

    model, x = Others().eval(), torch.randn(4, 3, 6)
    with torch.no_grad():
        report = explain(model, x, options={"linear": "int8_dynamic"})
        static = explain(model, x)
    found = {layer.operator: layer.reason for layer in report.layers if not layer.lowered}
    assert {"float bmm", "float einsum", "float addmm"} == set(found)
    assert "got shape (4, 6, 8)" in found["float bmm"]
    assert "'bnc,hcd->bhnd'" in found["float einsum"]
    assert "Write it as F.linear" in found["float einsum"]
    assert "alpha and beta of 1" in found["float addmm"]
    assert [layer.fallback for layer in report.layers if not layer.lowered] == [True] * 4
    assert [layer.fallback for layer in static.layers if "addmm" in layer.operator] == [False] * 2


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_model_of_transformers():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 50, "n_positions": 16}
    model = transformers.GPT2Model(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.2)
    ids = torch.randint(50, (2, 12))
    compiled = torch.compile(model, backend=qframework_backend, options={"linear": "int8_dynamic"})
    with torch.no_grad():
        expected, got = (m(ids, use_cache=False).last_hidden_state for m in (model, compiled))
    assert 25 < numerics.sqnr_db(expected, got) < 60


def test_frozen_weights_are_stored_as_the_kernels_read_them(case, monkeypatch):
    """A transposed one would be copied at every call."""
    model, x = case
    weights = []
    real = float_linear.insert_int8_linear

    def insert(gm, call, a, b, *rest):
        weights.append(gm.get_buffer(b.value.target))
        return real(gm, call, a, b, *rest)

    monkeypatch.setattr(float_linear, "insert_int8_linear", insert)
    torch._dynamo.reset()
    with torch.no_grad():
        options = {"linear": "int8_dynamic", "freeze_weights": True}
        torch.compile(model, backend="qframework", options=options)(x)
    assert [tuple(weight.shape) for weight in weights] == [(24, 16), (16, 24), (16, 24)]
    assert all(weight.is_contiguous() for weight in weights)
