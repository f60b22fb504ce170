"""``qframework benchmark``."""

from __future__ import annotations

import pytest
from cli_runs import run, run_json


def test_benchmark_a_float_model() -> None:
    rows = run_json("benchmark", "digits", "--repeats", "2", "--batch-size", "4")
    assert [row["configuration"] for row in rows] == [
        "float, eager",
        "float, compiled",
        "static INT8",
        "dynamic INT8",
    ]
    for row in rows:
        assert row["images_per_second"] > 0
        assert row["milliseconds_per_batch"] == pytest.approx(4000 / row["images_per_second"])


def test_benchmark_a_saved_model() -> None:
    run_json("quantize", "digits", "--output", "digits.pt2")
    result = run("benchmark", "digits.pt2", "--repeats", "1")
    assert result.exit_code == 0, result.output
    assert "saved, compiled" in result.stdout
