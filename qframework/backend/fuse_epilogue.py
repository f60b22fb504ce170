"""Fuses what follows an ``int8_linear`` that the model itself calls, as the modules of ``quantize_`` do.

From::

    x ─┬> dynamic_quantize ─> int8_linear (+ bias) -> [activation] -> [+ residual] -> [quantize] -> ...
       └> dynamic_quantize ─> int8_linear (+ bias) -> ...

To::

    x ──> dynamic_quantize ─┬> int8_linear (+ bias, activation, residual, int8 out) -> ...
                            └> int8_linear (+ bias) -> ...
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from qframework.backend.lowering import Lowering
from qframework.backend.quantized_linear import (
    Epilogue,
    Quantized,
    find_epilogue,
    insert_int8_linear,
    int8_linear_arguments,
    is_int8_linear,
)
from qframework.backend.report import LayerReport
from qframework.graph.nodes import LinearCall, fake_value, layer_name
from qframework.graph.writes import written_between

_ours = torch.ops.qframework
_QUANTIZE = (_ours.quantize.default, _ours.dynamic_quantize.default)


def fuse_epilogue(lowering: Lowering) -> None:
    """Quantize a tensor once for all layers that read it, extend every ``int8_linear``, and report on it."""
    gm = lowering.gm
    _share_quantize(lowering)
    for node in list(gm.graph.nodes):
        if not is_int8_linear(node):
            continue
        name, own = layer_name(node), _own_epilogue(node)
        epilogue = own or find_epilogue(node)
        if epilogue.end is not node:
            x = int8_linear_arguments(node)
            a, b = Quantized(x.a, x.a_scale), Quantized(x.b, x.b_scale)
            node = insert_int8_linear(gm, LinearCall(x.a, x.b, x.bias), a, b, epilogue, lowering.scales)
        lowering.layers[node] = name
        lowering.reports.append(LayerReport(name, True, epilogue.describe(), ""))


def is_bare_int8_linear(node: Node) -> bool:
    """Whether the node is an ``int8_linear`` that the model calls and that can be given an epilogue."""
    return is_int8_linear(node) and _own_epilogue(node) is None


def _own_epilogue(node: Node) -> Epilogue | None:
    """The epilogue that a call already has, or with which it cannot be extended; None if there is none."""
    x = int8_linear_arguments(node)
    unknown = fake_value(node) is None  # the dtype of a new call would be unknown as well
    if x.activation == "none" and x.residual is None and x.out_scale is None and not unknown:
        return None
    return Epilogue(node, x.activation, x.residual, x.out_scale)


def _share_quantize(lowering: Lowering) -> None:
    """Merge quantizations of one tensor with equal arguments, unless the tensor is written in between."""
    first: dict[Any, Node] = {}
    for node in list(lowering.gm.graph.nodes):
        if node.target not in _QUANTIZE or node.kwargs or not isinstance(node.args[0], Node):
            continue
        key = node.target, node.args
        known = first.setdefault(key, node)
        if known is node:
            continue
        if written_between(known.next, node, [node.args[0]]) is not None:
            first[key] = node
            continue
        node.replace_all_uses_with(known)
        lowering.gm.graph.erase_node(node)
