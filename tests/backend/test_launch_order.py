"""Inductor's kernels start early unless most kernels of a model are those of libraries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Mixed(nn.Module):
    """Convolutions, then linears."""

    def __init__(self, convolutions: int, linears: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(convolutions)))
        self.linears = nn.Sequential(*(nn.Linear(16, 16) for _ in range(linears)))

    def forward(self, x: Tensor) -> Tensor:
        return self.linears(self.convolutions(x).flatten(2).transpose(1, 2)) @ torch.ones(16, 16)


@pytest.mark.parametrize(
    ("convolutions", "linears", "early"), [(0, 1, True), (3, 2, True), (4, 2, False), (9, 2, False)]
)
def test_many_kernels_of_libraries(
    convolutions: int, linears: int, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last product is float, of a library as well; what the caller asks for counts."""
    from torch._inductor import compile_fx

    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(compile_fx, "compile_fx", lambda gm, inputs, **named: seen.append(named) or gm.forward)
    options = {"linear": "int8_dynamic", "triton.cudagraphs": True}
    with torch.no_grad():
        for more in ({}, {"triton.enable_pdl": True}):
            torch._dynamo.reset()
            model = Mixed(convolutions, linears).eval()
            torch.compile(model, backend="qframework", options=options | more)(torch.randn(1, 16, 4, 4))
    assert [each["config_patches"].get("triton.enable_pdl", False) for each in seen] == [early, True]
