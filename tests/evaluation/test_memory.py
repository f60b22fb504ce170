"""Peak memory, against a function with a known peak."""

from __future__ import annotations

import os

import pytest
import torch

from qframework.evaluation.memory import activation_bytes

KIB = torch.zeros(256)  # 1 KiB of float32


def two_at_a_time(x: torch.Tensor) -> torch.Tensor:
    """Four results of 256 KiB in turn, of which two are held at a time."""
    x = x.repeat(256)
    for _ in range(3):
        x = x + 1
    return x


def all_at_a_time(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x.repeat(256) for _ in range(3)])


@pytest.mark.parametrize(("function", "kib"), [(two_at_a_time, 2 * 256), (all_at_a_time, 6 * 256)])
def test_the_peak_of_a_known_function(function, kib: int, device: torch.device) -> None:
    held = activation_bytes(function, KIB.to(device))
    assert kib * 1024 <= held < kib * 1024 + 4096  # and a few small things
    assert held == activation_bytes(function, KIB.to(device))


def test_inputs_and_weights_are_not_counted(device: torch.device) -> None:
    linear = torch.nn.Linear(1024, 1, bias=False, device=device)
    assert activation_bytes(linear, torch.zeros(64, 1024, device=device)) < 64 * 1024


def test_what_earlier_calls_left_behind_is_not_subtracted_when_it_is_freed() -> None:
    """PyTorch's profiler knows the sizes of blocks that it saw in earlier profiles, even of those freed since."""
    kept: list[torch.Tensor] = []
    calls: list[int] = []

    def keeps(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.repeat(1024))
        return two_at_a_time(x)

    def frees(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(kept))
        if len(calls) == 2:  # the first call warms up, the second is measured
            kept.clear()
        return two_at_a_time(x)

    held = activation_bytes(two_at_a_time, KIB)
    activation_bytes(keeps, KIB)
    assert activation_bytes(frees, KIB) == held
    assert calls == [2, 2]


def test_the_environment_is_restored() -> None:
    before = dict(os.environ)
    activation_bytes(two_at_a_time, KIB)
    assert dict(os.environ) == before
