"""What ``pretrained_front`` compares: the model, uniform configurations and what ``tune`` may choose; its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import pretrained_models
from qframework.errors import FileFormatError
from qframework.quantizer import ActivationConfig
from qframework.tuning.assignment import Assignment, Meanings
from qframework.tuning.layer_times import DYNAMIC, FLOAT, STATIC
from qframework.tuning.layers import Layer, LinearOperands, Operands

SCHEMA = 1
BATCH = 64
VARIANTS = ("sage_b", "sage_vb", "sage2_int8")
SMALL_BATCH = 8  # images that are calibrated with, or evaluated, at a time
# What ``tune`` may choose for a static layer besides min-max, and what is only compared as a uniform configuration.
TRIED = {
    "moving average": ActivationConfig(observer="moving_average"),
    "percentile 99.999": ActivationConfig(observer="percentile", observer_args={"percentile": 99.999}),
    "mse": ActivationConfig(observer="mse"),
    "zero point": ActivationConfig(symmetric=False),
    "zero point, moving average": ActivationConfig(observer="moving_average", symmetric=False),
}
_COMPARED = {
    "percentile 99.99": ActivationConfig(observer="percentile", observer_args={"percentile": 99.99}),
    "entropy": ActivationConfig(observer="entropy"),
    "per position": ActivationConfig("per_token"),
}
MEANINGS = Meanings(observers=TRIED | _COMPARED)


def call_name(operands: Operands) -> str:
    """What a call's time depends on, for one image: without batch size and dtype."""
    if isinstance(operands, LinearOperands):
        *rows, inner = operands.input.shape[1:]
        tokens = 1
        for length in rows:
            tokens *= length
        return f"linear {tokens} x {operands.weight.shape[0]} x {inner}"
    return "attention " + " x ".join(map(str, operands.query.shape[1:]))


def uniform(layers: Sequence[Layer]) -> dict[str, Assignment]:
    """The configurations that treat all layers alike."""
    both = {
        "static": (STATIC, FLOAT),
        "static + attention": (STATIC, STATIC),
        "dynamic": (DYNAMIC, FLOAT),
        "dynamic + static attention": (DYNAMIC, STATIC),
    }
    for name in MEANINGS.observers:
        choice = f"{STATIC} {name}"
        attention = choice if choice in MEANINGS.statics("attention") else STATIC
        both[f"static + attention, {name}"] = (choice, attention)
    return {
        name: Assignment({layer.key: linear if layer.kind == "linear" else attention for layer in layers})
        for name, (linear, attention) in both.items()
    }


@dataclass(frozen=True)
class Settings:
    """Sizes of the model and the data."""

    model: Mapping[str, Any]
    batch: int = BATCH
    crops: int = 68
    held_out: int = 102
    calibration: int = 16

    @property
    def size(self) -> int:
        """Pixels of a side."""
        return int(self.model["img_size"])

    def network(self, trained: bool) -> nn.Module:
        """The model, of trained weights if asked for."""
        import timm

        if trained:
            return pretrained_models.dinov2()
        torch.manual_seed(0)
        made = timm.create_model(pretrained_models.DINOV2, pretrained=False, **self.model)
        return pretrained_models.Features(made).eval()


FULL = Settings({"img_size": pretrained_models.IMAGE_SIZE})
SMOKE = Settings({"img_size": 28, "embed_dim": 48, "depth": 2, "num_heads": 2, "init_values": 1.0}, 2, 34, 34, 4)


def digest(assignment: Mapping[str, Any]) -> str:
    """Identifies an assignment as ``to_dict`` gives it."""
    return hashlib.sha256(json.dumps(assignment, sort_keys=True).encode()).hexdigest()[:12]


def read(path: Path, step: str) -> dict[str, Any]:
    """A file of a step. Raises FileFormatError for another file."""
    document = json.loads(path.read_text())
    if (document.get("benchmark"), document.get("step")) != ("pretrained_front", step):
        raise FileFormatError(f"{path} must be a file of `benchmarks.pretrained_front {step}`, got another")
    return dict(document)
