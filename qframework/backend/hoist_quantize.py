"""Moves quantization before views, so that a linear layer writes the int8 that attention reads.

From::

    linear -> reshape -> permute -> unbind ─┬> quantize (s_q) -> ...
                                            ├> quantize (s_k) -> ...
                                            └> quantize (s_v) -> ...

To::

    linear -> qframework::quantize (one scale for each channel) -> reshape -> permute -> unbind -> ...

which lower_linear then moves into the linear's epilogue. This requires that all readers of the linear quantize it: a
normalization or rotary embedding in between needs float values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qframework.backend.lowering import Lowering
from qframework.backend.quantized_linear import find_epilogue, is_quantized_linear, static_quantize_scale
from qframework.backend.watched_values import Operand, WatchedValues, is_followed, is_written
from qframework.compat.dynamo import VALUE_KEYS
from qframework.graph.channels import ChannelView, Leaf, quantized_everywhere
from qframework.graph.nodes import fake_value, linear_call
from qframework.numerics import QMAX

_decomposed = torch.ops.quantized_decomposed
_ours = torch.ops.qframework


def hoist_quantize(lowering: Lowering) -> None:
    """Move the quantization of every quantized linear's output to the linear, across the views in between."""
    gm, constants, watched = lowering.gm, lowering.constants, WatchedValues()
    for node in list(gm.graph.nodes):
        if linear_call(node) is None or not is_quantized_linear(node, constants):
            continue
        epilogue = find_epilogue(node)
        fake = fake_value(epilogue.end)
        if epilogue.out_scale is not None or fake is None or not isinstance(fake.shape[-1], int):
            continue
        found = quantized_everywhere(epilogue.end, ChannelView.of(fake.shape), is_static_quantize)
        if found is None:
            continue
        leaves, views = found
        channel_scales = _ChannelScales(torch.full((fake.shape[-1],), -1))
        if all(channel_scales.take(leaf) for leaf in leaves):
            _quantize_here(gm, epilogue.end, channel_scales.node(lowering, epilogue.end, fake.device, watched))
            erase_quantize(gm, leaves)
            mark_int8(views)
    if watched:
        lowering.checks.append(watched.check)


def is_static_quantize(node: Node, value: Node) -> bool:
    """Whether ``node`` quantizes ``value`` with one static scale, or one for each head of ``(..., H, N, D)``."""
    return isinstance(static_quantize_scale(node, value), float) or per_head_scale(node, value) is not None


def per_head_scale(node: Node, value: Node) -> Node | None:
    """The scales ``(H,)`` of a quantize node of ``value`` along its heads; None for any other node."""
    if node.target is not _decomposed.quantize_per_channel.default or node.args[0] is not value:
        return None
    scale: Any
    _, scale, _, axis, quant_min, quant_max, dtype = node.args
    fake = fake_value(value)
    symmetric = (quant_min, quant_max, dtype) == (-QMAX, QMAX, torch.int8)  # only symmetric quantization has this range
    return scale if symmetric and fake is not None and axis == fake.ndim - 3 else None


@dataclass
class _ChannelScales:
    """The scale with which each output channel of a linear is quantized."""

    index: Tensor  # (N,) int64, into all elements of `sources`; -1: unknown
    sources: dict[float | Node, int] = field(default_factory=dict)  # numbers and nodes (H,), with their first element
    elements: int = 0

    def take(self, leaf: Leaf) -> bool:
        """Record the scales of a quantize node; False if one of its channels already has another scale."""
        scale, channels = _scale_and_channels(leaf)
        if scale is None or channels is None:
            return False
        if scale not in self.sources:
            self.sources[scale] = self.elements
            self.elements += channels.shape[0]
        wanted = (self.sources[scale] + torch.arange(channels.shape[0])[:, None]).expand(channels.shape)
        known = self.index[channels]
        self.index[channels] = wanted
        return bool(((known < 0) | (known == wanted)).all())

    def node(self, lowering: Lowering, end: Node, device: torch.device, watched: WatchedValues) -> Node:
        """A node of ``(N,)`` scales: a buffer that follows writes to the model's, or computed at each call."""
        index, scales = self.index.clamp(min=0).to(device), lowering.scales  # any scale for channels without readers
        nodes = [source for source in self.sources if isinstance(source, Node)]
        if not nodes:
            return scales.buffer(torch.tensor(list(self.sources), device=device)[index])
        if all(is_followed(node, lowering) for node in nodes) and not is_written(nodes, lowering):
            return self._followed(index, lowering, watched)
        position = scales.buffer(index)
        with lowering.gm.graph.inserting_before(end.next):
            parts = [_reread(lowering.gm, s) if isinstance(s, Node) else scales.node(s, device) for s in self.sources]
            joined = lowering.gm.graph.call_function(torch.ops.aten.cat.default, (parts,))
            return lowering.gm.graph.call_function(torch.ops.aten.index_select.default, (joined, 0, position))

    def _followed(self, index: Tensor, lowering: Lowering, watched: WatchedValues) -> Node:
        nodes = [lowering.scales.node(source, index.device) for source in self.sources]
        operands = [Operand(node, lowering.constants) for node in nodes]

        def compute(*values: Any) -> Tensor:
            return torch.cat(values)[index]

        buffer = lowering.scales.buffer(compute(*(each.value for each in operands)))
        watched.add(lowering.constants.value(buffer), compute, operands)
        for node in filter(lowering.scales.owns, nodes):
            lowering.scales.remove(node)
        return buffer


def _scale_and_channels(leaf: Leaf) -> tuple[float | Node | None, Tensor | None]:
    """The scale of a quantize node and the channels it covers, one row for each element of the scale."""
    value = leaf.node.all_input_nodes[0]
    scale = static_quantize_scale(leaf.node, value)
    if isinstance(scale, float):
        return scale, leaf.view.channels()
    heads = len(leaf.view.dims) - 3
    if leaf.view.dims[heads].stride is None and leaf.view.dims[heads].size != 1:
        return None, None  # scales along a dimension without channels
    return per_head_scale(leaf.node, value), leaf.view.channels(heads)


def _reread(gm: GraphModule, node: Node) -> Node:
    """``node``, or another read of its attribute, which may first be read further down."""
    if node.op != "get_attr":
        return node
    again = gm.graph.get_attr(str(node.target))
    again.meta = dict(node.meta)
    return again


def drop_requantization(gm: GraphModule) -> None:
    """Keep a value in int8 if it is dequantized only to be quantized again, after views, with the same scale."""
    for node in list(gm.graph.nodes):
        fake = fake_value(node)
        if node.target is not _decomposed.dequantize_per_tensor.default or fake is None:
            continue
        value: Any
        value, scale, *symmetric = node.args[:6]
        found = quantized_everywhere(node, ChannelView.without_channels(fake.shape), is_static_quantize)
        if found is None or symmetric != [0, -QMAX, QMAX, torch.int8]:
            continue
        leaves, views = found
        if all(static_quantize_scale(leaf.node, leaf.node.all_input_nodes[0]) == scale for leaf in leaves):
            erase_quantize(gm, leaves)
            node.replace_all_uses_with(value)
            gm.graph.erase_node(node)
            mark_int8(views)


def _quantize_here(gm: GraphModule, end: Node, scale: Node) -> None:
    with gm.graph.inserting_after(scale if scale.op == "call_function" else end):
        new = gm.graph.call_function(_ours.quantize.default, (end, scale))
    end.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    new.meta = dict(end.meta)
    mark_int8([new])


def erase_quantize(gm: GraphModule, leaves: list[Leaf]) -> None:
    """Erase quantize nodes, whose inputs are int8 by now."""
    for leaf in leaves:
        leaf.node.replace_all_uses_with(leaf.node.all_input_nodes[0])
        gm.graph.erase_node(leaf.node)


def mark_int8(nodes: list[Node]) -> None:
    """Record that float nodes are now int8."""
    for node in nodes:
        for key in VALUE_KEYS:
            if isinstance(node.meta.get(key), Tensor):
                node.meta[key] = node.meta[key].to(torch.int8)
