"""Each kernel test runs on what computes the operator: the CPU implementation, and Triton (interpreted or on a GPU)."""

from __future__ import annotations

import pytest
import torch

collect_ignore = ["test_interpreter.py"] if torch.cuda.is_available() else []  # nothing is interpreted beside a GPU


@pytest.fixture(params=["cpu", pytest.param("triton", marks=pytest.mark.interpreter)])
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def place(implementation: str) -> torch.device:
    """Where the implementation's tensors live: interpreted Triton kernels read CPU memory."""
    native = implementation == "triton" and torch.cuda.is_available()
    return torch.device("cuda" if native else "cpu")
