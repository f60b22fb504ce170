"""Dynamic quantization keeps our kernel on a GPU where fusing it gains nothing, or costs."""

from __future__ import annotations

import pytest
import torch
from lowered_models import Block, converted, example
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from qframework import numerics
from qframework.backend import keep_quantize
from qframework.backend.keep_quantize import keep_dynamic_quantize
from qframework.backend.lowering import Lowering
from qframework.quantizer import dynamic_int8

_ours = torch.ops.qframework


def kept(producer, device: str, shape: tuple[int, ...] = (4, 8)) -> bool:
    """Whether the quantization of ``producer``'s result, seen through a view, keeps our kernel."""
    graph = fx.Graph()
    a, a_scale, b, b_scale = map(graph.placeholder, ("a", "a_scale", "b", "b_scale"))
    y = graph.call_function(producer, (a, a_scale, b, b_scale) if producer is _ours.int8_linear.default else (a,))
    y = graph.call_method("contiguous", (y,)) if producer is F.gelu else y
    with FakeTensorMode():
        y.meta["val"] = torch.empty(shape, device=device)
    quantized = graph.call_function(_ours.dynamic_quantize.default, (y, "per_token"))
    graph.output(quantized)
    keep_dynamic_quantize(Lowering.of(fx.GraphModule(nn.Module(), graph)))
    return quantized.target is _ours.dynamic_quantize.alone


@pytest.mark.parametrize(
    ("producer", "device", "expected"),
    [
        (_ours.int8_linear.default, "cuda", True),
        (_ours.int8_linear.default, "cpu", False),  # there Inductor's vectorized loop is the faster
        (torch.ops.aten.relu.default, "cuda", False),  # fused with
    ],
    ids=["int8_linear", "on the CPU", "relu"],
)
def test_only_quantization_of_opaque_results_is_kept(producer, device, expected):
    assert kept(producer, device) == expected


@pytest.mark.parametrize(
    ("shape", "device", "expected"),
    [
        ((64, 196, 1280), "cuda", True),
        ((64, 196, 1280), "cpu", False),
        ((64, 196, 768), "cuda", False),  # Inductor keeps such a row
        ((1, 196, 1280), "cuda", False),  # launches decide
    ],
)
def test_many_long_rows_of_an_activation_are_written_first(shape, device, expected):
    assert kept(F.gelu, device, shape) == expected


def test_a_norm_and_its_activation_are_one_kernel():
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(F.gelu, (graph.call_function(F.layer_norm, (x, (2048,))),))
    y.meta["val"] = torch.empty(8192, 2048, device="meta")
    assert not keep_quantize.is_long_activation(y)
    y.args = (x,)
    assert keep_quantize.is_long_activation(y)


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_dynamo")
def test_in_a_compiled_model():
    model, x = Block().cuda(), example().cuda()
    quantized = converted(model, x, dynamic_int8())
    run = torch.compile(quantized, backend="qframework")
    with torch.no_grad():
        y = run(x)
        with torch.profiler.profile() as profile:
            run(x)
        assert sum(event.count for event in profile.key_averages() if event.key == "_dynamic_quantize_kernel") == 1
        assert numerics.sqnr_db(model(x), y) > 45
