"""use_sage_attention with torch.compile and CUDA graphs: inside, around, one graph, no breaks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_helpers import Attention, count_operators, qkv
from torch import Tensor, nn

from qframework import sage_attention, use_sage_attention
from qframework.attention import fallbacks, left_to_pytorch
from qframework.kernels.attention import auto
from qframework.kernels.attention.variants import AttentionVariant

SDPA = F.scaled_dot_product_attention
pytestmark = pytest.mark.usefixtures("no_fallbacks_yet")


def graphs_of(function: Any, **kwargs: Any) -> tuple[Any, list[torch.fx.GraphModule]]:
    """``function`` compiled, and the graphs Dynamo made of it."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(module)
        return module.forward

    return torch.compile(function, fullgraph=True, backend=keep, **kwargs), graphs


@pytest.mark.usefixtures("fresh_dynamo")
def test_inside_a_compiled_function() -> None:
    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with use_sage_attention("sage_vb"):
            out = SDPA(query, key, value) + 1
            with use_sage_attention("off"):
                out = out + SDPA(query, key, value)
        return out + SDPA(query, key, value)

    tensors = qkv()
    compiled, graphs = graphs_of(function)
    assert torch.equal(compiled(*tensors), function(*tensors))
    assert [count_operators(graph) for graph in graphs] == [1]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("variant", ["sage_t", AttentionVariant(8, "per_warp", "fp16")], ids=str)
def test_a_variant_inside_a_compiled_function(variant: str | AttentionVariant) -> None:
    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with use_sage_attention(variant, smooth_k=False):
            return SDPA(query, key, value)

    tensors = qkv()
    compiled, _ = graphs_of(function)
    assert torch.equal(compiled(*tensors), sage_attention(*tensors, variant=variant, smooth_k=False))


@pytest.mark.usefixtures("fresh_dynamo")
def test_around_a_compiled_function() -> None:
    """Each kind of scope has its graph, and none leaks into the next call."""
    tensors, module = qkv(), Attention()
    compiled, graphs = graphs_of(module)
    for variant in ("sage_t", "off", "sage_vb", "sage_t"):
        with use_sage_attention(variant):
            assert torch.equal(compiled(*tensors), module(*tensors))
    assert torch.equal(compiled(*tensors), module(*tensors))
    assert [count_operators(graph) for graph in graphs] == [1, 0, 1, 0]


@pytest.mark.usefixtures("fresh_dynamo")
def test_dynamic_shapes_need_one_graph() -> None:
    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with use_sage_attention():
            return SDPA(query, key, value, is_causal=True)

    compiled, graphs = graphs_of(function, dynamic=True)
    for nq, nk in ((20, 30), (33, 70), (90, 91)):
        tensors = qkv(nq, nk)
        assert torch.equal(compiled(*tensors), function(*tensors))
    assert [count_operators(graph) for graph in graphs] == [1]


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_fallback_does_not_break_the_graph() -> None:
    """It is counted when traced, once."""

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with use_sage_attention("sage_vb"), use_sage_attention():
            return SDPA(query, key, value)

    tensors = qkv(dtype=torch.float64)
    compiled, graphs = graphs_of(function)
    for _ in range(2):
        assert torch.equal(compiled(*tensors), SDPA(*tensors))
    assert [count_operators(graph) for graph in graphs] == [0]
    assert fallbacks == {"dtype torch.float64": 1}


@pytest.mark.usefixtures("fresh_dynamo")
def test_multi_head_attention_compiled() -> None:
    layer = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    x = torch.randn(2, 20, 32)

    def function(x: Tensor) -> Tensor:
        with use_sage_attention():
            return layer(x, x, x, need_weights=False)[0]

    compiled, graphs = graphs_of(function)
    torch.testing.assert_close(compiled(x), function(x), rtol=0, atol=1e-6)
    assert [count_operators(graph) for graph in graphs] == [1]


@pytest.mark.usefixtures("fresh_dynamo")
def test_training_step_compiled_by_inductor(device: torch.device) -> None:
    tensors = [x.requires_grad_() for x in qkv(device=device)]

    def function(*tensors: Tensor) -> Tensor:
        with use_sage_attention():
            return SDPA(*tensors).square().mean()

    expected = torch.autograd.grad(function(*tensors), tensors)
    found = torch.autograd.grad(torch.compile(function, fullgraph=True)(*tensors), tensors)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["auto", "sage_t", "sage_vb", "sage2_int8", "sage2_int4", "sage2pp_int8", "qattn"])
def test_cuda_graph_replays_with_new_inputs(variant: str) -> None:
    """What is computed from the data (scales, means) must be computed again at every replay."""
    tensors = [x.half() for x in qkv(device="cuda")]

    def function() -> Tensor:
        with use_sage_attention(variant):
            return SDPA(*tensors, is_causal=True)

    function()  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()
    for factor in (1.0, 5.0):
        for x in tensors:
            x.copy_(torch.randn_like(x) * factor)
        graph.replay()
        assert torch.equal(out, function())


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_dynamo")
@torch.no_grad()
def test_reduce_overhead_replays_with_new_inputs() -> None:
    compiled = torch.compile(Attention(), mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        tensors = qkv(device="cuda", dtype=torch.float16)
        with use_sage_attention():
            torch.testing.assert_close(compiled(*tensors), Attention()(*tensors), rtol=2e-3, atol=2e-3)


@pytest.mark.usefixtures("fresh_dynamo")
def test_auto_on_a_cpu_is_pytorchs_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled in one graph, with sizes that change; counted when it is traced."""
    monkeypatch.setattr(left_to_pytorch, "pytorch_is_faster", auto.pytorch_is_faster)

    def twice(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with use_sage_attention():
            first = F.scaled_dot_product_attention(query, key, value)
        return first + sage_attention(query, key, value, is_causal=True)

    compiled, graphs = graphs_of(twice, dynamic=True)
    for tokens in (5, 9):
        q, k, v = (torch.randn(2, 3, tokens, 16) for _ in range(3))
        exact = F.scaled_dot_product_attention
        torch.testing.assert_close(compiled(q, k, v), exact(q, k, v) + exact(q, k, v, is_causal=True))
    assert len(graphs) == 1
    assert count_operators(graphs[0]) == 0
    assert set(fallbacks) == {"PyTorch's attention is faster on this cpu device"}
