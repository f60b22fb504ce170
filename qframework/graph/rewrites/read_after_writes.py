"""Lets layers of an exported graph read their inputs behind all writes to them.

PT2E observes and quantizes a tensor where it is computed. If it is changed in place between there and a layer, the
quantized layer would read what it was before. From::

    x = mul(a, 2)
    fill_(select(x, 1, 0), 0)        # x[:, 0] = 0
    linear(x, weight, bias)

To::

    x = mul(a, 2)
    fill_(select(x, 1, 0), 0)
    linear(alias(x), weight, bias)

A weight that the model itself changes is read through an alias too: it is no parameter then, and the layer stays in
float, since its quantized form would never change.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from qframework.graph.nodes import is_sage_attention
from qframework.graph.writes import written_between

aten = torch.ops.aten

_LAYERS = (aten.linear.default, aten.scaled_dot_product_attention.default)


def read_after_writes(gm: GraphModule) -> int:
    """Insert an alias before each layer with an input that is written in between; returns the number of aliases."""
    aliases: dict[Node, Node] = {}  # the last one of each tensor
    number = 0
    end = next(iter(reversed(gm.graph.nodes)))
    for node in list(gm.graph.nodes):
        if node.target not in _LAYERS and not is_sage_attention(node):
            continue
        for operand in node.all_input_nodes:
            last = end if operand.op == "get_attr" else node
            if written_between(operand.next, last, [operand]) is None:
                continue
            alias = aliases.get(operand)
            if alias is None or written_between(alias.next, node, [operand]) is not None:
                alias = aliases[operand] = _alias(operand, node)
                number += 1
            node.replace_input_with(operand, alias)
    if number:
        gm.recompile()
    return number


def _alias(operand: Node, reader: Node) -> Node:
    """An alias of ``operand`` right before ``reader``."""
    with reader.graph.inserting_before(reader):
        alias = reader.graph.call_function(aten.alias.default, (operand,))
    alias.meta["val"] = operand.meta.get("val")
    return alias
