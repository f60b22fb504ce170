"""A graph break inside a block, as docs/training.md describes it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from qframework.training import convert_to_int8_training

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Breaks(nn.Module):
    """A graph break between the linear before it and ``tanh``, which has no INT8 implementation."""

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() * (2.0 if x.mean().item() < 1e9 else 1.0)


class BrokenBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.act, self.fc2 = nn.LayerNorm(64), nn.Linear(64, 96), Breaks(), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.act(self.fc1(self.norm(x))))


class BrokenForward(BrokenBlock):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(self.norm(x))
        factor = 2.0 if hidden.mean().item() < 1e9 else 1.0
        return x + self.fc2(hidden.tanh() * factor)


def broken_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(BrokenBlock(), BrokenBlock())


def test_keep_float_around_a_graph_break() -> None:
    model, x = broken_model(), torch.randn(2, 5, 64)
    convert_to_int8_training(model, blocks=["*"], keep_float=["*.act"], skip_slower=False)
    gradients = []
    for run in (model, torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        run(x).square().mean().backward()
        gradients.append(torch.cat([each.grad.flatten() for each in model.parameters()]))
    assert (gradients[0] - gradients[1]).norm() < 0.02 * gradients[0].norm()


def test_pytorch_refuses_a_float_gradient_of_blocks_that_left_a_graph() -> None:
    """If this fails, docs/training.md need not ask for a module around the graph break."""
    model, x = nn.Sequential(BrokenForward()), torch.randn(2, 5, 64)
    convert_to_int8_training(model, blocks=["*"], keep_float=["*.act"], skip_slower=False)
    model(x).sum().backward()
    compiled = torch.compile(model, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"Expected a BlockTensor tangent|guessed its\s+metadata incorrectly"):
        compiled(x).sum().backward()
