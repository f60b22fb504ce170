"""The example with FSDP2 and 8-bit optimizer states: the losses of one process, and nearly those of AdamW in FP32."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from example_scripts import EXAMPLES, example

UNCOMPILED = """
import runpy, sys, torch
torch.compiler.set_stance("force_eager")
sys.path.insert(0, sys.argv[1].rpartition("/")[0])
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(autouse=True)
def uncompiled_optimizer():
    """torchao compiles the update of each shape, which takes half a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


def losses(tmp_path: Path, optimizer: str) -> list[float]:
    output = tmp_path / f"{optimizer}.json"
    assert example("train_gpt_fsdp").main(["--smoke", "--optimizer", optimizer, "--output", str(output)]) == 0
    return json.loads(output.read_text())


def test_states_in_8_bits_train_as_those_in_fp32(tmp_path: Path) -> None:
    found, expected = losses(tmp_path, "adamw8bit"), losses(tmp_path, "adamw")
    assert found == pytest.approx(expected, rel=2e-3)
    assert found != expected
    assert found[-1] < 0.95 * found[0]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("gather", ["float", "int8"])
def test_two_processes_have_the_losses_of_one(gather: str, tmp_path: Path) -> None:
    """A weight's gradient sums other tokens in each block of 128, which a loss hardly sees."""
    output, script = tmp_path / "two.json", tmp_path / "uncompiled.py"
    script.write_text(UNCOMPILED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    result = subprocess.run(
        [*command, str(EXAMPLES / "train_gpt_fsdp.py"), "--smoke", "--gather", gather, "--output", str(output)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("6 steps") == 1  # the first process alone speaks
    assert json.loads(output.read_text()) == pytest.approx(losses(tmp_path, "adamw8bit"), rel=1e-3)
