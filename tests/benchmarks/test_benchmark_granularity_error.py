"""Errors by granularity (granularity_error.py): what an outlier costs, the file and the plot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import granularity_error
from benchmarks.granularity_error import GRANULARITIES, KINDS, error


def test_only_scales_shared_with_an_outlier_channel_lose_the_others() -> None:
    """A channel 1,000 times as large: a step of what shares its scale is 8 deviations of the others."""
    x = torch.randn(256, 256)
    x[:, 7] *= 1000
    rest = torch.ones(256, dtype=torch.bool)
    rest[7] = False

    def of_the_rest(granularity: str) -> float:
        return float((GRANULARITIES[granularity](x) - x)[:, rest].norm() / x[:, rest].norm())

    assert of_the_rest("per tensor") > 0.99
    assert of_the_rest("per token") > 0.7
    assert of_the_rest("per channel") < 0.02
    assert of_the_rest("block 32 x 32") == pytest.approx((31 / 255) ** 0.5, rel=0.1)  # of 255 channels, 31 are lost
    assert error(torch.zeros(4, 4), "per tensor") == 0


def test_smoke_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, plot = tmp_path / "errors.json", tmp_path / "errors.png"
    assert granularity_error.main(["--smoke", "--output", str(path), "--plot", str(plot)]) == 0
    document = json.loads(path.read_text())
    assert document["errors"].keys() == GRANULARITIES.keys()
    assert all(0 < row[kind] < 1 for row in document["errors"].values() for kind in KINDS)
    assert granularity_error.table(document["errors"]) in capsys.readouterr().out
    assert plot.read_bytes()[:4] == b"\x89PNG"
