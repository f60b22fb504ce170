"""Finds the product of queries and keys behind the logits of a softmax, and the steps in between.

These are the steps of patterns.py: scales, soft caps, summands, masks, views, a row's maximum and sinks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from qframework.graph.attention.call import (
    NO_WEIGHT,
    NotAttention,
    Refused,
    Summand,
    keeps_numbers,
    product_operands,
    shape_of,
)
from qframework.graph.attributes import is_zeros_and_ones
from qframework.graph.nodes import (
    argument,
    behind,
    fake_value,
    is_inactive_dropout,
    operation,
    plain_name,
    traced_number,
    users,
)
from qframework.graph.shapes import same, same_shape


class Unscaled(NamedTuple):
    """``x * factor`` with a number; ``steps`` are the nodes that multiply, the first one reads ``x``."""

    x: Node
    factor: float = 1.0
    steps: tuple[Node, ...] = ()


def unscaled(node: Node) -> Unscaled:
    """``x`` of ``x * s`` with a number s; the node itself for any other node."""
    x, factor = _scaled(node) or (node, 1.0)
    before, after = fake_value(x), fake_value(node)
    if x is node or not isinstance(factor, float) or before is None or after is None or before.dtype != after.dtype:
        return Unscaled(node)
    inner, more, steps = unscaled(x)
    return Unscaled(inner, factor * more, (*steps, node))


def _scaled(node: Node) -> tuple[Node, float | Node] | None:
    """``x`` and the number or tensor that multiplies it; division by a number counts as multiplication."""
    name = operation(node)
    if name not in ("mul", "div") or argument(node, 2, "rounding_mode") is not None:
        return None
    x, y = _operands(node)
    if name == "mul" and not isinstance(x, Node):
        x, y = y, x
    if isinstance(x, Node) and isinstance(y, (int, float)) and y != 0:
        return x, 1.0 / y if name == "div" else float(y)
    return (x, y) if isinstance(x, Node) and isinstance(y, Node) else None


def _operands(node: Node) -> tuple[Any, Any]:
    """Both operands of arithmetic, as numbers where they are inputs of the graph that are numbers."""
    return traced_number(argument(node, 0, "input", "self")), traced_number(argument(node, 1, "other"))


@dataclass
class Logits:
    """The product of Q and K before a softmax, and the steps in between."""

    a: Node
    b: Node
    shape: torch.Size
    factor: float
    nodes: list[Node]  # from the product on
    summands: list[Summand] = field(default_factory=list)
    row_factors: list[tuple[Node, bool]] = field(default_factory=list)
    sinks: Node | None = None
    softcap: float | None = None  # summands are added to, and a shift is of, the capped logits
    shifted: bool = False  # by the same for all keys, which changes no softmax over keys alone

    @classmethod
    def trace(cls, node: Any, factor: float) -> Logits:
        """Walk back from ``node`` to a product; ``factor`` multiplies ``node`` before the softmax."""
        if not isinstance(node, Node):
            raise NotAttention
        if (operands := product_operands(node)) is not None:
            return cls(*operands, shape_of(node), factor, [node])
        for step in (
            cls._product_and_sum,
            cls._same,
            cls._shifted,
            cls._scaled,
            cls._capped,
            cls._kept_by_product,
            cls._sum,
            cls._difference,
            cls._filled,
        ):
            if (logits := step(node, factor)) is not None:
                if logits.sinks is not None and step not in (cls._same, cls._shifted):
                    raise Refused("its logits must not change behind their sinks")
                logits.nodes.append(node)
                return logits
        if (logits := cls._with_sinks(node, factor)) is not None:
            return logits
        if any(product_operands(before) for before in _ancestors(node, 6)):
            raise Refused(
                f"its logits pass through {operation(node) or node.target}, which the operator does not compute"
            )
        raise NotAttention

    @classmethod
    def _product_and_sum(cls, node: Node, factor: float) -> Logits | None:
        """``beta * x + alpha * (a @ b)``."""
        if operation(node) != "baddbmm":
            return None
        x, a, b = (argument(node, i, *names) for i, names in enumerate((("input", "self"), ("batch1",), ("batch2",))))
        beta, alpha = (traced_number(argument(node, i, name, default=1)) for i, name in ((3, "beta"), (4, "alpha")))
        if isinstance(beta, Node) or isinstance(alpha, Node):
            return None
        logits = cls(a, b, shape_of(node), factor * alpha, [])
        if beta != 0:
            logits.summands.append(Summand(x, shape_of(node), factor * beta))
        return logits

    @classmethod
    def _same(cls, node: Node, factor: float) -> Logits | None:
        if keeps_numbers(node) or is_inactive_dropout(node):
            return cls.trace(argument(node, 0, "input", "self"), factor)
        return None

    @classmethod
    def _shifted(cls, node: Node, factor: float) -> Logits | None:
        """``x - x.amax(-1, keepdim=True)``, which a softmax does not depend on."""
        if operation(node) != "sub" or argument(node, 2, "alpha", default=1) != 1:
            return None
        x, subtracted = _operands(node)
        if not isinstance(x, Node) or not isinstance(subtracted, Node):
            return None
        own = [subtracted, *subtracted.all_input_nodes] if operation(subtracted) == "getitem" else [subtracted]
        if operation(own[-1]) not in ("max", "amax") or argument(own[-1], 0, "input", "self") is not x:
            return None
        if argument(subtracted, 1) != 0 and len(own) > 1:
            return None  # the indices of the maxima
        if shape_of(subtracted) != (*shape_of(x)[:-1], 1):
            return None
        logits = cls.trace(x, factor)
        logits.shifted = True
        unread = [user for user in users(own[-1]) if not user.users]  # exports also name the indices of the maxima
        logits.nodes += [own[-1], *unread, *own[:-1]]
        return logits

    @classmethod
    def _with_sinks(cls, node: Node, factor: float) -> Logits | None:
        """``cat([x, sinks], -1)``."""
        tensors = argument(node, 0, "tensors")
        if operation(node) != "cat" or not isinstance(tensors, (list, tuple)) or len(tensors) != 2:
            return None
        x, sinks = tensors
        dim = argument(node, 1, "dim", default=0)
        if dim not in (-1, len(shape_of(node)) - 1) or not same(shape_of(sinks)[-1], 1):
            return None
        logits = cls.trace(x, factor)
        if factor != 1.0 or logits.sinks is not None or not same_shape(shape_of(x), logits.shape):
            raise Refused("its logits must not change behind their sinks")
        if logits.shifted:
            raise Refused("its logits must not be shifted before their sinks, which are not")
        logits.sinks = sinks
        logits.nodes.append(node)
        return logits

    @classmethod
    def _scaled(cls, node: Node, factor: float) -> Logits | None:
        scaled = _scaled(node)
        if scaled is None:
            return None
        x, by = scaled
        if isinstance(by, float):
            return cls.trace(x, factor * by)
        divides = operation(node) == "div"
        try:
            logits = cls.trace(x, factor)
        except NotAttention:
            if divides:
                raise
            x, by, logits = by, x, cls.trace(by, factor)
        if fake_value(by) is None:
            raise Refused(f"its logits must be scaled by a constant, got {plain_name(by)}, a number from the graph")
        if logits.softcap is not None:
            raise Refused(
                f"its logits must be capped by a number, got {plain_name(by)}, a tensor that scales capped ones"
            )
        if logits.summands or shape_of(x) != logits.shape or (shape_of(by) or (1,))[-1:] != (1,):
            raise Refused(
                f"its logits must be scaled by one factor per row, got {plain_name(by)} of shape {tuple(shape_of(by))}"
            )
        logits.row_factors.append((by, divides))
        return logits

    @classmethod
    def _capped(cls, node: Node, factor: float) -> Logits | None:
        """``tanh(x)``: with what multiplies both it and x, ``c tanh(s / c)`` of scaled logits s."""
        if operation(node) != "tanh":
            return None
        logits = cls.trace(argument(node, 0, "input", "self"), 1.0)
        if logits.softcap is not None or logits.summands or logits.shifted:
            raise Refused("its logits must pass through one tanh, and nothing must be added to them before it")
        logits.softcap = abs(factor)
        logits.factor *= factor
        return logits

    @classmethod
    def _kept_by_product(cls, node: Node, factor: float) -> Logits | None:
        """``x * keep + low * (1 - keep)`` with a buffer of zeros and ones, as GPT-1 hides keys."""
        if operation(node) != "add" or argument(node, 2, "alpha", default=1) != 1:
            return None
        x, y = _operands(node)
        for kept, hidden in ((x, y), (y, x)):
            product, fill = (_scaled(each) if isinstance(each, Node) else None for each in (kept, hidden))
            if product is None or fill is None or not isinstance(fill[1], float) or factor * fill[1] > NO_WEIGHT:
                continue
            if operation(kept) != "mul":
                continue
            keep = _taken_from_one(fill[0])
            if keep is None or keep not in product or not is_zeros_and_ones(keep):
                continue
            logits_side = product[1] if product[0] is keep else product[0]
            if not isinstance(logits_side, Node) or shape_of(logits_side) != shape_of(node):
                continue
            logits = cls.trace(logits_side, factor)
            logits.summands.append(Summand(hidden, shape_of(node), factor))
            logits.nodes.append(kept)
            return logits
        return None

    @classmethod
    def _sum(cls, node: Node, factor: float) -> Logits | None:
        if operation(node) != "add" or argument(node, 2, "alpha", default=1) != 1:
            return None
        x, y = _operands(node)
        if isinstance(x, (int, float)) or isinstance(y, (int, float)):
            logits = cls.trace(y if isinstance(x, (int, float)) else x, factor)
            logits.shifted = True
            return logits
        failure: Exception = NotAttention()
        for logits_side, other in ((x, y), (y, x)):
            if not isinstance(other, Node) or fake_value(other) is None or shape_of(logits_side) != shape_of(node):
                continue
            try:
                logits = cls.trace(logits_side, factor)
            except (NotAttention, Refused) as error:
                failure = error if isinstance(error, Refused) else failure
                continue
            logits.summands.append(Summand(other, shape_of(node), factor))
            return logits
        raise failure

    @classmethod
    def _difference(cls, node: Node, factor: float) -> Logits | None:
        """``x - penalty``, as Funnel hides keys."""
        if operation(node) != "sub" or argument(node, 2, "alpha", default=1) != 1:
            return None
        x, penalty = _operands(node)
        if not isinstance(x, Node) or shape_of(x) != shape_of(node):
            return None
        if isinstance(penalty, Node) and fake_value(penalty) is None:
            return None
        logits = cls.trace(x, factor)
        if isinstance(penalty, Node):
            logits.summands.append(Summand(penalty, shape_of(node), -factor))
        else:
            logits.shifted = True
        return logits

    @classmethod
    def _filled(cls, node: Node, factor: float) -> Logits | None:
        """``x.masked_fill(mask, low)``, ``where(seen, x, low)`` or ``where(mask, low, x)``."""
        if operation(node) not in ("masked_fill", "where"):
            return None
        seen = False
        if operation(node) == "masked_fill":
            x, mask, fill = argument(node, 0, "input", "self"), argument(node, 1, "mask"), argument(node, 2, "value")
        else:
            mask, fill = argument(node, 0, "condition"), argument(node, 1, "input", "self")
            x = argument(node, 2, "other")
            if constant_number(fill) is None:
                x, fill, seen = fill, x, True
        logits, fill = cls.trace(x, factor), constant_number(fill)
        if operation(mask) == "expand_as" and argument(mask, 1, "other") is x and users(mask) == [node]:
            logits.nodes.append(mask)
            mask = argument(mask, 0, "input", "self")  # broadcasts as well
        if fill is None or factor * fill > NO_WEIGHT or shape_of(x) != shape_of(node):
            raise Refused(f"its logits must be filled with a number below {NO_WEIGHT:.0f}, got {plain_name(node)}")
        logits.summands.append(Summand(mask, shape_of(node), fill=factor * fill, seen=seen))
        return logits


def _taken_from_one(node: Node) -> Node | None:
    """``x`` of ``1 - x``."""
    name, (a, b) = operation(node), _operands(node)
    if name == "rsub":
        a, b = b, a
    plain = name in ("sub", "rsub") and argument(node, 2, "alpha", default=1) == 1
    return b if plain and isinstance(b, Node) and not isinstance(a, Node) and a == 1 else None


def constant_number(value: Any) -> float | None:
    """A number, which the graph may hold as a tensor."""
    if isinstance(value, Node):
        value = behind(value, ("detach", "lift_fresh_copy"))  # of constants in exports
    if isinstance(value, Node) and operation(value) in ("full", "scalar_tensor", "tensor"):
        value = value.args[-1] if shape_of(value) == () else None
    value = traced_number(value)
    return float(value) if isinstance(value, (int, float)) else None


def _ancestors(node: Node, depth: int) -> Iterator[Node]:
    """The nodes that a value is computed from, up to ``depth`` steps back or the previous layer."""
    for before in node.all_input_nodes if depth else ():
        if operation(before) not in ("linear", "layer_norm"):
            yield before
            yield from _ancestors(before, depth - 1)
