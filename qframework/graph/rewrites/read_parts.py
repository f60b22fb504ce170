"""Reads a part of a concatenation where it was joined from, not from the result.

From::

    cat([class_token, tokens], 1) -> [:, 1:] -> cat([new_class_token, .], 1) -> ...

To::

    cat([new_class_token, tokens], 1) -> ...

Class attention, as in VOLO, joins and parts its tokens in each block. Nothing is copied for a part that is read from
where it was joined. It also keeps Inductor from nesting the conditions of one concatenation in those of the next, whose
numbers PyTorch 2.11 and 2.14 compare in a recursion without end.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from qframework.graph.nodes import add_call, argument, fake_value, operation
from qframework.graph.selections import Selection, keeps_dimension, selection
from qframework.graph.writes import returned, written_between

aten = torch.ops.aten


def read_parts(gm: GraphModule) -> None:
    """Replace, in place, every selection that lies in one operand of a concatenation."""
    for node in list(gm.graph.nodes):
        selected = selection(node)
        if selected is None or (found := _part(selected)) is None:
            continue
        operand, start, stop = found
        value = fake_value(operand)
        assert value is not None
        joined = selected.source
        # A concatenation is a copy: no later write of its operand reaches it, and its parts are the caller's own.
        written = written_between(joined, gm.graph.output_node(), [joined, operand])
        if written is not None or returned(gm.graph, joined):
            continue
        part = operand
        with gm.graph.inserting_before(node):
            if not keeps_dimension(node, selected):
                part = add_call(node, aten.select.int, (operand, selected.dim, start))
            elif (start, stop) != (0, value.shape[selected.dim]):
                part = add_call(node, aten.slice.Tensor, (operand, selected.dim, start, stop))
        node.replace_all_uses_with(part)
        gm.graph.erase_node(node)
        if not joined.users:
            gm.graph.erase_node(joined)


def _part(selected: Selection) -> tuple[Node, int, int] | None:
    """The operand that holds all that is selected, and from where to where."""
    joined = selected.source
    operands = argument(joined, 0, "tensors")
    if operation(joined) not in ("cat", "concat", "concatenate") or not isinstance(operands, (list, tuple)):
        return None
    values = [fake_value(operand) if isinstance(operand, Node) else None for operand in operands]
    whole = fake_value(joined)
    dim = argument(joined, 1, "dim", "axis", default=0)
    if whole is None or type(dim) is not int or dim % whole.ndim != selected.dim:
        return None
    if any(value is None or value.ndim != whole.ndim or value.dtype != whole.dtype for value in values):
        return None
    sizes = [value.shape[selected.dim] for value in values if value is not None]
    if any(type(size) is not int for size in sizes):
        return None
    start, stop = selected.bounds(sum(sizes))
    begin = 0
    for operand, size in zip(operands, sizes, strict=True):
        if begin <= start < stop <= begin + size:
            return operand, start - begin, stop - begin
        begin += size
    return None
