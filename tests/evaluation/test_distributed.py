"""Several processes: the split of batches, and the same counts as one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from comparison_helpers import CONFIGURATIONS, EAGER, small_task, untimed

from qframework.errors import QFrameworkError
from qframework.evaluation.comparison import compare
from qframework.evaluation.comparison_results import Results
from qframework.evaluation.distributed import Processes, device_of_process, joined_processes

SCRIPT = """
import sys
from pathlib import Path
from torch import nn, ones
from torch.nn.parallel import DistributedDataParallel
from comparison_helpers import CONFIGURATIONS, EAGER, small_task
from qframework.evaluation.comparison import compare
from qframework.evaluation.comparison_results import Results
from qframework.evaluation.distributed import joined_processes

with joined_processes() as processes:
    assert processes.size == 2
    results = Results.open(Path(sys.argv[1]), processes=processes)
    compare(small_task(), CONFIGURATIONS, EAGER, processes=processes, results=results)
    model = DistributedDataParallel(nn.Linear(4, 4))
    model(ones(2, 4)).sum().backward()
    model.itself = [model]  # only a cycle keeps it, as after a training loop
    del model
threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
assert not [name for name in threads if "gloo" in name], threads  # one of them can abort a process that ends
"""


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("batches", [range(0), range(5), range(3, 21)])
def test_every_batch_is_taken_once(size: int, batches: range) -> None:
    taken = [Processes(rank, size).mine(batches) for rank in range(size)]
    assert sorted(batch for mine in taken for batch in mine) == list(batches)
    assert max(map(len, taken)) - min(map(len, taken)) <= 1


def test_one_process_alone() -> None:
    with joined_processes() as processes:
        assert processes == Processes(0, 1)
        assert processes.is_first
        assert processes.sum([3, 2**62]) == [3, 2**62]
        assert processes.gather(["a", "b"]) == ["a", "b"]
        assert processes.add_speeds(1.5) == 1.5
        processes.wait()
    assert not torch.distributed.is_initialized()


def two_processes(script: Path, output: Path) -> None:
    """Run a script as torchrun does."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, str(script), str(output)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_two_processes_give_the_same_figures_as_one(tmp_path: Path) -> None:
    """Also for scales over a whole batch, since the batches are the same. No thread outlives the process group."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    compare(small_task(), CONFIGURATIONS, EAGER, results=Results.open(one))
    two_processes(script, two)
    alone, together = (json.loads(path.read_text()) for path in (one, two))
    assert json.dumps(untimed(alone)) == json.dumps(untimed(together))
    assert [row["timing"]["processes"] for row in alone["rows"]] == [1, 1, 1]
    assert [row["timing"]["processes"] for row in together["rows"]] == [2, 2, 2]
    assert len({json.dumps(row["counts"]) for row in together["rows"]}) == 3


# Devices


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs that the kernels support, and two processes on this machine, of which this is the second."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("qframework.kernels.runtime.chip.check_device", lambda device: None)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")


def test_each_process_has_a_gpu_of_its_own(gpus: None) -> None:
    assert device_of_process("cuda") == torch.device("cuda", 1)
    assert device_of_process("cpu") == torch.device("cpu")


def test_one_gpu_for_two_processes_is_refused(gpus: None) -> None:
    with pytest.raises(QFrameworkError, match="device must be 'cuda', a GPU each, for 2 processes, got 'cuda:0'"):
        device_of_process("cuda:0")


def test_more_processes_than_gpus_are_refused(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(QFrameworkError, match="4 processes must have a GPU each, got 2 CUDA devices"):
        device_of_process("cuda")


@pytest.mark.parametrize("name", ["gpu0", "meta", "cuda:99"])
def test_devices_that_are_not_there_or_have_no_kernels_are_refused(name: str) -> None:
    with pytest.raises(QFrameworkError, match=f"device must be 'cpu', .*, got '{name}"):
        device_of_process(name)
