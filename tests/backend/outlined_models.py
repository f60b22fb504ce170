"""What a model computes with and without outlined blocks, as a graph and compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from qframework.backend import outline_blocks
from qframework.backend.outline_blocks import outline


def outlines(gm: GraphModule, inputs: Sequence[Any], behind_floats: bool = False) -> int:
    """Outlines blocks of a lowered graph. Returns their number; results stay, with their strides."""
    with torch.no_grad():
        expected = gm(*inputs)
        count = outline(gm, behind_floats)
        results = gm(*inputs)
    for ours, wanted in zip(results, expected, strict=True):
        assert torch.equal(ours, wanted)
        assert ours.stride() == wanted.stride()
    return count


def outlined_and_whole(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, x: Tensor
) -> tuple[list[int], Tensor, Tensor]:
    """How many blocks of each graph are outlined when the model is compiled, its result, and that without outlining."""
    counts: list[int] = []
    monkeypatch.setattr(outline_blocks, "outline", lambda gm, *_, **named: counts.append(outline(gm, **named)))
    ours = torch.compile(model, backend="qframework", dynamic=False)(x)
    torch._dynamo.reset()
    monkeypatch.setattr(outline_blocks, "outline", lambda gm, *_, **named: 0)
    return counts, ours, torch.compile(model, backend="qframework", dynamic=False)(x)
