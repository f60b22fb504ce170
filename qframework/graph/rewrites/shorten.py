"""Removes from a converted graph what computes nothing: dropout in eval mode, and repetitions of a constant.

Whoever traces, compiles, saves or loads the graph pays for every node and every tensor; a vision transformer has three
dropouts in each block, and zero points for each of its weights.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch.fx import GraphModule, Node

from qframework.compat.operators import OpOverload, schema
from qframework.graph.attributes import attribute, readers
from qframework.graph.nodes import fake_value, is_inactive_dropout
from qframework.graph.writes import is_view, storages, written_inputs

_DEQUANTIZE = "quantized_decomposed.dequantize_per_channel.default"


def shorten(gm: GraphModule) -> None:
    """Erase inactive dropouts, and let equal zero points be one buffer; in place."""
    erase_inactive_dropouts(gm)
    _share_zero_points(gm)
    gm.recompile()


def erase_inactive_dropouts(gm: GraphModule) -> None:
    """Let what reads a dropout that returns its input read that input; in place, without recompiling."""
    for node in list(gm.graph.nodes):
        if is_inactive_dropout(node):
            node.replace_all_uses_with(node.all_input_nodes[0])
            gm.graph.erase_node(node)


def erase_scale_origins(gm: GraphModule) -> None:
    """Let ``int8_linear`` read scales themselves, in place and without recompiling.

    For graphs without a backward pass that could refuse gradients.
    """
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.qframework.scale_of.default):
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)


def erase_unread_results(gm: GraphModule) -> None:
    """Erase operators whose result nothing reads, in place and without recompiling; also writes to memory of that kind.

    Exports keep the mean of the weights that ``nn.MultiheadAttention`` returns, with which its softmax has two readers,
    and the matrix to which BigBird copies the weights of its blocks. Dynamo keeps views, such as WavLM's of the weights
    that nobody asked for.
    """
    _erase_unread_memory(gm)
    for node in reversed(list(gm.graph.nodes)):
        if not node.users and _only_computes(node):
            gm.graph.erase_node(node)


def _erase_unread_memory(gm: GraphModule) -> None:
    """Erase tensors that the graph makes and writes, with their views and the writes, where nothing else reads them."""
    sharing: dict[int, set[Node]] = defaultdict(set)
    for node in gm.graph.nodes:
        for each in storages(node) or ():
            sharing[each].add(node)
    unread = [group for group in sharing.values() if len(group) > 1 and _is_written_only(group)]
    doomed = set().union(*unread)
    for node in reversed(list(gm.graph.nodes)):
        if node in doomed:
            gm.graph.erase_node(node)


def _is_written_only(group: set[Node]) -> bool:
    """Whether the nodes that share a memory do nothing but make it, view it and write to it."""
    return all(
        group.issuperset(node.users) and (_only_computes(node) or (_is_write(node) and group >= written_inputs(node)))
        for node in group
    )


def _is_write(node: Node) -> bool:
    """Whether a node does nothing but write to one of its inputs, which it returns."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return False
    return schema(node.target).is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags


def _only_computes(node: Node) -> bool:
    """Whether a node does nothing but compute tensors: no writes, random numbers or checks."""
    if is_view(node):
        return True
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten" or fake_value(node) is None:
        return False
    return not schema(node.target).is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags


def _share_zero_points(gm: GraphModule) -> None:
    kept: dict[tuple[object, ...], Node] = {}
    for node in list(gm.graph.find_nodes(op="get_attr")):
        if not node.users or not all(_reads_zero_point(user, node) for user in node.users):
            continue
        value = attribute(gm, node)
        first = kept.setdefault((value.dtype, value.device, *value.tolist()), node)
        if first is not node:
            alone = readers(gm, node) == set(node.users)
            node.replace_all_uses_with(first)
            gm.graph.erase_node(node)
            if alone and node.target != first.target:
                owner, _, leaf = str(node.target).rpartition(".")
                delattr(gm.get_submodule(owner), leaf)


def _reads_zero_point(user: Node, node: Node) -> bool:
    return str(user.target) == _DEQUANTIZE and [i for i, x in enumerate(user.args) if x is node] == [2]
