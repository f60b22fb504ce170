"""The rule for what accurate inputs cost at run time, held against whole models timed on an H100 and on a CPU."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest
import torch

from benchmarks.report import RESULTS
from qframework.quantizer import layer_costs
from qframework.quantizer.layer_costs import Costs, costs_for, costs_on

FRONT = RESULTS / "accuracy" / "front"
WIDTHS = {"qkv": (384, 1152), "proj": (384, 384), "fc1": (384, 1536), "fc2": (1536, 384)}
"""Inputs and outputs of the linears of a ViT-S."""
ROWS = 64 * 257
H100 = costs_on("cuda", torch.float16)
RUNS_DIFFER = 4.0
"""Percent between two medians of five runs; twelve zero points take 1.4 percent on one machine, -2.4 on another."""


def load(name: str) -> dict[str, Any]:
    return dict(json.loads((FRONT / name).read_text()))


def predicted(activations: dict[str, str], costs: Costs = H100, rows: int = ROWS) -> float:
    seconds = 0.0
    for layer, choice in activations.items():
        kind = layer.rpartition(".")[2]
        inputs, outputs = WIDTHS[kind]
        name = choice.partition(" ")[0]
        if name == "float":
            seconds += costs.in_float(rows, inputs, outputs)
        elif name == "dynamic":
            seconds += costs.per_token(rows, inputs, behind_norm=kind in ("qkv", "fc1"))
        elif name == "zero_point":
            seconds += costs.zero_point(rows, inputs)
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
    seconds = predicted({f"{i}.{kind}": "dynamic" for i in range(12) for kind in WIDTHS}, rows=4 * ROWS)
    assert 100 * seconds / 7.45e-3 == pytest.approx(23.3, rel=0.35)


def test_float_costs_less_than_a_scale_per_token_up_to_about_a_thousand_outputs() -> None:
    per_token = H100.per_token(ROWS, 4096, behind_norm=False)
    assert H100.in_float(ROWS, 4096, 768) < per_token < H100.in_float(ROWS, 4096, 1280)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_rule_predicts_whole_models_on_a_cpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minima of processor time, since other work shared the core."""
    monkeypatch.setattr(layer_costs, "_instructions", lambda: "amx")
    costs = costs_on("cpu", dtype)
    document = json.loads((RESULTS / "other" / "2026-11-27-cpu-vit_small-costs.json").read_text())
    measured = {name: min(runs) for name, runs in document[str(dtype).removeprefix("torch.")].items()}
    plain = measured.pop("static + attention")
    rows = document["batch"] * 257
    for name, milliseconds in measured.items():
        what = {"zero points": "zero_point", "float": "float", "token": "dynamic"}
        choice = next(value for key, value in what.items() if name.endswith(key))
        kind = next((kind for kind in WIDTHS if kind in name), "fc2")
        seconds = predicted({f"{i}.{kind}": choice for i in range(12)}, costs, rows)
        percent = 100 * (milliseconds / plain - 1)
        assert 100 * 1e3 * seconds / plain == pytest.approx(percent, rel=0.15, abs=6.0), name


def test_prices_are_those_of_the_device_and_dtype() -> None:
    fc2 = (8 * 257, *WIDTHS["fc2"])
    token = H100.per_token(8 * 257, 1536, behind_norm=False)
    assert H100.in_float(*fc2) < token < costs_on("cuda", torch.float32).in_float(*fc2)
    assert costs_for(None, torch.ones(1)) == costs_on("cpu", torch.float32) == costs_for("cpu", torch.ones(1).half())
    assert costs_for("cuda", torch.ones(1)) == H100
    for instructions in ("amx", "vnni", "avx512", "avx2"):
        costs = layer_costs._on_a_cpu(torch.float32, instructions)
        times = costs.in_float(*fc2) / costs.per_token(8 * 257, 1536, behind_norm=False)
        assert times > (4 if instructions in ("amx", "vnni") else 1)
        assert costs.zero_point(8 * 257, 1536) == 0


def test_the_instruction_set_is_that_of_this_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert layer_costs._instructions() == "avx512"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "NO AVX")
    assert layer_costs._instructions() == "avx2"
