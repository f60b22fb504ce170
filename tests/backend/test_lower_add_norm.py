"""Which sums and norms of a GPU one kernel of our own computes, and that the graph still computes the same."""

from __future__ import annotations

import functools
import operator

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from qframework.backend import lower_add_norm as rule
from qframework.backend.lowering import Lowering

_ours = torch.ops.qframework
C = 1152
ADD_NORM, STATIC, DYNAMIC = (
    _ours.add_norm.default,
    _ours.add_norm_quantize.default,
    _ours.add_norm_dynamic_quantize.default,
)


@pytest.fixture(autouse=True)
def every_long_row(monkeypatch):
    monkeypatch.setattr(rule, "FLOAT_ROWS", range(1025, 8193))
    monkeypatch.setattr(rule, "INT8_ROWS", range(1025, 8193))


class Traced(nn.Module):
    """``form(x, matrix, weight, scale)``."""

    def __init__(self, form) -> None:
        super().__init__()
        self.form = form

    def forward(self, x, matrix, weight, scale):
        return self.form(x, matrix, weight, scale)


class Recording(fx.Interpreter):
    """Runs a graph and records what its nodes return."""

    def run_node(self, node):
        node.meta["val"] = super().run_node(node)
        return node.meta["val"]


def lowered(form, shape=(8, 1024, C), *, device="cuda", grad=False):
    """The lowered graph of ``form``, recorded for float16 tensors of a GPU."""
    gm = fx.symbolic_trace(Traced(form))
    with FakeTensorMode(), torch.set_grad_enabled(grad):
        of = functools.partial(torch.empty, device=device, dtype=torch.float16, requires_grad=grad)
        channels = shape[-1]
        scale = torch.empty(1, device=device)
        Recording(gm).run(of(shape), of(channels, channels), of(channels), scale)
        rule.lower_add_norm(Lowering.of(gm))
    gm.graph.lint()
    gm.recompile()
    return gm


def calls(form, *args, **kwargs):
    return [node.target for node in lowered(form, *args, **kwargs).graph.nodes if node.op.startswith("call")]


def layer_norm(h, weight, channels=C):
    return F.layer_norm(h, (channels,), weight, None, 1e-6)


def written_out(h, weight):
    """Llama's."""
    y = h.float()
    return weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(h.dtype)


def gemma(h, weight):
    y = h.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + weight.float())).type_as(h)


NORMS = {
    "layer norm": (layer_norm, True, 0.0),
    "rms norm": (lambda h, weight: F.rms_norm(h, (C,), weight, 1e-6), False, 0.0),
    "written out": (written_out, False, 0.0),
    "with an offset": (gemma, False, 1.0),
}


def float_block(norm, x, matrix, weight, scale):
    """The sum is read by the norm, and again by the next sum."""
    h = x + F.linear(x, matrix)
    return h + F.linear(norm(h, weight), matrix)


def static_block(norm, x, matrix, weight, scale):
    h = x + F.linear(x, matrix)
    return h, _ours.quantize.default(norm(h, weight), scale)


def dynamic_block(norm, x, matrix, weight, scale):
    h = x + F.linear(x, matrix)
    quantized = _ours.dynamic_quantize.default(norm(h, weight), "per_token")
    return h + 2, operator.getitem(quantized, 1), operator.getitem(quantized, 0)


BLOCKS = {"float": (float_block, ADD_NORM), "static": (static_block, STATIC), "dynamic": (dynamic_block, DYNAMIC)}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("form", BLOCKS)
def test_a_sum_and_its_norm(form, name):
    """One operator, nothing of the norm is left, and the results are those of the graph before."""
    norm, center, offset = NORMS[name]
    block, target = BLOCKS[form]
    gm = lowered(functools.partial(block, norm))
    nodes = [node for node in gm.graph.nodes if node.op.startswith("call")]
    (fused,) = (node for node in nodes if node.target is target)
    arguments = ["x", "linear", "weight", "None", "1e-06", str(center), str(offset)]
    assert [str(each) for each in fused.args] == arguments + ["scale"] * (form == "static")
    assert {operation.target for operation in nodes} <= {target, F.linear, operator.getitem, operator.add}
    assert [node.target for node in nodes].count(operator.add) == (form != "static")
    x, matrix = torch.randn(2, 3, C), torch.randn(C, C) / C**0.5
    weight, scale = torch.rand(C) + 0.5 - offset, torch.tensor([0.05])
    for got, expected in zip(
        outputs(gm(x, matrix, weight, scale)), outputs(block(norm, x, matrix, weight, scale)), strict=True
    ):
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        atol = 1.0 if got.dtype == torch.int8 else 1e-5  # beside a tie, the last bit of a float decides
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=atol)
        assert got.ne(expected).sum() <= 3 or got.dtype != torch.int8


def outputs(results):
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize("form", BLOCKS)
def test_recorded_values(form):
    """Those of the results, for the passes behind."""
    block, target = BLOCKS[form]
    gm = lowered(functools.partial(block, layer_norm))
    (fused,) = (node for node in gm.graph.nodes if node.target is target)
    results = {user.args[1]: user.meta["val"] for user in fused.users}
    q = torch.float16 if form == "float" else torch.int8
    assert [results[place].dtype for place in sorted(results)] == [torch.float16, q, torch.float32][: len(results)]
    assert all(value.shape[:2] == (8, 1024) for value in results.values())
    assert len(results) == (3 if form == "dynamic" else 2)


def chain(x, matrix, weight, scale):
    """Two blocks behind what Inductor computes: it stores that for the sum, since the product depends on it."""
    h = x * scale.to(x.dtype)
    for _ in range(2):
        h = h + F.linear(layer_norm(h, weight), matrix)
    return h + F.linear(layer_norm(h, weight), matrix)


def test_every_sum_of_a_residual_stream():
    found = calls(chain)
    assert found.count(ADD_NORM) == 2
    assert found.count(F.layer_norm) == 1  # the first, whose input Inductor computes


def viewed(x, matrix, weight, scale):
    """Tokens of an image, and a product of rows."""
    rows = x.view(-1, C) * 2
    h = rows.view(8, 1024, C) + (rows @ matrix).view(8, 1024, C)
    return h, F.linear(layer_norm(h, weight).view(-1, C), matrix)


def test_views_that_copy_nothing():
    assert calls(viewed).count(ADD_NORM) == 1


def scaled(x, matrix, weight, scale):
    h = x + weight * F.linear(x, matrix)
    return h, F.linear(layer_norm(h, weight), matrix)


def with_alpha(x, matrix, weight, scale):
    h = torch.add(x, F.linear(x, matrix), alpha=2)
    return h, F.linear(layer_norm(h, weight), matrix)


def in_place(x, matrix, weight, scale):
    y = F.linear(x, matrix)
    h = y.add_(x)
    return h, F.linear(layer_norm(h, weight), matrix)


def not_read_again(x, matrix, weight, scale):
    return F.linear(layer_norm(x + F.linear(x, matrix), weight), matrix)


def read_by_two_norms(x, matrix, weight, scale):
    h = x + F.linear(x, matrix)
    return h + F.linear(layer_norm(h, weight), matrix) + F.linear(written_out(h, weight), matrix)


def broadcast(x, matrix, weight, scale):
    h = F.linear(x, matrix) + weight
    return h, F.linear(layer_norm(h, weight), matrix)


def transposed(x, matrix, weight, scale):
    columns = x.transpose(0, 1)
    h = F.linear(columns, matrix) + columns
    return h, F.linear(layer_norm(h, weight), matrix)


def independent(x, matrix, weight, scale):
    """The sum and what computes its first operand are one kernel of Inductor."""
    h = torch.relu(F.linear(x, matrix)) + F.linear(x, matrix)
    return h, F.linear(layer_norm(h, weight), matrix)


def read_by_inductor(x, matrix, weight, scale):
    h = x + F.linear(x, matrix)
    return h, F.linear(layer_norm(h, weight) * 2, matrix)


def sum_is_written(x, matrix, weight, scale):
    h = x + F.linear(x, matrix)
    h.mul_(2)
    return h, F.linear(layer_norm(h, weight), matrix)


def weight_is_written(x, matrix, weight, scale):
    h = x + F.linear(x, matrix)
    weight.mul_(2)
    return h, F.linear(layer_norm(h, weight), matrix)


def scale_is_written(x, matrix, weight, scale):
    h = x + F.linear(x, matrix)
    n = layer_norm(h, weight)
    scale.mul_(2)
    return h, _ours.quantize.default(n, scale)


def weight_is_computed_later(x, matrix, weight, scale):
    h = x + F.linear(x, matrix)
    return h, F.linear(layer_norm(h, weight * 2), matrix)


plain = functools.partial(float_block, layer_norm)
short = functools.partial(float_block, functools.partial(layer_norm, channels=1024))
LEFT = {
    **{
        form.__name__: (form, {})
        for form in (
            *(
                scaled,
                with_alpha,
                in_place,
                not_read_again,
                read_by_two_norms,
                broadcast,
                transposed,
                independent,
                read_by_inductor,
            ),
            *(sum_is_written, weight_is_written, scale_is_written, weight_is_computed_later),
        )
    },
    "short rows": (short, {"shape": (8, 1024, 1024)}),
    "few rows": (plain, {"shape": (1, 197, C)}),
    "on the CPU": (plain, {"device": "cpu"}),
    "with gradients": (plain, {"grad": True}),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_alone(name):
    form, options = LEFT[name]
    found = calls(form, **options)
    assert F.layer_norm in found
    assert not {ADD_NORM, STATIC, DYNAMIC} & set(found)


def test_a_write_behind_the_norm_changes_nothing():
    """The sum is memory of its own, as before."""

    def form(x, matrix, weight, scale):
        h = x + F.linear(x, matrix)
        n = layer_norm(h, weight)
        x.zero_()
        h.add_(2)
        return h, F.linear(n, matrix)

    gm = lowered(form)
    assert [node.target for node in gm.graph.nodes].count(ADD_NORM) == 1
    x, matrix, weight = torch.randn(2, 3, C), torch.randn(C, C) / C**0.5, torch.rand(C) + 0.5
    for got, expected in zip(gm(x.clone(), matrix, weight, None), form(x, matrix, weight, None), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_off_by_default(monkeypatch):
    monkeypatch.setattr(rule, "FLOAT_ROWS", range(0))
    monkeypatch.setattr(rule, "INT8_ROWS", range(0))
    for block, target in BLOCKS.values():
        assert target not in calls(functools.partial(block, layer_norm))
