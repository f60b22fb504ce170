"""Dequantizes where layers read, in graphs that ``torch.compile`` cannot capture whole.

From::

    w = self.fc_weight; dequantize(w)        at the beginning, as PyTorch writes exported graphs
    dequantize(x_int8)
    ... item(y) ...                          where torch.compile ends a graph and begins another
    linear(dequantize, dequantize)

To::

    ... item(y) ...
    w = self.fc_weight; dequantize(w)
    dequantize(x_int8)
    linear(dequantize, dequantize)

A graph of ``torch.compile`` that gets dequantized operands from the graph before it does not know the INT8 ones, and
leaves the layer in float.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from qframework.compat.operators import OpOverload

_ENDS_A_GRAPH = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def dequantize_late(gm: GraphModule) -> bool:
    """Give each reader of a dequantized tensor its own dequantization, in place; whether the graph needs that."""
    if not any(isinstance(node.target, OpOverload) and _ENDS_A_GRAPH & {*node.target.tags} for node in gm.graph.nodes):
        return False
    for node in list(gm.graph.nodes):
        if not _is_late(node):
            with gm.graph.inserting_before(node):
                node.args, node.kwargs = torch.fx.node.map_arg((node.args, node.kwargs), _copies())
    for node in reversed(list(gm.graph.nodes)):
        if not node.users and _is_late(node):
            gm.graph.erase_node(node)
    gm.recompile()
    return True


def _is_late(node: Node) -> bool:
    """Whether a node reads an attribute, or dequantizes a tensor."""
    return node.op == "get_attr" or (node.op == "call_function" and ".dequantize_" in str(node.target))


def _copies() -> Callable[[Node], Node]:
    """Copies a late node, and what it reads, to the graph's insertion point, once; returns any other node itself."""
    copies: dict[Node, Node] = {}

    def copy(node: Node) -> Node:
        if node not in copies:
            copies[node] = node.graph.node_copy(node, copy) if _is_late(node) else node
        return copies[node]

    return copy
