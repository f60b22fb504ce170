"""Computes the INT8 weights that torchao leaves to each call of a converted graph.

torchao folds the quantization of weights, except where something is computed from them that the graph writes in place::

    weight (float) -> quantize -> dequantize -> linear -> view -> slice <- copy_

as ``query[:, :, text:] = rotated`` does. The model would then keep the float weight, in files too, and quantize it at
each call. Unless the graph writes the weight itself, this is the same as::

    weight (int8) -> dequantize -> linear -> view -> slice <- copy_
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

import qframework.compat.quantized_decomposed  # noqa: F401  (registers the operators of PT2E)
from qframework.graph.attributes import add_attribute, attribute, readers
from qframework.graph.writes import written_attributes

_QUANTIZE = (
    torch.ops.quantized_decomposed.quantize_per_tensor.default,
    torch.ops.quantized_decomposed.quantize_per_channel.default,
)


def fold_weights(gm: GraphModule) -> None:
    """Replace the quantization of each parameter and buffer by its result; in place, without recompiling."""
    written = {str(node.target) for node in written_attributes(gm)}
    for target in _QUANTIZE:
        for node in gm.graph.find_nodes(op="call_function", target=target):
            inputs = node.all_input_nodes
            if all(x.op == "get_attr" and str(x.target) not in written for x in inputs):
                _fold(gm, node)
                for each in inputs:
                    _free(gm, each)


@torch.no_grad()
def _fold(gm: GraphModule, node: Node) -> None:
    value = node.target(*map_arg(node.args, lambda x: attribute(gm, x)))  # type: ignore[operator]
    weight = node.all_input_nodes[0]
    with gm.graph.inserting_before(node):
        folded = add_attribute(gm, f"{str(weight.target).removeprefix('_float_')}_int8", value)
    folded.meta = dict(node.meta)
    node.replace_all_uses_with(folded)
    gm.graph.erase_node(node)


def _free(gm: GraphModule, node: Node) -> None:
    """Erase a ``get_attr`` node that nothing reads, and its tensor if no other node reads that."""
    if node.users:
        return
    alone = not readers(gm, node)
    gm.graph.erase_node(node)
    if alone:
        owner, _, leaf = str(node.target).rpartition(".")
        delattr(gm.get_submodule(owner), leaf)
