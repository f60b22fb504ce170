"""Makes a norm a part of the quantization that reads it.

From, on a GPU, for many rows that come from memory::

    int8_linear, or an input -> layer_norm or rms_norm -> quantize, or dynamic_quantize per token

To::

    int8_linear, or an input -> qframework::norm_quantize or qframework::norm_dynamic_quantize

Inductor computes both in one kernel as well, with two to five times as many instructions for the same bytes. On an H100
it takes 1.1 to 4.7 times as long (``other/2026-11-27-h100-norm-quantize.json``); no other chip was measured. What
Inductor computes from other tensors is left to it, since it reads them in the same kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from qframework.backend.keep_quantize import has_many_rows, is_per_token, is_written_by_int8_linear
from qframework.backend.lowering import Lowering, erase_unused
from qframework.graph.nodes import argument, fake_value
from qframework.graph.norms import NormCall, norm_call
from qframework.graph.writes import written_between
from qframework.kernels.norm_quantize import MAX_CHANNELS
from qframework.numerics import FLOAT_DTYPES

_ours = torch.ops.qframework


def fuse_norm(lowering: Lowering) -> None:
    """Replace every such pair whose norm nothing else reads."""
    gm = lowering.gm
    for node in list(gm.graph.nodes):
        norm = _norm_before(node)
        if norm is None or not _pays(norm) or written_between(norm.input, node, norm.input_nodes):
            continue
        arguments: tuple[Any, ...] = tuple(norm)
        operator = _ours.norm_dynamic_quantize.default
        if node.target is _ours.quantize.default:
            operator, arguments = _ours.norm_quantize.default, (*arguments, node.args[1])
        with gm.graph.inserting_before(node):
            fused = gm.graph.call_function(operator, arguments)
        fused.meta = dict(node.meta)
        node.replace_all_uses_with(fused)
        erase_unused(gm, node)


def _norm_before(node: Node) -> NormCall | None:
    """The norm that only this quantization, per token or with one given scale, reads."""
    if node.target is _ours.quantize.default:
        scale = fake_value(node.args[1]) if isinstance(node.args[1], Node) else None
        fits = scale is not None and scale.numel() == 1 and argument(node, 2, "zero_point") is None
    else:
        fits = node.target is _ours.dynamic_quantize.default and is_per_token(node)
    source = node.args[0] if fits else None
    return norm_call(source) if isinstance(source, Node) and len(source.users) == 1 else None


def _pays(norm: NormCall) -> bool:
    """Whether the norm reads many rows from a GPU's memory."""
    x = fake_value(norm.input)
    if x is None or x.device.type != "cuda":
        return False
    if norm.input.op not in ("placeholder", "get_attr") and not is_written_by_int8_linear(norm.input):
        return False
    channels = x.shape[-1]
    fits = x.dtype in FLOAT_DTYPES and isinstance(channels, int) and channels <= MAX_CHANNELS and x.is_contiguous()
    return fits and has_many_rows(x.shape) and all(map(_is_parameter, (norm.weight, norm.bias)))


def _is_parameter(node: Node | None) -> bool:
    """Whether the operator takes it as weight or bias."""
    fake = None if node is None else fake_value(node)
    return node is None or (fake is not None and fake.ndim == 1 and fake.dtype in FLOAT_DTYPES)
