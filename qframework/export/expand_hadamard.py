"""Writes the operator ``hadamard`` of a recipe as products and sums that ONNX has.

From::

    qframework::hadamard(x, factor, offset, B)

To::

    x -> mul(factor) -> unflatten into blocks of B -> matmul(H / sqrt(B)) -> flatten -> sub(offset)
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from qframework.export.named_buffers import add_buffer
from qframework.graph.nodes import add_call, argument, fake_value, layer_name
from qframework.kernels.hadamard import hadamard_matrix

_aten = torch.ops.aten


def expand_hadamard(gm: GraphModule) -> None:
    """Expand every ``hadamard`` of a graph in place."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.qframework.hadamard.default):
        with gm.graph.inserting_before(node):
            expanded = _expanded(gm, node)
        node.replace_all_uses_with(expanded)
        gm.graph.erase_node(node)
    gm.recompile()


def _expanded(gm: GraphModule, node: Node) -> Node:
    x, factor, offset, size = (
        argument(node, i, name) for i, name in enumerate(("x", "factor", "offset", "block_size"))
    )
    fake = fake_value(node)
    assert fake is not None
    matrix = add_buffer(gm, layer_name(node), "hadamard", (hadamard_matrix(size) * size**-0.5).to(fake.dtype))
    matrix.meta["val"] = fake.new_empty(size, size)
    scaled = add_call(node, _aten.mul.Tensor, (x, factor))
    blocks = add_call(node, _aten.unflatten.int, (scaled, -1, [fake.shape[-1] // size, size]))
    turned = add_call(node, _aten.matmul.default, (blocks, matrix))
    return add_call(node, _aten.sub.Tensor, (add_call(node, _aten.flatten.using_ints, (turned, -2, -1)), offset))
