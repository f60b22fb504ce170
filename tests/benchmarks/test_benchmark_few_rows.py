"""benchmarks/few_rows.py: a smoke run, wrong results, and the summary."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import few_rows as module
from benchmarks.harness import Record, WrongResultError
from qframework.kernels.quantize import dynamic_quantize


def test_smoke(tmp_path, capsys):
    path = tmp_path / "few_rows.json"
    assert module.main(["--smoke", "--device", "cpu", "--output", str(path)]) == 0
    records = json.loads(path.read_text())["records"]
    status = {(record["provider"], record["status"]) for record in records}
    assert status == {("torch_fp16", "ok"), ("qframework", "ok"), ("qframework_general", "unsupported")}
    assert "times FP16" in capsys.readouterr().out
    layers = [record for record in records if record["op"] == "layers" and record["provider"] == "qframework"]
    assert [record["batch"] for record in layers] == [1, 4]
    assert all(0.003 < record["quantization_error"] < 0.05 for record in layers)


def test_a_limit_stops(capsys):
    assert module.main(["--smoke", "--device", "cpu", "--limit", "-1"]) == 0
    assert "stopped after -1 s" in capsys.readouterr().out


def test_wrong_results_are_found():
    weight = module.Weight(24, 64, "cpu")
    q, scale = dynamic_quantize(torch.randn(3, 64))
    right = module.product(q, scale, weight.int8, weight.scale)
    module.check_product(right, q, scale, weight)
    with pytest.raises(WrongResultError):
        module.check_product(right.roll(1, 1), q, scale, weight)


def test_copies_exceed_the_cache():
    weight = torch.zeros(10, 10, dtype=torch.int8)
    copies = module.Weight.copies(weight, 401)
    assert len(copies) == 5
    assert len({copy.data_ptr() for copy in copies}) == 5
    assert len(module.Weight.copies(weight, 1)) == 1


def test_speedups():
    rows = [
        Record(benchmark="few_rows", op="linear", shape=[1, 8, 8], provider=provider, p50_ms=ms)
        for provider, ms in (("torch_fp16", 0.004), ("qframework", 0.002))
    ]
    (line,) = module.speedups(rows)
    assert line.split() == ["linear", "1,8,8", "qframework", "2.00", "us", "2.00", "times", "FP16"]
    assert module.speedups(rows[1:]) == []
