"""Follows a tensor through views to its quantize nodes, keeping track of its channels.

A linear layer that computes queries, keys and values at once is read through ``reshape``, ``permute`` and ``unbind``.
The shapes alone determine which of its output channels reach which quantize node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from qframework.graph.nodes import argument, fake_value, is_inactive_dropout, operation
from qframework.graph.shapes import Size, same


class Dim(NamedTuple):
    """A dimension of a view; ``stride`` is its step in channels, None if it does not run over channels.

    A dimension merged from several, such as batch and heads, has them as its ``factors``, outermost first.
    """

    size: Size
    stride: int | None = None
    factors: tuple[Dim, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether it is not merged from several."""
        return not self.factors

    @property
    def has_channels(self) -> bool:
        """Whether it runs over channels, at least in part."""
        return any(factor.stride is not None for factor in self.split())

    def split(self) -> tuple[Dim, ...]:
        """Its factors; itself if it is plain."""
        return self.factors or (self,)


@dataclass(frozen=True)
class ChannelView:
    """A view of a tensor whose channels are its last dimension."""

    dims: tuple[Dim, ...]
    offset: int = 0

    @classmethod
    def of(cls, shape: Sequence[Size]) -> ChannelView:
        """The tensor itself."""
        return cls((*map(Dim, shape[:-1]), Dim(shape[-1], 1)))

    @classmethod
    def without_channels(cls, shape: Sequence[Size]) -> ChannelView:
        """A tensor whose channels are irrelevant."""
        return cls(tuple(map(Dim, shape)))

    def channels(self, order: int | None = None) -> torch.Tensor:
        """The channels in the view, int64 ``(size of dimension `order`, the others)``, or ``(1, all)`` without it."""
        first = [i for i in (order,) if i is not None]
        others = [dim for i, dim in enumerate(self.dims) if i not in first]
        running = [factor for dim in others for factor in dim.split() if factor.stride is not None]
        index = torch.tensor(self.offset)
        for factor in [*(factor for i in first for factor in self.dims[i].split()), *running]:
            index = index.unsqueeze(-1) + torch.arange(int(factor.size)) * (factor.stride or 0)
        return index.reshape(int(self.dims[order].size) if order is not None else 1, -1)

    def swapped(self, a: int, b: int) -> ChannelView:
        dims = list(self.dims)
        dims[a], dims[b] = dims[b], dims[a]
        return ChannelView(tuple(dims), self.offset)

    def permuted(self, order: Sequence[int]) -> ChannelView:
        return ChannelView(tuple(self.dims[i] for i in order), self.offset)

    def narrowed(self, dim: int, start: int, size: Size) -> ChannelView:
        """``size`` elements of a dimension, beginning at ``start``."""
        old = self.dims[dim]
        offset = self.offset + start * old.stride if old.stride is not None else self.offset
        return ChannelView((*self.dims[:dim], Dim(size, old.stride), *self.dims[dim + 1 :]), offset)

    def selected(self, dim: int, index: int) -> ChannelView:
        """One element of a dimension, which is removed."""
        view = self.narrowed(dim, index, 1)
        return ChannelView((*view.dims[:dim], *view.dims[dim + 1 :]), view.offset)

    def reshaped(self, shape: Sequence[Size]) -> ChannelView | None:
        """The same elements in another shape; None if a new dimension would end inside one of unknown size."""
        rest, dims = [factor for dim in self.dims for factor in dim.split() if not same(factor.size, 1)], []
        for size in reversed(shape):
            if all(factor.stride is None for factor in rest):
                dims.append(Dim(size))  # only dimensions without channels are left
                continue
            dim = _take(rest, size)
            if dim is None:
                return None
            dims.append(dim)
        return ChannelView(tuple(reversed(dims)), self.offset)


def _take(rest: list[Dim], size: Size) -> Dim | None:
    """Remove from the end of ``rest`` the factors of a dimension of ``size``; None if no boundary fits."""
    taken: list[Dim] = []
    product: Size = 1
    while not same(product, size):
        if not rest:
            return None
        last = rest.pop()
        if not same(product * last.size, size) and (inside := _inside(last, product, size)):
            rest.append(Dim(int(last.size) // inside, None if last.stride is None else last.stride * inside))
            last = Dim(inside, last.stride)
        product = product * last.size
        taken.insert(0, last)
    return _merged(taken, size)


def _inside(last: Dim, product: Size, size: Size) -> int | None:
    """The part of factor ``last`` that completes ``product`` to ``size``; None if it does not divide the factor."""
    if not (isinstance(last.size, int) and isinstance(product, int) and isinstance(size, int)):
        return None
    wanted, left = divmod(size, product)
    return wanted if not left and 0 < wanted < last.size and last.size % wanted == 0 else None


def _merged(factors: list[Dim], size: Size) -> Dim:
    """One dimension made of several; plain if their channels are consecutive."""
    joined: list[Dim] = []
    for factor in factors:
        before = joined[-1] if joined else None
        if before is not None and _follows(before, factor):
            joined[-1] = Dim(before.size * factor.size, factor.stride)
        else:
            joined.append(factor)
    if len(joined) > 1:
        return Dim(size, None, tuple(joined))
    return Dim(size, joined[0].stride) if joined else Dim(size)


def _follows(before: Dim, factor: Dim) -> bool:
    if before.stride is None or factor.stride is None:
        return before.stride is factor.stride
    return before.stride == factor.stride * int(factor.size)


# ----------------------------------------------------------------------------------------------------------------------
# One node

_UNCHANGED = {"contiguous", "clone", "detach", "alias"}
_RESHAPES = {"reshape", "view", "flatten", "unflatten", "unsqueeze", "squeeze"}
_SPLITS = {"unbind", "chunk", "split", "split_with_sizes", "tensor_split"}
READS_ONLY_THE_SHAPE = {"sym_size", "size"}


def through(view: ChannelView, node: Node) -> ChannelView | None:
    """The view of the result of ``node``, which reads the tensor ``view``; None if it is not a view with one result."""
    name, fake = operation(node), fake_value(node)
    if name in _UNCHANGED or is_inactive_dropout(node):
        return view
    if name in _RESHAPES:
        return view.reshaped(fake.shape) if fake is not None else None
    step = _STEPS.get(name or "")
    return step(view, node) if step is not None else None


def _transpose(view: ChannelView, node: Node) -> ChannelView | None:
    a, b = argument(node, 1, "dim0"), argument(node, 2, "dim1")
    return view.swapped(a, b) if isinstance(a, int) and isinstance(b, int) else None


def _permute(view: ChannelView, node: Node) -> ChannelView | None:
    order = argument(node, 1, "dims")
    order = node.args[1:] if isinstance(order, int) else order
    return view.permuted(order) if isinstance(order, Sequence) else None


def _select(view: ChannelView, node: Node) -> ChannelView | None:
    dim, index = argument(node, 1, "dim"), argument(node, 2, "index")
    if not isinstance(dim, int) or not isinstance(index, int) or not isinstance(view.dims[dim].size, int):
        return None
    if not view.dims[dim].is_plain:
        return None
    return view.selected(dim % len(view.dims), index % int(view.dims[dim].size))


def _slice(view: ChannelView, node: Node) -> ChannelView | None:
    dim, fake = argument(node, 1, "dim", default=0) % len(view.dims), fake_value(node)
    start, step = argument(node, 2, "start", default=None) or 0, argument(node, 4, "step", default=1)
    size = view.dims[dim].size
    if (
        step != 1
        or fake is None
        or not view.dims[dim].is_plain
        or not isinstance(start, int)
        or (start < 0 and not isinstance(size, int))
    ):
        return None
    start = start + int(size) if start < 0 else start
    return view.narrowed(dim, start, fake.shape[dim])


_STEPS: dict[str, Callable[[ChannelView, Node], ChannelView | None]] = {
    "transpose": _transpose,
    "permute": _permute,
    "select": _select,
    "slice": _slice,
}


def parts(view: ChannelView, node: Node) -> list[tuple[Node, ChannelView]] | None:
    """The results of a node that splits a tensor, each with its view; None for any other node."""
    name = operation(node)
    if name not in _SPLITS or any(operation(user) != "getitem" for user in node.users):
        return None
    found = []
    for user in node.users:
        index, fake = user.args[1], fake_value(user)
        if fake is None or not isinstance(index, int):
            return None
        default = argument(node, 1, "dim", default=0) if name == "unbind" else argument(node, 2, "dim", default=0)
        dim = default % len(view.dims)
        if not view.dims[dim].is_plain:
            return None
        if name == "unbind":
            found.append((user, view.selected(dim, index)))
        elif (start := _start(node, name, view.dims[dim].size, index)) is not None:
            found.append((user, view.narrowed(dim, start, fake.shape[dim])))
        else:
            return None
    return found


def _start(node: Node, name: str, size: Size, index: int) -> int | None:
    """The first element of result ``index`` of a split of ``size`` elements; None if unknown."""
    sizes: Any = argument(node, 1, "split_size_or_sections", "split_size", "split_sizes", "chunks")
    if not isinstance(size, int) or name == "tensor_split":
        return None
    if isinstance(sizes, int):
        return index * (-(-size // sizes) if name == "chunk" else sizes)
    if isinstance(sizes, Sequence) and all(isinstance(each, int) for each in sizes):
        return sum(sizes[:index])
    return None


# ----------------------------------------------------------------------------------------------------------------------
# To the quantize nodes


class Leaf(NamedTuple):
    """A quantize node behind views, and the view that it reads."""

    node: Node
    view: ChannelView


def quantized_everywhere(
    node: Node, view: ChannelView, is_quantize: Callable[[Node, Node], bool]
) -> tuple[list[Leaf], list[Node]] | None:
    """The quantize nodes that read ``node`` through views, and those views; None if it has any other reader.

    ``is_quantize(user, value)`` says whether ``user`` is a quantize node of ``value`` that may be moved.
    """
    leaves: list[Leaf] = []
    views: list[Node] = []
    waiting = [(node, view)]
    while waiting:
        value, seen = waiting.pop()
        for user in value.users:
            if is_quantize(user, value):
                leaves.append(Leaf(user, seen))
                continue
            reached = list(_next(user, seen))
            if not reached and operation(user) not in READS_ONLY_THE_SHAPE:
                return None
            views += [each for each, _ in reached]
            waiting += reached
    return (leaves, views) if leaves else None


def _next(user: Node, view: ChannelView) -> Iterator[tuple[Node, ChannelView]]:
    after = through(view, user)
    if after is not None:
        yield user, after
    else:
        yield from parts(view, user) or ()
