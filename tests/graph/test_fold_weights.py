"""``fold_weights``: quantized parameters become int8 buffers, unless the graph writes them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

from qframework.graph.rewrites.fold_weights import fold_weights
from qframework.numerics import sqnr_db

_decomposed = torch.ops.quantized_decomposed
RANGE = (-127, 127, torch.int8)


def quantized_weight(per_channel: bool, written: bool = False, also_read: bool = False) -> GraphModule:
    """A graph that returns its dequantized weight."""
    root = nn.Module()
    root.linear = nn.Linear(8, 4)
    graph = Graph()
    weight = graph.get_attr("linear.weight")
    if per_channel:
        root.register_buffer("scale", torch.full((4,), 0.01))
        root.register_buffer("zeros", torch.zeros(4, dtype=torch.int64))
        arguments = (graph.get_attr("scale"), graph.get_attr("zeros"), 0, *RANGE)
        q = graph.call_function(_decomposed.quantize_per_channel.default, (weight, *arguments))
        out = graph.call_function(_decomposed.dequantize_per_channel.default, (q, *arguments))
    else:
        q = graph.call_function(_decomposed.quantize_per_tensor.default, (weight, 0.01, 0, *RANGE))
        out = graph.call_function(_decomposed.dequantize_per_tensor.default, (q, 0.01, 0, *RANGE))
    if written:
        graph.call_function(torch.ops.aten.mul_.Tensor, (weight, 0.5))
    graph.output((out, weight) if also_read else out)
    return GraphModule(root, graph)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("also_read", [False, True])
def test_the_integers_take_the_place_of_the_weight(per_channel, also_read):
    gm = quantized_weight(per_channel, also_read=also_read)
    before = gm()
    fold_weights(gm)
    gm.recompile()
    torch.testing.assert_close(gm(), before, rtol=0, atol=0)
    matrices = {name: tensor.dtype for name, tensor in gm.state_dict().items() if tensor.ndim == 2}
    assert matrices == {"_linear_weight_int8": torch.int8} | ({"linear.weight": torch.float32} if also_read else {})


def test_a_weight_that_the_graph_writes_stays():
    gm = quantized_weight(per_channel=False, written=True)
    fold_weights(gm)
    gm.recompile()
    with torch.no_grad():
        first, second = gm(), gm()
    assert sqnr_db(first, 2 * second) > 25
