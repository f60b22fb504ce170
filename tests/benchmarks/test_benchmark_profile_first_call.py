"""Profiles of first calls: phases of the backend, PyTorch and threads; patches are restored."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import profile_first_call
from benchmarks.profile_first_call import Clock, Phase, first_call, show
from qframework.backend import compile as backend
from qframework.backend import passes


def test_the_phases_of_a_first_call(fresh_dynamo, tmp_path):
    before = dict(vars(backend)), dict(vars(passes))
    linear = nn.Linear(4, 2)
    file = tmp_path / "first.prof"
    with torch.no_grad():
        x = torch.randn(3, 4)
        output, phases = first_call(lambda: torch.compile(linear, backend="qframework"), x, file)
    assert torch.allclose(output, linear(x))
    assert file.stat().st_size > 0
    assert phases["qframework: run_passes"].calls == 1
    assert {f"qframework: {each.__name__}" for each in passes.LOWERING} <= set(phases)
    assert phases["qframework: lower_linear"].calls == 1
    assert phases["qframework: wait for its kernels"].calls == 1
    whole = phases[profile_first_call.WHOLE].s
    assert whole > phases["torch.compile"].s
    assert whole > phases["torch: OutputGraph.call_user_compiler"].s > phases["qframework: run_passes"].s
    assert phases["second call"].s < whole
    assert (dict(vars(backend)), dict(vars(passes))) == before


def test_phases_measure_cpu_time_per_thread():
    clock = Clock()

    def work(seconds: float) -> None:
        time.sleep(seconds)

    threads = [threading.Thread(target=clock.timed("sleep", work), args=(0.05,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    phase = clock.phases["sleep"]
    assert phase.calls == 3
    assert phase.s >= 0.15
    assert phase.cpu_s < 0.05


def test_a_failing_phase_is_counted_and_its_error_propagates():
    clock = Clock()

    def refuse() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        clock.timed("refused", refuse)()
    assert clock.phases["refused"].calls == 1


def test_the_table_is_sorted_and_omits_short_phases():
    phases = {"short": Phase(1, 0.001), "b": Phase(2, 0.5, 0.25), "a": Phase(1, 3.0)}
    lines = show(phases).splitlines()
    assert lines[2:] == ["| a | 1 | 3 |  |", "| b | 2 | 0.5 | 0.25 |"]


def test_every_provider_is_written(monkeypatch, tmp_path, capsys):
    asked = []

    def profiled(name: str, model: str, batch: int, device: str, smoke: bool, stats: Path | None) -> dict[str, Phase]:
        asked.append((name, batch, smoke, stats))
        return {"first call": Phase(1, 2.0, 1.0)}

    monkeypatch.setattr(profile_first_call, "profile_in_a_new_process", profiled)
    output = tmp_path / "deep" / "out.json"
    arguments = ["--smoke", "--output", str(output), "--cprofile", str(tmp_path / "stats")]
    assert profile_first_call.main(arguments) == 0
    names = profile_first_call.DEFAULT
    assert asked == [(name, 2, True, tmp_path / "stats" / f"{name}.prof") for name in names]
    found = json.loads(output.read_text())["providers"]
    assert found == {name: {"first call": {"calls": 1, "s": 2.0, "cpu_s": 1.0}} for name in names}
    assert "| first call | 1 | 2 | 1 |" in capsys.readouterr().out
