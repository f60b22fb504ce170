"""top1, throughput, weight_bytes and layer_sqnr, each against a value known beforehand."""

from __future__ import annotations

import math
import time

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qframework import numerics
from qframework.errors import CalibrationError, QFrameworkError
from qframework.evaluation import layer_sqnr, quantize_model, throughput, top1, weight_bytes
from qframework.quantizer import QFrameworkQuantizer, Recipe, dynamic_int8, static_int8


class TinyMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


def quantizer(config=None) -> QFrameworkQuantizer:
    return QFrameworkQuantizer().set_global(config or static_int8())


# top1


def test_top1_counts_over_uneven_batches() -> None:
    logits = F.one_hot(torch.tensor([0, 1, 2, 3, 4]), 10).float()
    labels = torch.tensor([0, 1, 2, 9, 9])
    loader = [(logits[:4], labels[:4]), (logits[4:], labels[4:])]
    assert top1(nn.Identity(), loader) == pytest.approx(60.0)


def test_top1_takes_a_generator() -> None:
    assert top1(nn.Identity(), (pair for pair in [(torch.eye(3), torch.arange(3))])) == 100.0


def test_top1_of_nothing_is_an_error() -> None:
    with pytest.raises(QFrameworkError, match="loader must yield at least one image"):
        top1(nn.Identity(), [])


def test_top1_needs_no_gradient() -> None:
    seen = []

    def model(images: Tensor) -> Tensor:
        seen.append(torch.is_grad_enabled())
        return images

    top1(model, [(torch.eye(3), torch.arange(3))])
    assert seen == [False]


# throughput


def test_throughput_is_images_over_the_median_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 0.0, 2.0, 0.0, 90.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    calls = []
    assert throughput(calls.append, torch.zeros(8, 1), warmup=2, repeats=3) == 8 / 2.0
    assert len(calls) == 2 + 3


@pytest.mark.parametrize(("images", "repeats"), [(0, 3), (2, 0)])
def test_throughput_of_nothing_is_an_error(images: int, repeats: int) -> None:
    with pytest.raises(QFrameworkError, match=f"{images} images and repeats={repeats}"):
        throughput(nn.Identity(), torch.zeros(images, 1), repeats=repeats)


# weight_bytes


def test_weight_bytes_counts_parameters_and_buffers() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    assert weight_bytes(model) == 4 * (15 + 5) + 4 * (4 * 5) + 8


def test_weight_bytes_counts_a_shared_weight_once() -> None:
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    assert weight_bytes(nn.Sequential(first, second)) == 4 * 16


def test_weight_bytes_counts_what_a_view_keeps_alive() -> None:
    model = nn.Module()
    model.register_buffer("view", torch.zeros(100)[:1])
    assert weight_bytes(model) == 400


def test_converted_model_keeps_no_float_weight() -> None:
    images = torch.randn(4, 16)
    converted = quantize_model(TinyMLP().eval(), images, quantizer(), [images]).converted
    weights, rows = 2 * 16 * 32, 32 + 16
    # int8 weights; per output channel a float32 scale, an int64 zero point and a float32 bias
    assert weight_bytes(converted) == weights + rows * (4 + 8 + 4)


# layer_sqnr


def test_layer_sqnr_of_a_first_layer_is_that_of_its_formula() -> None:
    model, images = TinyMLP().eval(), torch.randn(64, 16)
    float_exported, converted = quantize_model(model, images, quantizer(), [images])
    x_scale = numerics.dynamic_scale(images, "per_tensor")
    x = numerics.dequantize(numerics.quantize(images, x_scale), x_scale)
    w_int8, w_scale = numerics.quantize_weight(model.fc1.weight.detach())
    w = numerics.dequantize(w_int8, w_scale.unsqueeze(-1))
    with torch.no_grad():
        expected = numerics.sqnr_db(model.fc1(images), F.linear(x, w, model.fc1.bias))
    # the same sums in float32 in another order: the noise changes in its last digits only
    assert layer_sqnr(float_exported, converted, images)["fc1"] == pytest.approx(expected, abs=1e-3)


def test_layer_sqnr_names_every_linear() -> None:
    images = torch.randn(4, 16)
    model = nn.Sequential(TinyMLP(), TinyMLP()).eval()
    pair = quantize_model(model, images, quantizer(dynamic_int8()))
    assert list(layer_sqnr(*pair, images)) == ["0.fc1", "0.fc2", "1.fc1", "1.fc2"]


def test_layer_sqnr_tells_the_calls_of_a_layer_apart() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.fc(x))

    images = torch.randn(4, 16)
    pair = quantize_model(Twice().eval(), images, quantizer(dynamic_int8()))
    assert list(layer_sqnr(*pair, images)) == ["fc", "fc#2"]


def test_layer_sqnr_of_a_linear_in_two_ranges() -> None:
    images = torch.randn(8, 16)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).eval()
    pair = quantize_model(model, images, quantizer(), [images], recipe=Recipe(split_gelu=True))
    sqnr = layer_sqnr(*pair, images)
    assert list(sqnr) == ["0", "2", "2#2"]
    assert min(sqnr.values()) > 25


def test_layer_sqnr_is_infinite_where_nothing_is_quantized_before() -> None:
    images = torch.randn(4, 16)
    only_second = QFrameworkQuantizer().set_module_name("fc2", static_int8())
    sqnr = layer_sqnr(*quantize_model(TinyMLP().eval(), images, only_second, [images]), images)
    assert sqnr["fc1"] == math.inf
    assert 20 < sqnr["fc2"] < 60


def test_layer_sqnr_of_different_models_is_an_error() -> None:
    images = torch.randn(4, 16)
    mlp = quantize_model(TinyMLP().eval(), images, quantizer(), [images])
    other = quantize_model(nn.Sequential(TinyMLP()).eval(), images, quantizer(), [images])
    with pytest.raises(QFrameworkError, match=r"only in converted \['0.fc1', '0.fc2'\]"):
        layer_sqnr(mlp.float_exported, other.converted, images)


# quantize_model


@pytest.mark.parametrize("config", [static_int8(), static_int8("per_token"), dynamic_int8()])
def test_quantize_model_takes_any_batch_size(config) -> None:
    model, images = TinyMLP().eval(), torch.randn(4, 5, 16)
    _, converted = quantize_model(model, images, quantizer(config), [images])
    assert converted(torch.randn(7, 5, 16)).shape == (7, 5, 16)
    assert converted(torch.randn(1, 5, 16)).shape == (1, 5, 16)


def test_quantize_model_uses_so_many_batches() -> None:
    taken = []

    def batches():
        for index in range(5):
            taken.append(index)
            yield torch.randn(4, 16)

    quantize_model(TinyMLP().eval(), torch.randn(4, 16), quantizer(), batches(), batches=2)
    assert taken == [0, 1]


def test_static_without_calibration_is_an_error() -> None:
    with pytest.raises(CalibrationError, match="fc1"):
        quantize_model(TinyMLP().eval(), torch.randn(4, 16), quantizer())


@pytest.mark.parametrize("calibration", [None, iter([torch.randn(4, 16)])], ids=["no data", "an iterator"])
def test_a_recipe_needs_data_to_read_again(calibration) -> None:
    with pytest.raises(CalibrationError, match=r"must be a list or a DataLoader, got (NoneType|list_iterator)"):
        quantize_model(TinyMLP().eval(), torch.randn(4, 16), quantizer(), calibration, recipe=Recipe())


def test_quantize_model_runs_the_steps_of_a_recipe_around_calibration() -> None:
    images, seen = [torch.randn(4, 16), torch.randn(4, 16)], []

    class Steps(Recipe):
        def before_prepare(self, exported, quantizer, data):
            seen.append(("before", len(list(data)), any("activation_post" in n for n, _ in exported.named_modules())))
            return {}

        def after_calibrate(self, prepared, data):
            seen.append(("after", len(list(data)), any("activation_post" in n for n, _ in prepared.named_modules())))

    quantize_model(TinyMLP().eval(), images[0], quantizer(), images, recipe=Steps(), batches=1)
    assert seen == [("before", 1, False), ("after", 1, True)]
