"""Devices by name, for arguments and options of users: one that is there and that the kernels run on."""

from __future__ import annotations

import argparse

import torch

from qframework.errors import UnsupportedError
from qframework.kernels.runtime import chip

ACCEPTED = "accepted: cpu, or cuda, cuda:0, ... where there is a GPU"


def checked_device(name: torch.device | str, argument: str) -> torch.device:
    """``name``, the value of ``argument``, as a device.

    Raises:
        UnsupportedError: it is no device, has no kernels, or is not there.
    """
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise UnsupportedError(f"{argument} {str(name)!r} is not a device; {ACCEPTED}") from error
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"{argument} {str(name)!r} has no kernels; {ACCEPTED}")
    cuda, other = torch.cuda.device_count(), 1
    if (device.index or 0) >= (cuda if device.type == "cuda" else other):
        raise UnsupportedError(
            f"{argument} {str(name)!r} is not there, this machine has {cuda} CUDA devices; {ACCEPTED}"
        )
    chip.check_device(device)
    return device


def device_name(text: str) -> str:
    """An argparse type: the name of a device that is there and that the kernels run on."""
    try:
        return str(checked_device(text, "device"))
    except UnsupportedError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
