"""``quantize`` compares a recipe with no recipe and hands out the better model (recipe_check.py, exported.py)."""

from __future__ import annotations

import logging

import pytest
import torch
from quantized_models import MLP
from torch import Tensor
from torch.fx import GraphModule

from qframework import quantize
from qframework.conversion import exported as conversion
from qframework.conversion.exported import export_model, quantize_copy
from qframework.conversion.recipe_check import compare
from qframework.evaluation.sqnr import layer_sqnr
from qframework.graph.attributes import attribute
from qframework.numerics import sqnr_db
from qframework.quantizer import QFrameworkQuantizer, Recipe, static_int8


class Harmful(Recipe):
    """A recipe whose last step ruins the model."""

    def after_calibrate(self, prepared: GraphModule, data: object) -> None:
        bias = next(n for n in prepared.graph.nodes if n.op == "get_attr" and str(n.target).endswith("fc2.bias"))
        prepared.get_submodule("fc2").bias = torch.nn.Parameter(attribute(prepared, bias).detach() + 3.0)


def data() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(8, 5, 16) for _ in range(3)]


def test_a_harmful_recipe_is_dropped_and_said(caplog) -> None:
    model, batches = MLP().eval(), data()
    plain = quantize(model, batches[0], static_int8(), batches)
    with caplog.at_level(logging.WARNING):
        guarded = quantize(model, batches[0], static_int8(), batches, recipe=Harmful(guard=True))
    assert torch.equal(guarded(batches[0]), plain(batches[0]))
    report = guarded.explain()
    assert report.notes[0].startswith("recipe dropped, since it is worse for errors of tokens")
    assert "recipe dropped" in str(report)
    assert "recipe dropped" in caplog.text
    unguarded = quantize(model, batches[0], static_int8(), batches, recipe=Harmful())
    assert sqnr_db(plain(batches[0]), unguarded(batches[0])) < 20
    assert unguarded.explain().notes == ()


def test_a_good_recipe_is_kept_and_said() -> None:
    model, batches = MLP().eval(), data()
    with torch.no_grad():
        model.fc1.bias[0] = 30.0  # a channel that stands out behind GELU
    plain = quantize(model, batches[0], static_int8(), batches)
    best = quantize(model, batches[0], static_int8(), batches, recipe="best")
    expected = model(batches[1])
    assert sqnr_db(expected, best(batches[1])) > sqnr_db(expected, plain(batches[1])) + 3
    assert best.explain().notes[0].startswith("recipe kept: on held-out data")


@pytest.mark.parametrize("recipe", [Harmful(guard=True), Recipe.best()], ids=["dropped", "kept"])
def test_the_float_graph_is_that_of_the_chosen_model(recipe: Recipe) -> None:
    model, batches = MLP().eval(), data()
    graph = export_model(model, batches[0])
    found = quantize_copy(graph, QFrameworkQuantizer().set_global(static_int8()), batches, recipe=recipe)
    assert torch.allclose(found.float_exported(batches[0]), model(batches[0]), atol=1e-4)
    assert min(layer_sqnr(*found, batches[0]).values()) > 20


def test_tokens_are_judged_on_the_first_batch_alone(monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(conversion, "compare", lambda *outputs: seen.extend(outputs) or compare(*outputs))
    batches = data()
    model = MLP().eval()
    quantize(model, batches[0], static_int8(), batches, recipe=Recipe(guard=True))
    assert torch.allclose(seen[0][0], model(batches[0]), atol=1e-6)
    assert [each[0].shape for each in seen] == [(8, 5, 4)] * 3


# The comparison itself


def noisy(x: Tensor, size: float, seed: int) -> Tensor:
    return x + size * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))


def test_a_smaller_sum_of_errors_does_not_excuse_errors_of_most_tokens() -> None:
    torch.manual_seed(0)
    expected = torch.randn(4, 50, 8)
    expected[:, 0] *= 100  # one token holds nearly all energy
    plain, recipe = noisy(expected, 0.05, 1), noisy(expected, 0.2, 2)
    plain[:, 0] += 5.0
    assert sqnr_db(expected, recipe) > sqnr_db(expected, plain)
    found = compare([expected], [plain], [recipe])
    assert not found.kept
    assert "worse for errors of tokens and errors of the worst tokens and directions of tokens" in found.note


def test_rare_tokens_count_in_decisions() -> None:
    """The recipe halves every error, but pushes the rare tokens of the second class to the first."""
    expected = torch.tensor([4.0, 0.0]).repeat(400, 1) + 0.0
    expected[::10] = torch.tensor([0.0, 0.4])
    plain = noisy(expected, 0.1, 1)
    recipe = noisy(expected, 0.05, 2)
    recipe[::10] += torch.tensor([0.6, 0.0])
    found = compare([expected], [plain], [recipe])
    assert not found.kept
    assert "largest channels of tokens" in found.note
    assert compare([expected], [plain], [noisy(expected, 0.05, 2)]).kept


def test_few_ruined_tokens_count() -> None:
    """The recipe halves the errors of all tokens but two of 200, which lose their size and no direction."""
    torch.manual_seed(0)
    expected = torch.randn(200, 32)
    plain, recipe = noisy(expected, 0.1, 1), noisy(expected, 0.05, 2)
    assert compare([expected], [plain], [recipe]).kept
    recipe[:2] = 0.2 * expected[:2]
    found = compare([expected], [plain], [recipe])
    assert not found.kept
    assert "worse for errors of the worst tokens on" in found.note


def test_values_that_are_not_finite_are_worse() -> None:
    expected = torch.randn(3, 4)
    assert not compare([expected], [noisy(expected, 0.1, 0)], [expected * float("nan")]).kept
    assert compare([expected], [noisy(expected, 0.1, 0)], [expected]).kept
    assert compare([], [], []).kept
