"""``qframework sensitivity``, ``qframework tune`` and ``qframework quantize --config``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

from qframework import cli
from qframework.evaluation import digits_vit
from qframework.serialization import load, read_metadata
from qframework.tuning import mixed_precision as tune
from qframework.tuning import plots as tuning_plots
from qframework.tuning.layer_times import FLOAT

TINY = digits_vit.TrainingConfig(embed_dim=24, depth=1, epochs=1)
LAYERS = 6  # queries, keys and values; attention; projection; two of the MLP; head
FEW = ("--limit", "64", "--batches", "1")


@pytest.fixture(autouse=True)
def small_digits_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh_dynamo: None) -> None:
    """In an empty directory; ``digits`` is a small model, trained for one epoch; INT8 layers take half the time."""
    monkeypatch.chdir(tmp_path)
    original = digits_vit.load_or_train
    monkeypatch.setattr(digits_vit, "load_or_train", lambda path: original(path, TINY, show_progress=False))
    monkeypatch.setattr(tune, "milliseconds", lambda operands, choice, *_, **__: 1.0 if choice == FLOAT else 0.5)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


def run_json(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_sensitivity_writes_a_table_json_and_a_plot() -> None:
    result = run("sensitivity", "digits", *FEW)
    assert result.exit_code == 0, result.output
    assert "blocks.0.attn.qkv" in result.stdout
    assert "blocks.0.attn (attention)" in result.stdout
    written = json.loads(Path("digits_sensitivity.json").read_text())
    assert len(written["layers"]) == LAYERS
    assert Path("digits_sensitivity.png").read_bytes().startswith(b"\x89PNG")
    # the journal answers the second time, and equal figures give equal files
    before = Path("digits_sensitivity.json").read_bytes()
    assert run_json("sensitivity", "digits", *FEW) == written
    assert Path("digits_sensitivity.json").read_bytes() == before


def test_sensitivity_tries_what_it_is_told() -> None:
    arguments = ("--linear", "off", "--attention", "static,sage_b", "--output", "a.json", "--no-plot")
    rows = run_json("sensitivity", "digits", *arguments, *FEW)["layers"]
    assert [(row["layer"], row["choice"]) for row in rows] == [("blocks.0.attn", c) for c in ("static", "sage_b")]
    assert not Path("a.png").exists()


def test_what_tune_writes_is_what_quantize_takes() -> None:
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


def test_a_budget_that_cannot_be_met(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_measurements_of_other_settings_are_not_mixed() -> None:
    run_json("sensitivity", "digits", "--linear", "off", "--no-plot", *FEW)
    result = run("sensitivity", "digits", "--linear", "off", "--no-plot", "--limit", "32", "--batches", "1")
    assert result.exit_code == 2
    assert "other settings (limit was 64, is 32)" in result.stderr


def written(name: str, text: str) -> str:
    Path(name).write_text(text)
    return name


def test_config_decides_alone() -> None:
    result = run("quantize", "digits", "--config", "a.json", "--dynamic", "--observer", "mse")
    assert result.exit_code == 2
    assert "--config must be given without --static/--dynamic, --observer, which it replaces" in result.stderr


def test_a_config_that_is_none() -> None:
    result = run("quantize", "digits", "--config", written("a.json", "{}"))
    assert result.exit_code == 2
    assert "a.json: a plan must have a format and a quantizer" in result.stderr
    assert "none.json" in run("quantize", "digits", "--config", "none.json").stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sensitivity", "digits", "--linear", "int4"), "a linear must be one of float, static, dynamic, got 'int4'"),
        (("tune", "digits", "--variants", "sage9"), "variant='sage9' is unknown"),
        (("tune", "digits", "--observer", "max"), "observer='max' is unknown"),
        (("tune", "digits", "--data", "none"), "'none' does not fit model 'digits'"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments, *FEW)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("command", ["sensitivity", "tune"])
def test_without_matplotlib_nothing_runs_in_vain(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("plots need matplotlib")

    monkeypatch.setattr(tuning_plots, "require_matplotlib", missing)
    result = run(command, "digits")
    assert result.exit_code == 2
    assert "plots need matplotlib" in result.stderr
    assert not list(Path().glob("*.jsonl"))


def test_a_negative_budget_is_bad_usage() -> None:
    assert run("tune", "digits", "--max-drop", "-1").exit_code == 2


@pytest.mark.parametrize("command", ["sensitivity", "tune"])
def test_help_has_examples(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"qframework {command}" in result.stdout.split("Examples")[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of two images each, and one image that is cut off."""
    for label in ("cat", "dog"):
        (tmp_path / "images" / label).mkdir(parents=True)
        for index in range(2):
            pixels = torch.randint(0, 256, (40, 50, 3), dtype=torch.uint8).numpy()
            Image.fromarray(pixels).save(tmp_path / "images" / label / f"{index}.png")
    whole = (tmp_path / "images" / "cat" / "0.png").read_bytes()
    (tmp_path / "images" / "dog" / "cut.png").write_bytes(whole[: len(whole) // 2])
    return tmp_path / "images"


def test_damaged_images_are_counted_and_named(folder: Path, tmp_path: Path) -> None:
    import timm

    torch.save(timm.create_model("test_vit", num_classes=1000).state_dict(), tmp_path / "weights.pth")
    arguments = ("--checkpoint", "weights.pth", "--data", str(folder), "--batch-size", "2")
    result = run("quantize", "test_vit", *arguments, "--output", "a.pt2")
    assert result.exit_code == 0, result.output
    assert "1 damaged images left out: " in result.stderr
    assert "cut.png" in result.stderr


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_is_not_int8_has_the_dtype_that_was_asked_for(dtype: str) -> None:
    run_json("quantize", "digits", "--dtype", dtype, "--output", "a.pt2", "--batches", "1")
    assert read_metadata("a.pt2")["config"]["dtype"] == dtype
    assert {tensor.dtype for tensor in load("a.pt2").parameters()} == {getattr(torch, dtype)}
    halves, whole = (run_json("evaluate", *target, "--eager")["top1"] for target in (["a.pt2"], ["digits"]))
    # hardly trained, and 8 bits of mantissa at least
    assert halves == pytest.approx(whole, abs=5)
