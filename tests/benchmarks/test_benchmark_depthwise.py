"""The stored measurements of depthwise convolutions say what the code claims."""

import json
from pathlib import Path

import pytest

from benchmarks import depthwise
from qframework.backend.lower_depthwise import _FASTER
from qframework.kernels.depthwise import TAPS, tile

STORED = Path(__file__).parents[2] / "benchmarks/results/other/2026-11-28-h100-depthwise.json"
RECORDS = json.loads(STORED.read_text())["records"]


@pytest.mark.parametrize("taps", TAPS)
def test_the_kernel_is_used_where_it_was_faster(taps):
    speedups = [each["us"]["inductor"] / each["us"]["ours"] for each in RECORDS if each["taps"] == taps]
    assert speedups
    assert min(speedups) > 1.25 if taps in _FASTER else max(speedups) < 1


def test_strips_of_three_taps_are_the_best_that_were_measured():
    found = [each["us"] for each in RECORDS if each["taps"] == 3]
    others = [us[name] / us["ours"] for us in found for name in us if name.endswith("many rows")]
    assert len(others) == 2 * len(found) == 40
    assert min(others) > 1


def test_results_were_right():
    for each in RECORDS:
        assert set(each["errors"]) == set(each["us"])
        assert max(each["errors"].values()) <= depthwise._TOLERANCE[each["quantizes"]]


def test_smoke(capsys):
    default = tile
    assert depthwise.main(["--smoke"]) == 0
    assert capsys.readouterr().out.count("half as many rows") == 2
    assert depthwise.ours.tile is default
