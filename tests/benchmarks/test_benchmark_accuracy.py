"""The accuracy benchmark, and its page (accuracy.py, accuracy_cases.py, report_accuracy.py)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from benchmarks import accuracy, report, report_accuracy
from benchmarks.accuracy import Row, Rows, load_rows
from benchmarks.accuracy_cases import MAIN, STEPS
from benchmarks.report_accuracy import Promise
from qframework.errors import FileFormatError

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # pycocotools 2.0.11 with NumPy 2

MACHINE = {"device": "Chip 9000", "commit": "abc123", "date": "2026-01-02T03:04:05+00:00"}
HARD, GOOD = "INT8", "INT8 (best recipe)"


def row(configuration: str, value: float, seed: int = 0, task: str = "digits", model: str = "small") -> Row:
    return Row(task, model, seed, configuration, value, {"images": 100, "top1": round(value)})


ROWS = [
    row("FP32", 98.0),
    row(HARD, 90.0),
    row(GOOD, 97.9),
    row("FP32", 97.0, 1),
    row(HARD, 91.0, 1),
    row(GOOD, 96.0, 1),
]


def write(path: Path, rows: list[Row], smoke: bool = False, **machine: str) -> Path:
    kept = Rows(path, smoke)
    kept.machine = {**MACHINE, **machine}
    for each in rows:
        kept.add(each)
    return path


def page_of(tmp_path: Path) -> str:
    return report_accuracy.render(report_accuracy.load(tmp_path))


# Measuring


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names = ["FP32", HARD]
    monkeypatch.setattr(accuracy, "MAIN", {name: MAIN[name] for name in names})
    return names


def smoke(path: Path) -> dict:
    threads = torch.get_num_threads()
    try:
        assert accuracy.main(["--smoke", "--output", str(path)]) == 0
    finally:
        torch.set_num_threads(threads)
    return json.loads(path.read_text())


def test_a_run_measures_both_tasks_and_repeats(few: list[str], tmp_path: Path) -> None:
    document, again = smoke(tmp_path / "deep" / "first.json"), smoke(tmp_path / "again.json")
    first = document["rows"]
    assert first == again["rows"]
    assert document["configurations"] == json.loads(json.dumps({name: MAIN[name].to_dict() for name in few}))
    assert [(each["task"], each["configuration"]) for each in first] == [
        (task, name) for task in accuracy.TASKS for name in few
    ]
    digits, shapes = first[0], first[2]
    assert digits["counts"]["images"] == 599
    assert digits["value"] == 100 * digits["counts"]["top1"] / 599
    assert shapes["counts"]["images"] == 3
    assert 0 < shapes["value"] < 100


def test_outliers_do_not_change_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    config = accuracy.digits_vit.TrainingConfig(embed_dim=24, depth=1, epochs=1)
    torch.manual_seed(0)
    model = accuracy.digits_vit.build_model(config).eval()
    hard = accuracy.digits_task(model, seed=0).module
    images = accuracy.digits.load_digits().held_out.tensors[0][:64]
    with torch.no_grad():
        before, after = model(images), hard(images)
        outliers = hard.blocks[0].norm1(torch.randn(64, 16, 24)).abs().amax((0, 1))
    # Sums of 24 products, each a few roundings off, in a handful of layers.
    assert torch.allclose(before, after, atol=1e-4 * float(before.abs().max()), rtol=0)
    assert (outliers > 8 * outliers.median()).sum() == accuracy.OUTLIER_CHANNELS


def test_every_single_step_starts_from_static_int8() -> None:
    for name, configuration in STEPS.items():
        assert not configuration.config.linear.activation.dynamic, name
        assert configuration.config.attention is None, name
    assert len({json.dumps(each.to_dict()) for each in (MAIN | STEPS).values()}) == len(MAIN | STEPS)


# The page


def test_promises_name_measured_configurations() -> None:
    assert {promise.configuration for promise in report_accuracy.PROMISES} <= MAIN.keys()
    assert {promise.task for promise in report_accuracy.PROMISES} == set(accuracy.TASKS)


@pytest.mark.parametrize(("drop", "holds"), [(0.5, True), (0.51, False), (-1.0, True)])
def test_a_promise_limits_the_loss(drop: float, holds: bool) -> None:
    assert Promise("digits", GOOD, 0.5).holds(drop) == holds
    assert Promise("digits", HARD, 5.0, at_least=True).holds(drop) is False


def test_the_page_shows_means_over_seeds_and_the_worst(tmp_path: Path) -> None:
    write(tmp_path / "a.json", ROWS)
    page = page_of(tmp_path)
    title = report_accuracy.TITLES["digits"]
    assert f"| {title} | small | {HARD} | at least 5 | 7.00 | 8.00 | PASS |" in page
    assert f"| {title} | small | {GOOD} | at most 0.5 | 0.55 | 1.00 | FAIL |" in page
    assert f"| {title} | small | INT8-D (best recipe) | at most 0.2 |  |  | not measured |" in page
    assert "| FP32 | 97.50 |  |  |" in page
    assert f"| {GOOD} | 96.95 | 0.55 | 1.00 |" in page
    assert "### small: 2 seeds, 200 counted" in page
    assert "`abc123`" in page
    assert report_accuracy.TITLES["shapes"] not in page


def test_the_newest_file_of_each_model_counts(tmp_path: Path) -> None:
    write(tmp_path / "b.json", ROWS, date="2026-01-01")
    newer = [row("FP32", 50.0), row("FP32", 80.0, task="shapes", model="sam")]
    write(tmp_path / "a.json", newer, date="2026-02-01", commit="def456")
    write(tmp_path / "c.json", [row("FP32", 10.0)], smoke=True, date="2026-03-01")
    write(tmp_path / "d.json", [row("FP32", 70.0, model="base")], date="2025-01-01", commit="fed789")
    page = page_of(tmp_path)
    assert "| FP32 | 70.00 |  |  |" in page
    assert page.index("### small") < page.index("def456") < page.index("### base") < page.index("fed789")
    assert "| FP32 | 50.00 |  |  |" in page
    assert "| FP32 | 80.00 |  |  |" in page
    assert "97.50" not in page
    assert "10.00" not in page


def test_masks_are_counted_where_there_are_masks(tmp_path: Path) -> None:
    masks = dataclasses.replace(row("FP32", 80.0, task="shapes"), counts={"images": 3, "masks": 11})
    write(tmp_path / "a.json", [masks])
    assert "1 seed, 11 counted" in page_of(tmp_path)


def test_the_page_without_results(tmp_path: Path) -> None:
    assert "Nothing measured yet" in page_of(tmp_path)


@pytest.mark.parametrize("text", ["{}", "[", '{"schema": 1, "benchmark": "vit_cpu"}', "[1]"])
def test_foreign_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=r"a\.json"):
        load_rows(path)


def test_the_report_checks_the_page(tmp_path: Path) -> None:
    write(tmp_path / "results" / "accuracy" / "a.json", ROWS)
    arguments = ["--results", str(tmp_path / "results"), "--page", str(tmp_path / "performance.md")]
    assert report.main([*arguments, "--check"]) == 1
    assert report.main(arguments) == 0
    assert report.main([*arguments, "--check"]) == 0
    page = tmp_path / "accuracy.md"
    page.write_text(page.read_text().replace("0.55", "0.45"))
    assert report.main([*arguments, "--check"]) == 1
