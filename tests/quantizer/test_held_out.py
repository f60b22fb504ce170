"""Steps that fit weights and biases are undone where they do not help on a batch held out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from quantizer_models import exported, linears
from torch import Tensor, nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from qframework.numerics import sqnr_db
from qframework.quantizer import QFrameworkQuantizer, Recipe, calibrate, correct_bias, round_weights, static_int8
from qframework.quantizer.held_out import HeldOut
from qframework.quantizer.quantizer import keep_in_float

QUANTIZER = QFrameworkQuantizer().set_global(static_int8())


class Net(nn.Module):
    """The second linear has no bias, so that correction adds one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2 = nn.Linear(12, 24), nn.Linear(24, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


def data(seed: int, batches: int = 3, rows: int = 64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 12, generator=generator) + 0.5 for _ in range(batches)]


def prepared(batches: list[Tensor], last_in_float: bool = False):
    graph = exported(Net(), batches[0], dynamic_batch=True)
    if last_in_float:
        keep_in_float(linears(graph)[-1])
    model = prepare_pt2e(graph, QUANTIZER)
    calibrate(model, batches, progress=False)
    return model


@pytest.mark.parametrize("last_in_float", [False, True])
@pytest.mark.parametrize("step", [round_weights, correct_bias])
def test_a_step_that_makes_it_worse_leaves_no_trace(step, last_in_float: bool) -> None:
    batches = data(0)
    model, untouched = prepared(batches, last_in_float), prepared(batches, last_in_float)
    judge = HeldOut(model, batches[:1])
    nodes = len(model.graph.nodes)

    def harm() -> None:
        step(model, batches)
        for parameter in ("weight",):
            getattr(model.fc1, parameter).data = getattr(model.fc1, parameter).data.clone()
        model.fc1.bias = nn.Parameter(model.fc1.bias + 10)

    assert judge.keep_if_better(harm) is False
    assert len(model.graph.nodes) == nodes
    x = data(5, 1)[0]
    assert torch.equal(convert_pt2e(model)(x), convert_pt2e(untouched)(x))


def test_a_step_that_helps_stays() -> None:
    batches = data(0)
    model, untouched = prepared(batches), prepared(batches)
    assert HeldOut(model, batches[:1]).keep_if_better(lambda: round_weights(model, batches[1:])) is True
    x = data(5, 1)[0]
    wanted = Net()(x)
    assert sqnr_db(wanted, convert_pt2e(model)(x)) > sqnr_db(wanted, convert_pt2e(untouched)(x))


def test_a_guarded_recipe_does_not_fit_noise() -> None:
    """Biases corrected on a few rows whose means say nothing: without the guard they stay."""
    few = [batch[:2] for batch in data(3, 2)]
    recipe = Recipe(bias_correction=True)
    x = data(8, 1, 4096)[0]
    found = {}
    for guard in (True, False):
        model = prepared(few)
        replace(recipe, guard=guard).after_calibrate(model, few)
        found[guard] = sqnr_db(Net()(x), convert_pt2e(model)(x))
    plain = sqnr_db(Net()(x), convert_pt2e(prepared(few))(x))
    assert found[True] >= plain or found[True] > found[False]
