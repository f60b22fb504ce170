"""Host time: calls are timed without the work they launch."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import host_calls
from benchmarks.harness import WrongResultError
from qframework.kernels.runtime.operator import OPERATORS


def test_smoke(tmp_path):
    output = tmp_path / "out.json"
    assert host_calls.main(["--smoke", "--device", "cpu", "--output", str(output)]) == 0
    records = json.loads(output.read_text())["records"]
    assert len(records) == len(host_calls.PROVIDERS) * len(host_calls.operators("meta"))
    for record in records:
        written = record["provider"] == "qframework_as_written"
        assert record["status"] == ("unsupported" if written else "ok")
        assert written or record["p50_ms"] > 0
    assert {tuple(record["shape"]) for record in records if record["op"] == "int8_linear"} == {(1, 197, 768)}


def test_a_call_takes_the_mean_time_of_many(monkeypatch):
    now = [0.0]

    def fn():
        now[0] += 2e-6

    monkeypatch.setattr(host_calls.time, "perf_counter", lambda: now[0])
    timing = host_calls.time_host(fn, "cpu", samples=3)
    assert timing.samples_ms == pytest.approx((2e-3,) * 3)


def test_as_written_calls_the_implementation_behind_the_replays():
    call = host_calls.provider("qframework_as_written", "int8_linear", "meta")
    assert call.func is OPERATORS["int8_linear"].cuda


def test_a_wrong_replay_is_not_timed(monkeypatch):
    wrong = {"CUDA": lambda x, granularity: (x, x.sum())}
    monkeypatch.setattr(OPERATORS["dynamic_quantize"], "implementations", wrong)
    x = torch.arange(4.0)
    host_calls.check_replay("dynamic_quantize", (x, "per_token"), lambda: (x.clone(), x.sum()))
    with pytest.raises(WrongResultError, match="dynamic_quantize: a replay must equal the implementation"):
        host_calls.check_replay("dynamic_quantize", (x, "per_token"), lambda: (x + 1, x.sum()))
