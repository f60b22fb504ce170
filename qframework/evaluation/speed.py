"""Throughput of a model in images per second."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from qframework.errors import QFrameworkError


@torch.no_grad()
def throughput(model: Callable[[Tensor], Tensor], inputs: Tensor, *, warmup: int = 3, repeats: int = 20) -> float:
    """Images per second: ``len(inputs)`` over the median time of ``repeats`` calls.

    The first ``warmup`` calls, and with them compilation, are not timed. The median is robust against other load on the
    machine. On a GPU every call is synchronized.

    Raises:
        QFrameworkError: ``inputs`` is empty or ``repeats`` is not positive.
    """
    if len(inputs) == 0 or repeats < 1:
        raise QFrameworkError(
            f"throughput: inputs and repeats must be at least 1, got {len(inputs)} images and repeats={repeats}"
        )
    for _ in range(warmup):
        model(inputs)
    return len(inputs) / median(_seconds(model, inputs) for _ in range(repeats))


def _seconds(model: Callable[[Tensor], Tensor], inputs: Tensor) -> float:
    _synchronize(inputs)
    start = time.perf_counter()
    model(inputs)
    _synchronize(inputs)
    return time.perf_counter() - start


def _synchronize(inputs: Tensor) -> None:
    if inputs.is_cuda:
        torch.cuda.synchronize(inputs.device)
