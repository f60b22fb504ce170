"""Finds attention in a captured graph: one ``scaled_dot_product_attention`` node, or products around a softmax::

    q [* s] ──┐
    k [* s].T ┴> matmul -> [* s] -> [+ bias] -> [views] -> [+ mask] -> softmax -> [dropout] -> matmul -> ...
                                                                                       v ────────┘

Steps in brackets are optional and may come in any order and number. Scaling by a number becomes the operator's
``scale``; scaling by a tensor that is the same for all keys (Swin V2's logit scale) is applied to the query; every
summand keeps the shape in which it is added. The maximum of a row may be subtracted. Sinks (GPT-OSS), one logit of
each row that is appended before the softmax and whose weight is dropped behind it, are an operand of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.fx import Node

from qframework.compat.operators import ASSERT_METADATA
from qframework.graph.nodes import argument, fake_value, is_inactive_dropout, operation
from qframework.graph.selections import Selection, keeps_dimension, selection
from qframework.graph.shapes import same, same_shape
from qframework.numerics import FLOAT_DTYPES

# Operations that keep the values: casts to a dtype of _FLOATS, copies, and views of the same elements.
CASTS = {"to", "float", "half", "bfloat16", "double", "type_as", "type"}
COPIES = {"contiguous", "clone", "alias"}
VIEWS = {"view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "unsqueeze", "squeeze"}

_FLOATS = {*FLOAT_DTYPES, torch.float64}

Found = TypeVar("Found")

# A logit this low gets no weight beside any other, so that filling with it and adding it are equivalent.
NO_WEIGHT = -1e4


class NotAttention(Exception):
    """A softmax that is not between the two products of attention."""


class Refused(Exception):
    """Attention that the operator cannot compute; the message is the reason."""


class Unrecognized(Refused):
    """Products around a softmax that may be attention, with unknown operations behind the softmax."""


@dataclass(frozen=True)
class Summand:
    """``factor * value`` added to the logits when they have the shape ``shape``.

    With ``fill``, ``value`` is a bool mask, and ``fill`` is added where it is True, or where it is False if ``seen``.
    """

    value: Node
    shape: torch.Size
    factor: float = 1.0
    fill: float | None = None
    seen: bool = False


@dataclass
class AttentionCall:
    """One attention: its operands, and ``end``, the node that computes its output.

    ``shape`` is that of ``query @ key.T``; the value's leading dimensions may be a view of it (``value_shape``).
    """

    end: Node
    query: Node
    key: Node
    value: Node
    shape: torch.Size
    value_shape: torch.Size
    key_is_transposed: bool = False
    summands: list[Summand] = field(default_factory=list)
    row_factors: list[tuple[Node, bool]] = field(
        default_factory=list
    )  # tensors that scale rows, and whether they divide
    scale: float | None = None
    is_causal: bool = False
    enable_gqa: bool = False
    between: list[Node] = field(default_factory=list)  # the nodes that are replaced, from the first product to ``end``
    sinks: Node | None = None  # logits of shape (..., Nq, 1) that take weight from the keys
    first: Node | None = None  # the first node that reads an operand, ``end`` where None


def sdpa_call(node: Node) -> AttentionCall | None:
    """The operands of a ``scaled_dot_product_attention`` node, None for any other node.

    Raises:
        Refused: dropout, or an argument that is computed in the graph.
    """
    if operation(node) != "scaled_dot_product_attention":
        return None
    query, key, value = (argument(node, i, name) for i, name in enumerate(("query", "key", "value")))
    mask = argument(node, 3, "attn_mask")
    dropout_p, is_causal = argument(node, 4, "dropout_p", default=0.0), argument(node, 5, "is_causal", default=False)
    scale, enable_gqa = argument(node, 6, "scale"), argument(node, 7, "enable_gqa", default=False)
    if dropout_p != 0.0:
        raise Refused(f"its dropout_p must be 0, got {dropout_p}")
    for name, given in (("is_causal", is_causal), ("scale", scale), ("enable_gqa", enable_gqa)):
        if isinstance(given, Node):
            raise Refused(f"its {name} must be a number, got {given.name}, which the graph computes")
    shape = _logits_shape(query, key)
    summands = [_mask_summand(mask, shape)] if mask is not None else []
    enable_gqa = enable_gqa or share_one_head(query, key, value)
    return AttentionCall(
        node, query, key, value, shape, shape, summands=summands, scale=scale, is_causal=is_causal,
        enable_gqa=enable_gqa, between=[node],
    )  # fmt: skip


def share_one_head(query: Node, key: Node, value: Node) -> bool:
    """Whether all heads of the query read one head of keys and values, which broadcasts (Falcon).

    That is grouped-query attention with one group.
    """
    shapes = [shape_of(operand) for operand in (query, key, value)]
    if any(len(shape) < 4 or len(shape) != len(shapes[0]) for shape in shapes):
        return False
    heads, *others = (shape[-3] for shape in shapes)
    return not same(heads, 1) and all(same(other, 1) for other in others)


def _mask_summand(mask: Node, shape: torch.Size) -> Summand:
    """An ``attn_mask``: added to the logits, or a bool mask that is True where a key counts."""
    fake = fake_value(mask)
    if fake is not None and fake.dtype == torch.bool:
        return Summand(mask, shape, fill=-math.inf, seen=True)
    return Summand(mask, shape)


def _logits_shape(query: Node, key: Node) -> torch.Size:
    q, k = shape_of(query), shape_of(key)
    if len(q) < 2 or len(k) < 2:
        raise Refused(f"its query must have 3 to 5 dimensions, got shape {tuple(q)}")
    return torch.Size((*q[:-1], k[-2]))


def spelled_out_call(softmax: Node) -> AttentionCall | None:
    """The attention around a softmax over the last dimension, None for any other node.

    Raises:
        Refused: attention in a form that the operator does not compute.
    """
    if operation(softmax) != "softmax" or fake_value(softmax) is None:
        return None
    if argument(softmax, 1, "dim") not in (-1, len(shape_of(softmax)) - 1):
        return None  # not over keys
    try:
        weighted = _tried(_weighted_sum, softmax)
        logits = _Logits.trace(argument(softmax, 0, "input", "self"), 1.0)
    except NotAttention:
        return None
    if isinstance(weighted, Refused):
        raise weighted
    end, weights = weighted
    _check_keys(logits, weights)
    own = {*logits.nodes, *weights}
    for node in (*logits.nodes, *weights):
        _require_private(node, own)
    (query, query_factor, query_reader), (key, key_factor, key_reader) = _unscaled(logits.a), _unscaled(logits.b)
    value = argument(end, 1, "other", "mat2")
    return AttentionCall(
        end, query, key, value, logits.shape, shape_of(weights[-1]), key_is_transposed=True,
        enable_gqa=share_one_head(query, key, value), summands=logits.summands, row_factors=logits.row_factors,
        scale=logits.factor * query_factor * key_factor, between=[*logits.nodes, *weights, end],
        sinks=logits.sinks,
        first=min(reader for reader in (query_reader, key_reader, logits.nodes[0]) if reader is not None),
    )  # fmt: skip


def _tried(find: Callable[[Node], Found], node: Node) -> Found | Refused:
    """What ``find`` gives for a node, or with which reason it refuses it."""
    try:
        return find(node)
    except Refused as refusal:
        return refusal


def _check_keys(logits: _Logits, weights: list[Node]) -> None:
    """Raise Refused unless the softmax is over all logits of a row, and only the weights of sinks are dropped."""
    keys, over = logits.shape[-1], shape_of(weights[0])[-1]
    if not same(over, keys if logits.sinks is None else keys + 1):
        raise Refused(f"its softmax must be over the {keys} logits of a row, got {over}")
    dropping = [selected for node in weights if (selected := _dropped_weights(node)) is not None]
    if not (same(shape_of(weights[-1])[-1], keys) and len(dropping) == (logits.sinks is not None)):
        raise Refused("its weights of all keys, and of no sinks, must be multiplied with the values")
    if any(selected.start != 0 for selected in dropping):
        raise Refused("the weights of its sinks must be the last of a row")


def shape_of(node: Any) -> torch.Size:
    """The shape that tracing recorded. Raises NotAttention for anything but a tensor."""
    fake = fake_value(node) if isinstance(node, Node) else None
    if fake is None:
        raise NotAttention
    return fake.shape


def product_operands(node: Node) -> tuple[Node, Node] | None:
    """``a`` and ``b`` of ``a @ b``."""
    if operation(node) not in ("matmul", "bmm"):
        return None
    a, b = argument(node, 0, "input", "self"), argument(node, 1, "other", "mat2")
    return (a, b) if isinstance(a, Node) and isinstance(b, Node) else None


def users(node: Node) -> list[Node]:
    """The nodes that read a value, except the assertions about its metadata that exports contain."""
    return [user for user in node.users if not is_assertion(user)]


def is_assertion(node: Node) -> bool:
    """``aten._assert_tensor_metadata``."""
    return node.target is ASSERT_METADATA


def _require_private(node: Node, own: set[Node]) -> None:
    """Raise Refused if others read a node too; a row's maximum, which belongs to ``own``, is a second reader."""
    readers = users(node)
    if len(readers) > 1 and not own.issuperset(readers):
        raise Refused(f"its {node.name} has other readers too: {', '.join(user.name for user in readers)}")


def _weighted_sum(softmax: Node) -> tuple[Node, list[Node]]:
    """The product of the weights with the values, and the nodes from the softmax to it."""
    node, path = softmax, [softmax]
    while True:
        readers = users(node)
        products = [user for user in readers if (ab := product_operands(user)) and ab[0] is node and ab[1] is not node]
        if products:
            return products[0], path
        onward = [user for user in readers if _hands_on(user, node)]
        if not onward:
            if steps := _steps_to_product(node, 4):
                raise Unrecognized(f"its weights pass through {steps[0]}, which the operator does not compute")
            raise NotAttention
        node = onward[0]
        if operation(node) == "dropout" and not is_inactive_dropout(node):
            raise Refused("dropout of its attention weights must be inactive")
        path.append(node)


def _hands_on(node: Node, value: Node) -> bool:
    passes = _keeps_numbers(node) or operation(node) == "dropout" or _dropped_weights(node) is not None
    return passes and argument(node, 0, "input", "self") is value


def _dropped_weights(node: Node) -> Selection | None:
    """The selection of some keys, if ``node`` is one along the last dimension."""
    selected = selection(node)
    if selected is None or not keeps_dimension(node, selected):
        return None
    return selected if selected.dim == len(shape_of(selected.source)) - 1 else None


def _steps_to_product(node: Node, depth: int) -> list[str]:
    """The operations from a value to a product whose first operand they compute, none if there is no such product."""
    for user in users(node) if depth else ():
        name = operation(user)
        if name is None or name in ("linear", "layer_norm", "softmax"):
            continue
        if (operands := product_operands(user)) is not None:
            if operands[0] is node and operands[1] is not node:
                return [name]
        elif more := _steps_to_product(user, depth - 1):
            return [name, *more]
    return []


def _keeps_numbers(node: Node) -> bool:
    fake = fake_value(node)
    return operation(node) in CASTS | COPIES | VIEWS and fake is not None and fake.dtype in _FLOATS


def _unscaled(node: Node) -> tuple[Node, float, Node | None]:
    """``x``, ``s`` and the node that reads x for ``x * s`` with a number s; ``(node, 1, None)`` for any other node."""
    x, factor = _scaled(node) or (node, 1.0)
    before, after = fake_value(x), fake_value(node)
    if x is node or not isinstance(factor, float) or before is None or after is None or before.dtype != after.dtype:
        return node, 1.0, None
    inner, more, reader = _unscaled(x)
    return inner, factor * more, reader or node


def _scaled(node: Node) -> tuple[Node, float | Node] | None:
    """``x`` and the number or tensor that multiplies it; division by a number counts as multiplication."""
    name = operation(node)
    if name not in ("mul", "div") or argument(node, 2, "rounding_mode") is not None:
        return None
    x, y = argument(node, 0, "input", "self"), argument(node, 1, "other")
    if name == "mul" and not isinstance(x, Node):
        x, y = y, x
    if isinstance(x, Node) and isinstance(y, (int, float)) and y != 0:
        return x, 1.0 / y if name == "div" else float(y)
    return (x, y) if isinstance(x, Node) and isinstance(y, Node) else None


@dataclass
class _Logits:
    """The product of Q and K before a softmax, and the steps in between."""

    a: Node
    b: Node
    shape: torch.Size
    factor: float
    nodes: list[Node]  # from the product on
    summands: list[Summand] = field(default_factory=list)
    row_factors: list[tuple[Node, bool]] = field(default_factory=list)
    sinks: Node | None = None
    shifted: bool = False  # by the same for all keys, which changes no softmax over keys alone

    @classmethod
    def trace(cls, node: Any, factor: float) -> _Logits:
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
    def _product_and_sum(cls, node: Node, factor: float) -> _Logits | None:
        """``beta * x + alpha * (a @ b)``."""
        if operation(node) != "baddbmm":
            return None
        x, a, b = (argument(node, i, *names) for i, names in enumerate((("input", "self"), ("batch1",), ("batch2",))))
        beta, alpha = argument(node, 3, "beta", default=1), argument(node, 4, "alpha", default=1)
        logits = cls(a, b, shape_of(node), factor * alpha, [])
        if beta != 0:
            logits.summands.append(Summand(x, shape_of(node), factor * beta))
        return logits

    @classmethod
    def _same(cls, node: Node, factor: float) -> _Logits | None:
        if _keeps_numbers(node) or is_inactive_dropout(node):
            return cls.trace(argument(node, 0, "input", "self"), factor)
        return None

    @classmethod
    def _shifted(cls, node: Node, factor: float) -> _Logits | None:
        """``x - x.amax(-1, keepdim=True)``, which a softmax does not depend on."""
        if operation(node) != "sub" or argument(node, 2, "alpha", default=1) != 1:
            return None
        x, subtracted = argument(node, 0, "input", "self"), argument(node, 1, "other")
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
    def _with_sinks(cls, node: Node, factor: float) -> _Logits | None:
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
    def _scaled(cls, node: Node, factor: float) -> _Logits | None:
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
            raise Refused(f"its logits must be scaled by a constant, got {by.name}, a number from the graph")
        if logits.summands or shape_of(x) != logits.shape or (shape_of(by) or (1,))[-1:] != (1,):
            raise Refused(
                f"its logits must be scaled by one factor per row, got {by.name} of shape {tuple(shape_of(by))}"
            )
        logits.row_factors.append((by, divides))
        return logits

    @classmethod
    def _sum(cls, node: Node, factor: float) -> _Logits | None:
        if operation(node) != "add" or argument(node, 2, "alpha", default=1) != 1:
            return None
        x, y = argument(node, 0, "input", "self"), argument(node, 1, "other")
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
    def _difference(cls, node: Node, factor: float) -> _Logits | None:
        """``x - penalty``, as Funnel hides keys."""
        if operation(node) != "sub" or argument(node, 2, "alpha", default=1) != 1:
            return None
        x, penalty = argument(node, 0, "input", "self"), argument(node, 1, "other")
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
    def _filled(cls, node: Node, factor: float) -> _Logits | None:
        """``x.masked_fill(mask, low)``, ``where(seen, x, low)`` or ``where(mask, low, x)``."""
        if operation(node) not in ("masked_fill", "where"):
            return None
        seen = False
        if operation(node) == "masked_fill":
            x, mask, fill = argument(node, 0, "input", "self"), argument(node, 1, "mask"), argument(node, 2, "value")
        else:
            mask, fill = argument(node, 0, "condition"), argument(node, 1, "input", "self")
            x = argument(node, 2, "other")
            if _number(fill) is None:
                x, fill, seen = fill, x, True
        logits, fill = cls.trace(x, factor), _number(fill)
        if fill is None or factor * fill > NO_WEIGHT or shape_of(x) != shape_of(node):
            raise Refused(f"its logits must be filled with a number below {NO_WEIGHT:.0f}, got {node.name}")
        logits.summands.append(Summand(mask, shape_of(node), fill=factor * fill, seen=seen))
        return logits


def _number(value: Any) -> float | None:
    """A number, which the graph may hold as a tensor."""
    if isinstance(value, Node) and operation(value) in ("full", "scalar_tensor", "tensor"):
        value = value.args[-1] if shape_of(value) == () else None
    return float(value) if isinstance(value, (int, float)) else None


def _ancestors(node: Node, depth: int) -> Iterator[Node]:
    """The nodes that a value is computed from, up to ``depth`` steps back or the previous layer."""
    for before in node.all_input_nodes if depth else ():
        if operation(before) not in ("linear", "layer_norm"):
            yield before
            yield from _ancestors(before, depth - 1)
