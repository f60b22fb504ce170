"""The demo on a small model, its checks, and the whole demo (slow)."""

from __future__ import annotations

import importlib.util
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from rich.console import Console

from demos import digits_demo as demo
from qframework.evaluation import digits, digits_vit

FIELDS = [
    "configuration",
    "top1",
    "images_per_second",
    "weight_bytes",
    "worst_sqnr_db",
    "lowered_linears",
    "linears",
]


@pytest.fixture(scope="module")
def measured() -> demo.Demo:
    config = digits_vit.TrainingConfig(embed_dim=24, depth=1, epochs=2)
    model = digits_vit.train(config, show_progress=False)
    return demo.run_demo(model, digits.load_digits(), repeats=1, show_progress=False)


def test_rows(measured: demo.Demo) -> None:
    fp32, *quantized = measured.rows
    assert [row.configuration for row in measured.rows] == ["FP32", *demo.CONFIGURATIONS]
    assert (fp32.lowered_linears, fp32.linears, fp32.worst_sqnr_db) == (0, 5, None)
    for row in quantized:
        assert row.lowered_linears == row.linears == 5
        assert 0 < row.weight_bytes < fp32.weight_bytes
        assert 15 < row.worst_sqnr_db < 60
    assert all(row.images_per_second > 0 for row in measured.rows)
    assert measured.compiled_fp32_images_per_second > 0


def test_json_holds_exactly_the_fields(measured: demo.Demo, tmp_path: Path) -> None:
    measured.write_json(tmp_path / "build" / "demo.json")
    rows = json.loads((tmp_path / "build" / "demo.json").read_text())
    assert [list(row) for row in rows] == [FIELDS] * (1 + len(demo.CONFIGURATIONS))
    assert rows[1]["top1"] == measured.rows[1].top1


def test_attention_is_quantized_where_the_name_says_so(measured: demo.Demo) -> None:
    """Each kind of attention gives another result: were one left in float, two rows would be alike."""
    sqnr = [row.worst_sqnr_db for row in measured.rows[1:]]
    assert len(set(sqnr)) == len(sqnr)


def test_table_shows_every_row(measured: demo.Demo) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(measured.table())
    text = console.export_text()
    for row in measured.rows:
        assert row.configuration in text
        assert f"{row.weight_bytes:,}" in text
    assert "…" not in text


FP32 = demo.DemoRow("FP32", 98.0, 100.0, 1000, None, 0, 5)
GOOD = demo.DemoRow("static INT8", 97.5, 200.0, 300, 30.0, 5, 5)


def test_values_at_the_limits_pass() -> None:
    assert demo.Demo([FP32, GOOD], 0.0).failures() == []


def test_lost_accuracy_fails() -> None:
    (failure,) = demo.Demo([FP32, replace(GOOD, top1=97.4)], 0.0).failures()
    assert "static INT8: top-1 97.40 %" in failure


def test_large_weights_fail() -> None:
    (failure,) = demo.Demo([FP32, replace(GOOD, weight_bytes=301)], 0.0).failures()
    assert "301 weight bytes are more than 30% of FP32's 1,000" in failure


def example() -> ModuleType:
    path = Path(__file__).parents[3] / "examples" / "digits_demo.py"
    spec = importlib.util.spec_from_file_location("digits_demo", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_fails_when_a_check_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = example()
    monkeypatch.setattr(module.digits_vit, "load_or_train", lambda *_: torch.nn.Identity())
    monkeypatch.setattr(module, "run_demo", lambda *_, **__: demo.Demo([FP32, replace(GOOD, top1=1.0)], 0.0))
    assert module.main(["--build", str(tmp_path)]) == 1
    assert "failed: static INT8: top-1" in capsys.readouterr().err
    monkeypatch.setattr(module, "run_demo", lambda *_, **__: demo.Demo([FP32, GOOD], 0.0))
    assert module.main(["--build", str(tmp_path)]) == 0


@pytest.mark.slow
def test_the_whole_demo(tmp_path: Path, fresh_dynamo: None) -> None:
    """Trains the real model: INT8 keeps what is promised, and so does the training."""
    assert example().main(["--build", str(tmp_path)]) == 0
    fp32, *quantized = json.loads((tmp_path / "demo.json").read_text())
    assert fp32["top1"] >= 97.5
    assert len(quantized) == len(demo.CONFIGURATIONS)
    assert all(row["lowered_linears"] == row["linears"] == 3 * 4 + 1 for row in quantized)
    assert all(math.isfinite(row["worst_sqnr_db"]) for row in quantized)
