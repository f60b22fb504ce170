"""Whether a model quantized with a recipe is better than without, as a whole, before it is handed out.

The steps of a recipe are judged one by one, most of them on simulations. What counts is the converted model, so it is
compared with one that had no recipe: on the first examples of the calibration data, which no step was fitted to. The
error of all values together would not do: a recipe may reduce it and lose what few tokens say that differ from the
others. Four figures are taken over tokens, the vectors along the last dimension of the outputs, smaller is better::

    error       geometric mean of |y' - y|^2 / |y|^2
    worst       mean of the largest fiftieth of these, which a decoder may attend to
    direction   mean of 1 - cos(y' - m, y - m) with m, the mean of the float tokens
    decisions   tokens whose largest channel is another one: what classifiers and decoders of speech read

The recipe is kept if it is worse in none of them, and no more than twice as wrong for the worst tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qframework.quantizer.output_error import errors_of

# Meta of a converted model: what the comparison found, for ``explain``.
RECIPE_NOTE = "qframework_recipe_note"
# Changed decisions must differ by this many standard deviations of a fair coin, thrown for each that differs.
_DEVIATIONS = 2.0


class Comparison(NamedTuple):
    """Outputs of a model quantized with and without a recipe, compared with the float outputs.

    Attributes:
        kept: whether the recipe is worse in no figure.
        note: the figures, in a sentence.
    """

    kept: bool
    note: str


@torch.no_grad()
def compare(expected: Sequence[Tensor], plain: Sequence[Tensor], recipe: Sequence[Tensor]) -> Comparison:
    """Compare outputs ``(..., C)``, one tensor or several.

    Args:
        expected: of the float model.
        plain: of the quantized model without the recipe.
        recipe: with it.
    """
    errors = [errors_of(list(each), list(expected)) for each in (plain, recipe)]
    directions = [_direction(each, expected) for each in (plain, recipe)]
    changed = [_changed(each, expected) for each in (plain, recipe)]
    worse = [
        name
        for name, is_worse in (
            ("errors of tokens", not errors[1].typical <= errors[0].typical),
            ("errors of the worst tokens", errors[1].ruins_few(errors[0])),
            ("directions of tokens", not directions[1] <= directions[0]),
            ("largest channels of tokens", _clearly_more(*changed)),
        )
        if is_worse
    ]
    figures = (
        f"typical relative error of a token {_root(errors[1].typical)} with the recipe and {_root(errors[0].typical)} "
        f"without, of the worst ones {_root(errors[1].worst)} and {_root(errors[0].worst)}, 1 - cosine "
        f"{directions[1]:.2g} and {directions[0]:.2g}, another largest channel in {_share(changed[1])} and "
        f"{_share(changed[0])} of the tokens"
    )
    if worse:
        return Comparison(
            False, f"recipe dropped, since it is worse for {' and '.join(worse)} on held-out data: {figures}"
        )
    return Comparison(True, f"recipe kept: on held-out data, {figures}")


def _rows(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Tokens of each output, ``(n, C)`` float64."""
    return [each.double().reshape(-1, each.shape[-1] if each.dim() else 1) for each in outputs]


def _direction(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    found = []
    for a, b in zip(_rows(actual), _rows(expected), strict=True):
        center = b.mean(0) if len(b) > 1 and b.shape[1] > 1 else 0.0
        found.append(1 - torch.cosine_similarity(a - center, b - center, dim=-1))
    return float(torch.cat(found).mean()) if found else 0.0


def _changed(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> Tensor:
    """For each token, whether its largest channel is another one: bool."""
    pairs = zip(_rows(actual), _rows(expected), strict=True)
    found = [a.argmax(-1) != b.argmax(-1) for a, b in pairs if b.numel()]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.bool)


def _clearly_more(plain: Tensor, recipe: Tensor) -> bool:
    """Whether the recipe changes more decisions, by more than chance (a sign test, approximately normal)."""
    lost, won = int((recipe & ~plain).sum()), int((plain & ~recipe).sum())
    return lost - won > _DEVIATIONS * (lost + won) ** 0.5


def _root(error: float) -> str:
    return f"{error**0.5:.2g}"


def _share(changed: Tensor) -> str:
    return f"{100 * float(changed.double().mean()) if changed.numel() else 0.0:.2g} %"
