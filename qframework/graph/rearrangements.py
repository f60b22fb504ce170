"""Recognizes nodes that rearrange the tokens of ``(..., C)``, or drop some, and repeats them on another tensor."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from qframework.compat.dynamo import VALUE_KEYS
from qframework.graph.nodes import add_call, argument, fake_value, operation, why_not_plain
from qframework.graph.shapes import same, same_shape
from qframework.graph.writes import writes_in_place

_RESHAPES = {"reshape", "view", "flatten", "unflatten", "unsqueeze", "squeeze"}
_COPIES = {"contiguous", "clone", "detach", "alias"}
_PARTS = {"slice", "narrow", "getitem", "select"}
_ORDERS = {"permute", "transpose", "movedim", "moveaxis"}
_ROLLS = {"roll", "flip"}
_KNOWN = _RESHAPES | _COPIES | _PARTS | _ORDERS | _ROLLS | {"pad"}


def rearranges_tokens(node: Node, source: Node) -> bool:
    """Whether ``node`` rearranges the tokens of ``source (..., C)``, or drops some, and leaves each as it is."""
    before, after, name = fake_value(source), fake_value(node), operation(node)
    if name not in _KNOWN or before is None or after is None or before.dtype != after.dtype or after.ndim == 0:
        return False
    if node.args[:1] != (source,) or writes_in_place(node) or why_not_plain(before) is not None:
        return False
    channels = before.shape[-1]
    if not isinstance(channels, int) or channels < 2 or not same(channels, after.shape[-1]):
        return False
    if name in _RESHAPES:  # elements keep their order
        return sum(not isinstance(size, int) for size in after.shape) <= 1
    if node.all_input_nodes != [source]:  # sizes that are symbols, or indices
        return False
    if name == "pad":
        return not any(argument(node, 1, "pad"))
    if name in _ROLLS:
        dims = argument(node, 2 if name == "roll" else 1, "dims", default=())
        dims = (dims,) if isinstance(dims, int) else dims
        return len(dims) > 0 and all(dim % before.ndim != before.ndim - 1 for dim in dims)
    return name in _COPIES or _views_tokens(node, before)


def keeps_order(node: Node) -> bool:
    """Whether a node that rearranges tokens keeps their elements in order: it reshapes or copies."""
    return operation(node) in _RESHAPES | _COPIES


def rearranged(value: Node, node: Node) -> Node:
    """Do to ``value (..., K)``, at the graph's insertion point, what ``node`` does to its source ``(..., C)``.

    K may be any number up to C; above, ``node`` may only keep the order.
    """
    source: Any = node.args[0]
    name, before, after, x = operation(node), fake_value(source), fake_value(node), fake_value(value)
    assert before is not None
    assert after is not None
    assert x is not None
    if name in _COPIES or (name not in _ORDERS | _ROLLS and same_shape(before.shape, after.shape)):
        return value
    if name in _RESHAPES:
        sizes = [size if isinstance(size, int) else -1 for size in after.shape[:-1]]
        return add_call(node, torch.ops.aten.reshape.default, (value, [*sizes, x.shape[-1]]))
    new = node.graph.node_copy(node, lambda _: value)
    new.meta = {**node.meta, **dict.fromkeys(node.meta.keys() & set(VALUE_KEYS), _run(node, x))}
    return new


def _views_tokens(node: Node, fake: Tensor) -> bool:
    """Whether a view has the channels of a contiguous tensor last: no other dimension has the stride 1."""
    index = node.args[1] if node.target is operator.getitem else ()
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is None or part is ... or type(part) in (int, slice) for part in parts):
        return False  # a copy
    return _run(node, fake.new_empty(fake.shape)).stride(-1) == 1


def _run(node: Node, x: Tensor) -> Any:
    """What ``node`` computes of another first argument."""
    function: Any = getattr(Tensor, node.target) if isinstance(node.target, str) else node.target
    return function(x, *node.args[1:], **node.kwargs)
