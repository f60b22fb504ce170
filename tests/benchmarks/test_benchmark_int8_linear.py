"""INT8 linear: wrong results anywhere are detected, and the shapes are those of the models."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest
import torch

from benchmarks import int8_linear, int8_linear_cases, timing
from benchmarks.harness import Record, Results, WrongResultError
from benchmarks.int8_linear_cases import OPTIONAL, PROVIDERS, Case, check_output, operands, setup

FP8 = {name for name in PROVIDERS if name.startswith("scaled_mm_fp8")}
TALL = (700, 48, 64)  # more rows than are checked


def test_a_wrong_provider_makes_the_benchmark_fail(monkeypatch, tmp_path):
    """A provider that computes something else is recorded as wrong, without a time, and the exit status is 1."""
    monkeypatch.setattr(int8_linear, "Measurement", Doubled)
    output = tmp_path / "out.json"
    arguments = ["--smoke", "--device", "cpu", "--providers", "qframework_static", "--output", str(output)]
    assert int8_linear.main(arguments) == 1
    records = json.loads(output.read_text())["records"]
    assert [record["status"] for record in records] == ["wrong"] * len(int8_linear.SMOKE_SHAPES)
    assert not any("p50_ms" in record for record in records)


class Doubled(int8_linear.Measurement):
    """A worker whose ``qframework_static`` returns twice the product."""

    def __init__(self, plan: int8_linear.Plan) -> None:
        super().__init__(plan)
        right = int8_linear_cases.PROVIDERS["qframework_static"]
        int8_linear_cases.PROVIDERS["qframework_static"] = lambda given: doubled(right(given))


def doubled(case: Case) -> Case:
    return dataclasses.replace(case, fn=lambda: case.fn() * 2)


def test_a_wrong_result_is_never_timed(monkeypatch):
    calls = []

    def fn() -> torch.Tensor:
        calls.append(1)
        return torch.zeros(2, 2)

    check = int8_linear_cases.exactly(lambda: torch.ones(2, 2, dtype=torch.float64))
    monkeypatch.setitem(int8_linear_cases.PROVIDERS, "torch_bf16", lambda given: Case(fn, check, "wrong"))
    measurement = int8_linear.Measurement(int8_linear.Plan(("torch_bf16",), ((2, 2, 2),), "cpu"))
    assert [record.status for record in measurement("check")] == ["wrong"]
    assert list(measurement("time")) == []
    assert len(calls) == 1


def test_every_tile_of_64_rows_has_checked_rows():
    for m in (1, 197, 1576, 12608, 50432, 50433):
        rows = int8_linear_cases.checked_rows(m)
        assert len(rows.unique()) == len(rows)
        assert rows.max() == m - 1
        assert set((rows // 64).tolist()) == set(range((m + 63) // 64))
        assert len(rows) <= m // 61 + 190


@pytest.mark.parametrize("provider", sorted(set(PROVIDERS) - FP8))
@pytest.mark.parametrize(
    "spoil",
    [
        lambda out: out * 2,
        lambda out: out.roll(1, 0),
        lambda out: torch.cat([out[:-1], torch.zeros_like(out[-1:])]),
        lambda out: torch.cat([out[:64], torch.zeros_like(out[64:128]), out[128:]]),
        lambda out: out.index_fill(1, torch.tensor(7), 0),
        lambda out: out[:, :-1],
    ],
    ids=["doubled", "shifted", "last row", "tile of rows", "column", "shape"],
)
def test_every_check_detects_wrong_results(provider, spoil):
    case, given = setup(TALL, provider, "cpu"), operands(TALL, "cpu")
    out = case.fn()
    assert check_output(case, given, out) < 2.0**-7
    with pytest.raises(WrongResultError):
        check_output(case, given, spoil(out))


def test_smoke(tmp_path):
    output = tmp_path / "out.json"
    assert int8_linear.main(["--smoke", "--device", "cpu", "--output", str(output)]) == 0
    document = json.loads(output.read_text())
    assert document["smoke"] is True
    providers = set(PROVIDERS) - set(OPTIONAL)
    assert len(document["records"]) == len(int8_linear.SMOKE_SHAPES) * len(providers)
    timed = [record for record in document["records"] if record["status"] == "ok"]
    assert {record["provider"] for record in timed} == providers - FP8
    assert {record["status"] for record in document["records"]} == {"ok", "unsupported"}
    for record in timed:
        assert 0 < record["p20_ms"] <= record["p50_ms"] <= record["p80_ms"]
        rate = 2e-9 * record["shape"][0] * record["shape"][1] * record["shape"][2] / record["p50_ms"]
        assert record["tflops"] == pytest.approx(rate, rel=2e-3)


@pytest.mark.gpu
def test_every_provider_on_a_gpu(tmp_path):
    """Including a shape that is timed call by call."""
    output = tmp_path / "out.json"
    shapes = ["--shapes", f"197,768,768 {int8_linear.SMALL_M + 1},768,768"]
    assert int8_linear.main([*shapes, "--output", str(output)]) == 0
    assert {record["status"] for record in json.loads(output.read_text())["records"]} == {"ok"}


@pytest.mark.gpu
def test_graph_timing_excludes_launch_overhead():
    """A launch of a tiny kernel takes the host several microseconds, the kernel itself about two."""
    x = torch.zeros(1, device="cuda")
    alone = timing.time_provider(lambda: x.add_(1), "cuda", rep_ms=20)
    calls = float(x)
    in_graph = timing.time_in_graph(lambda: x.add_(1), "cuda", rep_ms=20)
    assert in_graph.median_s < 5e-6
    assert in_graph.median_s <= alone.median_s
    assert float(x) - calls > 10 * timing.GRAPH_CALLS


@pytest.mark.gpu
def test_kernel_timing_excludes_a_slow_host():
    x = torch.zeros(1, device="cuda")

    def slow():
        time.sleep(3e-4)
        x.add_(1)

    assert timing.time_provider(slow, "cuda", rep_ms=20).median_s > 1e-4
    assert timing.time_kernel(slow, "cuda", rep_ms=20).median_s < 5e-5


@pytest.mark.parametrize(("m", "in_graph"), [(int8_linear.SMALL_M, True), (int8_linear.SMALL_M + 1, False)])
def test_small_shapes_are_timed_in_a_graph_for_every_provider(monkeypatch, m, in_graph):
    seen = []
    for name in ("time_in_graph", "time_kernel"):
        monkeypatch.setattr(
            int8_linear, name, lambda fn, device, rep_ms, name=name: seen.append(name) or timing.Timing((1.0,))
        )
    for provider in ("torch_int_mm", "qframework_static"):
        shape = (m, 16, 32)
        record = int8_linear.measure(shape, provider, "cpu", int8_linear.identify(shape, provider))
        assert record.p50_ms == 1.0
    assert seen == ["time_in_graph" if in_graph else "time_kernel"] * 2


def test_the_quantization_error_is_that_of_eight_bits():
    """The step of a group is amax/127 and its error uniform: about 1 percent of a normal row, well above fp16."""
    records = {name: int8_linear.check((64, 64, 256), name, "cpu") for name in ("qframework_per_token", "torch_fp16")}
    assert 2.0**-11 < records["qframework_per_token"].quantization_error < 0.02
    assert records["torch_fp16"].quantization_error < 2.0**-10
    assert records["qframework_per_token"].error < 2.0**-11


def test_shapes_are_those_of_the_models():
    assert len(int8_linear.LARGE_SHAPES) == 20
    assert len(int8_linear.SMALL_SHAPES) == 8
    assert {shape[0] for shape in int8_linear.LARGE_SHAPES} == {12608, 50432, 32768}
    assert {(50432, 2304, 768), (50432, 1024, 4096), (32768, 5120, 1280)} < set(int8_linear.LARGE_SHAPES)
    assert max(m for m, _, _ in int8_linear.SMALL_SHAPES) <= int8_linear.SMALL_M < 12608


def test_percentages_are_of_the_best_gemm_of_the_same_width():
    def record(provider: str, shape: tuple[int, ...], tflops: float) -> Record:
        return dataclasses.replace(int8_linear.identify((1, 1, 1), provider), shape=list(shape), tflops=tflops)

    at_peak = [record("torch_int_mm", int8_linear.PEAK_SHAPE, 800.0), record("torch_bf16", (1, 1, 1), 9e9)]
    at_peak += [record("scaled_mm_fp8", int8_linear.PEAK_SHAPE, 1000.0)]
    peaks = int8_linear.peaks([*at_peak, record("qframework_static", int8_linear.PEAK_SHAPE, 9e9)])
    assert peaks == {"8-bit": 1000.0}
    assert int8_linear.against_peak(record("qframework_static", (1, 2, 3), 500.0), peaks).percent_of_peak == 50
    assert int8_linear.against_peak(record("torch_bf16", (1, 2, 3), 500.0), peaks).percent_of_peak is None


def test_a_second_run_is_kept_beside_the_first(tmp_path, monkeypatch):
    monkeypatch.setenv("QFRAMEWORK_COMMIT", "abc123")
    output = tmp_path / "out.json"
    for _ in range(2):
        arguments = ["--smoke", "--device", "cpu", "--providers", "torch_int_mm", "--output", str(output), "--add-run"]
        assert int8_linear.main(arguments) == 0
    assert [record.run for record in Results.load(output).records] == [None, None, 2, 2]
