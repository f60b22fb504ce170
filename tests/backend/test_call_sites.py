"""Generated code calls operators with kernels for GPUs through call sites, and others through the dispatcher."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.nn.functional import scaled_dot_product_attention

from qframework.compat import call_sites
from qframework.kernels.runtime import call_site as runtime
from qframework.kernels.runtime.operator import OPERATORS

OPTIONS = {"attention": "sage_b"}
LINE = "= call_site('sage_attention')"
CALL = "torch.ops.qframework.sage_attention.default("


@pytest.fixture
def on_cpus(monkeypatch, fresh_dynamo):
    """Call sites on CPUs too; nothing is read from or written to a cache."""
    monkeypatch.setattr(call_sites, "DEVICES", ("cpu",))
    with torch.compiler.config.patch(force_disable_caches=True):
        yield


class Attention(nn.Module):
    def forward(self, q, k, v):
        return scaled_dot_product_attention(q.sin(), k, v, is_causal=True).cos()


def inputs(tokens: int = 40):
    return [torch.randn(2, 3, tokens, 32) for _ in range(3)]


def code_of(model, xs, **compile_options):
    compiled = torch.compile(model, backend="qframework", options=OPTIONS, **compile_options)
    with torch.no_grad():
        result, codes = run_and_get_code(compiled, *xs)
    return result, "\n".join(codes), compiled


def test_each_call_has_a_site_and_the_same_result(on_cpus, monkeypatch):
    called = []
    # What a site calls is for GPUs; the operator itself gives the same.
    monkeypatch.setattr(runtime, "call_site", lambda name: called.append(name) or runtime.overload_of(name))
    model, xs = nn.ModuleList([Attention(), Attention()]), inputs()

    def twice(q, k, v):
        return model[1](model[0](q, k, v), k, v)

    result, code, compiled = code_of(twice, xs)
    assert called == ["sage_attention"] * 2
    assert code.count(LINE) == 2
    assert code.count(runtime.IMPORT) == 1
    assert CALL not in code
    torch._dynamo.reset()
    monkeypatch.setattr(call_sites, "DEVICES", ())
    expected, code, _ = code_of(twice, xs)
    assert LINE not in code
    assert CALL in code
    assert torch.equal(result, expected)
    with torch.no_grad():
        assert torch.equal(compiled(*xs), expected)


def test_symbolic_sizes_have_none(on_cpus):
    _, code, compiled = code_of(Attention(), inputs(), dynamic=True)
    assert LINE not in code
    assert CALL in code
    xs = inputs(56)
    with torch.no_grad():
        assert torch.allclose(compiled(*xs), Attention()(*xs), atol=0.03)


@pytest.mark.parametrize("name", [name for name, operator in OPERATORS.items() if operator.replayed is not None])
def test_arguments_that_are_left_out_have_the_defaults_of_implementations(name):
    """Which a site calls directly: there, no dispatcher makes a dtype of a number."""
    record = OPERATORS[name].arguments
    required = [field for field in record._fields if field not in record._field_defaults]
    given = call_sites._positional(runtime.overload_of(name), tuple(required), {})
    defaults = [record._field_defaults[field] for field in record._fields[len(required) : len(given)]]
    assert [(type(x), x) for x in given[len(required) :]] == [(type(x), x) for x in defaults]


def test_gpus_alone_have_sites(fresh_dynamo):
    assert call_sites.DEVICES == ("cuda",)
    _, code, _ = code_of(Attention(), inputs())
    assert LINE not in code
