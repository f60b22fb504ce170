"""``einsum`` of an activation and a parameter becomes a linear (einsum_linears.py), and what is none stays."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from qframework import numerics
from qframework.backend import explain, qframework_backend
from qframework.graph.rewrites.einsum_linears import expand_exported_einsum_linears
from qframework.quantizer import QFrameworkQuantizer, calibrate, static_int8

aten = torch.ops.aten
SIZES = {"i": 3, "b": 5, "h": 16, "n": 2, "d": 8, "e": 12}


class Product(nn.Module):
    """An einsum of the input, or of two with a parameter before it."""

    def __init__(self, equation: str, swapped: bool = False, learned: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        a, b = "".join(equation.split()).partition("->")[0].split(",")
        self.equation, self.swapped = equation, swapped
        given, weight = (b, a) if swapped else (a, b)
        shape = [SIZES[letter] for letter in weight]
        summed = [SIZES[letter] for letter in weight if letter in given]
        value = torch.randn(shape) * torch.Size(summed).numel() ** -0.5
        self.weight = nn.Parameter(value) if learned else nn.Buffer(value)
        self.x = torch.randn([SIZES[letter] for letter in given])

    def forward(self, x):
        return torch.einsum(self.equation, *((self.weight, x) if self.swapped else (x, self.weight)))


LINEARS = {
    "XLNet's queries": lambda: Product("ibh,hnd->ibnd"),
    "XLNet's output": lambda: Product("i b n d, h n d -> i b h"),
    "a matrix": lambda: Product("ibh,he->ibe"),
    "transposed": lambda: Product("ibh,eh->ibe"),
    "the parameter first": lambda: Product("hnd,ibh->ibnd", swapped=True),
    "heads before tokens": lambda: Product("ibh,hnd->inbd"),
    "summed dimensions apart": lambda: Product("inbd,ndh->ibh"),
    "summed in another order": lambda: Product("ibnd,hdn->ibh"),
}
OTHERS = {
    "a matrix for each head": lambda: Product("ibnd,nde->ibne"),
    "summed in the middle": lambda: Product("ibh,nhd->ibnd"),
    "a sum": lambda: Product("ibh,hnd->ibn"),
    "an outer product": lambda: Product("ib,nd->ibnd"),
    "a buffer": lambda: Product("ibh,hnd->ibnd", learned=False),
}


def exported(model: Product) -> torch.fx.GraphModule:
    return torch.export.export(model.eval(), (model.x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)).module()


def targets(graph: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes]


@pytest.mark.parametrize("name", LINEARS)
def test_an_exported_graph_computes_the_same_with_a_linear(name):
    model = LINEARS[name]()
    graph, before = exported(model), model.weight.clone()
    expand_exported_einsum_linears(graph)
    assert targets(graph).count("aten.linear.default") == 1
    assert "aten.einsum.default" not in targets(graph)
    torch.testing.assert_close(graph(model.x), model(model.x))
    assert torch.equal(model.weight, before), "the original is not touched"


@pytest.mark.parametrize("name", LINEARS)
def test_pt2e_quantizes_it(name):
    model = LINEARS[name]()
    prepared = prepare_pt2e(exported(model), QFrameworkQuantizer().set_global(static_int8()))
    calibrate(prepared, [model.x])
    converted = convert_pt2e(prepared)
    (linear,) = [node for node in converted.graph.nodes if node.target is aten.linear.default]
    assert all("dequantize" in str(node.target) for node in linear.all_input_nodes[:1])
    with torch.no_grad():
        expected, run = model(model.x), torch.compile(converted, backend=qframework_backend)
        assert 30 < numerics.sqnr_db(expected, converted(model.x)) < 60
        assert 30 < numerics.sqnr_db(expected, run(model.x)) < 60


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", LINEARS)
def test_the_backend_quantizes_it(name, frozen):
    model = LINEARS[name]()
    options = {"linear": "int8_dynamic", "freeze_weights": frozen}
    with torch.no_grad():
        (layer,) = explain(model, model.x, options=options).layers
        assert layer.lowered
        run = torch.compile(model, backend=qframework_backend, options=options, fullgraph=True)
        expected, out = model(model.x), run(model.x)
    assert out.shape == expected.shape
    assert 30 < numerics.sqnr_db(expected, out) < 60


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_linear_stays(name):
    model = OTHERS[name]()
    graph = exported(model)
    expand_exported_einsum_linears(graph)
    assert "aten.linear.default" not in targets(graph)
    torch.testing.assert_close(graph(model.x), model(model.x))
    with torch.no_grad():
        assert explain(model, model.x, options={"linear": "int8_dynamic"}).lowered == 0


@pytest.mark.usefixtures("fresh_dynamo")
def test_under_autocast_it_stays():
    model = LINEARS["XLNet's queries"]()

    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    with torch.no_grad():
        out = torch.compile(run, backend=qframework_backend, options={"linear": "int8_dynamic"})(model.x)
        assert out.dtype == run(model.x).dtype
        torch.testing.assert_close(out, run(model.x), atol=2**-8, rtol=2**-8)
