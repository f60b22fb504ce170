"""Rearranges tokens before a linear layer, not behind it, so that the layer adds the residual.

From, where windows of tokens become an image again, as in Swin and SAM::

    x -> [quantize] -> linear -> view -> permute -> view -> roll -> [:, :H, :W] -> add(residual)

To::

    x -> view -> permute -> view -> roll -> [:, :H, :W] -> [quantize] -> linear -> add(residual)

which is an ``int8_linear`` with a residual. A linear layer computes each token by itself, so that it commutes with any
order of tokens, and need not compute those that are cut off. Inductor rearranges them in the kernel that quantizes.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from qframework.backend.float_linear import why_float
from qframework.backend.fuse_epilogue import is_bare_int8_linear
from qframework.backend.keep_quantize import is_per_token
from qframework.backend.lowering import Lowering
from qframework.backend.quantized_linear import is_quantized_linear, may_be_contiguous, operands_read
from qframework.compat import pytree
from qframework.compat.dynamo import VALUE_KEYS, recorded_value
from qframework.graph.nodes import added_to, argument, fake_value, linear_call
from qframework.graph.rearrangements import keeps_order, rearranged, rearranges_tokens
from qframework.graph.shapes import Size
from qframework.graph.writes import written_between

_ours = torch.ops.qframework
_DEQUANTIZE = (torch.ops.quantized_decomposed.dequantize_per_tensor.default, _ours.dequantize.default)


def rearrange_early(lowering: Lowering) -> None:
    """Move the rearrangements between an INT8 layer and a sum before the layer and the quantization of its input."""
    for node in list(lowering.gm.graph.nodes):
        chain = _rearrangements(node) if linear_call(node) is not None or is_bare_int8_linear(node) else []
        inputs = _inputs(node) if chain and _becomes_int8(lowering, node) else None
        if inputs is not None and _pays(chain, inputs.value) and _can_add(node, chain[-1]):
            _move(node, chain, inputs)


def _rearrangements(layer: Node) -> list[Node]:
    """What rearranges the tokens of a layer's result before it is added to another tensor; else nothing."""
    chain: list[Node] = []
    value = layer
    while len(value.users) == 1:
        user = next(iter(value.users))
        if added_to(user, value) is not None:
            return chain
        if not rearranges_tokens(user, value):
            break
        chain.append(user)
        value = user
    return []


def _becomes_int8(lowering: Lowering, layer: Node) -> bool:
    """Whether the layer is an ``int8_linear``, or a later pass makes it one."""
    if linear_call(layer) is None or is_quantized_linear(layer, lowering.constants):
        return True
    return why_float(lowering, layer) is None


class _Inputs(NamedTuple):
    """The layer and what quantizes its input for it alone, backwards, and the tensor that the last of these reads."""

    path: list[Node]
    value: Node


def _inputs(layer: Node) -> _Inputs | None:
    """Where tokens can be rearranged before a layer; None if scales of positions or other readers are in the way."""
    value: Any
    path, value, scale = [layer], argument(layer, 0, "input", "a"), None
    if linear_call(layer) is None:
        scale = argument(layer, 1, "a_scale")
    elif value.target in _DEQUANTIZE:
        path.append(value)
        value, scale = value.args[:2]
    if isinstance(scale, Node) and not _is_one_number(scale):
        quantize = _quantize_per_token(value, scale)
        if quantize is None:
            return None
        path += [value, scale, quantize]
        value = argument(quantize, 0, "x")
    if value.target is _ours.hadamard.default:  # stays in front of the quantization, which takes it in
        path.append(value)
        value = argument(value, 0, "x")
    alone = all(user in path for node in (*path[1:], value) for user in node.users)
    return _Inputs(path, value) if alone else None


def _is_one_number(scale: Node) -> bool:
    fake = fake_value(scale)
    return fake is not None and fake.ndim < 2 and fake.numel() == 1


def _quantize_per_token(value: Node, scale: Node) -> Node | None:
    """What computes both from a tensor, token by token; None for scales that do not follow from it."""
    if value.target is not operator.getitem or scale.target is not operator.getitem:
        return None
    quantize: Any = value.args[0]
    if scale.args[:1] != (quantize,) or quantize.target is not _ours.dynamic_quantize.default:
        return None
    return quantize if is_per_token(quantize) else None


def _pays(chain: list[Node], value: Node) -> bool:
    """Whether reordering the input moves no more values than reordering the result; a reshape moves none."""
    x, y = fake_value(value), fake_value(chain[-1])
    if x is None or y is None or not isinstance(x.shape[-1], int):
        return False
    return all(map(keeps_order, chain)) or x.shape[-1] <= y.shape[-1]


def _can_add(layer: Node, last: Node) -> bool:
    """Whether the layer may compute the sum that reads the last rearrangement, in place of it."""
    total = next(iter(last.users))
    residual = added_to(total, last)
    assert residual is not None
    unchanged = written_between(layer.next, total, [*operands_read(layer), residual]) is None
    return unchanged and may_be_contiguous(total)


def _move(layer: Node, chain: list[Node], inputs: _Inputs) -> None:
    graph, last = layer.graph, fake_value(chain[-1])
    assert last is not None
    reader, value = inputs.path[-1], inputs.value
    with graph.inserting_before(reader):
        for node in chain:
            value = rearranged(value, node)
    reader.replace_input_with(inputs.value, value)
    for node in inputs.path:
        _record_tokens(node, last.shape[:-1])
    chain[-1].replace_all_uses_with(layer)
    for node in reversed(chain):
        graph.erase_node(node)


def _record_tokens(node: Node, tokens: tuple[Size, ...]) -> None:
    """Record that a node computes ``(*tokens, C)``, with the channels that it had."""
    new = pytree.tree_map_only(Tensor, lambda old: old.new_empty((*tokens, old.shape[-1])), recorded_value(node))
    node.meta.update(dict.fromkeys(node.meta.keys() & set(VALUE_KEYS), new))
