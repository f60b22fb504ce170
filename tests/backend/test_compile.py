"""The whole backend with Inductor (compile.py, passes.py, lowering.py)."""

from __future__ import annotations

import re

import pytest
import torch
from lowered_models import Block, converted, example
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.autograd import forward_ad

from qframework import numerics
from qframework.backend import compile
from qframework.backend.float_linear import NO_FAST_PRODUCT
from qframework.errors import UnsupportedError
from qframework.quantizer import dynamic_int8, qattn_paper, static_int8

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def profiled_calls(run, name):
    """How often an operator runs in one call of a function that is compiled already."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return sum(event.count for event in profile.key_averages() if event.key == name)


def int8_calls(run):
    """How often an INT8 product runs: whole layers where they are C++, else the product alone."""
    return profiled_calls(run, "qframework::int8_linear") + profiled_calls(run, "qframework::int8_product")


@pytest.mark.parametrize(
    "config",
    [static_int8(), static_int8(activation="per_token"), dynamic_int8(), qattn_paper()],
    ids=["static", "static per token", "dynamic", "paper"],
)
def test_converted_model(config):
    x = example()
    gm = converted(Block(), x, config)
    compiled = torch.compile(gm, backend="qframework", fullgraph=True)
    with torch.no_grad():
        reference, y = gm(x), compiled(x)
        assert numerics.sqnr_db(reference, y) > 60
        assert int8_calls(lambda: compiled(x)) == 2
        assert profiled_calls(lambda: compiled(x), "aten::addmm") == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    x = example().to(dtype)
    gm = converted(Block().to(dtype), x)
    with torch.no_grad():
        y = torch.compile(gm, backend="qframework", fullgraph=True)(x)
        assert y.dtype == dtype
        assert numerics.sqnr_db(gm(x), y) > 40  # LayerNorm's output is not rounded to the dtype in between


def test_float_model_with_and_without_gradients(caplog):
    model, x = Block().eval(), example()
    compiled = torch.compile(model, backend="qframework", options={"linear": "int8_dynamic"}, fullgraph=True)
    compile._warned.clear()
    y = compiled(x)  # parameters require gradients, and grad mode is on
    assert not y.requires_grad
    assert "carry no gradient; call the model under torch.no_grad()" in caplog.text
    assert numerics.sqnr_db(model(x), y) > 30
    assert int8_calls(lambda: compiled(x)) == 2


@pytest.mark.parametrize(("product", "expected"), [("float32", 1), ("multiply_add", 0)])
def test_products_that_are_slower_than_floats_are_told(monkeypatch, caplog, product, expected):
    """A model that was quantized before keeps its integers on a CPU without a fast product."""
    monkeypatch.setattr(compile, "cpu_implementation", lambda: product)
    compile.fallbacks.clear()
    x = example()
    compiled = torch.compile(converted(Block(), x), backend="qframework", fullgraph=True)
    with torch.no_grad():
        compiled(x)
    assert compile.fallbacks[NO_FAST_PRODUCT] == expected
    assert ("INT8 layers take longer than float ones" in caplog.text) == bool(expected)


def test_a_plain_float_model_is_left_to_inductor_and_trains():
    model, x = Block().eval(), example()
    y = torch.compile(model, backend="qframework")(x)
    torch.testing.assert_close(y, model(x))
    y.sum().backward()
    assert model.fc1.weight.grad is not None


@pytest.mark.parametrize("linear", ["off", "int8_dynamic"])
def test_tangents_of_inputs_are_refused(linear):
    model, x = Block().eval().requires_grad_(False), example()
    compiled = torch.compile(model, backend="qframework", options={"linear": linear})
    expected = compiled(x)
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match=r"model compiled .*, got a forward-mode deriv"):
        compiled(forward_ad.make_dual(x, x))
    torch.testing.assert_close(compiled(x), expected)


def test_batch_sizes_share_a_compilation():
    x = example()
    gm = converted(Block(), x)
    counters.clear()
    compiled = torch.compile(gm, backend="qframework")
    with torch.no_grad():
        for batch in (2, 3, 5, 8):
            other = torch.randn(batch, 7, 32)
            assert numerics.sqnr_db(gm(other), compiled(other)) > 60
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


def test_unknown_option_reaches_the_user():
    with pytest.raises(Exception, match="option 'linaer' is unknown"):
        torch.compile(nn.Linear(4, 4), backend="qframework", options={"linaer": "off"})(torch.randn(2, 4))


def test_inductor_options_reach_inductor(monkeypatch):
    from torch._inductor import compile_fx

    seen = {}
    original = compile_fx.compile_fx

    def spy(gm, inputs, **kwargs):
        seen.update(kwargs.get("config_patches") or {})
        return original(gm, inputs, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx", spy)
    model = nn.Linear(4, 4).eval()
    options = {"linear": "int8_dynamic", "epilogue_fusion": False}
    with torch.no_grad():
        torch.compile(model, backend="qframework", options=options)(torch.randn(2, 4))
    assert seen["epilogue_fusion"] is False


@pytest.mark.parametrize("options", [{}, {"size_asserts": True, "alignment_asserts": True}], ids=["default", "on"])
def test_strides_are_checked_at_every_call_on_request(options):
    """Asked for, Inductor also confirms what our operators told it of their results."""
    x = example()
    gm = converted(Block(), x)
    with torch.no_grad():
        y, (code,) = run_and_get_code(torch.compile(gm, backend="qframework", options=options or None), x)
        assert numerics.sqnr_db(gm(x), y) > 60
    assert "int8_linear" in code
    assert bool(re.search(r"^ +assert_\w+\(", code, re.MULTILINE)) is bool(options)
