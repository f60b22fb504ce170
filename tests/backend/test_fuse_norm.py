"""A norm becomes a part of the quantization that reads it, where it reads many rows from a GPU's memory."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from qframework.backend.fuse_norm import fuse_norm
from qframework.backend.lowering import Lowering

_ours = torch.ops.qframework
MANY = (8, 1024, 64)


def graph_of(
    shape=MANY, *, device="cuda", dynamic=True, written_by=None, also_read=False, zero_point=False, write=False
):
    """A norm of an input, or of the result of ``written_by``, and its quantization."""
    graph = fx.Graph()
    names = ("x", "weight", "bias", "scale", "zero_point")
    x, weight, bias, scale, point = map(graph.placeholder, names)
    with FakeTensorMode():
        x.meta["val"] = torch.empty(shape, device=device, dtype=torch.float16)
        weight.meta["val"] = bias.meta["val"] = torch.empty(shape[-1], device=device, dtype=torch.float16)
        scale.meta["val"] = torch.empty(1, device=device)
        point.meta["val"] = torch.empty(1, device=device, dtype=torch.int32)
    source = x
    if written_by is not None:
        source = graph.call_function(written_by, (x,))
        source.meta["val"] = x.meta["val"]
    normed = graph.call_function(F.layer_norm, (source, (shape[-1],), weight, bias, 1e-6))
    normed.meta["val"] = x.meta["val"]
    if write:
        graph.call_method("zero_", (x,)).meta["val"] = x.meta["val"]
    if dynamic:
        quantized = graph.call_function(_ours.dynamic_quantize.default, (normed, "per_token"))
    else:
        arguments = (normed, scale, point) if zero_point else (normed, scale)
        quantized = graph.call_function(_ours.quantize.default, arguments)
    graph.output((quantized, normed) if also_read else quantized)
    gm = fx.GraphModule(nn.Module(), graph)
    fuse_norm(Lowering.of(gm))
    gm.graph.lint()
    return [node for node in gm.graph.nodes if node.op == "call_function"]


def targets(**case):
    return [node.target for node in graph_of(**case)]


def test_scales_per_token():
    (fused,) = graph_of()
    assert fused.target is _ours.norm_dynamic_quantize.default
    assert [str(each) for each in fused.args] == ["x", "weight", "bias", "1e-06", "True"]


def test_a_static_scale():
    (fused,) = graph_of(dynamic=False)
    assert fused.target is _ours.norm_quantize.default
    assert [str(each) for each in fused.args] == ["x", "weight", "bias", "1e-06", "True", "scale"]


def test_the_result_of_an_int8_layer():
    assert targets(written_by=_ours.int8_linear.default)[1:] == [_ours.norm_dynamic_quantize.default]


LEFT = {
    "on the CPU": {"device": "cpu"},
    "few rows": {"shape": (1, 197, 64)},
    "long rows": {"shape": (8, 1024, 9000)},
    "what Inductor computes": {"written_by": torch.relu},  # it reads the operand in the same kernel
    "read by others": {"also_read": True},
    "a zero point": {"dynamic": False, "zero_point": True},
    "an input that is written": {"write": True},
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_inductor(name):
    found = targets(**LEFT[name])
    assert F.layer_norm in found
    assert not {_ours.norm_quantize.default, _ours.norm_dynamic_quantize.default} & set(found)
