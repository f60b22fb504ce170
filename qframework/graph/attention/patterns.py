"""Finds attention in a captured graph: one ``scaled_dot_product_attention`` node, or products around a softmax::

    q [* s] ──┐
    k [* s].T ┴> matmul -> [* s] -> [cap] -> [+ bias] -> [views] -> [+ mask] -> softmax -> [dropout] -> matmul -> ...
                                                                                                v ────────┘

Steps in brackets are optional and may come in any order and number. Scaling by a number becomes the operator's
``scale``; scaling by a tensor that is the same for all keys (Swin V2's logit scale) is applied to the query; every
summand keeps the shape in which it is added. One tanh before the summands, with what multiplies it, is a soft cap
(Gemma 2): ``c * tanh(s / c)`` of the scaled logits s. The maximum of a row may be subtracted. The weights of keys that
a mask hides may be set to zero (ESPnet, CPM-Ant), which the operator does too where a row has no other keys. A buffer
of zeros and ones may multiply the logits, with what hides the zeros added (GPT-1). Sinks (GPT-OSS), one logit of each
row that is appended before the softmax and whose weight is dropped behind it, are an operand of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch.fx import Node

from qframework.graph.attention.call import (
    AttentionCall,
    NotAttention,
    Refused,
    Summand,
    Unrecognized,
    keeps_numbers,
    product_operands,
    shape_of,
)
from qframework.graph.attention.logits import Logits, constant_number, unscaled
from qframework.graph.attention.same_mask import same_mask
from qframework.graph.nodes import (
    CASTS,
    argument,
    fake_value,
    is_inactive_dropout,
    operation,
    plain_name,
    traced_number,
    users,
)
from qframework.graph.selections import Selection, keeps_dimension, selection
from qframework.graph.shapes import same, same_shape
from qframework.graph.writes import is_written, written_between

Found = TypeVar("Found")
_PASS_THROUGH = "its weights pass through {}, which the operator does not compute"


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
    scale, enable_gqa = traced_number(argument(node, 6, "scale")), argument(node, 7, "enable_gqa", default=False)
    if dropout_p != 0.0:
        raise Refused(f"its dropout_p must be 0, got {dropout_p}")
    for name, given in (("is_causal", is_causal), ("scale", scale), ("enable_gqa", enable_gqa)):
        if isinstance(given, Node):
            raise Refused(f"its {name} must be a number, got {plain_name(given)}, which the graph computes")
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
        logits = Logits.trace(argument(softmax, 0, "input", "self"), 1.0)
    except NotAttention:
        return None
    if isinstance(weighted, Refused):
        raise weighted
    end, weights = weighted
    _check_keys(logits, weights)
    summands = _without_hidden_weights(logits.summands, weights)
    own = {*logits.nodes, *weights}
    for node in (*logits.nodes, *weights):
        _require_private(node, own)
    query, key = unscaled(logits.a), unscaled(logits.b)
    value = argument(end, 1, "other", "mat2")
    q, k = _before_upcasts(query.x, key.x, value, end) if not logits.row_factors else (query.x, key.x)
    return AttentionCall(
        end, q, k, value, logits.shape, shape_of(weights[-1]), key_is_transposed=True,
        enable_gqa=share_one_head(query.x, key.x, value), summands=summands, row_factors=logits.row_factors,
        scale=logits.factor * query.factor * key.factor, between=[*logits.nodes, *weights, end],
        sinks=logits.sinks, softcap=logits.softcap,
        first=min((*query.steps, *key.steps, logits.nodes[0])), scaling=[*query.steps, *key.steps],
    )  # fmt: skip


def _before_upcasts(query: Node, key: Node, value: Node, end: Node) -> tuple[Node, Node]:
    """Queries and keys; or those that a model casts to float32 for its logits, as GPT-J does (cast_late.py).

    Kernels compute logits of 16-bit operands in float32 as well, and would quantize operands in float32. Values and
    result must have the dtype of the operands.
    """
    result, values = fake_value(end), fake_value(value)
    if result is not None and values is not None and values.dtype == result.dtype:
        q, k = (_cast_from(each, result.dtype, end) for each in (query, key))
        if q is not None and k is not None:
            return q, k
    return query, key


def _cast_from(node: Node, dtype: torch.dtype, end: Node) -> Node | None:
    """What a node casts from ``dtype`` to float32 and is still the same at ``end``; otherwise None."""
    after = fake_value(node) if operation(node) in CASTS else None
    if after is None:
        return None
    x = argument(node, 0, "input", "self")
    before = fake_value(x)
    if before is None or before.dtype != dtype or after.dtype != torch.float32:
        return None
    if before.requires_grad != after.requires_grad:  # it is within torch.no_grad
        return None
    return x if written_between(node, end, [x]) is None and not is_written(node) else None


def _tried(find: Callable[[Node], Found], node: Node) -> Found | Refused:
    """What ``find`` gives for a node, or with which reason it refuses it."""
    try:
        return find(node)
    except Refused as refusal:
        return refusal


def _check_keys(logits: Logits, weights: list[Node]) -> None:
    """Raise Refused unless the softmax is over all logits of a row, and only the weights of sinks are dropped."""
    keys, over = logits.shape[-1], shape_of(weights[0])[-1]
    if not same(over, keys if logits.sinks is None else keys + 1):
        raise Refused(f"its softmax must be over the {keys} logits of a row, got {over}")
    dropping = [selected for node in weights if (selected := _dropped_weights(node)) is not None]
    if not (same(shape_of(weights[-1])[-1], keys) and len(dropping) == (logits.sinks is not None)):
        raise Refused("its weights of all keys, and of no sinks, must be multiplied with the values")
    if any(selected.start != 0 for selected in dropping):
        raise Refused("the weights of its sinks must be the last of a row")


def _require_private(node: Node, own: set[Node]) -> None:
    """Raise Refused if others read a node too; a row's maximum, which belongs to ``own``, is a second reader."""
    readers = users(node)
    if len(readers) > 1 and not own.issuperset(readers):
        names = sorted({plain_name(user) for user in readers})
        raise Refused(f"its {plain_name(node)} has other readers too: {', '.join(names)}")


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
                raise Unrecognized(_PASS_THROUGH.format(steps[0]))
            raise NotAttention
        node = onward[0]
        if operation(node) == "dropout" and not is_inactive_dropout(node):
            raise Refused("dropout of its attention weights must be inactive")
        path.append(node)


def _hands_on(node: Node, value: Node) -> bool:
    passes = keeps_numbers(node) or operation(node) == "dropout" or _dropped_weights(node) is not None or _zeroes(node)
    return passes and argument(node, 0, "input", "self") is value


def _zeroes(node: Node) -> bool:
    """Whether a node is ``x.masked_fill(mask, 0)``."""
    return operation(node) == "masked_fill" and constant_number(argument(node, 2, "value")) == 0.0


def _without_hidden_weights(summands: list[Summand], weights: list[Node]) -> list[Summand]:
    """The summands with which no weight is left that these nodes set to zero, also where no key is left in a row.

    Raises:
        Unrecognized: the weights of other keys are set to zero than those of the only mask.
    """
    for node in filter(_zeroes, weights):
        masks = [summand for summand in summands if summand.fill is not None]
        hidden = argument(node, 1, "mask")
        known = len(masks) == 1 and not masks[0].seen and same_shape(masks[0].shape, shape_of(node))
        if not known or not same_mask(masks[0].value, hidden):
            raise Unrecognized(_PASS_THROUGH.format(operation(node)))
        summands = [replace(each, fill=-math.inf) if each is masks[0] else each for each in summands]
    return summands


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
