"""Checks, records, result files and times (harness.py, machine.py, timing.py)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from benchmarks import harness, machine, timing
from benchmarks.harness import Record, Results, UnavailableError, WrongResultError
from benchmarks.machine import describe_machine
from qframework.errors import FileFormatError

SHAPE = (8, 16, 32)


IDENTITY = Record(benchmark="int8_linear", op="int8_linear", shape=[8, 16, 32], provider="any")


MACHINE = {
    "device": "Chip 9000", "capability": "sm_90", "driver": "1.2", "cpu": "CPU", "cores": 4, "threads": 4,
    "cpu_flags": ["avx2"], "torch": "2.11.0", "triton": "3.6.0", "torchao": "0.17.0", "timm": "1.0", "python": "3.12.1",
    "qframework": "0.1.0", "commit": "abc123", "dirty": False, "date": "2026-01-02T03:04:05+00:00",
}  # fmt: skip


def read(path: Path) -> dict:
    return json.loads(path.read_text())


@pytest.fixture
def reference() -> torch.Tensor:
    return torch.randn(64, 48, dtype=torch.float64)


def zero_one_row(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    value[5] = 0
    return value


@pytest.mark.parametrize(
    "spoil",
    [
        zero_one_row,
        lambda v: 2 * v,
        lambda v: v.roll(1, 0),
        lambda v: v[:-1],
        lambda v: v.masked_fill(v > 2, torch.nan),
    ],
    ids=["zeroed row", "twice", "shifted rows", "shape", "nan"],
)
@pytest.mark.parametrize("kind", ["rows_within", "elements_within", "one_step_apart"])
def test_checks_refuse_wrong_results(reference, spoil, kind):
    right = (reference * 30).round() if kind == "one_step_apart" else reference
    check = {
        "rows_within": harness.rows_within(lambda: right, 1e-6),
        "elements_within": harness.elements_within(lambda: right, lambda r: 1e-6 * r.abs()),
        "one_step_apart": harness.one_step_apart(lambda: right, 1e-2),
    }[kind]
    assert check(right) == 0
    with pytest.raises(WrongResultError):
        check(spoil(right))


def test_rows_within_returns_the_error_of_a_right_result(reference):
    error = harness.rows_within(lambda: reference, 1e-2)(reference * 1.001)
    assert error == pytest.approx(1e-3, rel=1e-9)


def test_one_step_apart_counts_the_steps():
    reference = torch.zeros(10, 100)
    value = reference.clone()
    value[0, :5] = 1
    harness.one_step_apart(lambda: reference, 5e-3)(value)
    with pytest.raises(WrongResultError, match="got up to 1 steps"):
        harness.one_step_apart(lambda: reference, 4e-3)(value)


@pytest.mark.parametrize(
    ("error", "status", "exit_code"),
    [
        (WrongResultError("off", 0.5), "wrong", 1),
        (RuntimeError("boom\nlong trace"), "failed", 1),
        (UnavailableError("no such chip"), "unsupported", 0),
    ],
)
def test_errors_become_rows_and_the_exit_status(error, status, exit_code):
    def measure() -> Record:
        raise error

    results = Results("int8_linear", MACHINE)
    results.attempt(IDENTITY, measure)
    (record,) = results.records
    assert record.status == status
    assert record.reason in (str(error), "RuntimeError: boom")
    assert record.p50_ms is None
    assert results.exit_code == exit_code


@pytest.mark.parametrize("error", [WrongResultError("off", 0.5), RuntimeError("boom")])
def test_a_failure_of_a_third_party_package_does_not_fail_the_benchmark(error):
    def measure() -> Record:
        raise error

    results = Results("attention", MACHINE)
    results.attempt(dataclasses.replace(IDENTITY, provider="sageattention"), measure)
    assert results.records[0].status in harness.BROKEN
    assert results.exit_code == 0


def test_interleaved_timing_takes_turns_after_one_warm_up_round():
    order = []
    turns = timing.time_interleaved({name: lambda name=name: order.append(name) for name in "abc"}, rounds=2)
    assert "".join(order) == "abcabcabc"
    assert {name: times.fields()["runs"] for name, times in turns.items()} == {"a": 2, "b": 2, "c": 2}


def test_timing_quantiles():
    fields = timing.Timing(tuple(float(ms) for ms in range(11))).fields()
    assert fields == {"p20_ms": 2.0, "p50_ms": 5.0, "p80_ms": 8.0, "runs": 11}


def test_records_survive_a_round_trip_through_the_file(tmp_path):
    """Including infinity and NaN; absent values stay absent."""
    record = dataclasses.replace(IDENTITY, p50_ms=1.23456, sqnr_db=float("inf"), error=0.0)
    path = tmp_path / "deep" / "out.json"
    Results("int8_linear", MACHINE, path).add(record)
    (fields,) = read(path)["records"]
    assert "gbps" not in fields
    assert Record.from_json(fields) == dataclasses.replace(record, p50_ms=1.235)


def test_another_run_of_the_same_code_is_added_to_the_file(tmp_path):
    """Runs are numbered and have their own exit status; other code or another machine is refused."""
    path = tmp_path / "out.json"
    Results("int8_linear", MACHINE, path, note="seen").add(dataclasses.replace(IDENTITY, status="failed"))
    for run in (2, 3):
        results = Results("int8_linear", {**MACHINE, "date": "later"}, path)
        results.follow(Results.load(path))
        results.add(dataclasses.replace(IDENTITY, p50_ms=float(run)))
        assert results.exit_code == 0
        assert [record.run for record in Results.load(path).records] == [None, *range(2, run + 1)]
    assert Results.load(path).note == "seen"
    for change in ({"commit": "def456"}, {"device": "Chip 1"}, {"dirty": True}):
        with pytest.raises(FileFormatError, match="must be"):
            Results("int8_linear", {**MACHINE, **change}, path).follow(Results.load(path))


def test_machine_header_names_everything():
    header = describe_machine("cpu")
    assert set(header) == set(MACHINE)
    assert header["torch"] == torch.__version__
    assert header["date"].endswith("+00:00")


@pytest.mark.parametrize(
    ("named", "state"),
    [("abc123", ("abc123", False)), ("abc123-dirty", ("abc123", True)), ("", ("fedcba987654", True))],
)
def test_the_environment_variable_overrides_gits_commit(monkeypatch, named, state):
    """For copies of the tree in a repository at another commit; an empty value is ignored."""
    monkeypatch.setattr(machine, "_output", lambda *command: "fedcba987654" if "rev-parse" in command else " M file.py")
    monkeypatch.setenv("QFRAMEWORK_COMMIT", named)
    assert machine.git_state() == state


def test_the_commit_is_unknown_without_git(monkeypatch):
    monkeypatch.setattr(machine, "_output", lambda *command: None)
    monkeypatch.delenv("QFRAMEWORK_COMMIT", raising=False)
    assert machine.git_state() == (None, None)


def test_the_error_behind_dynamos_is_recorded():
    def fail():
        raise RuntimeError("backend='any' raised:\nKeyError: scale\n\nwhile")

    record = harness.guarded(IDENTITY, fail)
    assert (record.status, record.reason) == ("failed", "RuntimeError: backend='any' raised: KeyError: scale")
