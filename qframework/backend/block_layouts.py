"""Lets the values of a row lie side by side in memory where a norm in a repeated block reads them.

From::

    x (B, N, C), with the N rows side by side, as convolutions leave them -> block -> block -> ...

To::

    x -> contiguous -> block -> block -> ...

What a subgraph reads has a fixed layout (outline_blocks.py). A norm over values that are N apart is three kernels
instead of one, and none of them quantizes: XCiT at batch 1, dynamic, had 0.94 times the speed of FP16
(``families/2026-11-28-h100-batch-1-4.json``). In a graph without subgraphs Inductor chooses the layout of what it
stores.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qframework.graph.nodes import add_call, fake_value, value_key
from qframework.graph.norms import norm_call
from qframework.graph.strides import follow_strides

_clone = torch.ops.aten.clone.default


def make_rows_contiguous(gm: GraphModule, block: Sequence[Node]) -> bool:
    """Copy, in place, what enters ``block`` and is normed there across its memory; returns whether anything changed.

    All that is computed from the copy has other strides then. Nothing changes if the graph depends on the old ones.
    """
    changed = False
    for node in block:
        norm = norm_call(node)
        x = None if norm is None else _source(norm.input, block)
        if x is not None and _is_strided(fake_value(x)):
            changed |= _copy(gm, x)
    return changed


def _source(x: Node, block: Sequence[Node]) -> Node | None:
    """The value from outside the block whose layout ``x`` has; None if it has none, or a graph's input has it."""
    inside = set(block)
    while x in inside:
        behind = next((each for each in x.all_input_nodes if _have_one_layout(each, x)), None)
        if behind is None:
            return None
        x = behind
    return x if x.op.startswith("call") else None


def _have_one_layout(first: Node, second: Node) -> bool:
    one, other = fake_value(first), fake_value(second)
    return one is not None and other is not None and (one.shape, one.stride()) == (other.shape, other.stride())


def _is_strided(fake: Tensor | None) -> bool:
    return fake is not None and fake.ndim > 1 and fake.shape[-1] > 1 and fake.stride(-1) != 1


def _copy(gm: GraphModule, x: Node) -> bool:
    """Make all readers of ``x`` read a contiguous copy; False, and no change, if one depends on its strides."""
    with gm.graph.inserting_after(x):
        copy = add_call(x, _clone, (x,), {"memory_format": torch.contiguous_format})
    x.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
    contiguous = fake_value(copy)
    copy.meta[value_key(copy)] = fake_value(x)
    moved = follow_strides(copy, contiguous)  # type: ignore[arg-type]
    if moved is None:
        copy.replace_all_uses_with(x)
        gm.graph.erase_node(copy)
        return False
    for node, value in moved.items():
        node.meta[value_key(node)] = value
    return True
