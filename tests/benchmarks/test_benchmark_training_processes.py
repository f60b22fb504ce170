"""Training by several processes: runs the example, and reports failures and differing losses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import training_processes
from benchmarks.training_processes import Run, main, missed, parse_arguments, table, train

ALONE = Run("bf16", 1, 100.0, 2.0, [3.0, 2.5])


@pytest.mark.slow
def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "processes.json"
    assert main(["--smoke", "--configurations", "per_block_1x128", "--output", str(path)]) == 0
    assert "| per_block_1x128 | 2 |" in capsys.readouterr().out
    document = json.loads(path.read_text())
    alone, both = (Run(**row) for row in document["runs"])
    assert document["smoke"] is True
    assert document["machine"]["torch"]
    assert (alone.processes, both.processes) == (1, 2)
    assert len(alone.losses) == len(both.losses) == document["settings"]["steps"]
    assert min(alone.examples_per_second, both.examples_per_second) > 0
    assert both.apart(alone) < 0.05  # percent; a token's scales are its own, so that only sums are rounded otherwise
    assert both.furthest(alone) < 0.05


def test_the_arguments_of_the_script() -> None:
    options = parse_arguments(["--device", "cuda", "--compile"])
    given = training_processes.script_arguments("per_block_1x128", options)
    assert given[given.index("--block-size") + 1] == "1x128"
    assert given[given.index("--batch-size") + 1] == str(training_processes.SETTINGS["batch_size"])
    assert given[-1] == "--compile"
    assert "--block-size" not in training_processes.script_arguments("bf16", options)


@pytest.mark.parametrize(
    ("loss", "verdict"), [(2.0199, "PASS"), (1.9801, "PASS"), (2.0201, "too far"), (1.97, "too far")]
)
def test_losses_that_are_too_far_apart_are_a_failure(loss: float, verdict: str) -> None:
    both = Run("bf16", 2, 150.0, loss, [3.0, 2.4])
    assert bool(missed([ALONE, both])) == (verdict == "too far")
    (line,) = (line for line in table([ALONE, both]).splitlines() if line.startswith("| bf16 | 2 |"))
    assert line.startswith("| bf16 | 2 | 150.0 | 1.50 |")
    assert line.endswith(f"| 4.000 | {verdict} |")


def test_a_loss_that_is_no_number_is_a_failure() -> None:
    assert missed([ALONE, Run("bf16", 2, 150.0, float("nan"), [3.0, 2.4])])


def test_a_failed_run_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    monkeypatch.setattr(training_processes, "SCRIPT", script)
    script.write_text("raise SystemExit(3)")
    options = parse_arguments(["--smoke", "--limit", "60"])
    assert train("bf16", 1, options, tmp_path).failed == "exit status 3"
    script.write_text("import time; time.sleep(600)")
    late = train("bf16", 1, parse_arguments(["--smoke", "--limit", "1"]), tmp_path)
    assert late.failed == "not done after 1 s"
    assert missed([ALONE, late]) == ["bf16, 1 processes: not done after 1 s"]
    assert "| bf16 | 1 |  |  |  |  |  | not done after 1 s |" in table([ALONE, late])


def test_failed_runs_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_processes, "train", lambda name, count, *_: Run(name, count, failed="exit status 3"))
    path = tmp_path / "processes.json"
    assert main(["--smoke", "--output", str(path)]) == 1
    assert [run["failed"] for run in json.loads(path.read_text())["runs"]] == ["exit status 3"] * 4
