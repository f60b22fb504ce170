"""The stored measurements of gated linears say what the code claims."""

import json
from pathlib import Path

import pytest

from benchmarks import gated_linear
from qframework.backend.gate_linears import _ROWS_OF_HALVES
from qframework.kernels.linear.tile import COOPERATIVE
from qframework.kernels.linear.tiles import gated_tile

STORED = Path(__file__).parents[2] / "benchmarks/results/other"
RUNS = {
    name: json.loads((STORED / f"2026-11-28-h100-{name}.json").read_text())["records"]
    for name in ("gated-linear", "gated-linear-first", "gated-tiles")
}
_PROCESSORS = 132


def tile_of(record):
    return gated_tile(*(record[name] for name in "mnk"), _PROCESSORS)


def tile_name(tile):
    return next(name for name, each in gated_linear.TILES.items() if each == tile)


def least(record, form):
    return min(us for name, us in record["us"].items() if name.startswith(form))


@pytest.mark.parametrize("run", ["gated-linear", "gated-linear-first"])
def test_tiles_are_near_the_best(run):
    """Of large problems with a long K, tiles were measured in models, where they take longer."""
    records = [each for each in RUNS[run] if tile_of(each).block_m < COOPERATIVE.block_m]
    assert len(records) > 25
    for each in records:
        tiles = [each["us"][name] for name in gated_linear.TILES]
        assert each["us"][tile_name(tile_of(each))] < 1.085 * min(tiles), each


@pytest.mark.parametrize("run", ["gated-linear", "gated-linear-first"])
def test_one_kernel_is_faster_where_it_is_used(run):
    for each in RUNS[run]:
        tile, us = tile_of(each), each["us"]
        if tile.block_m == COOPERATIVE.block_m:
            continue
        gain = least(each, "apart") / us[tile_name(tile)]
        assert 1.2 < gain < 1.9 if each["mode"] == "static" else 0.99 < gain < 1.55, each
        if each["mode"] == "static" or each["m"] >= _ROWS_OF_HALVES:
            assert least(each, "packed") / us[tile_name(tile)] > 0.97, each


def test_cooperative_tiles_are_faster_in_16_bit():
    for each in RUNS["gated-tiles"]:
        assert tile_of(each).block_m == COOPERATIVE.block_m
        us = each["us"]
        assert us["C4"] < (0.96 if each["mode"] == "dynamic" else 1.15) * min(us["P4"], us["P8"])


def test_cooperative_tiles_are_faster_in_whole_models():
    h100, h200 = (
        run["records"] for run in json.loads((STORED / "2026-11-28-hopper-gated-models.json").read_text())["runs"]
    )
    for model in ("llama_1b", "mistral_7b_4_layers", "phi3_mini_8_layers"):
        ms = {each.get("gated"): each["ms"] for each in h100 if each["model"] == model}
        assert 1.025 < ms["pingpong"] / ms["cooperative, groups of 4"] < 1.12
        assert ms["apart"] > 1.05 * ms["cooperative, groups of 4"]
        assert ms[None] > 2 * ms["cooperative, groups of 4"]  # FP16
    gemma = [each["ms"] for each in h200 if each["model"] == "gemma_2b"]
    assert max(gemma) < 1.003 * min(gemma)  # K = 2048


def test_results_were_right():
    for each in RUNS["gated-linear"]:
        assert set(each["errors"]) == set(each["us"])
        assert max(each["errors"].values()) <= gated_linear._TOLERANCE


def test_smoke(capsys):
    assert gated_linear.main(["--smoke"]) == 0
    assert capsys.readouterr().out.count("gated") == 2
