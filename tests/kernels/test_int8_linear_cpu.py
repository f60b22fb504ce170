"""The CPU's three ways to compute int8_linear: each right, the first exact one chosen."""

from __future__ import annotations

import logging

import pytest
import torch
from oracle import assert_float_close, assert_int8_close, linear, numpy64
from test_int8_linear import make_case

from qframework.errors import QFrameworkError
from qframework.kernels import int8_linear, int8_linear_cpu
from qframework.kernels.int8_linear_arguments import ACTIVATIONS

CPU = torch.device("cpu")


@pytest.fixture(params=["onednn", "int_mm", "reference"])
def forced(request, monkeypatch):
    """Make one implementation the chosen one."""
    if request.param == "onednn" and int8_linear_cpu.cpu_implementation() != "onednn":
        pytest.skip("this CPU's oneDNN product is not exact")
    monkeypatch.setattr(int8_linear_cpu, "cpu_implementation", lambda: request.param)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("scale", ["per_token", "per_tensor"])
def test_every_implementation_is_right(forced, activation, scale):
    a, a_scale, b, b_scale, bias, residual = make_case(CPU, (2, 7, 123), 65, scale, residual=True)
    for added in (residual, None):
        exact, error = linear(a, a_scale, b, b_scale, bias, activation, added)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            got = int8_linear(a, a_scale, b, b_scale, bias, activation, added, out_dtype=dtype)
            assert got.dtype == dtype
            assert_float_close(got, exact, error)
        out_scale = torch.tensor([0.5])
        got = int8_linear(a, a_scale, b, b_scale, bias, activation, added, out_scale)
        assert_int8_close(got, exact, error, numpy64(out_scale))
        channels = torch.linspace(0.1, 0.9, 65)
        got = int8_linear(a, a_scale, b, b_scale, bias, activation, added, channels)
        assert_int8_close(got, exact, error, numpy64(channels))
        assert got.min() >= -127


def test_an_inexact_product_is_not_chosen(monkeypatch, caplog):
    monkeypatch.setattr(int8_linear_cpu, "_onednn_product", lambda a, b: (a.float() @ b.float().t()).clamp(max=32767.0))
    caplog.set_level(logging.WARNING)
    assert int8_linear_cpu.cpu_implementation.__wrapped__() == "int_mm"
    assert "onednn INT8 product is not exact" in caplog.text


def test_a_missing_product_is_not_chosen(monkeypatch):
    def missing(a, b):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(int8_linear_cpu, "_onednn_product", missing)
    monkeypatch.setattr(int8_linear_cpu, "_int_mm", missing)
    assert int8_linear_cpu.cpu_implementation.__wrapped__() == "reference"


def test_scales_are_looked_at_again_when_they_change():
    a, a_scale, b, b_scale, bias, _ = make_case(CPU, (4, 32), 16, "per_tensor")
    int8_linear(a, a_scale, b, b_scale, bias)
    b_scale[3] = 0
    with pytest.raises(QFrameworkError, match=r"b_scale holds 0.0"):
        int8_linear(a, a_scale, b, b_scale, bias)


def test_packed_weight_follows_the_weight():
    a, a_scale, b, b_scale, bias, _ = make_case(CPU, (4, 32), 16, "per_tensor")
    before = int8_linear(a, a_scale, b, b_scale, bias)
    b.copy_(torch.flip(b, (0,)))
    after = int8_linear(a, a_scale, b, b_scale, bias)
    assert not torch.equal(before, after)
    assert_float_close(after, *linear(a, a_scale, b, b_scale, bias))


def test_packed_weights_are_dropped_with_the_weight(monkeypatch):
    if int8_linear_cpu.cpu_implementation() != "onednn":
        pytest.skip("nothing is packed where oneDNN's product is not exact")
    monkeypatch.setattr(int8_linear_cpu, "_packed", {})  # weights of models that other tests keep alive do not count
    a, a_scale, b, b_scale, bias, _ = make_case(CPU, (4, 32), 16, "per_tensor")
    weights = [b.clone() for _ in range(50)]  # alive together: one freed at once would give the next its address
    for weight in weights:
        int8_linear(a, a_scale, weight, b_scale, bias)
    assert len(int8_linear_cpu._packed) == 50
    del weight, weights
    int8_linear(a, a_scale, b, b_scale, bias)
    assert len(int8_linear_cpu._packed) == 1
