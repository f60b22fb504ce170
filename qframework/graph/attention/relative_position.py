"""Finds decomposed relative positions (SAM, ViTDet, MViTv2): an N x N bias that is the sum of two small factors.

From::

    rel_h (.., qh, qw, kh, 1) ─┐
    rel_w (.., qh, qw, 1, kw) ─┴> + -> (.., qh, qw, kh, kw) -> reshape (.., N, N) -> + logits

To::

    rel_h (.., N, kh), rel_w (.., N, kw)  ->  two arguments of the operator

Factors that are added to the logits one after the other, in the shape of the grid, are found too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.fx import Node

from qframework.graph.attention.call import AttentionCall, NotAttention, Summand, shape_of
from qframework.graph.nodes import CASTS, COPIES, VIEWS, argument, fake_value, operation
from qframework.graph.shapes import same, same_shape


class RelativePositions(NamedTuple):
    """``h (..., qh, qw, kh, 1)`` and ``w (..., qh, qw, 1, kw)``, both times ``factor``; ``read_by`` sums them."""

    h: Node
    w: Node
    read_by: Node
    factor: float = 1.0


def decomposed(summand: Summand) -> RelativePositions | None:
    """The factors of a summand ``reshape(h + w)`` of the logits; None for any other summand."""
    if summand.fill is not None:
        return None
    shape, total = shape_of(summand.value), _before_views(summand.value)
    if len(shape) < 3 or operation(total) != "add" or argument(total, 2, "alpha", default=1) != 1:
        return None
    x, y = argument(total, 0, "input", "self"), argument(total, 1, "other")
    grid = shape_of(total)
    if len(grid) < 4 or not (same(grid[-4] * grid[-3], shape[-2]) and same(grid[-2] * grid[-1], shape[-1])):
        return None
    for h, w in ((x, y), (y, x)):
        if is_height(h, grid) and is_width(w, grid):
            return RelativePositions(h, w, total, summand.factor)
    return None


def has_positions(call: AttentionCall) -> bool:
    """Whether what is added to the logits of a call are relative positions, in their own shape or in that of a grid."""
    return any(decomposed(each) is not None or is_grid(each.shape, call.shape) for each in call.summands)


def is_grid(shape: torch.Size, logits: torch.Size) -> bool:
    """Whether ``shape`` is logits (..., N, Nk) viewed as (..., qh, qw, kh, kw)."""
    queries, keys = logits[-2:]
    return len(shape) >= len(logits) + 2 and same(shape[-4] * shape[-3], queries) and same(shape[-2] * shape[-1], keys)


def is_height(node: object, grid: torch.Size) -> bool:
    """Whether a tensor is (..., qh, qw, kh, 1): the same for all columns of the keys."""
    return _varies_over(node, torch.Size((*grid[:-1], 1)))


def is_width(node: object, grid: torch.Size) -> bool:
    """Whether a tensor is (..., qh, qw, 1, kw): the same for all rows of the keys."""
    return _varies_over(node, torch.Size((*grid[:-2], 1, grid[-1])))


def _varies_over(node: object, shape: torch.Size) -> bool:
    try:
        return isinstance(node, Node) and same_shape(shape_of(node), shape)
    except NotAttention:
        return False


def _before_views(node: Node) -> Node:
    """The tensor before the views, casts and copies that lead to ``node``."""
    while operation(node) in VIEWS | CASTS | COPIES:
        before = argument(node, 0, "input", "self")
        if not isinstance(before, Node) or fake_value(before) is None:
            return node
        node = before
    return node
