"""Dynamic quantization keeps our kernel on a GPU where fusing it gains nothing, or costs."""

from __future__ import annotations

import operator

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


@pytest.mark.parametrize("attention", [F.scaled_dot_product_attention, _ours.sage_attention.default])
@pytest.mark.parametrize(
    ("tokens_first", "dtype", "expected"),
    [
        (True, torch.float16, True),
        (False, torch.float16, False),  # copied, in the kernel that quantizes
        (True, torch.float32, False),  # converted there
    ],
)
def test_the_result_of_attention_is_kept(attention, tokens_first, dtype, expected):
    with FakeTensorMode():
        heads = torch.empty((2, 8, 4, 16) if tokens_first else (2, 4, 8, 16), device="cuda", dtype=dtype)
        heads = heads.transpose(1, 2) if tokens_first else heads
    graph = fx.Graph()
    q = graph.placeholder("q")
    y = graph.call_function(attention, (q, q, q))
    if attention is not F.scaled_dot_product_attention:
        y = graph.call_function(operator.getitem, (y, 0))
    y.meta["val"] = heads
    for method, arguments, value in (
        ("transpose", (1, 2), heads.transpose(1, 2)),
        ("flatten", (2,), heads.transpose(1, 2).flatten(2)),
        ("to", (torch.float16,), heads.transpose(1, 2).flatten(2).to(torch.float16)),
    ):
        y = graph.call_method(method, (y, *arguments))
        y.meta["val"] = value
    quantized = graph.call_function(_ours.dynamic_quantize.default, (y, "per_token"))
    graph.output(quantized)
    keep_dynamic_quantize(Lowering.of(fx.GraphModule(nn.Module(), graph)))
    assert (quantized.target is _ours.dynamic_quantize.alone) == expected


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


@pytest.mark.parametrize(
    ("activation", "row", "expected"),
    [
        (F.gelu, 1024, False),
        (F.gelu, 1152, True),
        (F.gelu, 16384, True),
        (F.silu, 3072, True),
        (F.silu, 8192, False),
        (F.relu, 1280, False),  # computed twice at no cost
    ],
)
@pytest.mark.parametrize("gated", [False, True])
def test_what_an_activation_costs_decides(activation, row, expected, gated):
    x, y = activated(activation, row)
    if gated:
        y = like(y, y.graph.call_function(operator.mul, (x, y)))
    assert keep_quantize.is_computed_twice(y) is expected


def test_a_norm_and_its_activation_are_one_kernel():
    x, y = activated(F.gelu, 2048)
    assert keep_quantize.is_computed_twice(y)
    with y.graph.inserting_before(y):
        y.args = (like(x, y.graph.call_function(F.layer_norm, (x, (2048,)))),)
    assert not keep_quantize.is_computed_twice(y)


@pytest.mark.parametrize(("row", "expected"), [(1024, False), (2048, True), (4096, False)])
def test_many_operations_are_computed_once(row, expected):
    """As in ConvNeXt V2, which normalizes the responses of an image and adds them."""
    x, y = activated(F.relu, row)
    weight = y.graph.placeholder("weight")
    weight.meta["val"] = torch.empty(row, device="meta")
    scaled = like(y, y.graph.call_function(operator.mul, (y, weight)))
    assert not keep_quantize.is_computed_twice(like(y, y.graph.call_function(operator.add, (scaled, x))))
    shifted = like(y, y.graph.call_function(torch.addcmul, (weight, weight, scaled)))
    assert keep_quantize.is_computed_twice(like(y, y.graph.call_function(operator.add, (shifted, y)))) is expected


def test_a_norm_that_is_written_out_stays_in_one_kernel():
    _, y = activated(F.relu, 2048)
    mean = y.graph.call_method("mean", (y, -1, True))
    mean.meta["val"] = torch.empty(8192, 1, device="meta")
    for _ in range(3):
        y = like(y, y.graph.call_function(operator.mul, (y, mean)))
    assert not keep_quantize.is_computed_twice(y)


def activated(activation, row: int) -> tuple[fx.Node, fx.Node]:
    """An input of 8,192 rows and its activation."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(8192, row, device="meta")
    return x, like(x, graph.call_function(activation, (x,)))


def like(x: fx.Node, y: fx.Node) -> fx.Node:
    y.meta["val"] = x.meta["val"]
    return y


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
