"""An INT8 linear writes contiguous results; what depends on the strides of a sum keeps them."""

from __future__ import annotations

import pytest
import torch
from lowered_models import Block
from torch import nn
from torch.nn import functional as F

from qframework import numerics
from qframework.backend import outline_blocks
from qframework.backend.compile import lower
from qframework.backend.options import BackendOptions

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

_int8_linear = torch.ops.qframework.int8_linear.default
OPTIONS = {"linear": "int8_dynamic", "freeze_weights": True}


class Channels(nn.Module):
    """A linear between channels that come first in memory, and what reads the sum."""

    def __init__(self, reader) -> None:
        super().__init__()
        self.convolution, self.linear, self.reader = nn.Conv2d(3, 32, 4, 4), nn.Linear(32, 32), reader

    def forward(self, x):
        x = self.convolution(x).flatten(2).transpose(1, 2)
        return self.reader(x + self.linear(F.relu(x)))


def residuals(model, x) -> int:
    """How many layers add a residual, after the lowered graph's result was compared."""
    graphs = []

    def backend(gm, inputs):
        lower(gm, inputs, BackendOptions(**OPTIONS))
        graphs.append(gm)
        return gm.forward

    wanted, got = model(x), torch.compile(model, backend=backend)(x)
    assert numerics.sqnr_db(wanted, got) > 30
    assert got.stride() == wanted.stride()
    layers = [node for gm in graphs for node in gm.graph.nodes if node.target is _int8_linear]
    assert layers
    return sum(node.args[6] is not None for node in layers)


@torch.no_grad()
@pytest.mark.parametrize(
    ("reader", "fused"),
    [
        (lambda y: y.transpose(1, 2).view(len(y), -1), 0),  # no view of a contiguous sum
        (lambda y: y, 0),  # the caller sees the strides
        (lambda y: F.layer_norm(y, (32,)).mean(1), 1),
        (lambda y: 2 * y.transpose(1, 2).reshape(len(y), -1), 1),
    ],
    ids=["view", "output", "norm", "reshape"],
)
def test_a_sum_is_fused_unless_its_strides_are_needed(reader, fused):
    assert residuals(Channels(reader).eval(), torch.randn(2, 3, 32, 32)) == fused


@torch.no_grad()
def test_blocks_behind_other_strides_are_compiled_once(monkeypatch):
    """The first block reads channels that come first in memory, the others what INT8 layers wrote."""
    monkeypatch.setattr(outline_blocks, "_LEAST_SAVED", 4)
    blocks = nn.Sequential(*(Block() for _ in range(4))).eval()
    x = torch.randn(2, 32, 7)

    def function(x):
        return blocks(x.transpose(1, 2) * 2).mean(1)

    got = torch.compile(function, backend="qframework", options=OPTIONS)(x)
    assert numerics.sqnr_db(function(x), got) > 30
