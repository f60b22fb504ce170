"""Calls of ``int8_linear`` in the model itself take in what follows them (fuse_epilogue.py)."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from qframework.backend.compile import lower
from qframework.backend.options import BackendOptions

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

_ours = torch.ops.qframework
A, B = torch.randint(-127, 128, (4, 16), dtype=torch.int8), torch.randint(-127, 128, (16, 16), dtype=torch.int8)
SCALE, SCALES, BIAS, X = torch.tensor([0.01]), torch.rand(16) / 50 + 0.001, torch.randn(16), torch.randn(4, 16)


def run(function):
    """The graph of a function after the lowering, and the reports; checks the results."""
    kept = []

    def backend(gm, example_inputs):
        kept.append((gm, lower(gm, example_inputs, BackendOptions())))
        return gm.forward

    arguments = (A, SCALE, B, SCALES, BIAS, X)
    with torch.no_grad():
        wanted = function(*(x.clone() for x in arguments))
        got = torch.compile(function, backend=backend, fullgraph=True)(*(x.clone() for x in arguments))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=0 if got.dtype == torch.int8 else 1e-5)
    ((gm, reports),) = kept
    return [node.target for node in gm.graph.nodes if node.op.startswith("call")], [each.operator for each in reports]


@pytest.mark.parametrize("linear", [_ours.int8_linear, _ours.int8_linear.default], ids=["packet", "overload"])
def test_activation_residual_and_requantization(linear):
    def function(a, a_scale, b, b_scale, bias, x):
        return _ours.quantize.default(F.gelu(linear(a, a_scale, b, b_scale, bias)) + x, a_scale)

    targets, reports = run(function)
    assert targets == [_ours.int8_linear.default]
    assert reports == ["qframework::int8_linear (gelu, residual, int8 out)"]


def test_calls_with_an_epilogue_stay():
    def function(a, a_scale, b, b_scale, bias, x):
        return F.relu(_ours.int8_linear.default(a, a_scale, b, b_scale, bias, "gelu", x))

    targets, reports = run(function)
    assert targets == [_ours.int8_linear.default, F.relu]
    assert reports == ["qframework::int8_linear (gelu, residual)"]


def test_an_operand_that_is_written_in_between_ends_the_epilogue():
    def function(a, a_scale, b, b_scale, bias, x):
        y = _ours.int8_linear.default(a, a_scale, b, b_scale, bias)
        bias.mul_(2)
        return F.gelu(y) + x

    _, reports = run(function)
    assert reports == ["qframework::int8_linear"]


def test_a_result_with_two_readers_stays():
    def function(a, a_scale, b, b_scale, bias, x):
        y = _ours.int8_linear.default(a, a_scale, b, b_scale, bias)
        return F.gelu(y) * y

    _, reports = run(function)
    assert reports == ["qframework::int8_linear"]


def test_equal_quantizations_are_shared_and_others_are_not():
    def function(a, a_scale, b, b_scale, bias, x):
        first, scale = _ours.dynamic_quantize.default(x, "per_token")
        second, _ = _ours.dynamic_quantize.default(x, "per_token")
        other, one = _ours.dynamic_quantize.default(x, "per_tensor")
        return (first.float() + second.float()) * scale + other.float() * one

    targets, _ = run(function)
    assert targets.count(_ours.dynamic_quantize.default) == 2
