"""Norms over the last dimension: calls of layer_norm and rms_norm, and RMSNorms that are written out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from qframework.graph.nodes import CASTS, argument, fake_value, operation, traced_number
from qframework.graph.writes import writes_in_place


class NormCall(NamedTuple):
    """``(input - mean) / sqrt(variance + eps) * (weight + offset) + bias``, without a mean unless ``center``."""

    input: Node
    weight: Node | None
    bias: Node | None
    eps: float | Node  # a node for a number that dynamic shapes make an input of the graph
    center: bool
    offset: float = 0.0

    @property
    def input_nodes(self) -> list[Node]:
        """The nodes among the operands."""
        return [each for each in (self.input, self.weight, self.bias) if each is not None]


def norm_call(node: Node) -> NormCall | None:
    """The norm whose result a node is, as far as rounding in between makes no difference; None for other nodes."""
    name = operation(node)
    if name not in ("layer_norm", "rms_norm"):
        return _written_out(node)
    x, shape = argument(node, 0, "input"), argument(node, 1, "normalized_shape")
    fake = fake_value(x) if isinstance(x, Node) else None
    if fake is None or list(shape if isinstance(shape, (list, tuple)) else [shape]) != [fake.shape[-1]]:
        return None
    weight = argument(node, 2, "weight")
    if name == "layer_norm":
        return NormCall(x, weight, argument(node, 3, "bias"), argument(node, 4, "eps", default=1e-5), True)
    eps, result = argument(node, 3, "eps"), fake_value(node)
    if eps is None:  # of the dtype in which it computes: float32 under autocast
        eps = torch.finfo(fake.dtype if result is None else result.dtype).eps
    return NormCall(x, weight, None, eps, False)


def _written_out(node: Node) -> NormCall | None:
    """``x * rsqrt(mean(x ** 2) + eps)``, multiplied by a weight or not, with casts, as transformers has it."""
    for weight, normalized in [(None, node), *_factors(_behind(node))]:
        for x, root in _factors(_behind(normalized)):
            eps = _eps_of(_behind(root), x)
            if eps is not None and (weight is None or _has_a_value_for_each_channel(weight, x)):
                weight, offset = _without_offset(weight)
                return NormCall(_behind_widening(x), weight, None, eps, False, offset)
    return None


def _factors(node: Node) -> Iterator[tuple[Node, Node]]:
    """The two factors of a product of tensors, in both orders."""
    first, second = argument(node, 0, "input"), argument(node, 1, "other")
    if operation(node) == "mul" and isinstance(first, Node) and isinstance(second, Node):
        yield first, second
        yield second, first


def _eps_of(root: Node, x: Node) -> float | Node | None:
    """The eps of ``rsqrt(mean(x ** 2) + eps)``; None for any other node."""
    total = root.args[0] if operation(root) == "rsqrt" else None
    if not isinstance(total, Node) or operation(total) != "add":
        return None
    mean, eps = argument(total, 0, "input"), argument(total, 1, "other")
    if not (isinstance(mean, Node) and isinstance(traced_number(eps), float)) or operation(mean) != "mean":
        return None
    dims, keeps = argument(mean, 1, "dim"), argument(mean, 2, "keepdim", default=False)
    squares = argument(mean, 0, "input")
    if list(dims if isinstance(dims, (list, tuple)) else [dims]) != [-1] or not keeps:
        return None
    return eps if _base_of(squares) is _behind_widening(x) else None


def _base_of(squares: Any) -> Node | None:
    """``x`` of ``x ** 2``, ``x.square()`` or ``x * x``, behind casts; None for any other node."""
    x = argument(squares, 0, "input") if isinstance(squares, Node) else None
    if not isinstance(x, Node):
        return None
    name, second = operation(squares), argument(squares, 1, "exponent", "other")
    squared = name == "square" or (name == "pow" and second == 2) or (name == "mul" and second is x)
    return _behind_widening(x) if squared else None


def _without_offset(weight: Node | None) -> tuple[Node | None, float]:
    """``w`` and the number of ``w + 1``, as Gemma has it, behind casts; other weights as they are, with 0."""
    total = None if weight is None else _behind(weight)
    plain = total is not None and operation(total) == "add" and not writes_in_place(total)
    if total is None or not plain or argument(total, 2, "alpha", default=1) != 1:
        return weight, 0.0
    operands = [argument(total, 0, "input"), argument(total, 1, "other")]
    (number, base) = operands if isinstance(operands[1], Node) else reversed(operands)
    if not isinstance(base, Node) or not isinstance(number, (int, float)):
        return weight, 0.0
    return _behind(base), float(number)


def _has_a_value_for_each_channel(weight: Node, x: Node) -> bool:
    given, fake = fake_value(weight), fake_value(x)
    return given is not None and fake is not None and given.ndim == 1 and given.shape[0] == fake.shape[-1]


def _behind(node: Node) -> Node:
    while operation(node) in CASTS and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _behind_widening(node: Node) -> Node:
    """What a node casts to a dtype that holds its values, as float32 holds those of float16."""
    while operation(node) in CASTS and isinstance(node.args[0], Node):
        before, after = fake_value(node.args[0]), fake_value(node)
        if before is None or after is None or before.device != after.device:
            break
        if torch.promote_types(before.dtype, after.dtype) != after.dtype:
            break
        node = node.args[0]
    return node
