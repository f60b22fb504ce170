"""Scales of channels as products in the graph: the reduction of the error, against NumPy, and excluded inputs."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from quantizer_models import LINEAR, exported
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from qframework.graph.attributes import attribute
from qframework.numerics import sqnr_db
from qframework.quantizer import (
    QFrameworkQuantizer,
    Recipe,
    Smooth,
    calibrate,
    channel_scales,
    dynamic_int8,
    static_int8,
)
from qframework.quantizer.activation_choice import choose_activations
from qframework.quantizer.channel_scales import _least, scale_channels, unscale_channels
from qframework.quantizer.channel_statistics import channel_statistics

MUL = torch.ops.aten.mul.Tensor
DIM, HIDDEN = 8, 16
STRENGTHS = (0.0, 0.5, 1.0)


class UnevenMlp(nn.Module):
    """A GELU whose channels differ a hundredfold, between two linears."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.drop, self.fc2 = nn.Linear(DIM, HIDDEN), nn.Dropout(0.1), nn.Linear(HIDDEN, DIM)
        with torch.no_grad():
            self.fc1.weight[::3] *= 100
            self.fc2.weight[:, ::3] /= 100
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.drop(F.gelu(self.fc1(x))))


class Left(nn.Module):
    """Inputs that a layer before can scale, or that attention writes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(self.norm(x))
        return self.attention(x, x, x, need_weights=False)[0]


def quantizer(config=None) -> QFrameworkQuantizer:
    """Everything except the first linear, which reads the model's input."""
    return QFrameworkQuantizer().set_global(config or static_int8()).set_module_name("fc1", None)


def batches(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(2, 7, DIM, dtype=dtype) for _ in range(3)]


def products(graph: GraphModule) -> int:
    return sum(node.target == MUL for node in graph.graph.nodes)


def converted(model: nn.Module, recipe: Recipe, config=None) -> GraphModule:
    data = batches()
    graph = exported(model, data[0])
    recipe.before_prepare(graph, quantizer(config), data)
    prepared = prepare_pt2e(graph, quantizer(config))
    calibrate(prepared, data)
    return convert_pt2e(prepared)


@pytest.mark.parametrize(
    "config", [static_int8(), static_int8(observer="mse"), dynamic_int8()], ids=["minmax", "mse", "dynamic"]
)
def test_uneven_channels_become_more_accurate(config) -> None:
    model, x = UnevenMlp(), batches()[1]
    plain, scaled = (converted(model, Recipe(channel_scales=flag), config) for flag in (False, True))
    assert products(scaled) == 1
    assert sqnr_db(model(x), scaled(x)) > sqnr_db(model(x), plain(x)) + 6


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=str
)
def test_function_and_the_given_model_stay_the_same(dtype: torch.dtype, tolerance: float) -> None:
    model, data = UnevenMlp(dtype), batches(dtype)
    old = copy.deepcopy(model.state_dict())
    graph = exported(model, data[0])
    before = graph(data[0])
    assert set(scale_channels(graph, quantizer(), data, strengths=STRENGTHS)) == {"fc2"}
    assert products(graph) == 1
    difference = (graph(data[0]) - before).abs().max() / before.abs().max()
    assert float(difference) < tolerance
    assert all(torch.equal(value, old[name]) for name, value in model.state_dict().items())


def test_against_numpy() -> None:
    """A scale for each channel of the activation, folded into the weight: computed the other way round."""
    model, data = UnevenMlp(), batches()
    graph = exported(model, data[0])
    scale_channels(graph, quantizer(), data, strengths=(1.0,))
    quantized = QFrameworkQuantizer().set_module_name("fc2", static_int8())
    prepared = prepare_pt2e(graph, quantized)
    calibrate(prepared, data)
    got = convert_pt2e(prepared)(data[0]).detach().numpy()

    with torch.no_grad():
        hidden = [F.gelu(model.fc1(x)).double().numpy().reshape(-1, HIDDEN) for x in data]
    weight, bias = (p.detach().double().numpy() for p in (model.fc2.weight, model.fc2.bias))
    step = np.abs(np.concatenate(hidden)).max(0) / 127  # strength 1: every channel fills its own range
    q = np.clip(np.rint(hidden[0] / step), -127, 127)
    scaled = weight * step
    weight_step = np.abs(scaled).max(1, keepdims=True) / 127
    expected = (q @ np.rint(scaled / weight_step).T) * weight_step.T + bias
    # values next to a tie may round to the other side: one step of a channel times its weight
    one_step = np.abs(scaled).max()
    wrong = np.abs(got.reshape(-1, DIM) - expected)
    assert wrong.max() < 2 * one_step
    assert (wrong > 1e-4 * np.abs(expected).max()).mean() < 0.05


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (Left(), static_int8()),
        (UnevenMlp(), dynamic_int8("per_tensor")),
        (UnevenMlp(), static_int8("per_token")),
        (UnevenMlp(), None),
    ],
    ids=["scaled before, attention", "dynamic per tensor", "per token", "float"],
)
def test_inputs_that_are_not_scaled(model: nn.Module, config) -> None:
    data = batches()
    graph = exported(model, data[0])
    chosen = QFrameworkQuantizer().set_global(config)
    assert scale_channels(graph, chosen, data, strengths=STRENGTHS) == {}
    assert products(graph) == 0


def test_linears_that_read_one_tensor_share_a_product_and_float_ones_keep_theirs() -> None:
    class Three(UnevenMlp):
        def __init__(self) -> None:
            super().__init__()
            self.other, self.left = copy.deepcopy(self.fc2), copy.deepcopy(self.fc2)

        def forward(self, x: Tensor) -> Tensor:
            y = F.gelu(self.fc1(x))
            return self.fc2(y) + self.other(y) + self.left(y)

    model, data = Three(), batches()
    graph = exported(model, data[0])
    chosen = quantizer().set_module_name("left", None)
    assert set(scale_channels(graph, chosen, data, strengths=STRENGTHS)) == {"fc2", "other"}
    [product] = (node for node in graph.graph.nodes if node.target == MUL)
    assert len(product.users) == 2
    assert sum(node.target == LINEAR for node in product.args[0].users) == 1
    torch.testing.assert_close(graph(data[0]), model(data[0]), rtol=1e-5, atol=1e-5)


def test_a_linear_reads_again_what_was_multiplied_for_it() -> None:
    model, (x, *_) = UnevenMlp().eval(), batches()
    graph = exported(model, x)
    assert scale_channels(graph, quantizer(), batches(), strengths=(0.5,)) == {"fc2": 0.5}
    fc1, fc2 = (node for node in graph.graph.nodes if node.target == LINEAR)
    unscale_channels(graph, fc1)  # reads no product
    assert products(graph) == 1
    unscale_channels(graph, fc2)
    assert products(graph) == 0
    torch.testing.assert_close(graph(x), model(x))
    torch.testing.assert_close(attribute(graph, fc2.args[1]), model.fc2.weight, rtol=1e-6, atol=1e-7)


def test_even_channels_get_no_product() -> None:
    model, data = UnevenMlp(), batches()
    with torch.no_grad():
        model.fc1.weight[:], model.fc1.bias[:] = torch.eye(DIM).repeat(2, 1) * 30, 0.0
        model.fc2.weight.copy_(torch.where(torch.rand(DIM, HIDDEN) < 0.5, -1.0, 1.0))
    data = [x.clamp(-1, 1) for x in data]
    assert Recipe(Smooth(), channel_scales=True).before_prepare(exported(model, data[0]), quantizer(), data) == {
        "smooth": {},
        "channel_scales": {},
    }


def test_the_search_finds_the_least_error_with_few_measurements() -> None:
    strengths = [k / 10 for k in range(11)]
    for least in strengths:
        measured: list[float] = []

        def error(strength: float, least: float = least, measured: list[float] = measured) -> float:
            measured.append(strength)
            return (strength - least) ** 2

        assert _least(error, strengths) == least
        assert len(set(measured)) <= 6
    assert _least(lambda strength: strength, [0.3]) == 0.3


def test_a_former_result_is_applied_to_other_ranges_without_a_search(monkeypatch) -> None:
    data = batches()
    graph = exported(UnevenMlp(), data[0])
    found = scale_channels(graph, quantizer(), data, strengths=STRENGTHS)
    monkeypatch.setattr(channel_scales, "relative_error", lambda *_: pytest.fail("searched"))
    again = exported(UnevenMlp(), data[0])
    assert scale_channels(again, quantizer(), data, strengths=STRENGTHS, chosen=found) == found
    assert torch.equal(again(data[0]), graph(data[0]))
    scaled = {}
    for factor in (1, 10):  # ranges are those of the data given
        other = exported(UnevenMlp(), data[0])
        scale_channels(other, quantizer(), [factor * x for x in data], strengths=STRENGTHS, chosen={"fc2": 1.0})
        scaled[factor] = next(value for name, value in other.named_buffers() if "channel_scale" in name)
    assert not torch.allclose(scaled[1], scaled[10])
    assert scale_channels(exported(UnevenMlp(), data[0]), quantizer(), data, strengths=STRENGTHS, chosen={}) == {}


def test_static_scales_follow_the_reach_of_channels() -> None:
    torch.manual_seed(1)
    data = list(torch.randn(24, 7, DIM).split(2))
    constants = []
    for reach in (False, True):
        graph = exported(UnevenMlp(), data[0])
        node = next(node for node in graph.graph.nodes if "gelu" in node.name)
        seen = channel_statistics(graph, data, [node], 1)[node]
        scale_channels(graph, quantizer(), data, strengths=(), reach=reach, chosen={"fc2": 1.0})
        constants.append(next(value for name, value in graph.named_buffers() if "channel_scale" in name))
    expected, found = seen.reaching().amax / seen.amax, constants[0] / constants[1]
    assert float(expected.max() / expected.min()) > 1.2
    torch.testing.assert_close(found / found.mean(), expected / expected.mean())
    dynamic = []
    for reach in (False, True):
        graph = exported(UnevenMlp(), data[0])
        scale_channels(graph, quantizer(dynamic_int8()), data, strengths=(), reach=reach, chosen={"fc2": 1.0})
        dynamic.append(next(value for name, value in graph.named_buffers() if "channel_scale" in name))
    assert torch.equal(*dynamic)


def test_margins_start_from_the_reach_of_scaled_channels() -> None:
    torch.manual_seed(1)
    data = list(torch.randn(24, 7, DIM).split(6))
    graph = exported(UnevenMlp(), data[0], dynamic_batch=True)
    scale_channels(graph, quantizer(), data, strengths=(), reach=True, chosen={"fc2": 1.0})
    product = next(node for node in graph.graph.nodes if node.target == MUL)
    seen = channel_statistics(graph, data, [product], 1)[product]
    name = choose_activations(graph, quantizer(), data, observers=False, margins=True, reach=True)["fc2"]
    beyond = (1 + float(name.removeprefix("+ "))) * float(seen.amax.amax()) / float(seen.reaching().amax.amax())
    assert min(abs(beyond - 1 - more) for more in (0.0, 0.1, 0.2, 0.3, 0.5)) < 0.03
