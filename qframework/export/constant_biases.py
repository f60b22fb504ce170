"""Computes the biases of linears that a model puts together from parameters at each call, as BEiT, EVA and Swin V2 do.

From::

    x, weight, cat(q_bias, zeros, v_bias) -> linear

To::

    x, weight, bias -> linear
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from qframework.compat.operators import OpOverload, schema
from qframework.export.named_buffers import add_buffer
from qframework.graph.nodes import Constants, layer_name, linear_call


def fold_biases(gm: GraphModule) -> None:
    """Replace biases that follow from parameters and buffers alone by buffers, in place."""
    constants = Constants(gm, ())
    for node in list(gm.graph.nodes):
        call = linear_call(node)
        if call is None or call.bias is None or constants.value(call.bias) is not None:
            continue
        value = _value(call.bias, constants)
        if value is not None:
            with gm.graph.inserting_before(node):
                bias = add_buffer(gm, layer_name(node), "bias_folded", value)
            node.replace_input_with(call.bias, bias)
    gm.graph.eliminate_dead_code()
    gm.recompile()


def _value(node: Node, constants: Constants) -> Tensor | None:
    """The node's tensor, computed by the operators before it; None if they read an input, write, or draw at random."""
    known = constants.value(node)
    if known is not None:
        return known.detach()
    if not isinstance(node.target, OpOverload) or schema(node.target).is_mutable:
        return None
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return None
    values: dict[Node, Any] = {x: _value(x, constants) for x in node.all_input_nodes}
    if any(value is None for value in values.values()):
        return None
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    result = node.target(*args, **kwargs)
    return result if isinstance(result, Tensor) else None
