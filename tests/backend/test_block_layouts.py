"""Norms in repeated blocks read rows whose values lie side by side, and the model computes and returns the same."""

from __future__ import annotations

import pytest
import torch
from lowered_models import converted, lowered_graph
from outlined_models import outlined_and_whole, outlines
from torch import nn

pytestmark = pytest.mark.usefixtures("small_blocks")
_clone = torch.ops.aten.clone.default
_invoke = torch.ops.higher_order.invoke_subgraph
TOKENS, WIDTH = 24, 32


class Tokens(nn.Module):
    """A residual stream that begins with the result of a convolution, whose tokens lie side by side in memory."""

    returns_stream = False

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.positions = nn.Parameter(torch.randn(TOKENS, WIDTH))
        self.scale = nn.Parameter(torch.rand(WIDTH))  # between a layer and the sum, which is then not in its epilogue
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def begin(self, x):
        return self.stem(x).transpose(1, 2) + self.positions

    def forward(self, x):
        x = self.begin(x)
        for layer in self.layers:
            x = x + self.scale * layer(nn.functional.layer_norm(x, (WIDTH,))).relu()
        return x if self.returns_stream else nn.functional.layer_norm(x, (WIDTH,))


class Returned(Tokens):
    returns_stream = True


class Rows(Tokens):
    """The values of a row lie side by side."""

    def begin(self, x):
        return super().begin(x).contiguous()


class Given(Tokens):
    """The stream begins with what the caller passes."""

    def begin(self, x):
        return x


def example(cls=Tokens):
    torch.manual_seed(0)
    x = torch.randn(2, WIDTH, TOKENS)
    return x.transpose(1, 2) if cls is Given else x


def outlined(cls):
    """How many values of the graph are copied behind outlining, and the strides of what its four blocks norm."""
    x = example(cls)
    gm, inputs = lowered_graph(converted(cls().eval(), x), x)
    assert outlines(gm, inputs) == 4
    blocks = [node for node in gm.graph.nodes if node.target is _invoke]
    read = [each.meta["example_value"] for call in blocks for each in call.args[2:]]
    strides = {fake.stride() for fake in read if fake.shape == (2, TOKENS, WIDTH) and fake.dtype == torch.float32}
    return sum(node.target is _clone for node in gm.graph.nodes), strides


def test_rows_are_copied_once_before_the_first_block():
    assert outlined(Tokens) == (1, {(TOKENS * WIDTH, WIDTH, 1)})


@pytest.mark.parametrize(("cls", "between"), [(Returned, {1, WIDTH}), (Given, {1, WIDTH}), (Rows, {WIDTH})])
def test_others_stay(cls, between):
    """A result of the graph keeps its strides, an input has those it has, and rows need no copy."""
    copies, strides = outlined(cls)
    assert copies == 0
    assert {each[1] for each in strides} == between


def test_a_compiled_model_computes_the_same(monkeypatch):
    x = example()
    with torch.no_grad():
        counts, ours, wanted = outlined_and_whole(monkeypatch, converted(Tokens().eval(), x), x)
    assert counts == [4]
    torch.testing.assert_close(ours, wanted)
