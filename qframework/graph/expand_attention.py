"""Expands ``F.multi_head_attention_forward``, which Dynamo records as one node, into its operations.

From::

    query, key, value, weights -> multi_head_attention_forward -> getitem 0 -> ...

To::

    query, key, value, weights -> linear -> scaled_dot_product_attention -> linear -> ...

so that later passes find the linears and the attention of ``nn.MultiheadAttention``. Where the attention weights are
read too (``getitem 1``), two products and a softmax take the place of ``scaled_dot_product_attention``.
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
    """Replace, in place, every ``multi_head_attention_forward``."""
    for node in list(gm.graph.nodes):
        if node.target is F.multi_head_attention_forward and (outputs := _outputs(node)) is not None:
            _expand(gm, node, outputs)


def _outputs(node: Node) -> dict[int, Node] | None:
    """The ``getitem`` of each result that is read: 0 is the output, 1 the attention weights; None for other readers."""
    items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    if len(items) != len(node.users) or 0 not in items:
        return None
    return {index: items[index] for index in (0, 1) if index in items and (index == 0 or items[index].users)}


def _expand(gm: GraphModule, node: Node, outputs: dict[int, Node]) -> None:
    inputs = [operand for operand in node.all_input_nodes if fake_value(operand) is not None]
    fakes, recorded = [fake_value(operand) for operand in inputs], [fake_value(output) for output in outputs.values()]
    modes = [fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor)]
    if not modes or len(inputs) != len(node.all_input_nodes):
        return

    def run(*values: Any) -> tuple[Tensor, ...]:
        of = dict(zip(inputs, values, strict=True))
        args: Any
        kwargs: Any
        args, kwargs = map_arg((node.args, node.kwargs), of.__getitem__)
        call = signature(F.multi_head_attention_forward).bind(*args, **kwargs)
        results = F.multi_head_attention_forward(**{**call.arguments, "need_weights": 1 in outputs})
        return tuple(result for index, result in enumerate(results) if index in outputs and result is not None)

    with modes[0]:
        traced = make_fx(run, pre_dispatch=True)(*fakes)
    results: Any = traced.graph.output_node().args[0]
    values = [fake_value(result) for result in results]
    pairs = zip(values, recorded, strict=True)
    if all(x is not None and y is not None and x.dtype == y.dtype for x, y in pairs):  # differ under autocast
        copies = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
        _inline(gm, node, dict(zip(outputs.values(), results, strict=True)), traced, copies)


def _inline(
    gm: GraphModule, node: Node, results: dict[Node, Node], traced: GraphModule, copies: dict[Node, Node]
) -> None:
    """Copy a traced graph before ``node`` and replace each of its outputs by its result."""
    key = value_key(next(iter(results)))
    with gm.graph.inserting_before(node):
        for each in traced.graph.nodes:
            if each.op not in ("placeholder", "output"):
                new = copies[each] = gm.graph.node_copy(each, copies.__getitem__)
                kept = ("stack_trace",) if linear_call(new) else ("stack_trace", "nn_module_stack")
                new.meta = {name: node.meta[name] for name in kept if name in node.meta} | {key: each.meta.get("val")}
    for output, result in results.items():
        output.replace_all_uses_with(copies[result])
    for user in list(node.users):
        gm.graph.erase_node(user)
    gm.graph.erase_node(node)
