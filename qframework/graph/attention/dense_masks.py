"""Gives attention masks the layout and dtype that PyTorch's fused kernels read.

From::

    bias (B, H, N, Nk), its last dimension with a stride, as of embeddings (N, Nk, H) -> scaled_dot_product_attention

To::

    bias -> contiguous -> scaled_dot_product_attention

PyTorch's fused kernels take masks whose last dimension is contiguous. For any other it computes products and softmax by
themselves, those of 16-bit operands in float32: T5 spends two thirds of its time there, in FP16 on an H100.

A bool mask becomes 0 and -inf in the dtype of the queries, as PyTorch makes of it, but once for all calls that read it:
Inductor compiles repeated blocks by themselves, and would convert it in each.
"""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qframework.graph.nodes import add_call, argument, fake_value, operation
from qframework.graph.shapes import same
from qframework.graph.writes import written_between

aten = torch.ops.aten
_CONTIGUOUS = {"memory_format": torch.contiguous_format}


def make_masks_dense(gm: GraphModule) -> None:
    """Copy, in place, masks of ``scaled_dot_product_attention``, once for all calls that read them.

    These are masks whose last dimension has a stride, and bool masks of several calls.
    """
    calls = [node for node in gm.graph.nodes if operation(node) == "scaled_dot_product_attention"]
    times = Counter(argument(node, 3, "attn_mask") for node in calls)
    copies: dict[tuple[Node, torch.dtype], Node] = {}
    for node in calls:
        mask = argument(node, 3, "attn_mask")
        value = fake_value(mask) if isinstance(mask, Node) else None
        if value is None or value.ndim < 2 or same(value.shape[-1], 1):
            continue
        dtype = _dtype(node) if value.dtype == torch.bool and times[mask] > 1 else value.dtype
        if dtype == value.dtype and same(value.stride(-1), 1):
            continue
        known = copies.get((mask, dtype))
        if known is None or written_between(known, node, [mask]) is not None:
            with gm.graph.inserting_before(node):
                known = copies[mask, dtype] = _dense(node, mask, value, dtype)
        node.replace_input_with(mask, known)


def _dtype(attention: Node) -> torch.dtype:
    """That of its queries; bool, the mask's, if it is unknown."""
    query = argument(attention, 0, "query")
    fake = fake_value(query) if isinstance(query, Node) else None
    return torch.bool if fake is None else fake.dtype


def _dense(like: Node, mask: Node, value: Tensor, dtype: torch.dtype) -> Node:
    """A copy of the mask; dimensions along which it is expanded stay so, but for that of the keys.

    A mask that becomes floats is not expanded along the queries either, as PyTorch's is not.
    """
    last = value.ndim - (1 if dtype == value.dtype else 2)
    expanded = [dim for dim in range(last) if same(value.stride(dim), 0) and not same(value.shape[dim], 1)]
    part = mask
    for dim in expanded:
        part = add_call(like, aten.slice.Tensor, (part, dim, 0, 1))
    if dtype == value.dtype:
        copy = add_call(like, aten.clone.default, (part,), _CONTIGUOUS)
    else:
        zeros = add_call(like, aten.zeros_like.default, (part,), {"dtype": dtype, **_CONTIGUOUS})
        hidden = add_call(like, aten.logical_not.default, (part,))
        copy = add_call(like, aten.masked_fill.Scalar, (zeros, hidden, -math.inf))
    return add_call(like, aten.expand_as.default, (copy, mask)) if expanded else copy
