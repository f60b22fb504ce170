"""Selects a token before the operations that compute every token by itself, not behind them.

From::

    attention -> linear -> add -> norm -> linear -> gelu -> linear -> add -> norm -> [:, 0] -> head

To::

    attention -> [:, 0:1] -> linear -> add -> norm -> linear -> gelu -> linear -> add -> norm -> [:, 0] -> head

A classifier reads one token of the last block: three of its four linears, and the norms, then compute one token of each
sequence. The same holds for the last token of a prompt.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from qframework.compat.dynamo import value_key
from qframework.graph.nodes import (
    activation_name,
    add_call,
    argument,
    fake_value,
    is_inactive_dropout,
    linear_call,
    operation,
    why_not_plain,
)
from qframework.graph.selections import Selection, is_single, keeps_dimension, selection
from qframework.graph.shapes import same

aten = torch.ops.aten
_decomposed = torch.ops.quantized_decomposed
_ours = torch.ops.qframework

_NORMS = {
    *(F.layer_norm, torch.layer_norm, aten.layer_norm.default),
    *(F.rms_norm, torch.rms_norm, aten.rms_norm.default),
}
_OF_ELEMENTS = {
    *(operator.add, torch.add, aten.add.Tensor, operator.mul, torch.mul, aten.mul.Tensor),
    *(operator.sub, torch.sub, aten.sub.Tensor, operator.truediv, torch.div, aten.div.Tensor),
    _decomposed.quantize_per_tensor.default,
    _decomposed.dequantize_per_tensor.default,
    _ours.dequantize.default,
}
_OF_ONE_OPERAND = {"pow", "rsqrt", "to", "float"}  # of an RMSNorm that is written out, as in transformers


def select_early(gm: GraphModule) -> None:
    """Move, in place, every selection of one token as far up as each token is computed by itself."""
    for node in list(gm.graph.nodes):
        selected = _selection(node)
        if selected is not None and (moved := _movable(gm, selected)):
            _move(gm, node, selected, moved)


def _selection(node: Node) -> Selection | None:
    """Which token of ``(B, N, C)`` the node selects; None if it does something else."""
    selected = selection(node)
    fake = fake_value(selected.source) if selected is not None else None
    if selected is None or fake is None or fake.ndim != 3 or not fake.is_floating_point() or selected.dim != 1:
        return None
    if why_not_plain(fake) is not None:
        return None
    return selected if is_single(node, selected) else None


def _movable(gm: GraphModule, selected: Selection) -> list[Node]:
    """The operations whose other tokens nobody reads, in graph order."""
    kept: set[Node] = set()  # those that must stay
    if len(selected.source.users) > 1 or not _is_of_tokens(selected.source):
        return []
    while True:
        found: dict[Node, None] = {}
        for node in reversed(gm.graph.nodes):
            wanted = node is selected.source or _read_by(node, found)
            if wanted and node not in kept and _is_of_tokens(node):
                found[node] = None
        blocked = [node for node in found if _hides_quantization(node, found)]
        if not blocked:
            return list(found)[::-1]
        kept.update(blocked)


def _read_by(node: Node, found: Collection[Node]) -> bool:
    """Whether only operations that move read ``node``, and read it by tokens."""
    return bool(node.users) and all(user in found and node in _by_token(user) for user in node.users)


def _is_of_tokens(node: Node) -> bool:
    """Whether ``node`` computes each token of ``(B, N, C)`` from that token alone."""
    if _is_dynamic_quantize(node):
        fake = fake_value(node.args[0])  # type: ignore[arg-type]
        return fake is not None and fake.ndim == 3 and argument(node, 1, "granularity") == "per_token"
    fake = fake_value(node)
    if not node.op.startswith("call_") or fake is None or fake.ndim != 3:
        return False
    if node.target in _NORMS:
        return len(argument(node, 1, "normalized_shape")) == 1
    if node.target is operator.getitem:
        return isinstance(node.args[0], Node) and _is_dynamic_quantize(node.args[0])
    operands = [fake_value(operand) for operand in _by_token(node)]
    return _is_known(node) and bool(operands) and all(x is not None and x.ndim == 3 for x in operands)


def _is_known(node: Node) -> bool:
    """Whether ``node`` is a linear layer, an operation on elements, or a mean over channels."""
    if _name(node).endswith("_"):  # in place
        return False
    if operation(node) == "mean":
        kept = argument(node, 2, "keepdim", default=False)
        return argument(node, 1, "dim") in (-1, [-1], (-1,)) and kept is True
    if operation(node) in _OF_ONE_OPERAND or node.target in _OF_ELEMENTS:
        return True
    return linear_call(node) is not None or activation_name(node) is not None or is_inactive_dropout(node)


def _is_dynamic_quantize(node: Node) -> bool:
    """Whether ``node`` returns integers and their scales."""
    return node.target is _ours.dynamic_quantize.default


def _name(node: Node) -> str:
    """What the operation is called, with an underscore at the end if it works in place."""
    return getattr(node.target, "__name__", str(node.target)).partition(".")[0]


def _by_token(node: Node) -> list[Node]:
    """The operands of which a token of ``node`` reads the same token."""
    fake = fake_value(node)
    if node.target not in _OF_ELEMENTS:
        first = argument(node, 0, "input")
        return [first] if isinstance(first, Node) else []
    values = [(operand, fake_value(operand)) for operand in node.all_input_nodes]
    return [
        operand
        for operand, value in values
        if fake is not None and value is not None and value.ndim > 1 and same(value.shape[-2], fake.shape[-2])
    ]


def _hides_quantization(node: Node, found: Collection[Node]) -> bool:
    """Whether a selection in front of ``node`` would come between a value and its quantization."""
    outside = [operand for operand in _by_token(node) if operand not in found]
    quantizes = node.target is _decomposed.quantize_per_tensor.default
    results = any("dequantize" in str(operand.target) or fake_value(operand) is None for operand in outside)
    return bool(outside) and (quantizes or results)


def _move(gm: GraphModule, reader: Node, selected: Selection, moved: list[Node]) -> None:
    new: dict[Node, Node] = {}

    def one_token(operand: Node, like: Node) -> Node:
        if operand not in new:
            new[operand] = add_call(like, aten.slice.Tensor, (operand, -2, selected.start, selected.stop))
        return new[operand]

    for node in moved:
        with gm.graph.inserting_before(node):
            operands = {operand: one_token(operand, node) for operand in _by_token(node)}
            copy = gm.graph.node_copy(node, functools.partial(_replaced, operands))
        key = value_key(node)
        copy.meta = {**node.meta, key: _of_one_token(node.meta[key])}
        new[node] = copy
    result = new[selected.source]
    if keeps_dimension(reader, selected):
        reader.replace_all_uses_with(result)
    else:
        with gm.graph.inserting_before(reader):
            chosen = add_call(reader, aten.select.int, (result, 1, 0))
        reader.replace_all_uses_with(chosen)
    for node in (reader, *reversed(moved)):
        gm.graph.erase_node(node)


def _replaced(operands: Mapping[Node, Node], operand: Node) -> Node:
    return operands.get(operand, operand)


def _of_one_token(value: Any) -> Any:
    """A recorded value for one token."""
    return value[:, :1].contiguous() if isinstance(value, torch.Tensor) else tuple(map(_of_one_token, value))
