"""Devices: checks that an argument names one that exists and that the kernels run on; the threads of the CPU."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from qframework.errors import UnsupportedError
from qframework.kernels.runtime import chip


@contextmanager
def one_thread() -> Iterator[None]:
    """Let operators on the CPU use one thread inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def checked_device(name: torch.device | str, argument: str) -> torch.device:
    """The device called ``name``; ``argument`` names the option in errors.

    Raises:
        UnsupportedError: ``name`` is not a device, the kernels do not run on it, or this machine does not have it.
    """
    message = f"{argument} must be 'cpu', 'cuda' or 'cuda:<index>', got {str(name)!r}"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise UnsupportedError(message) from error
    cuda = torch.cuda.device_count()
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(message)
    if (device.index or 0) >= (cuda if device.type == "cuda" else 1):
        raise UnsupportedError(f"{message}. This machine has {cuda} CUDA devices")
    chip.check_device(device)
    return device


def default_device() -> torch.device:
    """The first GPU that the kernels run on, else the CPU."""
    gpus = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    return next((gpu for gpu in gpus if chip.why_unsupported(gpu) is None), torch.device("cpu"))


def device_name(text: str) -> str:
    """An argparse type: the name of a device that ``checked_device`` accepts."""
    try:
        return str(checked_device(text, "device"))
    except UnsupportedError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
