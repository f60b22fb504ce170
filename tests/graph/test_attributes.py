"""Attributes are replaced for one reader; the tensors themselves, which other modules share, stay as they are."""

from __future__ import annotations

import torch
from lowered_models import exported
from torch import Tensor, nn

from qframework.graph.attributes import attribute, readers, replace_attribute
from qframework.graph.nodes import linear_call

X = torch.randn(2, 3)


class Tied(nn.Module):
    """Two products with one weight, and one with another."""

    def __init__(self) -> None:
        super().__init__()
        self.tied, self.own = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.tied(self.tied(x)))


def graph_and_linears():
    model = Tied()
    gm = exported(model, X)
    return model, gm, [node for node in gm.graph.nodes if linear_call(node) is not None]


def test_an_attribute_with_one_reader_keeps_its_name():
    model, gm, (*_, own) = graph_and_linears()
    before, kept = model.own.weight.clone(), own.args[1]
    assert replace_attribute(gm, kept, own, torch.zeros(3, 3)) is kept
    gm.recompile()
    assert not gm(X).any()
    assert isinstance(attribute(gm, kept), nn.Parameter)
    assert torch.equal(model.own.weight, before)


def test_other_readers_of_an_attribute_keep_the_old_tensor():
    model, gm, (first, second, _) = graph_and_linears()
    assert readers(gm, first.args[1]) == {first, second}
    new = replace_attribute(gm, second.args[1], second, torch.eye(3))
    assert readers(gm, new) == {second}
    assert readers(gm, first.args[1]) == {first}
    gm.recompile()
    torch.testing.assert_close(gm(X), model.own(model.tied(X)))


def test_a_replacement_has_the_dtype_of_what_it_replaces():
    _, gm, (*_, own) = graph_and_linears()
    replace_attribute(gm, own.args[1], own, torch.zeros(3, 3, dtype=torch.float64))
    assert attribute(gm, own.args[1]).dtype == torch.float32
