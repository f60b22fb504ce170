"""The example with accelerate has the losses of the plain training loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from example_scripts import EXAMPLES, example

from demos.training_loop import train
from demos.training_tasks import DigitsTask
from qframework.evaluation import digits_vit

pytest.importorskip("accelerate")
from accelerate.state import AcceleratorState

TASK = DigitsTask(replace(digits_vit.SIZES["base"], embed_dim=48, depth=1))


@pytest.fixture
def fresh_accelerator() -> Iterator[None]:
    """accelerate keeps one state per process, with the first Accelerator's precision."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(("precision", "size"), [("fp32", 32), ("int8", 32), ("int8", (1, 128))])
def test_the_losses_are_those_of_the_plain_loop(precision: str, size: object, fresh_accelerator: None) -> None:
    """Bit for bit."""
    script = example("train_vit_accelerate")
    config = replace(script.RUN, steps=6, batch_size=8, precision=precision, block_size=size)
    losses = script.train(TASK, config, cpu=True)
    assert losses == train(TASK, config).curves.losses
    assert losses[-1] < losses[0]


@pytest.mark.full
@pytest.mark.slow
def test_two_processes_share_the_batches(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, str(EXAMPLES / "train_vit_accelerate.py")]
    result = subprocess.run(
        [*command, "--smoke", "--cpu", "--precision", "fp32", "--output", str(tmp_path / "losses.json")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    config = replace(example("train_vit_accelerate").RUN, steps=4, batch_size=8, precision="fp32")
    expected = train(TASK, config).curves.losses
    assert json.loads((tmp_path / "losses.json").read_text()) == pytest.approx(expected, rel=1e-5)
    assert result.stdout.count("step 4") == 1  # the first process alone speaks
