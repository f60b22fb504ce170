"""Compiles what an implementation for a GPU launches, without that GPU's tensors: it is called with tensors on "meta".

Inside, "meta" stands for the GPU where an implementation asks which chip it is on (chip.py), and launches compile
(launch.py). So the implementation itself decides which kernels these are. It must not read values, as on a GPU, where
that would synchronize.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

A = TypeVar("A")
_state = threading.local()


def launches_of(implementation: Callable[[A], Any]) -> Callable[[torch.device, A], list[Any]]:
    """``warm_up`` of an operator (:func:`~qframework.kernels.runtime.operator.declare`): its ``cuda`` is called."""

    def warm_up(device: torch.device, record: A) -> list[Any]:
        _state.device, _state.kernels = device, []
        try:
            implementation(record)
            return list(_state.kernels)
        finally:
            _state.device = _state.kernels = None

    return warm_up


def collected() -> list[Any] | None:
    """Where this thread's launches leave their kernels instead of running them; None where they run."""
    return getattr(_state, "kernels", None)


def stood_for(device: torch.device) -> torch.device:
    """The GPU that "meta" stands for in this thread; other devices as they are."""
    gpu: torch.device | None = getattr(_state, "device", None)
    return gpu if gpu is not None and device.type == "meta" else device
