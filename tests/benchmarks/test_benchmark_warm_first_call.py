"""First calls with warm caches: a smoke run, imports before the clock, and failed processes as rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import warm_first_call
from benchmarks.harness import Record, Results
from benchmarks.warm_first_call import Plan, import_all, use_libraries


@pytest.mark.full
def test_a_smoke_run_times_warm_processes_in_turns(tmp_path: Path) -> None:
    path = tmp_path / "warm.json"
    names = "fp16_compiled,qframework_static"
    arguments = ["--providers", names, "--jobs", "1", "--limit", "500", "--output", str(path)]
    assert warm_first_call.main(["--smoke", *arguments]) == 0
    rows = Results.load(path).records
    assert [row.op for row in rows] == ["save", "cold"] * 2 + ["warm 1"] * 2 + ["warm 2"] * 2
    times = {(row.provider, row.op): row for row in rows}
    for name in names.split(","):
        for warm in ("warm 1", "warm 2"):
            first, compiled = times[name, warm].first_call_s, times[name, warm].compile_s
            assert 0 < compiled <= first < times[name, "cold"].first_call_s


def test_a_provider_that_fails_is_left_out_of_the_rounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def ask(plan: Plan, request: str, *_: object, **__: object) -> Record:
        asked.append((plan.provider, request))
        status = "failed" if (plan.provider, request) == ("fp16_compiled", "cold") else "ok"
        return Record(benchmark="warm_first_call", provider=plan.provider, op=request, status=status)

    monkeypatch.setattr(warm_first_call, "ask", ask)
    plans = [Plan(name, "m", 1, "cpu", True, tmp_path) for name in ("fp16_compiled", "qframework_static")]
    results = Results("warm_first_call", {})
    warm_first_call.run(results, plans, None, jobs=1)  # type: ignore[arg-type]
    assert asked[4:] == [("qframework_static", "warm")] * 2
    assert [row.op for row in results.records[4:]] == ["warm 1", "warm 2"]
    assert results.exit_code == 1


def test_modules_that_cannot_be_imported_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    import_all(["no_such_module_of_inductor", "colorsys"])
    assert "colorsys" in sys.modules


def test_libraries_are_used_without_changing_random_numbers() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    use_libraries(torch.ones(2, 3, 32, 32))
    assert torch.equal(torch.rand(1), expected)


def test_a_row_keeps_the_compilation_alone() -> None:
    row = Record(benchmark="warm_first_call", provider="x", compile_s=1.25)
    assert json.loads(json.dumps(row.to_json()))["compile_s"] == 1.25
