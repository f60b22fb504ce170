"""Linears with one input become one product: the same results, current biases, and nothing that reads other strides."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from qframework.backend import passes
from qframework.backend.compile import run_passes
from qframework.backend.lowering import Lowering
from qframework.backend.merge_linears import merge_linears
from qframework.backend.options import BackendOptions
from qframework.numerics import sqnr_db

INT8_LINEAR = torch.ops.qframework.int8_linear.default
FROZEN = {"linear": "int8_dynamic", "freeze_weights": True}


@pytest.fixture(autouse=True)
def no_grad(fresh_dynamo):
    torch.manual_seed(0)
    with torch.no_grad():
        yield


class Attention(nn.Module):
    """Grouped heads, and a key projection without a bias."""

    def __init__(self, heads: int = 4, key_heads: int = 2, dim: int = 32, bias: bool = True) -> None:
        super().__init__()
        self.heads, self.key_heads, self.width = heads, key_heads, dim // heads
        self.q = nn.Linear(dim, dim, bias=bias)
        self.k = nn.Linear(dim, key_heads * self.width, bias=False)
        self.v = nn.Linear(dim, key_heads * self.width, bias=bias)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (part(x).view(*x.shape[:2], -1, self.width).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = scaled_dot_product_attention(q, k, v, enable_gqa=self.heads != self.key_heads)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Reads(nn.Module):
    """Two linears of one input, and what reads them."""

    def __init__(self, read) -> None:
        super().__init__()
        self.a, self.b, self.read = nn.Linear(32, 24), nn.Linear(32, 24), read

    def forward(self, x):
        return self.read(self.a(x), self.b(x), x)


def lowered(model, x, options=FROZEN, merged=True, dynamic=False):
    """The lowered graphs, run without Inductor; and what to call."""
    found = []

    def backend(gm, inputs):
        lowering = Lowering.of(gm, inputs, BackendOptions(**options))
        run_passes(lowering)
        found.append(gm)

        def run(*args):
            for check in lowering.checks:
                check(args)
            return gm(*args)

        return run

    with pytest.MonkeyPatch.context() as patch:
        if not merged:
            patch.setattr(passes, "LOWERING", tuple(each for each in passes.LOWERING if each is not merge_linears))
        torch._dynamo.reset()
        compiled = torch.compile(model.eval(), backend=backend, dynamic=dynamic)
        compiled(x)
    return found, compiled


def products(graphs):
    return sum(node.target is INT8_LINEAR for gm in graphs for node in gm.graph.nodes)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_projections_are_one_product_with_the_same_result(bias, dynamic, dtype):
    model = nn.Sequential(Attention(bias=bias), Attention(4, 4, bias=bias)).to(dtype)
    x = torch.randn(2, 7, 32, dtype=dtype)
    apart, run_apart = lowered(model, x, merged=False, dynamic=dynamic)
    expected = run_apart(x)
    together, run = lowered(model, x, dynamic=dynamic)
    assert (products(apart), products(together)) == (8, 4)
    assert torch.equal(run(x), expected)
    int8 = [buffer for gm in together for buffer in gm.buffers() if buffer.dtype == torch.int8]
    assert sorted(len(buffer) for buffer in int8) == [32, 32, 64, 96], "the separate weights are still held"


def test_inductor_compiles_the_same():
    model, x = Attention().eval(), torch.randn(2, 7, 32)
    expected = lowered(model, x, merged=False)[1](x)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="qframework", options=FROZEN)(x)
    assert sqnr_db(expected, compiled) > 50, "the same integers but for a few ties"


def test_biases_follow_writes_and_new_parameters():
    model, x = Attention(), torch.randn(2, 7, 32)
    _, run = lowered(model, x)
    before = run(x)
    model.q.bias.add_(1.0)
    model.v.bias.copy_(torch.randn_like(model.v.bias))
    after = run(x)
    assert not torch.allclose(before, after, atol=1e-2)
    assert torch.equal(after, lowered(model, x, merged=False)[1](x))


READS = {
    "an activation, which is an epilogue": lambda a, b, x: torch.relu(a) * b.sin(),
    "a sum, which is an epilogue": lambda a, b, x: (a + x[..., :24]) * b.sin(),
    "the caller": lambda a, b, x: (a, b),
    "a view that needs contiguous memory": lambda a, b, x: a.view(-1) + b.view(-1),
    "strides": lambda a, b, x: a.as_strided((2, 24), (24, 1)) + b.as_strided((2, 24), (24, 1)),
    "a write": lambda a, b, x: a.sin().add_(b) + a.mul_(2),
}


@pytest.mark.parametrize("read", READS)
def test_what_needs_its_own_result_keeps_it(read):
    model, x = Reads(READS[read]), torch.randn(2, 7, 32)
    graphs, run = lowered(model, x)
    assert products(graphs) == 2
    got, expected = run(x), lowered(model, x, merged=False)[1](x)
    for mine, theirs in zip(got, expected, strict=True) if isinstance(got, tuple) else [(got, expected)]:
        assert torch.equal(mine, theirs)


def test_results_that_only_float_operations_read_are_merged():
    model, x = Reads(lambda a, b, x: a.sin() * b + a.reshape(2, 7, 24)), torch.randn(2, 7, 32)
    graphs, run = lowered(model, x)
    assert products(graphs) == 1
    assert torch.equal(run(x), lowered(model, x, merged=False)[1](x))


class Repeated(nn.Module):
    """A layer that is called twice, and one with its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 24), nn.Linear(32, 24, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.a(x).sin() * self.a(x).cos() * self.b(x).exp()


class WritesItsBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 24), nn.Linear(32, 24)

    def forward(self, x):
        y = self.a(x).sin()
        self.b.bias.add_(1.0)
        return y * self.b(x).cos()


@pytest.mark.parametrize(("kind", "number"), [(Repeated, 1), (WritesItsBias, 2)])
def test_layers_that_share_or_write_their_parameters(kind, number):
    model, x = kind(), torch.randn(2, 7, 32)
    other = copy.deepcopy(model)
    graphs, run = lowered(model, x)
    assert products(graphs) == number
    results = [run(x) for _ in range(2)]
    run = lowered(other, x, merged=False)[1]
    assert all(torch.equal(result, run(x)) for result in results)


def test_weights_that_are_not_frozen_stay_apart():
    model, x = Attention(), torch.randn(2, 7, 32)
    assert products(lowered(model, x, {"linear": "int8_dynamic"})[0]) == 4


def test_linears_of_different_inputs_stay_apart():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(32, 24), nn.Linear(32, 24)

        def forward(self, x):
            return self.a(x.sin()) * self.b(x.cos())

    assert products(lowered(Two(), torch.randn(2, 7, 32))[0]) == 2
