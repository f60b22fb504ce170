"""A small classification whose counts differ between configurations, and its comparison in processes of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from qframework.evaluation.comparison import Configuration, Settings
from qframework.evaluation.image_folder import TensorBatches
from qframework.evaluation.models import Classifier
from qframework.evaluation.tasks import Classification
from qframework.quantizer import QuantizationConfig, dynamic_int8, static_int8

CLASSES = 10
EAGER = Settings(compiled=False, repeats=1, show_progress=False)
# The scale of a whole batch: what an image becomes depends on the company it has.
CONFIGURATIONS = {
    "FP32": Configuration(),
    "INT8": Configuration(QuantizationConfig(static_int8())),
    "INT8-D": Configuration(QuantizationConfig(dynamic_int8("per_tensor", "per_tensor"))),
}


class Patches(nn.Module):
    """``(B, 1, 8, 8)`` to logits: close ones, so that quantization moves some of the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.num_classes = CLASSES
        self.fc1, self.fc2 = nn.Linear(64, 32), nn.Linear(32, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.fc1(images.flatten(1))))


def data(images: int, seed: int) -> TensorDataset:
    """Random images of very different contrast, mixed, with random labels: one scale does not suit them all."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(images, 1, 8, 8, generator=generator)
    values *= 10 ** (1 - 3 * torch.rand(images, 1, 1, 1, generator=generator))
    return TensorDataset(values, torch.randint(0, CLASSES, (images,), generator=generator))


def small_task(images: int = 230, batch_size: int = 10, seed: int = 0, calibrated: bool = True) -> Classification:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        classifier = Classifier("patches", Patches().eval(), {})
    calibration = TensorBatches(data(40, seed=1), 20) if calibrated else None
    return Classification(classifier, TensorBatches(data(images, seed=2), batch_size), calibration)


def untimed(document: dict[str, Any]) -> dict[str, Any]:
    """A results file without what differs from run to run."""
    rows = [{name: value for name, value in row.items() if name != "timing"} for row in document["rows"]]
    return {**document, "rows": rows}
