"""Gives attention masks the layout that PyTorch's fused kernels can read.

From::

    bias (B, H, N, Nk), its last dimension with a stride, as of embeddings (N, Nk, H) -> scaled_dot_product_attention

To::

    bias -> contiguous -> scaled_dot_product_attention

PyTorch's fused kernels take masks whose last dimension is contiguous. For any other it computes products and softmax by
themselves, those of 16-bit operands in float32: T5 spends two thirds of its time there, in FP16 on an H100.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qframework.graph.nodes import add_call, argument, fake_value, operation
from qframework.graph.shapes import same
from qframework.graph.writes import written_between

aten = torch.ops.aten


def make_masks_dense(gm: GraphModule) -> None:
    """Copy, in place, every strided mask of ``scaled_dot_product_attention``, once for all calls that read it."""
    copies: dict[Node, Node] = {}
    for node in list(gm.graph.nodes):
        if operation(node) != "scaled_dot_product_attention":
            continue
        mask = argument(node, 3, "attn_mask")
        value = fake_value(mask) if isinstance(mask, Node) else None
        if value is None or value.ndim < 2 or same(value.shape[-1], 1) or same(value.stride(-1), 1):
            continue
        known = copies.get(mask)
        if known is None or written_between(known, node, [mask]) is not None:
            with gm.graph.inserting_before(node):
                known = copies[mask] = _dense(node, mask, value)
        node.replace_input_with(mask, known)


def _dense(like: Node, mask: Node, value: Tensor) -> Node:
    """A copy of the mask; dimensions along which it is expanded stay so, but for that of the keys."""
    expanded = [dim for dim in range(value.ndim - 1) if same(value.stride(dim), 0) and not same(value.shape[dim], 1)]
    part = mask
    for dim in expanded:
        part = add_call(like, aten.slice.Tensor, (part, dim, 0, 1))
    copy = add_call(like, aten.clone.default, (part,), {"memory_format": torch.contiguous_format})
    return add_call(like, aten.expand_as.default, (copy, mask)) if expanded else copy
