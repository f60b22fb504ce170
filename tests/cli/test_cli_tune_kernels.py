"""``qframework tune-kernels``."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runs import run

from qframework.cli import tune_kernels as command
from qframework.kernels.linear import local_tiles
from qframework.kernels.linear.local_tiles import Chip, read_tiles
from qframework.kernels.linear.tile_candidates import candidates
from qframework.tuning import kernel_tiles
from qframework.tuning.kernel_tiles import TileProblem, TileTimes

ADA = Chip("NVIDIA L40S", (8, 9), 142)


@pytest.fixture
def an_l40s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where its file will be."""

    def measure(problem: TileProblem, *_: Any) -> TileTimes | None:
        before, other = candidates(ADA.capability, problem.m)[:2]
        return TileTimes(problem, before, {before: 10.0, other: 5.0})

    monkeypatch.setenv(local_tiles.FOLDER, str(tmp_path / "tiles"))
    monkeypatch.setattr(command, "device_named", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(local_tiles, "this_chip", lambda _: ADA)
    monkeypatch.setattr(kernel_tiles, "measure_tiles", measure)
    return tmp_path / "tiles" / "nvidia-l40s-sm_89-142.json"


def test_it_writes_the_file_that_the_package_reads(an_l40s: Path) -> None:
    result = run("tune-kernels", "--width", "768", "--rows", "197,1576", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert len(rows) == len(read_tiles(an_l40s, ADA)) == 24
    assert rows[0] == {
        "rows": 256, "columns": 2304, "inner": 768, "epilogue": "float", "us": 5.0, "us_before": 10.0,
        "tile": "64 x 128 x 64",
    }  # fmt: skip
    assert "24 of 24 shapes measured, 2.00 times the speed before" in result.stderr
    assert set(json.loads(an_l40s.read_text())) == {"format", "chip", "versions", "date", "tiles"}
    table = run("tune-kernels", "--width", "768", "--rows", "197", "--output", "mine.json")
    assert table.exit_code == 0
    assert "64 x 128 x 64" in table.stdout
    assert Path("mine.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--width", "wide"), "--width must be numbers separated by commas, got 'wide'"),
        (("--width", "100"), "widths must be positive multiples of 16, got [100]"),
        (("--rows", "64"), "rows must be more than 64, which other kernels compute, got [64]"),
        (("--output", "."), "--output: cannot write ."),
    ],
)
def test_bad_input(arguments: tuple[str, ...], message: str, an_l40s: Path) -> None:
    result = run("tune-kernels", *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert not an_l40s.exists()


def test_without_a_gpu() -> None:
    result = run("tune-kernels", "--device", "cpu")
    assert result.exit_code == 2
    assert "--device must be a GPU for tune-kernels, got 'cpu'" in result.stderr


def test_nothing_runs(an_l40s: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_tiles, "measure_tiles", lambda *_: None)
    result = run("tune-kernels", "--width", "768", "--rows", "197")
    assert result.exit_code == 1
    assert "no tile of int8_linear runs on this GPU" in result.stderr
    assert not an_l40s.exists()
