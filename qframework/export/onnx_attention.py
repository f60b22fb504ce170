"""Writes float attention in the one form that ``torch.onnx`` converts: four dimensions, and a contiguous result.

From::

    q, k, v (..., H, N, D) -> scaled_dot_product_attention

To::

    q, k, v -> (B, H, N, D) -> scaled_dot_product_attention -> clone -> (..., H, N, D)

``torch.onnx`` refuses attention with other than four dimensions (windows of Hiera, heads folded into the batch in SAM).
It also decomposes attention whose mask is a parameter (BEiT, T5) to an equal result with other strides, on which a view
that tracing recorded fails. The clone fixes the strides, and is not in the file.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from qframework.compat.operators import schema
from qframework.graph.nodes import fake_value

_aten = torch.ops.aten
_SDPA = _aten.scaled_dot_product_attention.default


def write_plain_attention(gm: GraphModule) -> None:
    """Rewrite all ``scaled_dot_product_attention`` of a graph in place."""
    for node in list(gm.graph.nodes):
        if node.target is _SDPA:
            _rewrite(gm, node)
    gm.recompile()


def _rewrite(gm: GraphModule, node: Node) -> None:
    names = [argument.name for argument in schema(_SDPA).arguments]
    call: dict[str, Any] = dict(zip(names, node.args, strict=False)) | node.kwargs
    query = fake_value(call["query"])
    function = gm.graph.call_function
    lead = None if query is None or query.dim() == 4 else query.dim() - 3
    with gm.graph.inserting_before(node):
        sizes = [function(_aten.sym_size.int, (call["query"], axis)) for axis in range(lead or 0)]
        if lead is not None:
            call |= {name: _four_dimensions(gm, call[name], lead) for name in ("query", "key", "value")}
            call["attn_mask"] = _mask(gm, call.get("attn_mask"), sizes)
        positional = [call.pop(name) for name in names[:6] if name in call]
    node.args, node.kwargs = tuple(positional), call
    with gm.graph.inserting_after(node):
        out = function(_aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
    if lead is not None:
        with gm.graph.inserting_after(out):
            result = _with_leading(gm, out, sizes)
    else:
        result = out
    result.meta = dict(node.meta)
    node.replace_all_uses_with(result, lambda user: user is not out)


def _four_dimensions(gm: GraphModule, x: Node, lead: int) -> Node:
    """``x`` with its ``lead`` dimensions before heads, tokens and channels as one."""
    if lead == 0:
        return gm.graph.call_function(_aten.unsqueeze.default, (x, 0))
    return gm.graph.call_function(_aten.flatten.using_ints, (x, 0, lead - 1))


def _with_leading(gm: GraphModule, x: Node, sizes: list[Node]) -> Node:
    if not sizes:
        return gm.graph.call_function(_aten.squeeze.dim, (x, 0))
    return gm.graph.call_function(_aten.unflatten.int, (x, 0, sizes))


def _mask(gm: GraphModule, mask: Node | None, sizes: list[Node]) -> Node | None:
    """A mask ``(..., H, N, Nk)``; one without leading dimensions broadcasts as it is."""
    value = None if mask is None else fake_value(mask)
    if mask is None or value is None or value.dim() <= 3:
        return mask
    whole = gm.graph.call_function(_aten.expand.default, (mask, [*sizes, -1, -1, -1]))
    return _four_dimensions(gm, whole, len(sizes))
