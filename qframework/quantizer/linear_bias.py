"""Constants that steps of a recipe add to float graphs, foremost to the biases of linears."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qframework.graph.attributes import add_attribute, attribute, replace_attribute
from qframework.graph.nodes import add_call, fake_value, linear_call
from qframework.quantizer.quantizer import layer_name


def add_to_bias(gm: GraphModule, linear: Node, values: Tensor) -> None:
    """Add ``values (N,)`` to the bias of a linear, in place; a linear without one gets one."""
    call = linear_call(linear)
    assert call is not None
    if call.bias is not None and call.bias.op == "get_attr":
        replace_attribute(gm, call.bias, linear, attribute(gm, call.bias).detach().double() + values)
        return
    weight = attribute(gm, call.weight)
    with gm.graph.inserting_before(linear):
        added = constant(gm, f"{layer_name(linear)}_bias", values, call.weight, weight)
        if call.bias is not None:
            added = add_call(linear, torch.ops.aten.add.Tensor, (call.bias, added))
    linear.args, linear.kwargs = (call.input, call.weight, added), {}


def constant(gm: GraphModule, name: str, value: Tensor, like: Node, example: Any) -> Node:
    """A ``get_attr`` node of a new buffer in the dtype of ``example``, with a fake value as ``like`` has one."""
    device = next((tensor.device for tensor in [*gm.parameters(), *gm.buffers()]), value.device)
    buffer = value.to(device, example.dtype)
    node = add_attribute(gm, name, buffer)
    fake = fake_value(like)
    assert fake is not None
    node.meta["val"] = fake.new_empty(buffer.shape)
    return node
