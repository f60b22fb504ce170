"""A Hadamard transform becomes a part of the quantization behind it, on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from qframework.backend.fuse_hadamard import fuse_hadamard
from qframework.backend.lowering import Lowering

_ours = torch.ops.qframework


def lowered(device: str, granularity: str = "per_token", also_read: bool = False) -> list[object]:
    """The targets of the lowered graph of a transform that is quantized."""
    graph = fx.Graph()
    x, factor, offset = map(graph.placeholder, ("x", "factor", "offset"))
    turned = graph.call_function(_ours.hadamard.default, (x, factor, offset, 32))
    with FakeTensorMode():
        turned.meta["val"] = torch.empty(4, 64, device=device)
    quantized = graph.call_function(_ours.dynamic_quantize.default, (turned, granularity))
    graph.output((quantized, turned) if also_read else quantized)
    gm = fx.GraphModule(nn.Module(), graph)
    fuse_hadamard(Lowering.of(gm))
    gm.graph.lint()
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("cuda",), [_ours.hadamard_quantize.default]),
        (("cpu",), [_ours.hadamard.default, _ours.dynamic_quantize.default]),
        (("cuda", "per_tensor"), [_ours.hadamard.default, _ours.dynamic_quantize.default]),
        (("cuda", "per_token", True), [_ours.hadamard.default, _ours.hadamard_quantize.default]),
    ],
    ids=["on a GPU", "on a CPU", "per tensor", "read by others too"],
)
def test_pairs(arguments, expected):
    assert lowered(*arguments) == expected
