"""Runs resume, and bounds are judged on equal seeds (training_parity.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import training_parity
from benchmarks.training_parity import Case
from demos import training_loop
from demos.training_loop import RunConfig
from qframework.errors import QFrameworkError
from qframework.kernels.blocks.format import BLOCK_SIZES


def smoke(folder: Path, *more: str) -> int:
    places = ["--output", str(folder / "results"), "--build", str(folder / "build")]
    return training_parity.main(["--smoke", "--tasks", "gpt", "--seeds", "0", *places, *more])


def test_existing_runs_are_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configurations = ["--configurations", "bf16,per_block_1x128,per_block_32"]
    assert smoke(tmp_path, *configurations) == 0
    said = capsys.readouterr().out
    assert "gpt,per_block_32,0: loss" in said
    assert "gpt,per_block_1x128,0: loss" in said
    path = Case("gpt", "per_block_32", 0).path(tmp_path / "results")
    document = json.loads(path.read_text())
    assert document["machine"]["torch"] == torch.__version__
    assert document["settings"]["steps"] == 2
    before = path.read_bytes()
    assert smoke(tmp_path, "--configurations", "bf16,per_block_32,per_tensor") == 0
    said = capsys.readouterr().out
    assert "gpt,per_block_32,0" not in said
    assert "gpt,per_tensor,0: loss" in said
    assert path.read_bytes() == before
    table = (tmp_path / "results" / "gpt.md").read_text()
    names = ["| bf16", "| per_block_32", "| per_block_1x128", "| per_tensor"]
    assert [line.split(" | ")[0] for line in table.splitlines()[2:]] == names
    assert (tmp_path / "results" / "gpt.png").read_bytes()[:4] == b"\x89PNG"


def test_every_block_size_is_a_configuration_and_the_most_wanted_ones_come_first() -> None:
    sizes = {settings.get("block_size") for settings in training_parity.CONFIGURATIONS.values()}
    assert sizes == {None, *BLOCK_SIZES}
    assert set(training_parity.DEFAULT) == set(training_parity.CONFIGURATIONS) - {"fp32"}
    assert training_parity.DEFAULT[:4] == ("bf16", "per_block_1x128", "per_block_32", "per_block_128")
    labels = {name: RunConfig(1, 1, 1e-3, **each).label for name, each in training_parity.CONFIGURATIONS.items()}
    assert all(name == label for name, label in labels.items())


def test_a_limit_kills_running_workers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert smoke(tmp_path, "--configurations", "bf16", "--limit", "0.1") == 0
    assert "gpt,bf16,0 timeout: not done after 0.0" in capfd.readouterr().out
    assert not Case("gpt", "bf16", 0).path(tmp_path / "results").exists()


def test_a_failed_run_is_counted_and_the_others_still_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    checkpoint = tmp_path / "build" / "gpt" / "bf16-0" / "checkpoint.pt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_bytes(b"damaged")
    assert smoke(tmp_path, "--configurations", "bf16", "--jobs", "2", "--seeds", "0,1") == 1
    said = capfd.readouterr().out
    assert "gpt,bf16,0 failed: the process ended with exit status 1" in said
    assert "gpt,bf16,1: loss" in said


def runs(metric: str, **values: list[float]) -> dict:
    return {
        name: [
            {"seed": seed, "validation": [[1, {metric: 0.0}], [2, {metric: value}]]} for seed, value in enumerate(row)
        ]
        for name, row in values.items()
    }


def test_bounds_are_judged_on_equal_seeds() -> None:
    """The mean difference of pairs, in points or percent; baselines have no bound."""
    table, kept = training_parity.table(
        "digits", runs("top1", bf16=[98.0, 97.0], per_block_32=[97.8, 96.8], per_tensor=[50.0])
    )
    assert kept
    assert "| per_block_32 | 2 | 97.3 ± 0.71 | +0.20 ± 0.00 | 0.3 | open: 2 of 3 seeds |" in table
    assert "| per_tensor | 1 | 50 | +48.00 |  |  |" in table
    assert not training_parity.table("digits", runs("top1", bf16=[98.0], per_block_128=[97.6]))[1]
    table, kept = training_parity.table("gpt", runs("loss", bf16=[1.0, 2.0], per_block_32=[1.005, 2.01]))
    assert kept
    assert "+0.50" in table
    assert not training_parity.table("gpt", runs("loss", bf16=[1.0], per_block_32=[1.011]))[1]


def test_runs_of_other_settings_are_not_compared(tmp_path: Path) -> None:
    for seed in (0, 1):
        path = Case("gpt", "bf16", seed).path(tmp_path)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"settings": {"steps": seed}, "seed": seed, "configuration": "bf16"}))
    with pytest.raises(QFrameworkError, match="must have the same settings, got 2 kinds"):
        training_parity.read(tmp_path, "gpt")


def test_the_exit_status_says_that_a_bound_is_missed(tmp_path: Path) -> None:
    for name, top1 in (("bf16", 98.0), ("per_block_32", 90.0)):
        path = Case("digits", name, 0).path(tmp_path)
        path.parent.mkdir(exist_ok=True)
        fields = {"settings": {}, "seed": 0, "configuration": name, "losses": [2.0, 1.0], "losses_every": 10}
        path.write_text(json.dumps({**fields, "validation": [[20, {"loss": 1.0, "top1": top1}]]}))
    assert training_parity.main(["--report", "--tasks", "digits", "--output", str(tmp_path)]) == 1


def test_deviations_are_those_of_the_seeds_and_of_their_differences() -> None:
    """Sample deviations: of 98, 97 and 96 it is 1, of 1, 0 and 2 points behind BF16 as well."""
    found = training_parity.compare("digits", runs("top1", bf16=[99.0, 97.0, 98.0], per_block_32=[98.0, 97.0, 96.0]))
    assert [(each.deviation, each.behind_deviation) for each in found] == [(1.0, 0.0), (1.0, 1.0)]
    assert found[1].shown_behind == "+1.00 ± 1.00"
    assert training_parity.compare("gpt_long", runs("loss", bf16=[1.0], per_block_1x128=[1.001]))[1].verdict == "PASS"


def test_a_bound_within_the_standard_error_is_undecided() -> None:
    """Differences of 1, 0 and 2 points have a standard error of 0.58 points; of 0.2 points each, none."""
    found = training_parity.compare("digits", runs("top1", bf16=[99.0, 97.0, 98.0], per_block_32=[98.7, 97.0, 97.4]))
    assert found[1].error == pytest.approx(0.1732, abs=1e-4)
    assert found[1].verdict == "undecided: standard error 0.17, PASS by the mean"
    found = training_parity.compare("digits", runs("top1", bf16=[99.0, 97.0, 98.0], per_block_32=[98.0, 97.0, 96.0]))
    assert found[1].verdict == "short of 0.3 by 2.3e+02 percent"
    found = training_parity.compare("digits", runs("top1", bf16=[99.0, 97.0, 98.0], per_block_32=[98.8, 96.8, 97.8]))
    assert found[1].verdict == "PASS"


def test_a_long_task_resumes_once_and_has_one_seed_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the checkpoint at half of its steps; a smoke run has two."""
    started, load = [], training_loop.load_checkpoint

    def counted(*arguments: Any) -> Any:
        checkpoint = load(*arguments)
        started.append(checkpoint.step)
        return checkpoint

    monkeypatch.setattr(training_loop, "load_checkpoint", counted)
    places = ["--output", str(tmp_path / "results"), "--build", str(tmp_path / "build")]
    assert training_parity.main(["--smoke", "--tasks", "digits_long", "--seeds", "3", *places]) == 0
    paths = sorted((tmp_path / "results" / "digits_long").glob("*.json"))
    assert [path.name for path in paths] == ["bf16-3.json", "per_block_1x128-3.json"]
    assert [json.loads(path.read_text())["resumed_at"] for path in paths] == [[1], [1]]
    assert started == [1, 1]
    assert training_parity.SUBJECTS["digits_long"].seeds == 1
    for name in ("digits_long", "gpt_long"):
        assert training_parity.SUBJECTS[name].config.steps >= 20 * training_parity.SUBJECTS["gpt"].config.steps
