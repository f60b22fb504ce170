"""Functions whose calls with the same first operand can be one call, such as the linears of INT8 training.

A function in a captured graph says so itself, since graphs know nothing of training::

    @joined_by(linears, own=2, most=3, kind=dtype_of_weight)
    def linear(x, weight, bias, *options): ...

    linear(x, w_q, b_q, *options)
    linear(x, w_k, b_k, *options)     ->     q, k, v = linears(x, [w_q, w_k, w_v], [b_q, b_k, b_v], *options)
    linear(x, w_v, b_v, *options)

The one call takes the place of the first.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from qframework.compat.dynamo import record_value, recorded_value
from qframework.graph.writes import written_between

F = TypeVar("F", bound=Callable[..., Any])
_JOINING = "_qframework_joining"


class Joining(NamedTuple):
    """How calls are one."""

    together: Callable[..., Any]
    own: int
    most: int
    kind: Callable[..., Any]


def joined_by(together: Callable[..., Any], *, own: int, most: int, kind: Callable[..., Any]) -> Callable[[F], F]:
    """Declare that calls of a function can be one.

    Args:
        together: computes several calls: takes the first operand, a list for each operand that is a call's own, and
            what follows, and returns a tuple.
        own: how many operands behind the first one are each call's own.
        most: calls that ``together`` takes.
        kind: None for a call that stays alone, otherwise what it must have in common with those it joins; from its
            operands, which are fake tensors while a graph is compiled.
    """

    def declare(function: F) -> F:
        setattr(function, _JOINING, Joining(together, own, most, kind))
        return function

    return declare


def join_calls(gm: GraphModule) -> None:
    """Make calls with the same first operand one call."""
    for joining, nodes in _groups(gm):
        first = nodes[0]
        own = [each for node in nodes for each in node.args[1 : 1 + joining.own] if isinstance(each, Node)]
        known = all(each < first for each in own)
        if known and written_between(first, nodes[-1], [first.args[0], *own], own=nodes) is None:  # type: ignore[list-item]
            _join(joining, nodes)


def _groups(gm: GraphModule) -> list[tuple[Joining, list[Node]]]:
    """Two calls or more that differ in their own operands only, with no call of another tensor in between.

    A decoder's layers all read the encoder's result. Together, the keys and values of one layer would be computed and
    kept with those of the layer before, and their gradients would wait for each other.
    """
    calls = [node for node in gm.graph.nodes if node.op == "call_function" and hasattr(node.target, _JOINING)]
    found = []
    for _, run in itertools.groupby(calls, lambda node: node.args[0]):
        groups: dict[Any, list[Node]] = {}
        for node in run:
            joining = getattr(node.target, _JOINING)
            kind = None if node.kwargs else joining.kind(*map_arg(node.args, recorded_value))
            if kind is not None:
                groups.setdefault((joining, kind, node.args[1 + joining.own :]), []).append(node)
        for (joining, *_), nodes in groups.items():
            parts = (nodes[start : start + joining.most] for start in range(0, len(nodes), joining.most))
            found += [(joining, part) for part in parts if len(part) > 1]
    return found


def _join(joining: Joining, nodes: Sequence[Node]) -> None:
    """Replace the calls by one at the place of the first, and its results."""
    first, graph = nodes[0], nodes[0].graph
    own = [list(each) for each in zip(*(node.args[1 : 1 + joining.own] for node in nodes), strict=True)]
    with graph.inserting_before(first):
        whole = graph.call_function(joining.together, (first.args[0], *own, *first.args[1 + joining.own :]))
        parts = [graph.call_function(operator.getitem, (whole, place)) for place in range(len(nodes))]
    whole.meta = dict(first.meta)
    record_value(whole, tuple(map(recorded_value, nodes)))
    for node, part in zip(nodes, parts, strict=True):
        part.meta = dict(node.meta)
        node.replace_all_uses_with(part)
        graph.erase_node(node)
