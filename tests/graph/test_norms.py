"""Norms are found however a model writes them, and what only looks like one is not."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from qframework.backend.lower_norm import norm_arguments
from qframework.graph.norms import NormCall, norm_call
from qframework.graph.rewrites.missing_values import record_missing_values


class Norm(nn.Module):
    """``form`` of the input and a weight."""

    def __init__(self, form) -> None:
        super().__init__()
        self.form = form
        self.weight, self.bias = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8))

    def forward(self, x):
        return self.form(x, self.weight, self.bias)


def root(x, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


FORMS = {
    "layer norm": (lambda x, w, b: F.layer_norm(x, (8,), w, b, 1e-3), (True, True, 1e-3, True)),
    "layer norm, nothing learned": (lambda x, w, b: F.layer_norm(x, (8,)), (False, False, 1e-5, True)),
    "rms norm": (lambda x, w, b: F.rms_norm(x, (8,), w, 1e-4), (True, False, 1e-4, False)),
    "rms norm, eps of float16": (lambda x, w, b: F.rms_norm(x, (8,), w), (True, False, 2.0**-10, False)),
    "as Llama": (lambda x, w, b: w * root(x.to(torch.float32)).to(x.dtype), (True, False, 1e-6, False)),
    "as T5": (
        lambda x, w, b: w * (x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-6)).half(),
        (True, False, 1e-6, False),
    ),
    "as Gemma": (lambda x, w, b: (root(x.float()) * (1.0 + w.float())).type_as(x), (True, False, 1e-6, False)),
    "x * x": (
        lambda x, w, b: x * torch.rsqrt((x * x).mean((-1,), keepdim=True) + 1e-6) * w,
        (True, False, 1e-6, False),
    ),
    "without a weight": (lambda x, w, b: root(x), (False, False, 1e-6, False)),
}
OTHERS = {
    "over two dimensions": lambda x, w, b: F.layer_norm(x, (4, 8)),
    "of another dimension": lambda x, w, b: w * (x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + 1e-6)),
    "the third power": lambda x, w, b: w * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-6)),
    "of another tensor": lambda x, w, b: w * (x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + 1e-6)),
    "a sum instead of the mean": lambda x, w, b: w * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)),
    "a bias": lambda x, w, b: root(x) + b,
    "a number for each row": lambda x, w, b: root(x) * x[..., :1],
    "a vector of one value": lambda x, w, b: root(x) * w[:1],
    "of a rounded input": lambda x, w, b: w * root(x.to(torch.bfloat16)).to(x.dtype),
}


def found(form) -> tuple[NormCall | None, torch.fx.Node]:
    model, x = Norm(form).half(), torch.randn(2, 4, 8).half()
    gm = torch.export.export(model, (x,)).module()
    record_missing_values(gm)
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    (x_node,) = (node for node in gm.graph.nodes if node.op == "placeholder")
    return norm_call(output.all_input_nodes[0]), x_node


@pytest.mark.parametrize("name", FORMS)
def test_norms(name):
    form, (has_weight, has_bias, eps, center) = FORMS[name]
    norm, x = found(form)
    assert norm is not None
    assert norm.input is x
    assert (norm.weight is not None, norm.bias is not None, norm.center) == (has_weight, has_bias, center)
    assert norm.eps == pytest.approx(eps)
    assert norm.offset == (1.0 if name == "as Gemma" else 0.0)


@pytest.mark.parametrize("name", OTHERS)
def test_other_operations(name):
    norm, x = found(OTHERS[name])
    assert norm is None or norm.input is not x


def test_eps_under_autocast():
    """On a GPU, autocast runs rms_norm in float32, whose epsilon is then the default."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    norm = graph.call_function(F.rms_norm, (x, (8,)))
    x.meta["val"], norm.meta["val"] = torch.empty(4, 8, dtype=torch.float16), torch.empty(4, 8)
    found = norm_call(norm)
    assert found is not None
    assert found.eps == torch.finfo(torch.float32).eps


class Root(nn.Module):
    """RMSNorm whose eps is an attribute, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6

    def forward(self, x):
        return root(x, self.eps)


@pytest.mark.parametrize("replaced", [True, False])
def test_an_eps_that_dynamic_shapes_make_an_input(replaced):
    """It is fixed where an operator reads it, so that another one compiles the model again, and only there."""
    model, x, found = Root(), torch.rand(2, 3, 8), []

    def backend(gm, inputs):
        (result,) = gm.graph.output_node().all_input_nodes
        norm = norm_call(result)
        found.append(norm_arguments(norm)[3] if replaced else norm is not None)
        return gm.forward

    run = torch.compile(model, backend=backend, dynamic=True)
    for eps in (1e-6, 1e-3):
        model.eps = eps
        assert torch.equal(run(x), model(x))
    assert found == ([1e-6, 1e-3] if replaced else [True])
