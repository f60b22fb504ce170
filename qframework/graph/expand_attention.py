"""Expands ``F.multi_head_attention_forward``, which Dynamo records as one node, into its operations.

From::

    query, key, value, weights -> multi_head_attention_forward -> getitem 0 -> ...

To::

    query, key, value, weights -> linear -> scaled_dot_product_attention -> linear -> ...

so that later passes find the linears and the attention of ``nn.MultiheadAttention``. A node whose attention weights
are read stays as it is.
"""

from __future__ import annotations

import operator
from inspect import signature
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from qframework.compat.dispatch import FakeTensor
from qframework.compat.dynamo import value_key
from qframework.compat.graphs import make_fx
from qframework.graph.nodes import fake_value, linear_call


def expand_multi_head_attention(gm: GraphModule) -> None:
    """Replace, in place, every ``multi_head_attention_forward`` whose attention weights are not read."""
    for node in list(gm.graph.nodes):
        if node.target is F.multi_head_attention_forward and (output := _only_output(node)) is not None:
            _expand(gm, node, output)


def _only_output(node: Node) -> Node | None:
    """The ``getitem`` of the output; None if the attention weights are read too."""
    items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    if len(items) != len(node.users) or (1 in items and items[1].users):
        return None
    return items.get(0)


def _expand(gm: GraphModule, node: Node, output: Node) -> None:
    inputs = [operand for operand in node.all_input_nodes if fake_value(operand) is not None]
    fakes, recorded = [fake_value(operand) for operand in inputs], fake_value(output)
    modes = [fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor)]
    if recorded is None or not modes or len(inputs) != len(node.all_input_nodes):
        return

    def run(*values: Any) -> Tensor:
        of = dict(zip(inputs, values, strict=True))
        args: Any
        kwargs: Any
        args, kwargs = map_arg((node.args, node.kwargs), of.__getitem__)
        call = signature(F.multi_head_attention_forward).bind(*args, **kwargs)
        return F.multi_head_attention_forward(**{**call.arguments, "need_weights": False})[0]

    with modes[0]:
        traced = make_fx(run, pre_dispatch=True)(*fakes)
    result: Any = traced.graph.output_node().args[0]
    if result.meta["val"].dtype == recorded.dtype:  # differs under autocast
        _inline(gm, node, output, traced, dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True)))


def _inline(gm: GraphModule, node: Node, output: Node, traced: GraphModule, copies: dict[Node, Node]) -> None:
    """Copy a traced graph before ``node`` and replace ``output`` by its result."""
    key = value_key(output)
    with gm.graph.inserting_before(node):
        for each in traced.graph.nodes:
            if each.op not in ("placeholder", "output"):
                new = copies[each] = gm.graph.node_copy(each, copies.__getitem__)
                kept = ("stack_trace",) if linear_call(new) else ("stack_trace", "nn_module_stack")
                new.meta = {name: node.meta[name] for name in kept if name in node.meta} | {key: each.meta.get("val")}
    output.replace_all_uses_with(copies[traced.graph.output_node().args[0]])  # type: ignore[index]
    for user in list(node.users):
        gm.graph.erase_node(user)
    gm.graph.erase_node(node)
