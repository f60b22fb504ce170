"""Turns ``addmm(bias, x, weight)`` into a linear: the layer ``Conv1D`` of transformers' GPT-2 and its relatives.

Its weight is a parameter of shape (input features, output features), the transpose of a linear's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from qframework.compat.dynamo import record_value, recorded_value
from qframework.graph.attributes import attribute, replace_attribute
from qframework.graph.nodes import fake_value, operation

aten = torch.ops.aten


def expand_addmm(gm: GraphModule, is_weight: Callable[[Node], bool]) -> int:
    """Replace the products whose weight ``is_weight`` by linears of its transpose, in place; returns their number."""
    found = [node for node in gm.graph.nodes if _is_linear(node) and is_weight(node.args[2])]
    for node in found:
        bias, x, weight = node.args
        with gm.graph.inserting_before(node):
            transposed = gm.graph.call_function(torch.t, (weight,))
            linear = gm.graph.call_function(F.linear, (x, transposed, bias))
        record_value(transposed, recorded_value(weight).t())
        _replace(node, linear)
    return len(found)


def expand_exported_addmm(gm: GraphModule) -> int:
    """The same in an exported graph, where the parameter itself becomes its transpose; returns the number."""
    found = [node for node in gm.graph.nodes if _is_linear(node) and node.args[2].op == "get_attr"]
    for node in found:
        bias, x, weight = node.args
        value = attribute(gm, weight).detach().t().contiguous()
        fake = fake_value(weight)
        weight = replace_attribute(gm, weight, node, value)
        weight.meta["val"] = None if fake is None else fake.t().contiguous()
        with gm.graph.inserting_before(node):
            linear = gm.graph.call_function(aten.linear.default, (x, weight, bias))
        _replace(node, linear)
    if found:
        gm.recompile()
    return len(found)


def _replace(node: Node, linear: Node) -> None:
    linear.meta = dict(node.meta)
    node.replace_all_uses_with(linear)
    node.graph.erase_node(node)


def _is_linear(node: Node) -> bool:
    """Whether a node is the product of a matrix and a weight, plus a bias of one value for each column."""
    if operation(node) != "addmm" or len(node.args) != 3 or set(node.kwargs) - {"alpha", "beta"}:
        return False
    if any(factor != 1 for factor in node.kwargs.values()) or not all(isinstance(x, Node) for x in node.args):
        return False
    shapes: list[Any] = [None if fake is None else fake.shape for fake in map(fake_value, node.args)]  # type: ignore[arg-type]
    return None not in shapes and len(shapes[0]) == 1 and shapes[0][0] == shapes[2][1]
