"""Keeps our own kernel for a quantization that Inductor cannot fuse with anything.

From::

    int8_linear, or a parameter -> dynamic_quantize          decomposed; Inductor reads long rows twice

To, on a GPU::

    int8_linear, or a parameter -> dynamic_quantize.alone    a row of up to 8,192 values is read once

The input of the quantization comes from an opaque operator or from memory, so there is nothing to fuse with.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from qframework.backend.lowering import Lowering
from qframework.graph.nodes import argument, fake_value

_ours = torch.ops.qframework


def keep_dynamic_quantize(lowering: Lowering) -> None:
    """Replace every such ``dynamic_quantize`` by its ``alone`` overload, which is not decomposed."""
    for node in lowering.gm.graph.nodes:
        if node.target is _ours.dynamic_quantize.default and is_per_token(node) and _not_fused(node.args[0]):
            node.target = _ours.dynamic_quantize.alone


def is_per_token(node: Node) -> bool:
    """Whether a ``dynamic_quantize`` node has a scale for each token."""
    return argument(node, 1, "granularity") == "per_token"


def _not_fused(x: object) -> bool:
    """Whether ``x`` is not computed by Inductor: an input of the graph, a parameter, a result of ``int8_linear``."""
    if not isinstance(x, Node) or not (x.op in ("placeholder", "get_attr") or x.target is _ours.int8_linear.default):
        return False
    fake = fake_value(x)
    return fake is not None and fake.device.type == "cuda"
