"""Launches on the device of the operands, and past Triton from the second call on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from qframework.kernels import _launch
from qframework.kernels._launch import Launch, on_its_device


@pytest.mark.parametrize("index", [0, 1])
def test_the_operands_device_is_the_current_one(monkeypatch, index):
    current = [0]

    class Guard:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            current.append(self.device.index)

        def __exit__(self, *_):
            current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", Guard)
    x = SimpleNamespace(device=torch.device("cuda", index))
    assert on_its_device(lambda x, y: (current[-1], y))(x, y=3) == (index, 3)
    assert current == [0]


class Kernel:
    """Counts what goes through Triton and what goes past it."""

    def __init__(self):
        self.through, self.past = [], []

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.through.append((grid, arguments, options))
            return {grid: lambda *arguments: self.past.append(arguments)}

        return launch


def test_a_second_launch_goes_past_triton():
    kernel = Kernel()
    launch = Launch(kernel, (2, 1, 1), (True, 64), alike=True, num_warps=4)
    for value in (1, 2, 3):
        launch(value)
    assert kernel.through == [((2, 1, 1), (1, True, 64), {"num_warps": 4})]
    assert kernel.past == [(2, True, 64), (3, True, 64)]


def test_launches_that_may_differ_all_go_through_triton():
    kernel = Kernel()
    launch = Launch(kernel, (2, 1, 1), (), alike=False)
    launch(1)
    launch(2)
    assert len(kernel.through) == 2
    assert kernel.past == []


def test_every_operator_guards_its_device():
    """Nothing registers a CUDA implementation any other way."""
    from pathlib import Path

    sources = Path(_launch.__file__).parent.glob("*.py")
    direct = [path.name for path in sources if '"CUDA")' in path.read_text() and path.name != "_launch.py"]
    assert direct == []
