"""Equal calls of a subgraph share one schema; others, and calls that write, keep their own."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

from qframework.compat import missing, subgraphs

_invoke = torch.ops.higher_order.invoke_subgraph


@pytest.fixture
def traced(monkeypatch):
    """Operands of the calls whose schema PyTorch found by tracing."""
    found = []
    original = type(_invoke).gen_schema

    def gen_schema(self, subgraph, identifier, *operands):
        found.append(operands)
        return original(self, subgraph, identifier, *operands)

    monkeypatch.setattr(type(_invoke), "gen_schema", gen_schema)
    return found


def body(write: bool) -> GraphModule:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    written = graph.call_function(torch.ops.aten.add_.Tensor, (x, y)) if write else x
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (written, y)),))
    return GraphModule(nn.Module(), graph)


def schemas(shapes):
    gm = body(write=False)
    with subgraphs.one_schema_for_equal_calls():
        return [_invoke.gen_schema(gm, "body", *(torch.empty(shape) for _ in "xy")) for shape in shapes]


def test_equal_calls_share_a_schema(traced):
    first, second, third = schemas([(2, 3), (2, 3), (4, 3)])
    assert first is second
    assert third is not first
    assert len(traced) == 2
    assert "gen_schema" not in vars(_invoke), "PyTorch's own is back"


def test_strides_and_dtypes_count(traced):
    gm = body(write=False)
    like = [torch.empty(3, 3), torch.empty(3, 3).t(), torch.empty(3, 3, dtype=torch.float16)]
    with subgraphs.one_schema_for_equal_calls():
        for x in like:
            _invoke.gen_schema(gm, "body", x, x)
            _invoke.gen_schema(gm, "other", x, x)
    assert len(traced) == 6


def test_what_a_subgraph_writes_is_in_its_schema():
    with subgraphs.one_schema_for_equal_calls():
        for gm, writes in ((body(write=True), True), (body(write=False), False)):
            for _ in range(2):
                schema = _invoke.gen_schema(gm, "body", torch.ones(2), torch.ones(2))
                assert schema.is_mutable == writes


def test_other_subgraphs_and_operands_go_to_pytorch(traced):
    with subgraphs.one_schema_for_equal_calls():
        for _ in range(2):
            _invoke.gen_schema(lambda x: (x + 1,), "plain function", torch.ones(2))
    assert len(traced) == 2
    assert subgraphs._layout(object()) is None
    assert subgraphs._layout(3) != subgraphs._layout(4)


def test_an_error_puts_pytorchs_back():
    with pytest.raises(ValueError, match="inside"), subgraphs.one_schema_for_equal_calls():
        raise ValueError("inside")
    assert "gen_schema" not in vars(_invoke)


def test_without_the_name_compilation_goes_on(monkeypatch):
    monkeypatch.setattr(torch.ops.higher_order, "invoke_subgraph", SimpleNamespace())
    monkeypatch.setattr(missing, "replaced", counted := Counter())
    with subgraphs.one_schema_for_equal_calls():
        assert not vars(torch.ops.higher_order.invoke_subgraph)
    assert counted == {"gen_schema": 1}
