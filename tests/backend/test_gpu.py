"""The backend on a GPU: the same results as on the CPU, CUDA graphs, every linear lowered."""

from __future__ import annotations

import pytest
import torch
from lowered_models import Block, converted, example
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import qframework
from qframework import numerics
from qframework.backend import linear_gain, merge_linears
from qframework.compat import call_sites
from qframework.kernels.quantize import dynamic_quantize
from qframework.quantizer import dynamic_int8, qattn_paper, static_int8

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_dynamo")]
CONFIGS = {
    "static": static_int8(),
    "static per token": static_int8(activation="per_token"),
    "dynamic": dynamic_int8(),
    "paper": qattn_paper(),
}


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def no_tf32():
    """The patch embedding's convolution in float32, as on the CPU."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def assert_as_close_to_float(reference, quantized, other):
    """Two ways to run one quantized model: no further from float, and no further apart than quantization itself.

    A value next to a tie rounds either way when float sums run in another order, and every layer multiplies that. At
    worst the two are independent roundings of one model, and their difference has twice the power of one noise: 3 dB.
    """
    noise, other_noise = numerics.sqnr_db(reference, quantized), numerics.sqnr_db(reference, other)
    apart = numerics.sqnr_db(quantized, other)
    print(f"SQNR against float {noise:.1f} dB and {other_noise:.1f} dB, between the two {apart:.1f} dB")
    assert other_noise > noise - 1
    assert apart > noise - 3
    assert noise > 15


@pytest.mark.parametrize("name", CONFIGS)
def test_same_result_as_on_the_cpu(name):
    x = example()
    gm = converted(nn.Sequential(Block(), Block()), x, CONFIGS[name])
    on_cpu = torch.compile(gm, backend="qframework")(x)
    torch._dynamo.reset()
    on_gpu = torch.compile(gm.cuda(), backend="qframework")(x.cuda()).cpu()
    # The same int8 values but for a few next to a tie, where float32 sums in another order round the other way.
    assert numerics.sqnr_db(on_cpu, on_gpu) > 50


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    model, x = Block().to("cuda", dtype), example().to("cuda", dtype)
    gm = converted(model, x)
    y = torch.compile(gm, backend="qframework", fullgraph=True)(x)
    assert y.dtype == dtype
    assert numerics.sqnr_db(gm(x), y) > 40
    assert numerics.sqnr_db(model(x), y) > 25


@pytest.mark.parametrize("name", CONFIGS)
def test_call_sites_give_what_operators_give(name, monkeypatch):
    """Over repeats, at other addresses, on another stream, under a profiler and captured: bit for bit."""
    x = example().cuda().half()
    gm = converted(nn.Sequential(Block(), Block()).cuda().half(), x, CONFIGS[name])
    xs = [torch.randn_like(x) for _ in range(6)]
    with torch.compiler.config.patch(force_disable_caches=True):
        monkeypatch.setattr(call_sites, "DEVICES", ())
        expected = [torch.compile(gm, backend="qframework")(each) for each in xs]
        torch._dynamo.reset()
        monkeypatch.setattr(call_sites, "DEVICES", ("cuda",))
        compiled = torch.compile(gm, backend="qframework")
        kept = [compiled(each) for each in xs]  # no result's memory is used again
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            elsewhere = [compiled(each) for each in xs]
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            profiled = [compiled(each) for each in xs]
        graph, static = torch.cuda.CUDAGraph(), xs[0].clone()
        with torch.cuda.graph(graph):
            captured = compiled(static)
    for i, wanted in enumerate(expected):
        static.copy_(xs[i])
        graph.replay()
        for got in (kept[i], elsewhere[i], profiled[i], captured):
            assert torch.equal(got, wanted)
    assert "qframework::int8_linear" in {event.key for event in seen.key_averages()}


def with_cuda_graphs(model, options):
    """torch.compile takes a mode or options, not both."""
    if options is None:
        return torch.compile(model, backend="qframework", mode="reduce-overhead")
    return torch.compile(model, backend="qframework", options={**options, "triton.cudagraphs": True})


class Projections(nn.Module):
    """Attention with separate projections, as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        return scaled_dot_product_attention(
            *(part(x).unflatten(-1, (2, 32)).transpose(1, 2) for part in self.children())
        )


def test_cuda_graphs_of_merged_projections_see_writes(monkeypatch):
    merged, merge = [], merge_linears._merge
    monkeypatch.setattr(linear_gain, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(
        merge_linears, "_merge", lambda nodes, *others: (merged.append(len(nodes)), merge(nodes, *others))
    )
    x = example(64).cuda().half()
    model = converted(Projections().cuda().half(), x)
    graphed = torch.compile(model, backend="qframework", mode="reduce-overhead")
    for _ in range(3):  # warm up, capture, replay
        before = graphed(x).clone()
    assert merged == [3]
    for name, tensor in [*model.named_buffers(), *model.named_parameters()]:
        if name.endswith(("_frozen_param2", "v_weight_scale_0", "v.bias")):
            tensor.copy_(tensor.flip(0) * 2 if tensor.is_floating_point() else tensor.flip(0))
            after = graphed(x).clone()
            assert numerics.sqnr_db(before, after) < 20, name
            assert numerics.sqnr_db(model(x), after) > 40, name
            before, merged = after, [*merged, name]
    assert len(merged) == 1 + 3


class TableOfPlaces(Block):
    """A bias that parameters alone determine, which a converted model computes once."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4096, 8))

    def forward(self, x):
        return super().forward(x) + self.table.square().sum(-1)[: x.shape[-1]]


@pytest.mark.parametrize("options", [None, {"freeze_weights": True}], ids=["default", "frozen"])
def test_cuda_graphs_of_constants_see_writes(options):
    x = example().cuda().half()
    model = converted(TableOfPlaces().cuda().half(), x)
    graphed = with_cuda_graphs(model, options)
    with torch.no_grad():
        for _ in range(3):  # warm up, capture, replay
            before = graphed(x).clone()
        for _ in range(2):
            model.table.mul_(2)
            for _ in range(3):
                torch.compiler.cudagraph_mark_step_begin()
                after = graphed(x).clone()
                assert numerics.sqnr_db(model(x), after) > 40
            assert numerics.sqnr_db(before, after) < 6
            before = after


@pytest.mark.parametrize("source", ["converted static", "converted dynamic", "float"])
def test_cuda_graph_replays_see_new_inputs(source):
    model = nn.Sequential(Block(), Block()).eval().cuda().half()
    x = example().cuda().half()
    options = {"linear": "int8_dynamic"} if source == "float" else None
    if source != "float":
        model = converted(model, x, dynamic_int8() if source.endswith("dynamic") else static_int8())
    eager = torch.compile(model, backend="qframework", options=options)
    graphed = with_cuda_graphs(model, options)
    for _ in range(3):  # warm up, capture, replay
        graphed(x)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(graphed(x).clone(), eager(x))


def test_cuda_graphs_follow_changed_weights():
    model, x = Block().eval().cuda().half(), example().cuda().half()
    graphed = with_cuda_graphs(model, {"linear": "int8_dynamic"})
    for _ in range(3):
        graphed(x)
    model.load_state_dict(Block().state_dict())
    torch.compiler.cudagraph_mark_step_begin()
    assert numerics.sqnr_db(model(x), graphed(x).clone()) > 25


def test_operators_under_capture():
    """The operators themselves in a hand-made graph: capture, overwrite the input, replay."""
    x = torch.randn(130, 96, device="cuda", dtype=torch.half)
    w, w_scale = numerics.quantize_weight(torch.randn(64, 96, device="cuda"))

    def run():
        q, scale = dynamic_quantize(x)
        return qframework.kernels.int8_linear(q, scale, w, w_scale, activation="gelu", out_dtype=torch.half)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, run())


@pytest.mark.slow
@pytest.mark.parametrize("config", [static_int8(), dynamic_int8()], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", ["vit_base_patch16_224", "vit_large_patch16_224"])
def test_whole_vit(name, config):
    timm = pytest.importorskip("timm")
    model = timm.create_model(name).eval()
    x = torch.randn(4, 3, 224, 224)
    half = model.cuda().half()
    gm = converted(half, x.cuda().half(), config)
    compiled = torch.compile(gm, backend="qframework", fullgraph=True)
    report = qframework.explain(compiled, x.cuda().half())
    assert report.lowered == report.total == sum(isinstance(m, nn.Linear) for m in model.modules())
    images = x.cuda().half()
    assert_as_close_to_float(half(images), gm(images), compiled(images))


@pytest.mark.slow
def test_vit_on_both_devices():
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_base_patch16_224", depth=4).eval()
    x = torch.randn(2, 3, 224, 224)
    reference = model(x)
    gm = converted(model, x)
    on_cpu = gm(x)
    on_gpu = torch.compile(gm.cuda(), backend="qframework")(x.cuda()).cpu()
    assert_as_close_to_float(reference, on_cpu, on_gpu)
