"""A graph's source that looks up every operator and module once computes the same, also copied, exported and saved."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

from qframework.graph.source import look_up_once


class Stack(nn.Module):
    """Two blocks in a list, with a parameter of its own, and a linear two attributes away."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.randn(8))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2))
        self.outer = nn.Sequential()
        self.outer.inner = nn.Linear(8, 8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x) + self.offset
        return self.outer.inner(x)


X = torch.randn(3, 8)


@pytest.fixture
def shorter() -> GraphModule:
    torch.manual_seed(0)
    gm = torch.export.export(Stack().eval(), (X,)).module()
    look_up_once(gm)
    return gm


def test_every_operator_and_module_is_looked_up_once(shorter):
    looked_up = re.findall(r"torch\.ops[.\w]+", shorter.code)
    assert sorted(looked_up) == [
        f"torch.ops.aten.{op}" for op in ("add.Tensor", "layer_norm.default", "linear.default")
    ]
    lines = shorter.code.splitlines()
    assert sum("self.blocks" in line for line in lines) == 4  # two linears and two norms, of 8 tensors
    assert sum("self.outer" in line for line in lines) == 1
    assert sum(" = module_" in line for line in lines) == 10


def test_the_result_is_the_same_also_after_further_changes(shorter):
    expected = torch.export.export(copy.deepcopy(shorter), (X,)).module()(X)
    assert torch.equal(shorter(X), expected)
    for node in list(shorter.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)):
        node.replace_all_uses_with(node.args[0])
        shorter.graph.erase_node(node)
    shorter.recompile()
    assert "torch.ops.aten.add" not in shorter.code
    linear, norm = torch.ops.aten.linear.default, torch.ops.aten.layer_norm.default
    x = X
    for block in range(2):
        weights = {name: value for name, value in shorter.state_dict().items() if name.startswith(f"blocks.{block}.")}
        w, b, scale, shift = weights.values()
        x = norm(linear(x, w, b), [8], scale, shift)
    assert torch.allclose(shorter(X), linear(x, shorter.outer.inner.weight, shorter.outer.inner.bias))


def test_twice_is_once(shorter):
    code = shorter.code
    look_up_once(shorter)
    assert shorter.code == code


def test_dynamo_traces_it(shorter):
    traced = []

    def backend(gm, inputs):
        traced.append([str(node.target) for node in gm.graph.nodes if node.op == "call_function"])
        return gm.forward

    assert torch.allclose(torch.compile(shorter, backend=backend, fullgraph=True)(X), shorter(X))
    assert traced == [
        ["aten.linear.default", "aten.layer_norm.default", "aten.add.Tensor"] * 2 + ["aten.linear.default"]
    ]


def test_a_value_with_the_name_of_a_lookup_keeps_it():
    graph = Graph()
    op = graph.placeholder("op_0")
    graph.output(graph.call_function(torch.ops.aten.neg.default, (op,)))
    gm = GraphModule(nn.Module(), graph)
    look_up_once(gm)
    assert torch.equal(gm(X), -X)
    assert "op_0_ = torch.ops.aten.neg.default" in gm.code


def test_calls_of_modules_and_strings_stay():
    graph = Graph()
    x = graph.placeholder("x")
    called = graph.call_module("inner.act", (x,))
    graph.output(graph.call_function(torch.ops.aten.gelu.default, (called,), {"approximate": "self.none"[5:]}))
    inner = nn.Module()
    inner.act = nn.ReLU()
    root = nn.Module()
    root.inner = inner
    gm = GraphModule(root, graph)
    before = gm(X)
    look_up_once(gm)
    assert torch.equal(gm(X), before)
    assert "self.inner.act(x)" in gm.code
