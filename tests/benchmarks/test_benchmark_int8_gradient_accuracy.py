"""The table of 8-bit gradients on the page on attention matches the stored measurement."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks.int8_gradient_accuracy import FORMS, NAMES, SMOKE_SHAPES, SMOKE_SPREADS, measure

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/attention.md").read_text()
(FILE,) = re.findall(r"benchmarks/results/other/\S+?int8_gradient_accuracy\.json", PAGE)
ROWS = [row for row in json.loads((ROOT / FILE).read_text())["rows"] if row["channels"] == 64]
PRINTED = re.findall(r"^\| (\d+) \| (yes|no) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
PAPER = {"ds": 0.979, "dq": 0.966, "dk": 0.954, "dv": 0.9985}


def test_the_table_is_what_was_measured():
    assert len(PRINTED) == 7
    for spread, normed, *printed in PRINTED:
        key = (float(spread), normed == "yes", "int8", "auto")
        (row,) = [r for r in ROWS if (r["spread"], r["qk_norm"], r["gradient"], r["variant"]) == key]
        assert [f"{row[name]:.4f}" for name in NAMES[1:]] == printed


def test_the_times_on_the_page_are_those_measured():
    """Those of the last run; speeds of both."""
    (file,) = set(re.findall(r"benchmarks/results/attention/\S+?-gradient\.json", PAGE))
    rows = json.loads((ROOT / file).read_text())["rows"]
    last = [row for row in rows if row["run"] == 2 and row["order"] == "tokens" and row["dtype"] == "float16"]
    for row in last:
        shape = " x ".join(f"{row[name]:,}" for name in ("batch", "heads", "tokens", "channels"))
        cudnn, mixed = (row[name]["p50_ms"] for name in ("cudnn", "mixed"))
        sizes = {name: row[name] for name in ("batch", "heads", "tokens", "channels", "causal", "order", "dtype")}
        speeds = [r["cudnn"]["p50_ms"] / r["mixed"]["p50_ms"] for r in rows if sizes.items() <= r.items()]
        where = "" if row["mixed"]["error"] > 0.01 else "PyTorch's"
        kind = ", causal" * row["causal"]
        text = f"| {shape}{kind} | {cudnn:.2f} | {mixed:.2f} | {speeds[0]:.2f}, {speeds[1]:.2f} | {where} |"
        assert text in PAGE, text
        assert row["mixed"]["error"] < 0.03
    ours = [r["cudnn"]["p50_ms"] / r["mixed"]["p50_ms"] for r in rows if r["mixed"]["error"] > 0.01]
    assert f"{min(ours):.2f} to {max(ours):.2f} times" in PAGE


def test_errors_are_below_the_papers_up_to_a_spread_of_four():
    for row in ROWS:
        if row["spread"] <= 4 or row["qk_norm"]:
            assert all(row[name] > least for name, least in PAPER.items()), row


def test_measuring_int8_gradients_still_works():
    rows = measure(SMOKE_SHAPES, SMOKE_SPREADS)
    assert len(rows) == 2 * len(SMOKE_SPREADS) * len(FORMS)
    assert all(row["ds"] > 0.999 for row in rows if row["qk_norm"])
    assert all(row["ds"] < 0.99 for row in rows if not row["qk_norm"] and row["spread"] == 6)
