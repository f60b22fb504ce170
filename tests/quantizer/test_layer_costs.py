"""The rule for what accurate inputs cost at run time, held against whole models that were timed on an H100."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest

from benchmarks.report import RESULTS
from qframework.quantizer.layer_costs import float_seconds, per_token_seconds, zero_point_seconds

FRONT = RESULTS / "accuracy" / "front"
WIDTHS = {"qkv": (384, 1152), "proj": (384, 384), "fc1": (384, 1536), "fc2": (1536, 384)}
"""Inputs and outputs of the linears of a ViT-S."""
ROWS = 64 * 257
RUNS_DIFFER = 4.0
"""Percent between two medians of five runs; twelve zero points take 1.4 percent on one machine, -2.4 on another."""


def load(name: str) -> dict[str, Any]:
    return dict(json.loads((FRONT / name).read_text()))


def predicted(activations: dict[str, str]) -> float:
    seconds = 0.0
    for layer, choice in activations.items():
        kind = layer.rpartition(".")[2]
        inputs, outputs = WIDTHS[kind]
        name = choice.partition(" ")[0]
        if name == "float":
            seconds += float_seconds(ROWS, inputs, outputs)
        elif name == "dynamic":
            seconds += per_token_seconds(ROWS, inputs, behind_norm=kind in ("qkv", "fc1"))
        elif name == "zero_point":
            seconds += zero_point_seconds(ROWS, inputs)
    return seconds


@pytest.mark.parametrize(
    ("choices", "speeds"),
    [
        ("2026-11-26-choices-by-hand.json", "2026-11-27-h100-recipe-costs.json"),
        ("2026-11-27-choices-of-kinds.json", "2026-11-27-h100-recipe-costs-2.json"),
    ],
)
def test_the_rule_predicts_whole_models(choices: str, speeds: str) -> None:
    chosen, measured = load(choices)["choices"], load(speeds)["images_per_second"]
    plain = 64 / statistics.median(measured.pop("static + attention"))
    differences = {}
    for name, runs in measured.items():
        percent = 100 * (64 / statistics.median(runs) / plain - 1)
        differences[name] = 100 * predicted(chosen[name]["activations"]) / plain - percent
    assert max(map(abs, differences.values())) < RUNS_DIFFER, differences
    assert abs(statistics.median(differences.values())) < 0.5, differences


def test_scales_per_token_for_all_inputs() -> None:
    """Against 7.45 ms of a static ViT-S with 256 images, 23.3 percent (other/2026-11-26-h100-dynamic_costs.json)."""
    seconds = sum(
        12 * per_token_seconds(4 * ROWS, inputs, behind_norm=kind in ("qkv", "fc1"))
        for kind, (inputs, _) in WIDTHS.items()
    )
    assert 100 * seconds / 7.45e-3 == pytest.approx(23.3, rel=0.35)


def test_float_costs_less_than_a_scale_per_token_up_to_about_a_thousand_outputs() -> None:
    per_token = per_token_seconds(ROWS, 4096, behind_norm=False)
    assert float_seconds(ROWS, 4096, 768) < per_token < float_seconds(ROWS, 4096, 1280)
