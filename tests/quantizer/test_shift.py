"""Shifts: functions stay the same, what a bias can take, errors that become smaller, and what is left alone."""

from __future__ import annotations

import copy

import pytest
import torch
from quantizer_models import exported, linears
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from qframework.numerics import sqnr_db
from qframework.quantizer import (
    QFrameworkQuantizer,
    QuantizationConfig,
    Recipe,
    calibrate,
    dynamic_int8,
    shift,
    static_attention,
    static_int8,
)
from qframework.quantizer.shift import shift_channels, shift_dynamic_inputs

DIM, TOKENS, HEADS = 16, 9, 2
SUB = torch.ops.aten.sub.Tensor


class Block(nn.Module):
    """Inputs of linears far from zero: behind a norm with a large bias, attention with large values, and a GELU."""

    def __init__(self, masked: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.qkv, self.proj = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM, bias=False)
        self.fc1, self.fc2, self.masked = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM), masked
        with torch.no_grad():
            self.norm.bias.copy_(torch.linspace(-20, 20, DIM))
            self.qkv.bias += 4 * torch.randn(3 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=x.device) if self.masked else None
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(-2)
        return self.fc2(F.gelu(self.fc1(x + self.proj(y))))


def batches(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, TOKENS, DIM, generator=generator).to(dtype) for _ in range(3)]


def quantizer(config=None) -> QFrameworkQuantizer:
    return QFrameworkQuantizer().set_global(config or dynamic_int8())


def subtractions(graph: GraphModule) -> int:
    return sum(node.target == SUB for node in graph.graph.nodes)


def sqnr_with(recipe: Recipe, config=None) -> float:
    data, model = batches(), Block()
    graph = exported(model, data[0], dynamic_batch=True)
    recipe.before_prepare(graph, quantizer(config), data)
    prepared = prepare_pt2e(graph, quantizer(config))
    calibrate(prepared, data, progress=False)
    recipe.after_calibrate(prepared, data)
    x = torch.randn(32, TOKENS, DIM, generator=torch.Generator().manual_seed(7))
    return sqnr_db(model(x), convert_pt2e(prepared)(x))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=str
)
def test_function_and_the_given_model_stay_the_same(dtype: torch.dtype, tolerance: float) -> None:
    model, data = Block().to(dtype), batches(dtype)
    old = copy.deepcopy(model.state_dict())
    graph = exported(model, data[0], dynamic_batch=True)
    before = graph(data[0])
    done = shift_channels(graph, quantizer(), data)
    assert {"qkv", "proj"} <= set(done)
    assert set(shift_dynamic_inputs(graph, quantizer(), data, corrects_bias=True)) == {"fc2"}
    assert subtractions(graph) == 1  # all other shifts are part of biases
    difference = (graph(data[0]) - before).abs().max() / before.abs().max()
    assert float(difference) < tolerance
    assert all(torch.equal(value, old[name]) for name, value in model.state_dict().items())


def values_of(graph: GraphModule, data: list[Tensor]) -> dict:
    """The value of each node of a graph."""
    values: dict = {}
    interpreter = torch.fx.Interpreter(graph, garbage_collect_values=False)
    interpreter.run(torch.cat(data), enable_io_processing=False)
    values.update(interpreter.env)
    return values


def test_inputs_behind_norms_and_attention_are_centred() -> None:
    def distance(graph: GraphModule, name: str) -> float:
        """The largest mean of a channel relative to the standard deviation of all, in the input of a linear."""
        node = next(node for node in linears(graph) if node.args[1].target == f"{name}.weight")
        rows = values_of(graph, data)[node.args[0]].detach().reshape(-1, DIM)
        return float(rows.mean(0).abs().max() / (rows - rows.mean(0)).std())

    data = batches()
    graph = exported(Block(), data[0], dynamic_batch=True)
    assert min(distance(graph, name) for name in ("qkv", "proj")) > 5
    shift_channels(graph, quantizer(), data)
    assert max(distance(graph, name) for name in ("qkv", "proj")) < 1


def test_values_behind_a_mask_are_not_shifted() -> None:
    """Where a mask excludes all keys, the output is zero, and no longer the values' constant."""
    data = batches()
    graph = exported(Block(masked=True), data[0], dynamic_batch=True)
    assert "proj" not in shift_channels(graph, quantizer(), data)


def test_keys_of_static_attention_are_shifted() -> None:
    data = batches()
    graph = exported(Block(), data[0], dynamic_batch=True)
    before, config = graph(data[0]), QuantizationConfig(static_int8(), static_attention())
    done = shift_channels(graph, quantizer(config), data)
    assert "keys" in done.values()
    key = next(node for node in graph.graph.nodes if "attention" in str(node.target)).args[1]
    keys = values_of(graph, data)[key].detach()
    torch.testing.assert_close(keys.amax((0, 2)), -keys.amin((0, 2)), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(graph(data[0]), before, rtol=1e-4, atol=1e-4)


def test_symmetric_inputs_are_left() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    data = batches()
    graph = exported(Plain(), data[0], dynamic_batch=True)
    assert shift_dynamic_inputs(graph, quantizer(), data) == {}
    assert shift_channels(graph, quantizer(), data) == {}


@pytest.mark.parametrize(("config", "gain"), [(dynamic_int8(), 4), (static_int8(), 1)], ids=["dynamic", "static"])
def test_shifts_raise_accuracy(config, gain: float) -> None:
    plain, shifted = (sqnr_with(Recipe(shift=flag, bias_correction=True, guard=True), config) for flag in (False, True))
    assert shifted > plain + gain


def test_shifted_layers_stay_int8_when_compiled(caplog) -> None:
    """The subtraction is between GELU and the quantization, which the backend has to see through."""
    data, model = batches(), nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
    graph = exported(model, data[0], dynamic_batch=True)
    recipe = Recipe(shift=True, bias_correction=True)
    assert recipe.before_prepare(graph, quantizer(), data)["dynamic_shift"]
    prepared = prepare_pt2e(graph, quantizer())
    calibrate(prepared, data, progress=False)
    converted = convert_pt2e(prepared)
    assert subtractions(converted) == 1
    fast = torch.compile(converted, backend="qframework", fullgraph=True)
    with torch.no_grad(), caplog.at_level("INFO", logger="qframework"):
        got = fast(data[0])
    assert "2 of 2 linear layers lowered" in caplog.text
    assert sqnr_db(converted(data[0]), got) > 45


def test_numbers_of_a_former_result_are_subtracted_without_a_search(monkeypatch) -> None:
    data, model = batches(), nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
    graph = exported(model, data[0], dynamic_batch=True)
    found = shift_dynamic_inputs(graph, quantizer(), data, corrects_bias=True)
    monkeypatch.setattr(shift, "relative_error", lambda *_: pytest.fail("searched"))
    again = exported(model, data[0], dynamic_batch=True)
    assert shift_dynamic_inputs(again, quantizer(), data, corrects_bias=True, chosen=found) == found != {}
    assert torch.equal(again(data[0]), graph(data[0]))
    assert subtractions(again) == 1
