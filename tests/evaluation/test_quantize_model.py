"""``quantize_model`` in evaluation/pt2e.py: batch sizes, calibration and recipes."""

from __future__ import annotations

import pytest
import torch
from mlp_helpers import TinyMLP, quantizer

from qframework.errors import CalibrationError
from qframework.evaluation import quantize_model
from qframework.quantizer import Recipe, dynamic_int8, static_int8


@pytest.mark.parametrize("config", [static_int8(), static_int8("per_token"), dynamic_int8()])
def test_quantize_model_takes_any_batch_size(config) -> None:
    model, images = TinyMLP().eval(), torch.randn(4, 5, 16)
    _, converted = quantize_model(model, images, quantizer(config), [images])
    assert converted(torch.randn(7, 5, 16)).shape == (7, 5, 16)
    assert converted(torch.randn(1, 5, 16)).shape == (1, 5, 16)


def test_quantize_model_uses_at_most_the_given_number_of_batches() -> None:
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
def test_a_recipe_needs_data_that_can_be_read_again(calibration) -> None:
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
