"""``qframework benchmark``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cli_runs import run, run_json

from qframework.cli import benchmark
from qframework.evaluation import digits_vit

CPU = [
    "FP32 eager", "FP32 compiled", "BF16 compiled", "static INT8", "static INT8 with attention", "dynamic INT8",
]  # fmt: skip
GPU = [
    "FP16 eager", "FP16 compiled", "FP16 compiled, CUDA graphs", "static INT8", "static INT8, CUDA graphs",
    "static INT8 with attention", "static INT8 with attention, CUDA graphs", "dynamic INT8",
    "dynamic INT8, CUDA graphs",
]  # fmt: skip


@pytest.fixture(autouse=True)
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speed needs no training, so the model comes from ``build_model``."""
    original = digits_vit.build_model
    monkeypatch.setattr(
        digits_vit, "build_model", lambda: original(digits_vit.TrainingConfig(embed_dim=24, depth=1, num_heads=3))
    )

    monkeypatch.setattr(digits_vit, "load_or_train", fail)


def fail(*_: Any, **__: Any) -> None:
    raise AssertionError("the digits were trained")


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("cpu", "float32", CPU),
        ("cpu", "bfloat16", ["BF16 eager", "BF16 compiled", "FP32 compiled", *CPU[3:]]),
        ("cuda", "float16", GPU),
        ("cuda", "bfloat16", ["BF16 eager", "BF16 compiled", "BF16 compiled, CUDA graphs", *GPU[1:]]),
    ],
)
def test_configurations(device: str, dtype: str, expected: list[str]) -> None:
    model = torch.nn.Linear(1, 1)
    found = list(benchmark._configurations(model, torch.device(device), dtype))
    assert [each.name for each in found] == expected
    assert [each.name for each in found if not each.is_float] == [name for name in expected if "INT8" in name]


def test_benchmark_a_float_model() -> None:
    few = ("FP32 eager", "BF16 compiled", "static INT8 with attention")  # each compilation takes seconds
    arguments = ("--repeats", "2", "--batch-size", "4", "--device", "cpu", "--only", ", ".join(few))
    rows = run_json("benchmark", "digits", *arguments)
    assert [row["configuration"] for row in rows] == list(few)
    fastest = max(row["images_per_second"] for row in rows[:2])
    for row in rows:
        assert row["milliseconds_per_batch"] == pytest.approx(4000 / row["images_per_second"])
        assert row["times_the_fastest_float"] == pytest.approx(row["images_per_second"] / fastest)
        assert row["first_call_seconds"] > 0


def test_only_some_configurations_and_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory\nis left")

    def configurations(model: torch.nn.Module, *_: Any) -> list[benchmark.BenchmarkedModel]:
        return [
            benchmark.BenchmarkedModel("float", "float32", True, lambda _: model),
            benchmark.BenchmarkedModel("INT8", "float32", False, out_of_memory),
        ]

    monkeypatch.setattr(benchmark, "_configurations", configurations)
    result = run("benchmark", "digits", "--repeats", "1")
    assert result.exit_code == 1
    assert "check failed: not measured: INT8 (no memory is left)" in result.stderr
    assert result.stdout.count("1.00 │") == 1, "times the fastest float"
    assert run("benchmark", "digits", "--repeats", "1", "--only", "flo").exit_code == 0
    refused = run("benchmark", "digits", "--only", "INT4")
    assert refused.exit_code == 2
    assert "--only must name a part of 'float', 'INT8', got 'INT4'" in refused.stderr


@pytest.mark.parametrize(("speed", "sentence"), [(90.0, "reaches 0.90 times the speed of FP32"), (101.0, None)])
def test_a_sentence_where_int8_is_slower(speed: float, sentence: str | None) -> None:
    rows = [
        {"configuration": name, "is_float": "INT8" not in name, "images_per_second": value}
        for name, value in {"FP32": 100.0, "BF16": 50.0, "static INT8": speed, "dynamic INT8": 10.0}.items()
    ]
    found = benchmark._slower_than_float(rows)
    assert (found is None) is (sentence is None)
    assert sentence is None or sentence in str(found)
    assert benchmark._slower_than_float(rows[2:]) is None


def test_benchmark_a_saved_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits_vit, "load_or_train", lambda _: digits_vit.build_model().eval())
    run_json("quantize", "digits", "--output", "digits.pt2", "--device", "cpu")
    monkeypatch.setattr(digits_vit, "load_or_train", fail)
    arguments = ("--repeats", "1", "--device", "cpu")
    rows = run_json("benchmark", "digits.pt2", *arguments, "--only", "eager,saved")
    assert [row["configuration"] for row in rows] == ["FP32 eager", "saved, compiled"]
    assert rows[0]["times_the_fastest_float"] == 1
    every = benchmark._saved("digits.pt2", None, torch.device("cpu"))[1]
    assert [each.name for each in every] == [*CPU[:3], "saved, compiled"]

    def unknown(name: str, _: Any) -> None:
        raise benchmark.QFrameworkError(f"no model {name}")

    monkeypatch.setattr(benchmark, "random_classifier", unknown)
    result = run("benchmark", "digits.pt2", *arguments)
    assert result.exit_code == 0, result.output
    assert "nothing to compare with: no model digits" in result.stderr
    assert "times" not in result.stdout
