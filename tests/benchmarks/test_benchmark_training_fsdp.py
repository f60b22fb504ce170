"""Steps under FSDP2: every way to gather is checked before it is timed (training_fsdp.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import training_fsdp
from benchmarks.harness import Record
from benchmarks.machine import REPOSITORY

PROVIDERS = "bf16_gather_bf16,qframework_gather_fp32,qframework_gather_int8"


def rows(path: Path) -> dict[str, dict[str, Any]]:
    return {row["provider"]: row for row in json.loads(path.read_text())["records"]}


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    """The first one writes; the loss with INT8 gathered differs from that with FP32, where the linears' INT8 is one."""
    output = tmp_path / "out.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    benchmark = ["-m", "benchmarks.training_fsdp", "--smoke", "--providers", PROVIDERS, "--output", str(output)]
    result = subprocess.run(
        [*command, *benchmark],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = rows(output)
    assert list(found) == PROVIDERS.split(",")
    assert all(row["status"] == "ok" and row["p50_ms"] > 0 and row["runs"] == 12 for row in found.values())
    assert all(row["model"].endswith("2 processes") for row in found.values())
    assert found["qframework_gather_fp32"]["error"] == 0.0
    fp32, int8 = (found[f"qframework_gather_{kind}"] for kind in ("fp32", "int8"))
    assert fp32["gather_mb"] > int8["gather_mb"] > fp32["gather_mb"] / 4
    assert fp32["reduce_mb"] == int8["reduce_mb"] > 0


def test_a_wrong_loss_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are the cases after it, which another process may not reach."""

    def spoil(model: Any) -> Any:
        with torch.no_grad():
            model.lm_head.weight.mul_(20)
        return model

    monkeypatch.setattr(training_fsdp, "gather_in_int8", spoil)
    names = ["qframework_gather_fp32", "qframework_gather_int8", "qframework_gather_bf16"]
    output = tmp_path / "out.json"
    assert training_fsdp.main(["--smoke", "--providers", ",".join(names), "--output", str(output)]) == 1
    assert [(name, row["status"]) for name, row in rows(output).items()] == [(names[0], "ok"), (names[1], "wrong")]


def test_table() -> None:
    row = Record(benchmark="training_fsdp", provider="qframework_gather_int8_adamw8bit", p50_ms=12.5, gather_mb=100.0)
    text = training_fsdp.table([row]).splitlines()[-1]
    assert text.startswith("| INT8 | INT8 | AdamW8bit | 12.5 | 100 |")
