"""Whether two masks are the same, which a model may compute a second time: ``scores.masked_fill(mask == 0, low)``."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from qframework.graph.nodes import CASTS, COPIES, VIEWS, operation
from qframework.graph.writes import is_written

# What masks are computed by. The same arguments give the same result, as those of random operations do not.
_STEPS = {*CASTS, *COPIES, *VIEWS, "eq", "ne", "lt", "le", "gt", "ge", "invert", "bitwise_not", "logical_not", "bool"}
_STEPS |= {"getitem", "slice", "expand", "tensor", "full", "scalar_tensor", "lift_fresh_copy", "detach"}


def same_mask(a: Any, b: Any) -> bool:
    """Whether two nodes, or arguments of nodes, are equal or computed alike from equal ones."""
    if isinstance(a, Node) and isinstance(b, Node):
        return a is b or (_is_step(a) and _is_step(b) and _same_call(a, b))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same_mask, a, b))
    if isinstance(a, slice) and isinstance(b, slice):
        return same_mask((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    return type(a) is type(b) and not isinstance(a, Node) and bool(a == b)


def _is_step(node: Node) -> bool:
    return operation(node) in _STEPS and not is_written(node)


def _same_call(a: Node, b: Node) -> bool:
    return (
        a.target == b.target
        and a.kwargs.keys() == b.kwargs.keys()
        and same_mask((a.args, *a.kwargs.values()), (b.args, *(b.kwargs[name] for name in a.kwargs)))
    )
