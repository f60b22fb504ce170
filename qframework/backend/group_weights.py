"""Quantizes all weights of a float model together at the start of each call instead of one by one.

From, on a GPU::

    w_0 -> dynamic_quantize -> int8_linear -> ... -> w_1 -> dynamic_quantize -> int8_linear -> ...

To::

    [w_0, w_1, ...] -> qframework::quantize_weights -> views -> int8_linear -> ... -> int8_linear -> ...

Weights that the graph itself writes are quantized where they are read. So are those of large models, for which keeping
all INT8 values during a call would need too much memory.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qframework.backend.lowering import Lowering
from qframework.compat.dynamo import record_value, recorded_value
from qframework.graph.nodes import Constants, argument, fake_value
from qframework.graph.writes import written_between
from qframework.kernels.linear.quantize_weights import MOST, places

_MOST_BYTES = 2**30  # of INT8 values kept during a call
_dynamic_quantize = torch.ops.qframework.dynamic_quantize.default
_quantize_weights = torch.ops.qframework.quantize_weights.default
aten = torch.ops.aten


def group_weights(lowering: Lowering) -> None:
    """Group the quantization of every weight on a GPU."""
    gm = lowering.gm
    found = [node for node in gm.graph.nodes if _quantizes_weight(node, lowering.constants)]
    if sum(_fake(node).numel() for node in found) > _MOST_BYTES:
        return
    by_kind: dict[Any, list[Node]] = {}
    for node in found:
        by_kind.setdefault((_fake(node).dtype, _fake(node).device), []).append(node)
    first = next(node for node in gm.graph.nodes if node.op not in ("placeholder", "get_attr"))
    for nodes in by_kind.values():
        for start in range(0, len(nodes), MOST):
            _quantize_together(gm, nodes[start : start + MOST], first)


def reads_grouped_weight(node: Node) -> bool:
    """Whether the node is a weight of a group, or its scales: contiguous and computed at the start."""
    while node.target in (aten.slice.Tensor, aten.view.default):
        node = node.all_input_nodes[0]
    return bool(node.all_input_nodes) and node.all_input_nodes[0].target is _quantize_weights


def _quantizes_weight(node: Node, constants: Constants) -> bool:
    if node.target is not _dynamic_quantize or argument(node, 1, "granularity") != "per_token":
        return False
    weight, fake = node.args[0], fake_value(node.args[0]) if isinstance(node.args[0], Node) else None
    if fake is None or constants.value(weight) is None or fake.device.type != "cuda" or fake.ndim != 2:
        return False
    known = all(isinstance(size, int) and size > 0 for size in fake.shape)
    return known and written_between(next(iter(node.graph.nodes)), node, [weight]) is None  # type: ignore[list-item]


def _fake(node: Node) -> Tensor:
    fake = fake_value(node.all_input_nodes[0])
    assert fake is not None
    return fake


def _quantize_together(gm: GraphModule, nodes: list[Node], before: Node) -> None:
    """Replace every ``dynamic_quantize`` by views of one operator's results."""

    def add(target: Any, *args: Any) -> Node:
        node = gm.graph.call_function(target, args)
        operands = torch.fx.node.map_arg(args, recorded_value)
        record_value(node, target(*operands))  # on fake tensors
        return node

    fakes = [_fake(node) for node in nodes]
    with gm.graph.inserting_before(before):
        together = add(_quantize_weights, [node.args[0] for node in nodes])
        values, scales = (add(operator.getitem, together, i) for i in range(2))
        begins = places([(fake.shape[0], fake.shape[1]) for fake in fakes])
        for node, fake, (value, scale) in zip(nodes, fakes, begins, strict=False):
            n, k = fake.shape
            alone = (
                add(aten.view.default, add(aten.slice.Tensor, values, 0, value, value + n * k), [n, k]),
                add(aten.view.default, add(aten.slice.Tensor, scales, 0, scale, scale + n), [n, 1]),
            )
            for item in list(node.users):
                item.replace_all_uses_with(alone[item.args[1]])  # type: ignore[index]
                gm.graph.erase_node(item)
    for node in nodes:  # at the end: the first may be the one before which all others are inserted
        gm.graph.erase_node(node)
