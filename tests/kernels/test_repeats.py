"""Operators between blocks give the same bits every time, at sizes that take milliseconds, and beside other processes.

A kernel that reads what is not there yet, or keeps something where the chip has its own, is right nearly always: a test
that calls it once at a small size sees nothing.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Iterator

import pytest
import torch
from block_chain import Chain, differences, poison

from qframework.kernels.blocks.format import BLOCK_SIZES, block_size_name

SECONDS = 5.0


def load(ready) -> None:
    """Keep the GPU busy with products of some milliseconds."""
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    ready.set()
    while True:
        for _ in range(20):
            x @ x
        torch.cuda.synchronize()


@contextlib.contextmanager
def other_processes(count: int) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    ready = [context.Event() for _ in range(count)]
    processes = [context.Process(target=load, args=(event,), daemon=True) for event in ready]
    try:
        for process in processes:
            process.start()
        assert all(event.wait(60) for event in ready)
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def repeat(chain: Chain, seconds: float, least: int = 3) -> list[str]:
    """The differences of the first run that has some, and how many have."""
    first, found, runs, wrong = chain.steps(), [], 0, 0
    deadline = time.monotonic() + seconds
    while runs < least or time.monotonic() < deadline:
        steps = chain.steps()
        apart = list(differences(steps, first))
        runs, wrong, found = runs + 1, wrong + bool(apart), found or apart
        poison(steps)
    return [f"{wrong} of {runs} runs", *found] if found else []


@pytest.mark.gpu
@pytest.mark.parametrize("others", [0, 2], ids=["alone", "beside-others"])
@pytest.mark.parametrize("block_size", BLOCK_SIZES, ids=block_size_name)
def test_large_operators_repeat_bit_for_bit(block_size, others):
    with other_processes(others):
        found = repeat(Chain(16384, 4096, block_size, "cuda"), SECONDS)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("block_size", BLOCK_SIZES, ids=block_size_name)
def test_references_repeat_bit_for_bit(block_size):
    assert repeat(Chain(96, 32, block_size, "cpu"), 0.0) == []


def test_a_difference_is_reported():
    chain = Chain(64, 32, 32, "cpu")
    first, steps = chain.steps(), chain.steps()
    steps[-1][1][1][1, 0] = float("nan")
    assert list(differences(steps, first)) == [
        f"add dy, result 1, (2, 1) torch.float32: 1 differ, 1 not finite, in [1, 0] to [1, 0], nan was "
        f"{first[-1][1][1][1, 0].item()}"
    ]
    poison(steps)
    assert len(list(differences(steps, first))) == sum(x.numel() > 0 for _, made in first for x in made)
