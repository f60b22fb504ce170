"""The costs of int8_linear's tiles are what the stored measurements give, and choose well among them."""

import json
import statistics
from pathlib import Path

import pytest

from benchmarks import tile_costs
from qframework.kernels.linear.tile_costs import COSTS, HALF, half_us, tile_us

RESULTS = Path(__file__).parents[2] / "benchmarks/results/other"
STORED = RESULTS / "2026-11-30-h200-tile-costs.json"
OF_OTHERS = RESULTS / "2026-11-27-h100-tile-costs.json"  # float16 and the tiles of the kernel for all chips


def records_of(path: Path):
    return json.loads(path.read_text())["records"]


@pytest.fixture(scope="module")
def records():
    return records_of(STORED)


@pytest.fixture(scope="module")
def records_of_others():
    return records_of(OF_OTHERS)


@pytest.mark.parametrize("tile", COSTS, ids=lambda tile: "x".join(map(str, tile[:5])))
def test_costs_are_those_of_the_stored_measurements(records, records_of_others, tile):
    found = tile_costs.fit(records if tile.specialized else records_of_others, tile)
    assert found == pytest.approx(COSTS[tile], abs=0.00051 if tile.specialized else 0.0051)


def test_costs_of_float16_are_those_of_the_stored_measurements(records_of_others):
    assert tile_costs.fit_half(records_of_others) == pytest.approx(HALF, abs=0.0051)


def test_costs_of_the_h100_predict_the_h200(records):
    for tile in (tile for tile in COSTS if not tile.tma):
        found = [(each, tile_costs.times_of(each)[tile]) for each in records if tile in tile_costs.times_of(each)]
        ratios = [tile_us(tile, each["m"], each["n"], each["k"], 132) / us for each, us in found]
        assert statistics.geometric_mean(ratios) == pytest.approx(1, abs=0.02)


def test_estimates_are_as_close_as_documented(records, records_of_others):
    shapes = [(each, (each["m"], each["n"], each["k"])) for each in records_of_others]
    halves = [half_us(*shape) / each["fp16_us"] for each, shape in shapes]
    assert statistics.stdev(halves) < 0.085
    shapes = [(each, (each["m"], each["n"], each["k"])) for each in records]
    least = [min((tile_us(tile, *shape, tile_costs.PROCESSORS), tile) for tile in COSTS) for _, shape in shapes]
    found = [us / tile_costs.times_of(each)[tile] for (us, tile), (each, _) in zip(least, shapes, strict=True)]
    assert statistics.stdev(found) < 0.08


def test_the_chosen_tile_is_close_to_the_fastest(records):
    excess = [tile_costs.excess(each) for each in records]
    assert len(excess) == 256
    assert statistics.geometric_mean(excess) < 1.0085
    assert max(excess) < 1.22


def test_the_fit_is_printed(capsys):
    assert tile_costs.main(["--fit", str(STORED)]) == 0
    assert "times the fastest" in capsys.readouterr().out


def test_a_fit_finds_the_costs_that_made_the_times():
    tile, costs = next(iter(COSTS)), (1.0, 2.0, 0.0, 0.5, 0.25)
    made = []
    for m, n, k in [
        (128, 512, 512),
        (1000, 768, 3072),
        (3000, 2048, 512),
        (300, 4096, 1024),
        (2000, 640, 640),
        (2500, 3000, 256),
    ]:
        terms = tile_costs.terms(tile, m, n, k, tile_costs.PROCESSORS)
        us = sum(cost * term for cost, term in zip(costs, terms, strict=True))
        made.append({"m": m, "n": n, "k": k, "tiles": [{"tile": list(tile), "us": us}]})
    assert tile_costs.fit(made, tile) == pytest.approx(costs, abs=1e-6)
