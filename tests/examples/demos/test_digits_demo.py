"""The whole demo, once, and its checks."""

from __future__ import annotations

import importlib.util
import io
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console

from demos import digits_demo as demo

FIELDS = [
    "configuration",
    "top1",
    "images_per_second",
    "weight_bytes",
    "worst_sqnr_db",
    "lowered_linears",
    "linears",
]


def example() -> ModuleType:
    path = Path(__file__).parents[3] / "examples" / "digits_demo.py"
    spec = importlib.util.spec_from_file_location("digits_demo", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("build")


@pytest.fixture(scope="module")
def measured(build: Path) -> demo.Demo:
    """The whole demo, which trains the real model: 80 seconds of a core."""
    module, results = example(), []

    def run_demo(*arguments: Any, **options: Any) -> demo.Demo:
        results.append(demo.run_demo(*arguments, **options))
        return results[0]

    module.run_demo = run_demo
    torch._dynamo.reset()
    assert module.main(["--build", str(build)]) == 0
    torch._dynamo.reset()
    return results[0]


def test_rows(measured: demo.Demo) -> None:
    """INT8 keeps what is promised, and so does the training."""
    fp32, *quantized = measured.rows
    assert [row.configuration for row in measured.rows] == ["FP32", *demo.CONFIGURATIONS]
    assert (fp32.lowered_linears, fp32.linears, fp32.worst_sqnr_db) == (0, 3 * 4 + 1, None)
    assert fp32.top1 >= 97.5
    for row in quantized:
        assert row.lowered_linears == row.linears == 3 * 4 + 1
        assert 0 < row.weight_bytes < fp32.weight_bytes
        assert 15 < row.worst_sqnr_db < 60
    assert all(row.images_per_second > 0 for row in measured.rows)
    assert measured.compiled_fp32_images_per_second > 0


def test_json_holds_exactly_the_fields(measured: demo.Demo, build: Path) -> None:
    rows = json.loads((build / "demo.json").read_text())
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
