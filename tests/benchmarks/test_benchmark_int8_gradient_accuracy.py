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


def test_the_times_on_the_page_are_those_measured():
    (file,) = set(re.findall(r"benchmarks/results/other/\S+?h100-int8_gradient-times\.json", PAGE))
    rows = json.loads((ROOT / file).read_text())["rows"]
    providers = ("cudnn", "flash", "mixed", "int8")
    for row in rows:
        shape = " x ".join(f"{row[name]:,}" for name in ("batch", "heads", "tokens", "channels"))
        times = " | ".join(f"{row[name]['p50_ms']:.2f}" for name in providers)
        assert f"| {shape}{', causal' * row['causal']} | {times} |" in PAGE
        assert row["mixed"]["error"] < row["int8"]["error"] < 0.03
    for name in ("mixed", "int8"):
        speeds = [row["cudnn"]["p50_ms"] / row[name]["p50_ms"] for row in rows]
        assert f"{min(speeds):.2f} to {max(speeds):.2f} times" in PAGE


def test_errors_are_below_the_papers_up_to_a_spread_of_four():
    for row in ROWS:
        if row["spread"] <= 4 or row["qk_norm"]:
            assert all(row[name] > least for name, least in PAPER.items()), row


def test_measuring_int8_gradients_still_works():
    rows = measure(SMOKE_SHAPES, SMOKE_SPREADS)
    assert len(rows) == 2 * len(SMOKE_SPREADS) * 2
    assert all(row["ds"] > 0.999 for row in rows if row["qk_norm"])
    assert all(row["ds"] < 0.99 for row in rows if not row["qk_norm"] and row["spread"] == 6)
