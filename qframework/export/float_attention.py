"""Puts float attention in the place of INT8 attention, which neither QDQ nor a standard operator of ONNX expresses.

Static INT8 attention, from::

    q, k, v -> quantize -> dequantize -> scaled_dot_product_attention

To::

    q, k, v -> scaled_dot_product_attention

The operator ``qframework.sage_attention`` of the variants becomes ``scaled_dot_product_attention``, with its relative
positions as a bias.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from qframework.compat.operators import schema
from qframework.errors import UnsupportedError
from qframework.export.qdq import float_before
from qframework.graph.nodes import fake_value, layer_name

_aten = torch.ops.aten
_SDPA = _aten.scaled_dot_product_attention.default
_VARIANT = torch.ops.qframework.sage_attention.default
REASON = "INT8 attention has no form in QDQ"


def write_float_attention(gm: GraphModule) -> dict[str, str]:
    """Replace all INT8 attention of a graph in place; returns the layers with the reason.

    Raises:
        UnsupportedError: the model reads the log-sum-exp of a variant, which float attention does not return, or caps
            its logits, which float attention does not compute.
    """
    replaced: dict[str, str] = {}
    gm.graph.eliminate_dead_code()  # an exported program has a node for each result of an operator, read or not
    for node in list(gm.graph.nodes):
        if node.target is _SDPA and _read_float_operands(node):
            replaced[layer_name(node)] = REASON
        elif node.target is _VARIANT:
            replaced[layer_name(node)] = REASON
            _write_sdpa(gm, node)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return replaced


def _read_float_operands(node: Node) -> bool:
    sources = {operand: x for operand in node.args[:3] if (x := float_before(operand)) is not None}  # type: ignore[arg-type]
    for operand, x in sources.items():
        node.replace_input_with(operand, x)  # type: ignore[arg-type]
    return bool(sources)


def _write_sdpa(gm: GraphModule, node: Node) -> None:
    names = [argument.name for argument in schema(_VARIANT).arguments]
    call: dict[str, Any] = {argument.name: argument.default_value for argument in schema(_VARIANT).arguments}
    call |= dict(zip(names, node.args, strict=False)) | node.kwargs
    if any(user.target is not operator.getitem or user.args[1] != 0 for user in node.users):
        raise UnsupportedError(
            f"to_onnx: attention {layer_name(node)!r} must return its output alone, but the model reads its log-sum-exp"
        )
    if call["softcap"] is not None:
        raise UnsupportedError(
            f"to_onnx: attention {layer_name(node)!r} must have no softcap, got {call['softcap']}, which "
            "scaled_dot_product_attention does not take. Leave it in float"
        )
    with gm.graph.inserting_before(node):
        mask = _mask(gm, call)
        out = gm.graph.call_function(
            _SDPA,
            (call["query"], call["key"], call["value"], mask, 0.0, call["is_causal"]),
            {"scale": call["scale"], "enable_gqa": call["enable_gqa"]},
        )
    for user in list(node.users):
        out.meta = dict(user.meta)
        user.replace_all_uses_with(out)
        gm.graph.erase_node(user)
    gm.graph.erase_node(node)


def _mask(gm: GraphModule, call: dict[str, Any]) -> Node | None:
    """The mask and the relative positions ``rel_h (..., N, kh)`` and ``rel_w (..., N, kw)`` as one mask."""
    mask, rel_h, rel_w = call["attn_mask"], call["rel_h"], call["rel_w"]
    if rel_h is None:
        return mask
    function = gm.graph.call_function
    grid = function(
        _aten.add.Tensor,
        (function(_aten.unsqueeze.default, (rel_h, -1)), function(_aten.unsqueeze.default, (rel_w, -2))),
    )
    bias = function(_aten.flatten.using_ints, (grid, -2))
    if mask is None:
        return bias
    value = fake_value(mask)
    if value is not None and value.dtype == torch.bool:
        excluded = function(_aten.logical_not.default, (mask,))
        return function(_aten.masked_fill.Scalar, (bias, excluded, float("-inf")))
    return function(_aten.add.Tensor, (bias, mask))
