"""Attention: oracle, checks, workers and page (attention*.py, boxed.py, report_attention.py)."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from benchmarks import attention, attention_oracle, report
from benchmarks.attention import Measurement, Plan
from benchmarks.attention_cases import PER_WARP, PROVIDERS, Shape, make_inputs
from benchmarks.attention_oracle import float32_attention, predicted_noise
from benchmarks.boxed import Answers, Limits, Worker
from benchmarks.harness import Record, Results, WrongResultError
from qframework.errors import FileFormatError
from qframework.kernels.attention.variants import VARIANTS, resolve

SHAPE = Shape(2, 2, 33, 16)
GPU_ONLY = {"torch_cudnn", "torch_efficient", "sageattention"}


def plan(*providers: str, shape: Shape = SHAPE) -> Plan:
    return Plan(providers, (shape,), "cpu", seed=0)


# Cases


@pytest.mark.parametrize("causal", [False, True])
def test_the_oracle_matches_float64_attention(causal, monkeypatch):
    """Also when heads do not divide evenly into groups."""
    monkeypatch.setattr(attention_oracle, "ORACLE_BYTES", 3 * 4 * 33 * 33)
    given = make_inputs(dataclasses.replace(SHAPE, causal=causal), "cpu", 0)
    tensors = [tensor.double() for tensor in (given.query, given.key, given.value)]
    expected = F.scaled_dot_product_attention(*tensors, is_causal=causal)
    got = float32_attention(given.query, given.key, given.value, causal)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


def test_operations_count_two_products():
    assert Shape(2, 3, 5, 7).operations == 2 * (2 * 2 * 3 * 5 * 5 * 7)
    assert Shape(2, 3, 5, 7, causal=True).operations == 2 * 2 * 3 * 5 * 5 * 7


@pytest.mark.parametrize(
    "spoil",
    [
        lambda out: out * 1.2,
        lambda out: out.roll(1, 2),
        lambda out: out.index_fill(2, torch.tensor(5), 0.0),
        lambda out: out.masked_fill(out > 1, torch.nan),
        lambda out: out[..., :-1],
    ],
    ids=["scaled", "shifted", "zeroed row", "nan", "shape"],
)
def test_checks_refuse_wrong_attention(spoil):
    given = make_inputs(SHAPE, "cpu", 0)
    for variant in (None, resolve("sage_b"), resolve("sage_vb"), resolve("sage2_int8")):
        check = given.check(variant)
        assert check(given.oracle) == 0
        with pytest.raises(WrongResultError):
            check(spoil(given.oracle))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", [*VARIANTS, PER_WARP])
def test_measured_errors_match_the_prediction(name, causal):
    """All rows together have the predicted rounding error, and no row exceeds its bound.

    Without quantized Q and K only roundings to 16 bit are left, whose prediction is their bound for the worst mantissa.
    """
    given = make_inputs(Shape(2, 4, 320, 64, causal), "cpu", 1)
    variant = resolve(name)
    out = torch.ops.qframework.sage_attention(
        given.query, given.key, given.value, is_causal=causal, variant=name
    )[0].float()  # fmt: skip
    given.check(variant)(out)
    noise = predicted_noise(given.query, given.key, given.value, given.rows, variant)
    error = (out - given.oracle).norm(dim=-1)
    assert (0.8 if variant.quantizes_qk else 0.4) < float(error.norm() / noise.rows.norm()) < 1.1


@pytest.mark.parametrize(
    ("name", "seen"), [("sage_b", 1.0), ("sage_vb", 1.0), ("sage2_int8", 1.0), ("sage2_int4", 0.5)]
)
def test_one_zeroed_row_is_detected(name, seen):
    """Any row; with INT4, except rows that depend on few keys."""
    given = make_inputs(Shape(1, 2, 320, 64), "cpu", 2)
    rows = given.rows
    noise = predicted_noise(given.query, given.key, given.value, rows, resolve(name))
    refused = given.oracle.norm(dim=-1) > attention_oracle.largest_noise(rows, noise)
    assert float(refused.float().mean()) >= seen
    first = refused[0, 0].nonzero()[0]
    with pytest.raises(WrongResultError, match="the worst row"):
        given.check(resolve(name))(given.oracle.index_fill(2, first, 0.0))


@pytest.mark.parametrize("provider", sorted(set(PROVIDERS) - GPU_ONLY))
def test_every_provider_is_right(provider):
    (record,) = Measurement(plan(provider))("check")
    assert record.status == "ok", record.reason
    if provider.startswith("qframework"):
        least = 2.0**-13 if provider == "qframework_unquantized" else 2.0**-11  # only its result is rounded
        assert least < record.relative_l1 < 0.25


# Workers


def test_every_provider_in_a_smoke_run(tmp_path):
    output = tmp_path / "out.json"
    slow = ["--time-limit", "120", "--limit", "500"]  # for a loaded machine
    # The bounds are statistical: at these sizes the inputs of one seed in a thousand exceed them.
    assert attention.main(["--smoke", "--device", "cpu", "--output", str(output), "--seed", "1", *slow]) == 0
    document = json.loads(output.read_text())
    records = [Record.from_json(fields) for fields in document["records"]]
    assert document["smoke"] is True
    parts = [record for record in records if record.op != "attention"]
    records = [record for record in records if record.op == "attention"]
    assert len(records) == len(PROVIDERS) * len(attention.SMOKE_SHAPES)
    assert len(parts) == 2 * len([*VARIANTS, PER_WARP]) * len(attention.SMOKE_SHAPES)
    assert all(record.p50_ms > 0 for record in parts)
    reasons = {record.provider: record.reason for record in records if record.status != "ok"}
    assert reasons.keys() == GPU_ONLY, reasons
    for record in records:
        if record.status == "ok":
            assert 0 < record.p20_ms <= record.p50_ms <= record.p80_ms
            b, h, n, d = record.shape
            operations = 4 * b * h * n * n * d / (2 if record.causal else 1)
            assert record.tflops == pytest.approx(1e-9 * operations / record.p50_ms, rel=2e-3)


@pytest.mark.gpu
def test_every_provider_on_a_gpu(tmp_path):
    output = tmp_path / "out.json"
    assert attention.main(["--smoke", "--device", "cuda", "--output", str(output)]) == 0
    records = json.loads(output.read_text())["records"]
    timed = [record for record in records if record["op"] == "attention" and "p50_ms" in record]
    assert set(PROVIDERS) - {"sageattention"} <= {record["provider"] for record in timed}
    assert all(record["peak_mb"] > 0 for record in timed)


def test_a_wrong_provider_is_never_timed(monkeypatch):
    def doubled(given):
        case = PROVIDERS["torch_math"](given)
        return dataclasses.replace(case, fn=lambda: 2 * case.fn())

    monkeypatch.setitem(attention.PROVIDERS, "torch_flash", doubled)
    measurement = Measurement(plan("torch_flash"))
    (record,) = measurement("check")
    assert record.status == "wrong"
    assert list(measurement("time")) == []


class Hangs:
    """A worker that answers once and then sleeps."""

    def __call__(self, seconds: float) -> Iterator[Record]:
        yield Record(benchmark="attention", provider="slow")
        time.sleep(seconds)


class Exits:
    def __call__(self, status: int) -> Iterator[Record]:
        print("out of luck\n", file=sys.stderr, flush=True)
        raise SystemExit(status)


def test_a_late_worker_is_killed_and_its_records_are_kept():
    worker = Worker(Hangs)
    assert [record.provider for record in worker.request(0.0, 60)] == ["slow"]
    assert worker.status is None
    start = time.monotonic()
    assert len(list(worker.request(60.0, 1.5))) == 1
    assert time.monotonic() - start < 10
    assert worker.status is not None
    status, reason = worker.status
    assert status == "timeout"
    assert re.fullmatch(r"not done after 1.5 s, in __call__ \(test_benchmark_attention.py:\d+\)", reason)
    assert list(worker.request(0.0, 60)) == []
    worker.close()


def test_the_end_of_a_dead_worker_is_reported():
    worker = Worker(Exits)
    assert list(worker.request(3, 60)) == []
    assert worker.status == ("failed", "the process ended with exit status 3: out of luck")
    worker.close()


def test_missing_records_of_a_killed_worker_have_its_status():
    other = Shape(1, 1, 8, 16)
    both = dataclasses.replace(plan("a"), shapes=(SHAPE, other))
    checked = [attention.identify("a", SHAPE)]
    timed = [dataclasses.replace(checked[0], p50_ms=1.0)]
    answers = Answers(both, checked, timed, ("timeout", "late"))
    first, second = answers.complete(attention.identities(both))
    assert (first.status, first.p50_ms) == ("ok", 1.0)
    assert (second.status, second.reason, second.shape) == ("timeout", "late", other.sizes)


def test_limits_are_zero_after_the_deadline():
    """And a check leaves the time that timing the plans needs."""
    limits = Limits(check=100, time=20, deadline=time.monotonic() + 15, reserve=5)
    assert 4 < limits.to_check(2) <= 5
    assert 14 < limits.to_time() <= 15
    late = dataclasses.replace(limits, deadline=time.monotonic() - 1)
    assert late.to_check(0) == late.to_time() == 0


# A run in parts


def test_merge_adds_to_the_results_of_an_earlier_call(tmp_path, monkeypatch):
    """Missing records are added, measured ones stay, and another commit is refused."""
    output = tmp_path / "out.json"
    shape = attention.SMOKE_SHAPES[0].name
    common = ["--smoke", "--seed", "1", "--device", "cpu", "--output", str(output), "--no-parts", "--shapes", shape]
    monkeypatch.setenv("QFRAMEWORK_COMMIT", "abc123")

    def run(provider: str) -> list[tuple[str, float]]:
        assert attention.main([*common, "--merge", "--providers", provider]) == 0
        return [(record.provider, record.p50_ms) for record in Results.load(output).records]

    (first,) = run("qframework_sage_b")
    second = run("torch_math")
    assert second[0] == first
    assert [name for name, _ in second] == ["qframework_sage_b", "torch_math"]
    assert len(run("torch_math")) == 2
    assert list(tmp_path.iterdir()) == [output]
    before = output.read_text()
    for commit in ("def456", "abc123-dirty"):
        monkeypatch.setenv("QFRAMEWORK_COMMIT", commit)
        with pytest.raises(FileFormatError, match="must be"):
            run("torch_math")
    assert output.read_text() == before


@pytest.mark.parametrize(
    ("second", "kept"), [({"status": "timeout"}, 1.0), ({"p50_ms": 2.0}, 2.0), ({"status": "wrong"}, None)]
)
def test_merge_keeps_the_measurement_that_has_a_time(second, kept):
    """But an earlier time does not hide a wrong result."""
    record = attention.identify("torch_math", SHAPE)
    old = Results("attention", {"commit": "a"}, records=[dataclasses.replace(record, p50_ms=1.0)], note="seen")
    new = Results("attention", {"commit": "a"}, records=[dataclasses.replace(record, **second)])
    attention.merge_runs(old, new)
    assert [record.p50_ms for record in new.records] == [kept]
    assert new.note == "seen"


def test_the_most_important_providers_come_first():
    names = list(PROVIDERS)
    assert names[:5] == ["torch_flash", "torch_cudnn", "sageattention", "qframework_auto", "qframework_mixed_static"]
    assert {f"qframework_{name}" for name in (*VARIANTS, PER_WARP)} < set(names)


# The page


@pytest.fixture
def site(tmp_path) -> Path:
    results = Results("attention", {"device": "Chip 9000"}, tmp_path / "results" / "attention.json")
    record = Record(
        benchmark="attention", op="attention", provider="", shape=[1, 2, 3, 4], p50_ms=1.0, relative_l1=0.01
    )

    def add(provider: str, tflops: float, **fields) -> None:
        results.add(dataclasses.replace(record, provider=provider, tflops=tflops, **fields))

    add("torch_cudnn", 400.0)
    add("torch_cudnn", 900.0, causal=True)
    add("qframework_sage_t", 300.0, relative_l1=0.0123)
    add("qframework_sage_vb", 500.0)
    add("qframework_sage_vb", 450.0, causal=True)
    add("qframework_sage_vb", 0.0, op="attention_quantize", p50_ms=0.25)
    add("qframework_sage_vb", 9999.0, op="attention_kernel", p50_ms=0.75)
    return tmp_path


def page(site: Path) -> str:
    assert report.main(["--results", str(site / "results"), "--page", str(site / "performance.md")]) == 0
    return (site / "performance.md").read_text() + (site / "performance-history.md").read_text()


def test_the_page_compares_whole_calls(site):
    """Kernels alone are not compared; causal is a separate shape."""
    text = page(site)
    assert "| 1,2,3,4 | 400 | **500** | sage_vb | 1.25 |" in text
    assert "| 1,2,3,4 causal | **900** | 450 | sage_vb | 0.50 |" in text
    losses = text.split("## Where qframework is slower")[1].split("\n## ")[0]
    assert "| 1,2,3,4 causal | sage_vb | 0.50 cuDNN |" in losses
    assert "| 1,2,3,4 |" not in losses


def test_the_page_shows_accuracy_and_the_parts_of_a_call(site):
    text = page(site)
    assert "| 1,2,3,4 | 0.0100 | 0.0123 | 0.0100 |" in text
    assert "| 1,2,3,4 | 0.25 + 0.75 |" in text


def test_the_page_shows_wrong_results_and_notes(site):
    path = site / "results" / "attention.json"
    results = Results.load(path)
    results.note = "Read this first."
    results.add(
        dataclasses.replace(results.records[0], provider="peer", status="wrong", reason="off by 3", p50_ms=None)
    )
    text = page(site)
    assert "| peer | 1,2,3,4 | off by 3 |" in text.split("### Wrong and not timed")[1]
    assert "Read this first." in text


def test_the_plot_names_every_peer_and_the_fastest_variant(site):
    page(site)
    (plot,) = (site / "assets").iterdir()
    text = plot.read_text()
    assert ">cuDNN<" in text
    assert ">sage_vb<" in text
    assert ">sage_t<" not in text
    assert text.count(">1,2,3,4<") == 1  # whole calls, not the kernel alone
    assert report.main(["--results", str(site / "results"), "--page", str(site / "performance.md"), "--check"]) == 0
