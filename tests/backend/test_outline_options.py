"""Under which options of Inductor repeated blocks are outlined, and that CUDA graphs hold them."""

from __future__ import annotations

import re

import pytest
import torch
from lowered_models import Block, converted, example
from torch import nn
from torch._inductor import scheduler
from torch._inductor.utils import run_and_get_code

from qframework.backend import outline_blocks as module
from qframework.backend.outline_blocks import outline
from qframework.compat import inductor

pytestmark = pytest.mark.usefixtures("small_blocks")


def blocks(count: int) -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(count))).eval()


def outlined(monkeypatch, model, x, **arguments):
    """How many blocks the backend outlines; the model is not compiled."""
    counts = []
    monkeypatch.setattr(module, "outline", lambda gm, **_: counts.append(outline(gm)))
    monkeypatch.setattr(inductor, "compile_graph", lambda gm, *_: gm.forward)
    with torch.no_grad():
        torch.compile(model, backend="qframework", dynamic=False, **arguments)(x)
    return sum(counts)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, 4),
        ({"mode": "reduce-overhead"}, 4),
        ({"mode": "max-autotune"}, 4),
        ({"mode": "max-autotune-no-cudagraphs"}, 4),
        ({"options": {"triton.cudagraphs": True, "triton.cudagraph_skip_dynamic_graphs": True}}, 4),
        ({"options": {"cpp_wrapper": True}}, 0),
        ({"options": {"freezing": True}}, 0),
        ({"options": {"triton.cudagraphs": True, "freezing": True}}, 0),
        ({"options": {"post_grad_custom_pre_pass": None}}, 0),
    ],
)
def test_options_that_choose_kernels_or_their_launch_outline_blocks(arguments, expected, monkeypatch):
    x = example()
    assert outlined(monkeypatch, converted(blocks(4), x), x, **arguments) == expected


@pytest.mark.parametrize("name", ["cpp_wrapper", "fx_wrapper"])
def test_a_configuration_whose_code_calls_no_subgraphs_leaves_the_graph_whole(name, monkeypatch):
    x = example()
    model = converted(blocks(4), x)
    with inductor.inductor_config.patch({name: True}):
        assert outlined(monkeypatch, model, x) == 0


def test_a_model_compiles_to_cpp(monkeypatch):
    x = example()
    model = converted(blocks(2), x)
    with torch.no_grad(), inductor.inductor_config.patch(cpp_wrapper=True):
        ours = torch.compile(model, backend="qframework", dynamic=False)(x)
        torch._dynamo.reset()
        wanted = torch.compile(model, backend="qframework", dynamic=False, options={"cpp_wrapper": True})(x)
    assert torch.equal(ours, wanted)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_hold_all_blocks(mode, monkeypatch):
    """What is captured is the function that calls the blocks; nothing is left outside, where each launch takes time."""
    monkeypatch.setattr(scheduler.BaseSchedulerNode, "is_gpu", lambda node: True)  # as far as graphs are concerned
    x = example()
    model, counts = converted(blocks(4), x), []
    monkeypatch.setattr(module, "outline", lambda gm, **_: counts.append(outline(gm)))
    with torch.no_grad(), torch.compiler.config.patch(force_disable_caches=True):
        wanted = torch.compile(model, backend="qframework", dynamic=False)(x)
        torch._dynamo.reset()
        ours, (code,) = run_and_get_code(torch.compile(model, backend="qframework", dynamic=False, mode=mode), x)
    assert counts == [4, 4]
    assert torch.equal(ours, wanted)
    captured, calling = code[code.index("def partition_0(") :].split("class Runner")
    assert len(re.findall(r"= \w*repeated_\w+\(", captured)) == 4
    assert "partition_1" not in code
    assert "torch.ops" not in calling
    assert "cpp_fused" not in calling


def test_a_float_model_is_left_whole(monkeypatch):
    monkeypatch.setattr(module, "outline", lambda gm, **_: pytest.fail("outlined"))
    with torch.no_grad():
        torch.compile(nn.Linear(8, 4), backend="qframework")(torch.randn(3, 8))


@pytest.mark.parametrize(("mode", "behind"), [("reduce-overhead", [True]), ("max-autotune", [False])])
def test_products_that_inductor_tunes_are_no_place_to_cut(mode, behind, monkeypatch):
    found = []
    monkeypatch.setattr(module, "outline", lambda gm, behind_floats: found.append(behind_floats))
    monkeypatch.setattr(inductor, "compile_graph", lambda gm, *_: gm.forward)
    x = example()
    with torch.no_grad():
        torch.compile(converted(blocks(2), x), backend="qframework", dynamic=False, mode=mode)(x)
    assert found == behind
