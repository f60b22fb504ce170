"""Lowers the static quantize and dequantize nodes that are left around float operators.

From::

    x -> quantized_decomposed.quantize_per_tensor         x_int8 -> quantized_decomposed.dequantize_per_tensor

To::

    x -> qframework::quantize                             x_int8 -> qframework::dequantize

so that rounding is the same everywhere. Inductor gets decompositions of both and fuses them into the neighbouring
LayerNorm, softmax or GELU; in some versions, its own form of ``quantize_per_tensor`` supports only float32.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from qframework.backend.lowering import Lowering, ScaleConstants
from qframework.backend.quantized_linear import static_quantization
from qframework.compat.operators import OpOverload
from qframework.graph.nodes import fake_value
from qframework.numerics import FLOAT_DTYPES, QMAX

_decomposed = torch.ops.quantized_decomposed
_ours = torch.ops.qframework


def lower_quantize(lowering: Lowering) -> None:
    """Replace every static INT8 quantize and dequantize with a single scale, and perhaps a zero point."""
    gm, scales = lowering.gm, lowering.scales
    for node in list(gm.graph.nodes):
        if node.target is _decomposed.quantize_per_tensor.default:
            _lower_one_quantize(gm, node, scales)
        elif node.target is _decomposed.dequantize_per_tensor.default:
            _lower_one_dequantize(gm, node, scales)


def _lower_one_quantize(gm: GraphModule, node: Node, scales: ScaleConstants) -> None:
    x = node.args[0]
    found = static_quantization(node, x) if isinstance(x, Node) else None
    fake = fake_value(x) if isinstance(x, Node) else None
    if found is not None and fake is not None and fake.dtype in FLOAT_DTYPES and fake.ndim > 0:
        scale, zero_point = found
        arguments = (x, scales.node(scale, fake.device), scales.zero_point(zero_point, fake.device))
        _replace(gm, node, _ours.quantize.default, arguments)


def _lower_one_dequantize(gm: GraphModule, node: Node, scales: ScaleConstants) -> None:
    q, scale, zero_point, quant_min, quant_max, dtype = node.args
    fake = fake_value(node)
    ours = (quant_min, quant_max, dtype) == (-QMAX, QMAX, torch.int8) and isinstance(zero_point, int)
    if ours and isinstance(scale, float) and fake is not None and fake.dtype in FLOAT_DTYPES:
        zero = scales.zero_point(zero_point, fake.device)  # type: ignore[arg-type]
        _replace(gm, node, _ours.dequantize.default, (q, scales.node(scale, fake.device), fake.dtype, zero))


def _replace(gm: GraphModule, node: Node, target: OpOverload, args: tuple) -> None:
    with gm.graph.inserting_before(node):
        new = gm.graph.call_function(target, args)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)
