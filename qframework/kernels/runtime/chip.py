"""The GPU that a kernel runs on: which chips are supported, compute capability, number of multiprocessors."""

from __future__ import annotations

import functools

import torch

from qframework.errors import UnsupportedError
from qframework.kernels.runtime.ahead import stood_for

MIN_CAPABILITY = (8, 0)


@functools.cache
def check_device(device: torch.device) -> None:
    """Raise UnsupportedError for a GPU that the kernels do not run on."""
    if reason := why_unsupported(device):
        raise UnsupportedError(f"{reason} Run the model on the CPU or on a newer GPU.")


def why_unsupported(device: torch.device) -> str | None:
    """Why the kernels do not run on a GPU (AMD, or older than sm_80); None where they do, and for other devices."""
    if device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability >= MIN_CAPABILITY and not torch.version.hip:
        return None
    what = "an AMD GPU" if torch.version.hip else f"sm_{capability[0]}{capability[1]}"
    name = torch.cuda.get_device_name(device)
    return f"{name} ({device}) is {what}; qframework's kernels need an NVIDIA GPU of sm_80 or newer."


def chip_of(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability and number of multiprocessors."""
    return _chip_of(stood_for(device))


@functools.cache
def _chip_of(device: torch.device) -> tuple[tuple[int, int], int]:
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.multi_processor_count


def memory_rate_of(device: torch.device) -> float | None:
    """Bytes that the memory of a GPU moves in a microsecond at most; None for a CPU, and where it does not say."""
    device = stood_for(device)
    return _memory_rate_of(device) if device.type == "cuda" else None


@functools.cache
def _memory_rate_of(device: torch.device) -> float | None:
    properties = torch.cuda.get_device_properties(device)
    kilohertz, bits = properties.memory_clock_rate, properties.memory_bus_width
    return 2 * kilohertz / 1e3 * bits / 8 or None  # twice a clock


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Compute capability, None for a CPU."""
    device = stood_for(device)
    return chip_of(device)[0] if device.type == "cuda" else None
