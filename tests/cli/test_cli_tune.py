"""``qframework sensitivity`` and ``qframework tune``, which share ``Study`` in cli/targets.py."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from cli_runs import FEW, run, run_json

from qframework.cli.targets import Study
from qframework.serialization import read_metadata
from qframework.tuning import mixed_precision as tune
from qframework.tuning import plots as tuning_plots
from qframework.tuning.assignment import Assignment, Meanings
from qframework.tuning.layer_times import FLOAT
from qframework.tuning.results import Measured

LAYERS = 6  # queries, keys and values; attention; projection; two of the MLP; head


@pytest.fixture(autouse=True)
def int8_takes_half_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "milliseconds", lambda operands, choice, *_, **__: 1.0 if choice == FLOAT else 0.5)


def test_sensitivity_writes_a_table_json_and_a_plot() -> None:
    result = run("sensitivity", "digits", *FEW)
    assert result.exit_code == 0, result.output
    assert "blocks.0.attn.qkv" in result.stdout
    assert "blocks.0.attn (attention)" in result.stdout
    written = json.loads(Path("digits_sensitivity.json").read_text())
    assert len(written["layers"]) == LAYERS
    assert Path("digits_sensitivity.png").read_bytes().startswith(b"\x89PNG")
    # the second run reads the journal, and equal measurements give equal files
    before = Path("digits_sensitivity.json").read_bytes()
    assert run_json("sensitivity", "digits", *FEW) == written
    assert Path("digits_sensitivity.json").read_bytes() == before


def test_sensitivity_tries_the_given_choices() -> None:
    arguments = ("--linear", "off", "--attention", "static,sage_b", "--output", "a.json", "--no-plot")
    rows = run_json("sensitivity", "digits", *arguments, *FEW)["layers"]
    assert [(row["layer"], row["choice"]) for row in rows] == [("blocks.0.attn", c) for c in ("static", "sage_b")]
    assert not Path("a.png").exists()


def test_quantize_reads_the_file_that_tune_writes() -> None:
    arguments = ("--max-drop", "100", "--variants", "sage_b", "--eager", "--observer", "mse", *FEW)
    tuned = run_json("tune", "digits", *arguments)
    assert tuned["met"]
    assert tuned["drop"] <= 100
    assert tuned["timings"]["images_per_second"] > tuned["timings"]["float_images_per_second"]
    assert json.loads(Path("digits_tuned.json").read_text()) == tuned
    assert Path("digits_tuned.png").exists()
    quantized = run_json("quantize", "digits", "--config", "digits_tuned.json", "--output", "a.pt2", "--batches", "1")
    assert quantized["lowered_linears"] == sum(c != "float" for c in tuned["assignment"]["linear"].values())
    kept = read_metadata("a.pt2")["config"]
    assert kept["quantizer"] == tuned["quantizer"]
    assert kept["options"] == tuned["options"]


def test_tune_chooses_between_the_observers_it_is_given() -> None:
    arguments = ("--max-drop", "100", "--variants", "off", "--eager", "--no-plot", *FEW)
    run_json("tune", "digits", "--observers", "mse, entropy", *arguments)
    keys = [json.loads(line).get("key", "") for line in Path("digits_tuned.journal.jsonl").read_text().splitlines()]
    tried = [key for key in keys if key.startswith("noise attention blocks.0.attn static")]
    assert [key.rpartition(".attn ")[2] for key in tried] == ["static", "static mse", "static entropy"]
    other = run("tune", "digits", *arguments)  # its journal says which observers were tried
    assert other.exit_code == 2
    assert "other settings (observers was ['mse', 'entropy'], is [])" in other.stderr


def test_an_impossible_budget_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a metric that only float reaches."""
    from qframework import evaluation

    measured: list[object] = []

    def falling(module: object, *_: object, **__: object) -> float:
        measured.append(module)  # the float model is the first
        return 61.0 - len(measured)

    monkeypatch.setattr(evaluation, "top1", falling)
    result = run("tune", "digits", "--eager", "--variants", "off", "--no-plot", *FEW)
    assert result.exit_code == 1, result.output
    assert "check failed: no quantized assignment keeps the drop within 0.5; digits_tuned.json holds" in result.stderr
    assert not json.loads(Path("digits_tuned.json").read_text())["met"]


@pytest.mark.parametrize(("speeds", "said"), [((90.0, 80.0), "reaches 0.90 times"), ((90.0, 101.0), ""), ((), "")])
def test_tune_says_where_int8_is_slower_than_float(speeds: tuple[float, ...], said: str) -> None:
    layer = ("linear", "head")
    in_float, static = (Assignment({layer: choice}) for choice in ("float", "static"))
    measured = [Measured(static, 50.0, 0.0, speed) for speed in speeds]
    whole = Measured(in_float, 50.0, 0.0, 100.0)
    result = tune.Tuning(50.0, 0.5, True, whole, whole, [], measured, Meanings())
    assert said in (result.slower_than_float() or "")
    assert bool(result.slower_than_float()) is bool(said)


def test_a_journal_of_other_settings_is_refused() -> None:
    run_json("sensitivity", "digits", "--linear", "off", "--no-plot", *FEW)
    result = run("sensitivity", "digits", "--linear", "off", "--no-plot", "--limit", "32", "--batches", "1")
    assert result.exit_code == 2
    assert "other settings (limit was 64, is 32)" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sensitivity", "digits", "--linear", "int4"), "a linear must be one of float, static, dynamic, got 'int4'"),
        (("tune", "digits", "--variants", "sage9"), "variant must be auto, sage_t"),
        (("tune", "digits", "--observer", "max"), "observer must be one of 'minmax'"),
        (("tune", "digits", "--observers", "mse,max"), "--observers must be off or some of moving_average, "),
        (("tune", "digits", "--data", "none"), "'none' does not fit model 'digits'"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments, *FEW)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("sensitivity", "--linear", "static,int4"),
        ("sensitivity", "--attention", "sage9"),
        ("tune", "--variants", "sage9"),
        ("tune", "--observers", "mse,max"),
    ],
)
def test_choices_are_checked_before_a_model_is_trained(arguments: tuple[str, ...]) -> None:
    command, *options = arguments
    result = run(command, "digits", *options, "--checkpoint", "none.pt")
    assert result.exit_code == 2, result.output
    assert "none.pt" not in result.stderr
    assert options[-1].rpartition(",")[2] in result.stderr


@pytest.mark.parametrize("command", ["sensitivity", "tune"])
def test_missing_matplotlib_is_reported_before_anything_runs(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("plots need matplotlib")

    monkeypatch.setattr(tuning_plots, "require_matplotlib", missing)
    result = run(command, "digits", "--plot")
    assert result.exit_code == 2
    assert "plots need matplotlib" in result.stderr
    assert not list(Path().glob("*.jsonl"))


@pytest.mark.parametrize("command", ["sensitivity", "tune"])
def test_without_matplotlib_there_is_no_plot(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    study = Study(command, Path("a.json"), None, "minmax", "none", 1)
    assert study._plot is None
    monkeypatch.undo()
    assert Study(command, Path("a.json"), None, "minmax", "none", 1)._plot == Path("a.png")


def test_a_negative_budget_is_bad_usage() -> None:
    assert run("tune", "digits", "--max-drop", "-1").exit_code == 2
