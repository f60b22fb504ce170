"""smooth.py and channel_statistics.py: formula and search against NumPy, and that the function stays the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quantizer_models import exported, tiny_vit
from torch import Tensor, nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from qframework.errors import CalibrationError
from qframework.numerics import sqnr_db
from qframework.quantizer import QFrameworkQuantizer, Recipe, Smooth, calibrate, dynamic_int8, static_int8
from qframework.quantizer.channel_statistics import ChannelStatistics, channel_statistics
from qframework.quantizer.smooth import CalibratedLinear, search_smoothing, smooth, smoothing_scales

CHANNELS, OUTPUTS = 16, 12
STRENGTHS = tuple(k / 10 for k in range(11))


class NormLinear(nn.Module):
    """A norm with outlier channels before two linears."""

    def __init__(self, outlier: float = 50.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.a, self.b = nn.LayerNorm(CHANNELS), nn.Linear(CHANNELS, OUTPUTS), nn.Linear(CHANNELS, OUTPUTS)
        with torch.no_grad():
            self.norm.weight[::5] *= outlier
            self.a.weight[:, ::5] /= outlier
            self.b.weight[:, ::5] /= outlier

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return torch.cat([self.a(y), self.b(y)], -1)


def quantizer(config=None) -> QFrameworkQuantizer:
    return QFrameworkQuantizer().set_global(config or static_int8())


def data(count: int = 3) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(2, 7, CHANNELS) for _ in range(count)]


def quantized(model: nn.Module, recipe: Recipe, config=None) -> tuple[Tensor, Tensor]:
    """The outputs of the float model and of the quantized one."""
    batches = data()
    graph = exported(model, batches[0])
    recipe.before_prepare(graph, quantizer(config), batches)
    prepared = prepare_pt2e(graph, quantizer(config))
    calibrate(prepared, batches)
    return model(batches[1]), convert_pt2e(prepared)(batches[1])


# ----------------------------------------------------------------------------------------------------------------------
# NumPy twins


def numpy_scales(amax_x: np.ndarray, amax_w: np.ndarray, strength: float) -> np.ndarray:
    scales = amax_x**strength / amax_w ** (1 - strength)
    return scales / np.exp(np.log(scales).mean())


def numpy_error(x: np.ndarray, weights: list[np.ndarray], scales: np.ndarray) -> float:
    """Min-max INT8, per tensor and per output channel."""

    def rounded(values: np.ndarray, step: np.ndarray) -> np.ndarray:
        return np.clip(np.rint(values / step), -127, 127) * step

    total = 0.0
    for w in weights:
        scaled_x, scaled_w = x / scales, w * scales
        q_x = rounded(scaled_x, np.abs(scaled_x).max() / 127)
        q_w = rounded(scaled_w, np.abs(scaled_w).max(1, keepdims=True) / 127)
        total += ((q_x @ q_w.T - x @ w.T) ** 2).sum() / ((x @ w.T) ** 2).sum()
    return total


def test_scales_against_numpy() -> None:
    torch.manual_seed(0)
    amax_x, amax_w = torch.rand(CHANNELS) + 0.1, torch.rand(CHANNELS) + 0.1
    for strength in STRENGTHS:
        got = smoothing_scales(amax_x, amax_w, torch.ones(CHANNELS, dtype=torch.bool), strength)
        # rounded once to float32
        np.testing.assert_allclose(
            got, numpy_scales(amax_x.double().numpy(), amax_w.double().numpy(), strength), 2**-22
        )


def test_search_against_numpy() -> None:
    model, x = NormLinear(), torch.cat(data()).reshape(-1, CHANNELS)
    x = model.norm(x).detach()
    identity = torch.arange(CHANNELS)
    layers = [
        CalibratedLinear(name, layer.weight.detach(), identity, static_int8(), x, x.abs().amax(0))
        for name, layer in (("a", model.a), ("b", model.b))
    ]
    found = search_smoothing(layers, torch.ones(CHANNELS, dtype=torch.bool), STRENGTHS)
    weights = [layer.weight.detach().double().numpy() for layer in (model.a, model.b)]
    values = x.double().numpy()
    amax_w = np.abs(np.concatenate(weights)).max(0)
    errors = [numpy_error(values, weights, numpy_scales(np.abs(values).max(0), amax_w, a)) for a in STRENGTHS]
    assert found.strength == STRENGTHS[int(np.argmin(errors))]
    # a product that lies on a tie in float32 may round to the other side
    assert found.error == pytest.approx(min(errors) / numpy_error(values, weights, np.ones(CHANNELS)), rel=0.02)


# ----------------------------------------------------------------------------------------------------------------------
# In the flow


@pytest.mark.parametrize("config", [static_int8(), static_int8(observer="mse"), static_int8("per_token")], ids=str)
def test_smoothing_gains_where_there_are_outliers(config) -> None:
    expected, plain = quantized(NormLinear(), Recipe(), config)
    _, smoothed = quantized(NormLinear(), Recipe(smooth=Smooth()), config)
    assert sqnr_db(expected, smoothed) > sqnr_db(expected, plain) + 10


def test_function_and_the_given_model_stay_the_same() -> None:
    model = NormLinear()
    old = {name: value.clone() for name, value in model.state_dict().items()}
    batches = data()
    graph = exported(model, batches[0])
    strengths = smooth(graph, quantizer(), batches, strengths=STRENGTHS)
    assert set(strengths) == {"a", "b"}
    assert not torch.equal(graph.get_parameter("a.weight"), model.a.weight)
    assert all(torch.equal(value, old[name]) for name, value in model.state_dict().items())
    # two roundings a factor, in sums of 16 products
    torch.testing.assert_close(graph(batches[0]), model(batches[0]), rtol=1e-5, atol=1e-5)


def test_only_groups_with_a_quantized_linear_are_smoothed() -> None:
    batches = data()
    graph = exported(NormLinear(), batches[0])
    chosen = QFrameworkQuantizer().set_module_name("a", static_int8())
    assert set(smooth(graph, chosen, batches, strengths=STRENGTHS)) == {"a"}
    graph = exported(NormLinear(), batches[0])
    float_only = QFrameworkQuantizer().set_global(None)
    assert smooth(graph, float_only, [], strengths=STRENGTHS) == {}


def test_nothing_is_done_where_no_strength_helps() -> None:
    """Channels and columns that are all alike: every scale is 1, and an equal error is no gain."""
    x = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    layer = CalibratedLinear("fc", torch.ones(3, 4), torch.arange(4), static_int8(), x, x.abs().amax(0))
    assert search_smoothing([layer], torch.ones(4, dtype=torch.bool), STRENGTHS) is None


def test_dead_channels_keep_finite_scales() -> None:
    amax_x, amax_w = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0.0, 0.0, 3.0])
    for strength in STRENGTHS:
        scales = smoothing_scales(amax_x, amax_w, torch.tensor([True, True, True]), strength)
        assert bool(((scales >= 2**-10) & (scales <= 2**10)).all())


def test_vit_is_smoothed_everywhere_and_the_same_every_time() -> None:
    model = tiny_vit()
    images = torch.randn(4, 3, 32, 32)
    found = []
    for _ in range(2):
        graph = exported(model, images)
        found.append(Recipe(smooth=Smooth(samples=64)).before_prepare(graph, quantizer(), [images, images.flip(0)]))
    assert found[0] == found[1]
    norms = {f"blocks.{i}.{name}" for i in (0, 1) for name in ("attn.qkv", "mlp.fc1")} | {"head"}
    assert set(found[0]["smooth"]) <= norms | {"blocks.0.attn.proj", "blocks.1.attn.proj"}
    assert len(found[0]["smooth"]) >= 5


class UnevenValues(nn.Module):
    """Attention whose values have a few large channels, with small weights in the projection."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.proj = nn.Linear(CHANNELS, 3 * CHANNELS), nn.Linear(CHANNELS, CHANNELS)
        with torch.no_grad():
            self.qkv.weight[2 * CHANNELS :: 5] *= 50
            self.proj.weight[:, ::5] /= 50

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_values_are_smoothed_through_attention() -> None:
    expected, plain = quantized(UnevenValues(), Recipe())
    _, smoothed = quantized(UnevenValues(), Recipe(smooth=Smooth()))
    assert sqnr_db(expected, smoothed) > sqnr_db(expected, plain) + 6


def test_dynamic_activations_are_smoothed_too() -> None:
    expected, plain = quantized(NormLinear(), Recipe(), dynamic_int8())
    _, smoothed = quantized(NormLinear(), Recipe(smooth=Smooth()), dynamic_int8())
    assert sqnr_db(expected, smoothed) > sqnr_db(expected, plain) + 10


# ----------------------------------------------------------------------------------------------------------------------
# Statistics


def test_statistics_see_all_data_and_sample_evenly() -> None:
    seen = ChannelStatistics(samples=100)
    batches = [torch.full((2, 50, 3), float(i)) for i in range(20)]
    for batch in batches:
        seen.add(batch)
    assert seen.amax.tolist() == [19.0] * 3
    assert seen.rows.shape == (100, 3)
    # 100 of 2000 rows: each batch gives 5 on average, with a standard deviation of 2.1
    per_batch = torch.bincount(seen.rows[:, 0].long(), minlength=20)
    assert int(per_batch.max()) <= 14
    assert int((per_batch > 0).sum()) >= 17


def test_statistics_reach_beyond_extremes_by_the_tail_of_examples_against_numpy() -> None:
    torch.manual_seed(0)
    values = torch.rand(12, 50, 3) + 1  # 600 rows
    values[3, 0] = torch.tensor([2.0, 4.0, 2.0])  # one example far beyond the others
    values[:, 0, 2] = -3.0  # all equal
    seen = ChannelStatistics(samples=1)
    for batch in values.split(5):
        seen.add(batch)
    x = values.double().numpy()
    expected = []
    for flipped in (-x, x):
        largest = -np.sort(-flipped.max(1), axis=0)[:5]
        decay = largest[:4].mean(0) - largest[4]
        width = x.max((0, 1)) - x.min((0, 1))
        logarithm = np.log(np.maximum(decay * 12 * 254**2 / (600 * width), 1))
        expected.append(largest[0] + decay * np.minimum(logarithm, 4))
    reach = seen.reaching()
    np.testing.assert_allclose(-reach.low.numpy(), expected[0], rtol=1e-5)
    np.testing.assert_allclose(reach.high.numpy(), expected[1], rtol=1e-5)
    assert float(reach.high[0]) < 1.1 * float(seen.high[0]) < 1.5 * float(seen.high[1]) < float(reach.high[1])
    assert float(reach.low[2]) == -3.0
    assert torch.equal(seen.high, values.amax((0, 1)))  # unchanged


def test_statistics_of_one_example_reach_as_far_as_it() -> None:
    seen = ChannelStatistics(samples=1)
    seen.add(torch.randn(1, 9, 3))
    assert torch.equal(seen.reaching().amax, seen.amax)


def test_statistics_errors() -> None:
    graph = exported(NormLinear(), data()[0])
    norm = next(node for node in graph.graph.nodes if "layer_norm" in node.name)
    with pytest.raises(CalibrationError, match="must have at least one batch"):
        channel_statistics(graph, [], [norm], 8)
    with pytest.raises(CalibrationError, match=r"batch 0: input 'x' must have shape .*, got \(7, 5\)"):
        channel_statistics(graph, [torch.zeros(7, 5)], [norm], 8)
    dynamic = exported(NormLinear(), data()[0], dynamic_batch=True)
    nodes = [node for node in dynamic.graph.nodes if "layer_norm" in node.name]
    with pytest.raises(CalibrationError, match="layer_norm: the data must have values"):
        channel_statistics(dynamic, [torch.zeros(0, 7, CHANNELS)], nodes, 8)
    with torch.no_grad():
        graph.get_parameter("norm.weight")[0] = torch.nan
    with pytest.raises(CalibrationError, match="layer_norm: the activation must be finite"):
        channel_statistics(graph, data(), [norm], 8)


def test_a_former_result_is_applied_to_the_ranges_of_other_data() -> None:
    graph = exported(NormLinear(), data()[0])
    found = smooth(graph, quantizer(), data(), strengths=STRENGTHS)
    assert found
    again = exported(NormLinear(), data()[0])
    assert smooth(again, quantizer(), data(), strengths=(), chosen=found) == found  # nothing to search
    assert torch.equal(again.get_parameter("norm.weight"), graph.get_parameter("norm.weight"))
    other = exported(NormLinear(), data()[0])
    assert smooth(other, quantizer(), [x**3 for x in data()], strengths=(), chosen=found) == found
    assert not torch.allclose(other.get_parameter("norm.weight"), graph.get_parameter("norm.weight"))
    assert smooth(exported(NormLinear(), data()[0]), quantizer(), data(), strengths=STRENGTHS, chosen={}) == {}
