"""The benchmark of experts' linears runs, and would see a wrong result."""

from __future__ import annotations

import json

import torch

from benchmarks import grouped_linear


def test_smoke(tmp_path) -> None:
    path = tmp_path / "times.json"
    assert grouped_linear.main(["--smoke", "--output", str(path)]) == 0
    records = json.loads(path.read_text())["records"]
    assert [record["groups"] for record in records] == ["even", "uneven"]
    for record in records:
        assert set(record["us"]) == {"grouped_mm", "int8 and quantize", "int8"}
        assert not record["failed"]


def test_rows_of_another_expert_are_wrong() -> None:
    case = grouped_linear.draw(grouped_linear.Shape(60, 1, 3, 48, 64), "even", torch.device("cpu"))
    run = dict(grouped_linear.forms(case, ()))["int8"]
    assert grouped_linear.error(case, run()) < grouped_linear._TOLERANCE
    assert grouped_linear.error(case, run().roll(1, 0)) > 2 * grouped_linear._TOLERANCE
