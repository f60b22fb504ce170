"""Linears whose weight is some rows of a parameter, as where ``nn.MultiheadAttention`` attends to another tensor.

From::

    in_proj_weight -> split -> getitem 0 -> linear (queries)
                            -> getitem 1 -> linear (keys and values)

To, in an exported graph::

    in_proj_weight_0_32  -> linear (queries)
    in_proj_weight_32_96 -> linear (keys and values)

PT2E observes and quantizes weights that are parameters. A compiled graph stays as it is, since it may read the
parameter at each call.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
from torch import nn
from torch.fx import GraphModule, Node

from qframework.graph.attributes import add_attribute, attribute
from qframework.graph.nodes import argument, fake_value, operation
from qframework.graph.selections import keeps_dimension, selection
from qframework.graph.writes import written_between

_SPLITS = ("split", "split_with_sizes", "chunk", "tensor_split")


class Rows(NamedTuple):
    """Rows ``start`` to ``stop`` of what ``source`` computes."""

    source: Node
    start: int
    stop: int


def rows_of(node: Node) -> Rows | None:
    """What a node that does nothing but select rows selects, at any depth; None for any other node."""
    found = _selected(node)
    if found is None or (outer := rows_of(found.source)) is None:
        return found
    return Rows(outer.source, outer.start + found.start, outer.start + found.stop)


def _selected(node: Node) -> Rows | None:
    split = node.args[0] if node.target is operator.getitem else None
    if isinstance(split, Node) and operation(split) in _SPLITS:
        return _part(split, node.args[1])
    selected = selection(node)
    if selected is None or selected.dim != 0 or not keeps_dimension(node, selected):
        return None
    source = fake_value(selected.source)
    size = None if source is None else source.shape[0]
    return Rows(selected.source, *selected.bounds(size)) if isinstance(size, int) else None


def _part(split: Node, index: object) -> Rows | None:
    """The rows in one result of a split."""
    source = split.args[0] if split.args else None
    fake = fake_value(source) if isinstance(source, Node) else None
    if fake is None or not fake.ndim or not isinstance(index, int):
        return None
    assert isinstance(source, Node)
    how = argument(split, 1, "split_size_or_sections", "split_size", "split_sizes", "chunks", "indices_or_sections")
    dim, size = argument(split, 2, "dim", default=0), fake.shape[0]
    plain = isinstance(size, int) and isinstance(how, (int, list, tuple)) and isinstance(dim, int)
    if not plain or dim % fake.ndim != 0:
        return None
    name = "split" if operation(split) == "split_with_sizes" else operation(split)
    parts = getattr(torch, str(name))(torch.empty(size, device="meta"), how)
    sizes = [part.shape[0] for part in parts]
    start = sum(sizes[: index % len(sizes)])
    return Rows(source, start, start + sizes[index])


def separate_weights(gm: GraphModule) -> int:
    """Give linears of an exported graph parameters of their own for rows of one; returns the number of linears."""
    linears = [node for node in gm.graph.nodes if node.target is torch.ops.aten.linear.default]
    found = sum(_separate(gm, node) for node in linears)
    if found:
        gm.recompile()
    return found


def _separate(gm: GraphModule, linear: Node) -> bool:
    weight, bias = argument(linear, 1), argument(linear, 2)
    if not isinstance(weight, Node) or not _own(gm, linear, weight):
        return False
    if isinstance(bias, Node):
        _own(gm, linear, bias)
    return True


def _own(gm: GraphModule, linear: Node, operand: Node) -> bool:
    """Make ``linear`` read a parameter of its own instead of some rows of one; False if the operand is none such."""
    rows = rows_of(operand)
    first, last = next(iter(gm.graph.nodes)), gm.graph.output_node()
    if rows is None or rows.source.op != "get_attr" or written_between(first, last, [operand]) is not None:
        return False
    value, name = attribute(gm, rows.source), str(rows.source.target)
    copied = nn.Parameter(value.detach()[rows.start : rows.stop].clone(), value.requires_grad)
    with gm.graph.inserting_before(linear):
        own = add_attribute(gm, f"{name}_{rows.start}_{rows.stop}", copied)
    own.meta = dict(operand.meta)
    linear.replace_input_with(operand, own)
    _drop_unread(gm, operand, name)
    return True


def _drop_unread(gm: GraphModule, node: Node, name: str) -> None:
    """Erase a selection that nothing reads, and free the parameter ``name`` if nothing reads that either."""
    while all(not user.users and rows_of(user) is not None for user in node.users):  # other results of a split
        source = None if node.op == "get_attr" else node.args[0]
        for each in (*node.users, node):
            gm.graph.erase_node(each)
        if not isinstance(source, Node):
            break
        node = source
    if not any(node.target == name for node in gm.graph.find_nodes(op="get_attr")):
        owner, _, leaf = name.rpartition(".")
        delattr(gm.get_submodule(owner), leaf)
