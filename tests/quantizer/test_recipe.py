"""Recipes: which steps run, and that they survive JSON."""

from __future__ import annotations

import json

import pytest

from qframework.errors import CalibrationError, UnsupportedError
from qframework.quantizer import Recipe, Smooth


@pytest.mark.parametrize("recipe", [Recipe(), Recipe.best(), Recipe(Smooth((0.5,), 7), split_gelu=True, batches=3)])
def test_recipe_survives_json(recipe: Recipe) -> None:
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Recipe(weight_rounding="up"), "Recipe: weight_rounding='up' is unknown; accepted: nearest, gptq"),
        (lambda: Recipe(smooth=True), "Recipe: smooth=True; accepted: a Smooth"),
        (lambda: Recipe(bias_correction=1), "Recipe: bias_correction=1; accepted: True, False"),
        (lambda: Recipe(batches=0), "Recipe: batches=0; accepted: None or a positive number"),
        (lambda: Smooth(strengths=(0.5, 1.5)), r"strengths=\(0.5, 1.5\); accepted: numbers from 0 to 1"),
        (lambda: Smooth(strengths=()), r"strengths=\(\); accepted"),
        (lambda: Smooth(samples=0), "samples=0; accepted: a positive number"),
        (lambda: Recipe.from_dict({"smoothing": None}), "Recipe has no field 'smoothing'"),
    ],
)
def test_unknown_values_are_refused(make, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        make()


def test_an_iterator_is_refused_since_every_step_reads_the_data() -> None:
    with pytest.raises(CalibrationError, match=r"iterator .list_iterator., which the first step would use up"):
        Recipe.best().after_calibrate(None, iter([1, 2]))
