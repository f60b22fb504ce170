"""The GPU that a kernel runs on: which chips are supported, compute capability, number of multiprocessors."""

from __future__ import annotations

import functools

import torch

from qframework.errors import UnsupportedError

MIN_CAPABILITY = (8, 0)


@functools.cache
def check_device(device: torch.device) -> None:
    """Raise UnsupportedError for a GPU older than sm_80: it has no INT8 tensor cores that Triton can use."""
    if device.type != "cuda" or torch.version.hip:
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise UnsupportedError(
            f"{name} ({device}) is sm_{capability[0]}{capability[1]}; qframework's kernels need sm_80 or newer. "
            "Run the model on the CPU or on a newer GPU."
        )


@functools.cache
def chip_of(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability, (0, 0) for an AMD GPU, and number of multiprocessors."""
    properties = torch.cuda.get_device_properties(device)
    capability = (0, 0) if torch.version.hip else (properties.major, properties.minor)
    return capability, properties.multi_processor_count


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Compute capability, (0, 0) for an AMD GPU, None for a CPU."""
    return chip_of(device)[0] if device.type == "cuda" else None
