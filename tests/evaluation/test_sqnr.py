"""SQNR of the output of every layer, against its formula."""

from __future__ import annotations

import math

import pytest
import torch
from mlp_helpers import TinyMLP, both, quantizer
from torch import Tensor, nn
from torch.nn import functional as F

from qframework import numerics
from qframework.errors import QFrameworkError
from qframework.evaluation import layer_sqnr
from qframework.quantizer import QFrameworkQuantizer, Recipe, dynamic_int8, static_int8


def test_layer_sqnr_of_a_first_layer_matches_its_formula() -> None:
    model, images = TinyMLP().eval(), torch.randn(64, 16)
    float_exported, converted = both(model, images, quantizer(), [images])
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
    pair = both(model, images, quantizer(dynamic_int8()))
    assert list(layer_sqnr(*pair, images)) == ["0.fc1", "0.fc2", "1.fc1", "1.fc2"]


def test_layer_sqnr_lists_each_call_of_a_layer() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.fc(x))

    images = torch.randn(4, 16)
    pair = both(Twice().eval(), images, quantizer(dynamic_int8()))
    assert list(layer_sqnr(*pair, images)) == ["fc", "fc#2"]


def test_layer_sqnr_of_a_linear_in_two_ranges() -> None:
    images = torch.randn(8, 16)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).eval()
    pair = both(model, images, quantizer(), [images], recipe=Recipe(split_gelu=True))
    sqnr = layer_sqnr(*pair, images)
    assert list(sqnr) == ["0", "2", "2#2"]
    assert min(sqnr.values()) > 25


def test_layer_sqnr_is_infinite_where_nothing_is_quantized_before() -> None:
    images = torch.randn(4, 16)
    only_second = QFrameworkQuantizer().set_module_name("fc2", static_int8())
    sqnr = layer_sqnr(*both(TinyMLP().eval(), images, only_second, [images]), images)
    assert sqnr["fc1"] == math.inf
    assert 20 < sqnr["fc2"] < 60


def test_layer_sqnr_of_different_models_is_an_error() -> None:
    images = torch.randn(4, 16)
    mlp = both(TinyMLP().eval(), images, quantizer(), [images])
    other = both(nn.Sequential(TinyMLP()).eval(), images, quantizer(), [images])
    with pytest.raises(QFrameworkError, match=r"only in converted \['0.fc1', '0.fc2'\]"):
        layer_sqnr(mlp.float_exported, other.converted, images)
