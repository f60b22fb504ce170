"""Recognizes nodes that select a range along one dimension: ``x[:, 0]``, ``x[:, 1:]``, ``x.narrow(1, 0, 1)``."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from qframework.graph.nodes import argument, fake_value, operation
from qframework.graph.shapes import same

aten = torch.ops.aten
END = 2**63 - 1  # of a slice that goes on
_EVERYTHING = slice(None, None, None)


class Selection(NamedTuple):
    """Elements ``start`` to ``stop`` along ``dim`` of ``source``; negative ones count from the end, as in Python."""

    source: Node
    dim: int
    start: int
    stop: int

    def bounds(self, size: int) -> tuple[int, int]:
        """Start and stop, both at least 0, in a dimension of ``size`` elements."""
        start, stop, _ = slice(self.start, self.stop).indices(size)
        return start, max(start, stop)


def selection(node: Node) -> Selection | None:
    """What ``node`` selects; None if it does something else, or along several dimensions, or with a step."""
    if node.op not in ("call_function", "call_method") or not node.args or not isinstance(node.args[0], Node):
        return None
    source = node.args[0]
    fake, result = fake_value(source), fake_value(node)
    found = _dimension_and_index(node)
    if fake is None or result is None or found is None:
        return None
    dim, index = found[0] % max(fake.ndim, 1), found[1]
    if type(index) is int:
        return Selection(source, dim, index, index + 1 if index != -1 else END)
    if not isinstance(index, slice) or index.step not in (None, 1):
        return None
    start, stop = (0 if index.start is None else index.start), (END if index.stop is None else index.stop)
    return Selection(source, dim, start, stop) if type(start) is int and type(stop) is int else None


def keeps_dimension(node: Node, selected: Selection) -> bool:
    """Whether the result still has the dimension, of one or more elements."""
    fake, result = fake_value(selected.source), fake_value(node)
    return fake is not None and result is not None and fake.ndim == result.ndim


def _dimension_and_index(node: Node) -> tuple[int, Any] | None:
    """The dimension and a number or slice."""
    if node.target is operator.getitem:
        index = _without_ellipsis(node)
        chosen = [dim for dim, part in enumerate(index) if part != _EVERYTHING]
        plain = all(isinstance(part, (int, slice)) for part in index)
        return (chosen[0], index[chosen[0]]) if plain and len(chosen) == 1 else None
    name, dim = operation(node), argument(node, 1, "dim", default=0)
    if type(dim) is not int:
        return None
    if name == "slice":
        return dim, slice(*(argument(node, 2 + i, part) for i, part in enumerate(("start", "end", "step"))))
    if name == "select":
        return dim, argument(node, 2, "index")
    if name == "narrow":
        start, length = argument(node, 2, "start"), argument(node, 3, "length")
        if type(start) is int and type(length) is int:
            return dim, slice(start, start + length if start + length else None)
    return None


def _without_ellipsis(node: Node) -> tuple[Any, ...]:
    """The index of a ``getitem`` with a full slice for each dimension that ``...`` stands for."""
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    places = [place for place, part in enumerate(index) if part is Ellipsis]
    source = node.args[0]
    fake = fake_value(source) if isinstance(source, Node) else None
    if len(places) != 1 or fake is None or any(part is None for part in index):
        return index
    (place,) = places
    return (*index[:place], *[_EVERYTHING] * (fake.ndim - len(index) + 1), *index[place + 1 :])


def is_single(node: Node, selected: Selection) -> bool:
    """Whether one element is selected from a dimension of several."""
    fake, result = fake_value(selected.source), fake_value(node)
    assert fake is not None
    assert result is not None
    if same(fake.shape[selected.dim], 1):
        return False
    return result.ndim < fake.ndim or same(result.shape[selected.dim], 1)
