"""Writes the operator ``int8_linear`` of modules that ``quantize_`` made as PT2E writes a quantized linear.

From::

    x -> quantize -> int8_linear(_, scale, w_int8, w_scale, bias)

To::

    x -> quantize -> dequantize ──┐
    w_int8 (N, K) -> dequantize ──┴> linear (+ bias)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from qframework.compat.operators import schema
from qframework.errors import UnsupportedError
from qframework.graph.attributes import add_attribute, attribute
from qframework.graph.nodes import layer_name
from qframework.graph.rewrites.shorten import erase_scale_origins

_aten = torch.ops.aten
_ours = torch.ops.qframework
_INT8_LINEAR = _ours.int8_linear.default
_UNFUSED = {"activation": "none", "residual": None, "out_scale": None, "out_zero_point": None}


def expand_int8_linear(gm: GraphModule) -> None:
    """Expand every ``int8_linear`` of a graph in place.

    Raises:
        UnsupportedError: one has an epilogue, which the modules of ``quantize_`` do not have.
    """
    erase_scale_origins(gm)
    for node in gm.graph.find_nodes(op="call_function", target=_INT8_LINEAR):
        with gm.graph.inserting_before(node):
            linear = _linear(gm, node, _arguments(node))
        node.replace_all_uses_with(linear)
        gm.graph.erase_node(node)
    gm.recompile()


def _arguments(node: Node) -> dict[str, Any]:
    arguments = schema(_INT8_LINEAR).arguments
    call = {argument.name: argument.default_value for argument in arguments}
    call |= dict(zip((argument.name for argument in arguments), node.args, strict=False)) | node.kwargs
    fused = [name for name, value in _UNFUSED.items() if call.get(name) != value]
    if fused:
        raise UnsupportedError(
            f"to_onnx: layer {layer_name(node)!r}: int8_linear must have no epilogue, got {', '.join(fused)}"
        )
    return call


def _linear(gm: GraphModule, node: Node, call: dict[str, Any]) -> Node:
    dtype, function = call["out_dtype"], gm.graph.call_function
    scale: Any = call["b_scale"]
    if not isinstance(scale, Node) or scale.op != "get_attr":
        raise UnsupportedError(f"to_onnx: layer {layer_name(node)!r}: the scales of its weight must be constants")
    rows = add_attribute(gm, f"{scale.target}_rows", attribute(gm, scale).reshape(-1, 1))
    x = function(_ours.dequantize.default, (call["a"], call["a_scale"], dtype))
    weight = function(_ours.dequantize.default, (call["b"], rows, dtype))
    linear = function(_aten.linear.default, (x, weight, call["bias"]))
    linear.meta = {key: node.meta[key] for key in ("val", "nn_module_stack") if key in node.meta}
    return linear
