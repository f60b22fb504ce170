"""The table of 8-bit gradients on the page on attention matches the stored measurement."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks.int8_gradient_accuracy import NAMES, SMOKE_SHAPES, SMOKE_SPREADS, measure

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/attention.md").read_text()
(FILE,) = re.findall(r"benchmarks/results/other/\S+?int8_gradient_accuracy\.json", PAGE)
ROWS = [row for row in json.loads((ROOT / FILE).read_text())["rows"] if row["channels"] == 64]
PRINTED = re.findall(r"^\| (\d+) \| (yes|no) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
PAPER = {"ds": 0.979, "dq": 0.966, "dk": 0.954, "dv": 0.9985}


def test_the_table_is_what_was_measured():
    assert len(PRINTED) == 7
    for spread, normed, *printed in PRINTED:
        key = (float(spread), normed == "yes", "int8")
        (row,) = [r for r in ROWS if (r["spread"], r["qk_norm"], r["gradient"]) == key]
        assert [f"{row[name]:.4f}" for name in NAMES[1:]] == printed


def test_the_forward_passes_time_on_the_page_is_what_was_measured():
    (file,) = re.findall(r"benchmarks/results/other/\S+?h100-int8_gradient\.json", PAGE)
    stored = json.loads((ROOT / file).read_text())
    rows = stored["times"] + stored["times_of_the_second_run"]
    ratios = [row["forward"] / row["cudnn_forward"] for row in rows]
    assert f"took {min(ratios):.2f} to {max(ratios):.2f} times as long as cuDNN's" in PAGE
    assert all(row["forward_sage_vb"] > row["forward"] for row in stored["times"])
    for check in stored["checks"]:  # rounding of the results, in float16 2^-12 on average
        if check["case"] != "dropout":
            assert max(check["reference"]) < (0.002 if "bfloat16" in check["dtype"] else 0.0003)
            assert max(check["exact"]) < 0.03


def test_errors_are_below_the_papers_up_to_a_spread_of_four():
    for row in ROWS:
        if row["spread"] <= 4 or row["qk_norm"]:
            assert all(row[name] > least for name, least in PAPER.items()), row


def test_measuring_int8_gradients_still_works():
    rows = measure(SMOKE_SHAPES, SMOKE_SPREADS)
    assert len(rows) == 2 * len(SMOKE_SPREADS) * 2
    assert all(row["ds"] > 0.999 for row in rows if row["qk_norm"])
    assert all(row["ds"] < 0.99 for row in rows if not row["qk_norm"] and row["spread"] == 6)
