"""Which instruction sets of the package's C++ this machine can test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from qframework.kernels.runtime.native import SETS, instructions_of


def reason_against(instructions: str, load: Callable[[str], Any]) -> str | None:
    """Why the library that ``load`` compiles for a set cannot run here, or None."""
    assert instructions in SETS
    try:
        instructions_of("multiply_add" if instructions.startswith("avx") else instructions)
        if instructions == "avx512" and torch.backends.cpu.get_cpu_capability() != "AVX512":
            return "PyTorch does not use AVX-512"
        load(instructions)
    except NotImplementedError as error:
        return str(error)
    return None
