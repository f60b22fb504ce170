"""Linears of many rows and few channels stay in float, with static and dynamic INT8, and ``explain`` says why."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import qframework
from qframework import numerics
from qframework.backend.compile import lower
from qframework.backend.options import BackendOptions
from qframework.graph import small_linears

TOKENS = 64


class TalkingHeads(nn.Module):
    """Attention whose logits are mixed over heads by a linear, as in CaiT."""

    def __init__(self, heads: int = 4, channels: int = 64) -> None:
        super().__init__()
        self.heads, self.qkv, self.mix = heads, nn.Linear(channels, 3 * channels), nn.Linear(heads, heads)
        self.proj = nn.Linear(channels, channels)

    def forward(self, x):
        batch, tokens, channels = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        logits = self.mix((q @ k.transpose(-1, -2)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.proj((logits.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, channels))


def model_and_input(rows: int):
    torch.manual_seed(0)
    return TalkingHeads().eval(), torch.randn(rows // TOKENS**2, TOKENS, 64)


def by_name(reports):
    return {report.name: report for report in reports if report.kind == "linear"}


def dynamic(model, x):
    reports = []

    def backend(gm, example_inputs):
        reports.extend(lower(gm, example_inputs, BackendOptions(linear="int8_dynamic")))
        return gm.forward

    with torch.no_grad():
        y = torch.compile(model, backend=backend, fullgraph=True)(x)
        assert numerics.sqnr_db(model(x), y) > 25
    return by_name(reports)


def static(model, x):
    quantized = qframework.quantize(model, x, "static_int8", [x])
    with torch.no_grad():
        assert numerics.sqnr_db(model(x), quantized(x)) > 25
    return by_name(quantized.explain().layers)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("convert", [dynamic, static])
def test_a_mix_of_heads_stays_in_float(convert):
    found = convert(*model_and_input(2 * TOKENS**2))
    assert {name for name, report in found.items() if report.lowered} == {"qkv", "proj"}
    assert not found["mix"].fallback
    assert found["mix"].reason.startswith(f"it has 4 inputs and 4 outputs for each of {2 * TOKENS**2} rows")


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("convert", [dynamic, static])
def test_layers_with_an_empty_weight_stay_in_float(convert):
    empty, inner = nn.Linear(16, 0), nn.Linear(0, 16)
    nn.init.normal_(inner.bias)
    model, x = nn.Sequential(nn.Linear(16, 16), empty, inner, nn.Linear(16, 16)).eval(), torch.randn(4, 16)
    reports = convert(model, x)
    assert [name for name, each in reports.items() if each.lowered] == ["0", "3"]
    assert "its weight is empty, of shape (0, 16)" in reports["1"].reason or convert is static


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("convert", [dynamic, static])
def test_layers_of_few_rows_or_many_channels_are_quantized(convert):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 256)).eval()
    assert all(report.lowered for report in convert(model, torch.randn(4095, 8)).values())
    wide = nn.Sequential(nn.Linear(32, 32)).eval()
    assert all(report.lowered for report in convert(wide, torch.randn(4096, 32)).values())


@pytest.mark.parametrize(
    ("inputs", "outputs", "static", "dynamic"),
    [
        (32, 64, True, True),  # slower in INT8
        (64, 64, False, True),
        (40, 160, True, True),  # rows of 40 bytes
        (160, 40, False, True),
        (64, 192, False, False),
    ],
)
def test_limits_on_hopper(monkeypatch, inputs, outputs, static, dynamic):
    monkeypatch.setattr(small_linears, "capability_of", lambda device: (9, 0))
    graph = torch.fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    x.meta["val"], weight.meta["val"] = torch.empty(4096, inputs), torch.empty(outputs, inputs)
    assert (small_linears.why_too_small(x, weight, False) is not None) == static
    assert (small_linears.why_too_small(x, weight, True) is not None) == dynamic
    monkeypatch.setattr(small_linears, "capability_of", lambda device: (8, 9))
    assert small_linears.why_too_small(x, weight, True) is None  # other chips were not measured


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "small"),
    [
        (3136, 40, 160, True),
        (3136, 48, 160, False),
        (64, 40, 160, False),
        (197, 1000, 2000, False),
        (65, 100, 100, True),
    ],
)
def test_few_rows_that_are_copied_stay_in_float_on_hopper(monkeypatch, rows, inputs, outputs, small):
    monkeypatch.setattr(small_linears, "capability_of", lambda device: (9, 0))
    graph = torch.fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    x.meta["val"], weight.meta["val"] = torch.empty(rows, inputs), torch.empty(outputs, inputs)
    reasons = [small_linears.why_too_small(x, weight, dynamic) for dynamic in (False, True)]
    assert [reason is not None and "no multiple of 16" in reason for reason in reasons] == [small, small]
    monkeypatch.setattr(small_linears, "capability_of", lambda device: (8, 9))
    assert small_linears.why_too_small(x, weight, False) is None
