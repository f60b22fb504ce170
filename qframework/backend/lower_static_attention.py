"""Lowers static INT8 attention of a converted PT2E graph (QAttn).

From::

    q -> quantize -> dequantize ─┐
    k -> quantize -> dequantize ─┼> attention -> transpose -> reshape -> [quantize] -> ...
    v -> quantize -> dequantize ─┘

To::

    q -> quantize ─┐
    k -> quantize ─┼> qframework::mixed_attention (int8) -> transpose -> reshape -> ...
    v -> quantize ─┘

If all readers of the output quantize it, behind views, with one scale, that becomes the operator's ``out_scale``, and
the next linear reads int8. hoist_quantize then moves the quantization of q, k and v into the epilogue of their linear.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from qframework.backend.hoist_quantize import drop_requantization, erase_quantize, is_static_quantize, mark_int8
from qframework.backend.lowering import Lowering, ScaleConstants, erase_unused
from qframework.backend.quantized_linear import CannotLower, Quantized, dequantized, static_quantize_scale
from qframework.backend.report import LayerReport
from qframework.graph.attention.call import NotAttention, Refused
from qframework.graph.attention.patterns import sdpa_call, share_one_head
from qframework.graph.attention.write import AttentionWriter
from qframework.graph.channels import ChannelView, quantized_everywhere
from qframework.graph.nodes import Constants, argument, fake_value, layer_name, notes_of, operation

_ours = torch.ops.qframework
_ROLES = ("query", "key", "value")


def lower_static_attention(lowering: Lowering) -> None:
    """Replace every attention whose query, key and value are dequantized; report on those.

    Report also on attention, in either form, of which the quantizer noted why no kernel computes it.
    """
    gm, constants, scales, reports = lowering.gm, lowering.constants, lowering.scales, lowering.reports
    for node in list(gm.graph.nodes):
        notes = notes_of(node)
        if notes and operation(node) == "softmax":
            name = layer_name(argument(node, 0, "input", "self"))
            reports.append(LayerReport(name, False, "matmul, softmax, matmul", notes, fallback=True, kind="attention"))
        if operation(node) != "scaled_dot_product_attention":
            continue
        name = layer_name(node)
        try:
            operands = _operands(node, constants, name)
        except (CannotLower, Refused) as refusal:
            reports.append(
                LayerReport(name, False, "float attention", notes or str(refusal), fallback=True, kind="attention")
            )
            continue
        if operands is not None:
            reports.append(LayerReport(name, True, _lower(gm, node, operands, scales), notes, kind="attention"))
        elif notes:
            reports.append(LayerReport(name, False, "float attention", notes, fallback=True, kind="attention"))
    drop_requantization(gm)


class _Operands(NamedTuple):
    query: Quantized
    key: Quantized
    value: Quantized


def _operands(node: Node, constants: Constants, name: str) -> _Operands | None:
    """The operands of attention; None if none of them is quantized."""
    nodes = {role: argument(node, i, role) for i, role in enumerate(_ROLES)}
    found = {role: _dequantized(operand, constants, name, role) for role, operand in nodes.items()}
    missing = [role for role, operand in found.items() if operand is None]
    if len(missing) == len(_ROLES):
        return None
    if missing:
        raise CannotLower(f"its query, key and value must be quantized together; not quantized: {', '.join(missing)}")
    if (dropout_p := argument(node, 4, "dropout_p", default=0.0)) != 0:
        raise CannotLower(f"its dropout_p must be 0, got {dropout_p}")
    return _Operands(**found)  # type: ignore[arg-type]


def _dequantized(node: Any, constants: Constants, name: str, role: str) -> Quantized | None:
    """``dequantized``, also with one scale for each head of ``(..., H, N, D)``."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    if node.target is _ours.dequantize.default:
        raise CannotLower(f"its {role} must have one static scale, got one per token or from the data")
    found = dequantized(node, constants, name, role=role, axis=_heads_axis(node))
    if found is not None and found.zero_point != 0:
        raise CannotLower(f"its {role} must have zero point 0 (symmetric quantization), got {found.zero_point}")
    return found


def _heads_axis(node: Node) -> int | None:
    fake = fake_value(node)
    return fake.ndim - 3 if fake is not None and fake.ndim > 3 else None


def _lower(gm: GraphModule, node: Node, operands: _Operands, scales: ScaleConstants) -> str:
    """Replace ``node`` by ``mixed_attention``; returns the operator's name for the report."""
    fake = fake_value(node)
    assert fake is not None
    mask, rel_h, rel_w = _bias(gm, node)
    out_scale = _output_scale(gm, node)
    grouped = argument(node, 7, "enable_gqa", default=False)
    if not grouped:
        grouped = share_one_head(*(argument(node, i, role) for i, role in enumerate(_ROLES)))
    with gm.graph.inserting_before(node):
        operand_scales = [_scale_node(gm, operand, fake.device, scales) for operand in operands]
        new = gm.graph.call_function(
            _ours.mixed_attention.default,
            (
                *(operand.value for operand in operands),
                *operand_scales,
                mask,
                argument(node, 5, "is_causal", default=False),
                argument(node, 6, "scale"),
                grouped,
                scales.node(out_scale, fake.device) if out_scale is not None else None,
                fake.dtype if out_scale is None else None,
                rel_h,
                rel_w,
            ),
        )
    new.meta = dict(node.meta)
    if out_scale is not None:
        mark_int8([new])
    node.replace_all_uses_with(new)
    erase_unused(gm, node)
    _allow_any_strides(new)
    return "qframework::mixed_attention" + (" (int8 out)" if out_scale is not None else "")


def _bias(gm: GraphModule, node: Node) -> tuple[Node | None, Node | None, Node | None]:
    """Mask, relative heights and widths: a mask that is a sum of relative positions becomes its two factors."""
    call, mask = sdpa_call(node), argument(node, 3, "attn_mask")
    if call is None or mask is None:
        return mask, None, None
    writer = AttentionWriter(gm, call)
    try:
        return writer.operands()[3:]
    except (NotAttention, Refused):
        writer.undo()
        return mask, None, None


def _scale_node(gm: GraphModule, operand: Quantized, device: torch.device, scales: ScaleConstants) -> Node:
    if isinstance(operand.scale, float):
        return scales.node(operand.scale, device)
    return gm.graph.call_function(torch.ops.aten.view.default, (operand.scale, [-1, 1, 1]))


def _output_scale(gm: GraphModule, node: Node) -> float | None:
    """The scale with which all readers quantize the output behind views; erases those quantize nodes."""
    fake = fake_value(node)
    assert fake is not None
    found = quantized_everywhere(node, ChannelView.without_channels(fake.shape), is_static_quantize)
    if found is None:
        return None
    leaves, views = found
    kept = {static_quantize_scale(leaf.node, leaf.node.all_input_nodes[0]) for leaf in leaves}
    scale = kept.pop()
    if kept or not isinstance(scale, float):
        return None
    erase_quantize(gm, leaves)
    mark_int8(views)
    return scale


def _allow_any_strides(node: Node) -> None:
    """Turn ``view`` after attention into ``reshape``: the memory order, (..., N, H, D), may differ from SDPA's."""
    for user in node.users:
        if operation(user) == "transpose" or operation(user) == "permute":
            _allow_any_strides(user)
        elif user.target is torch.ops.aten.view.default:
            user.target = torch.ops.aten.reshape.default
