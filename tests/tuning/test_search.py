"""The search against all assignments of small problems."""

from __future__ import annotations

import itertools
import random

import pytest

from qframework.tuning.assignment import Assignment
from qframework.tuning.search import Cost, climb, ladder, pareto, rungs, total_time


def key(name: str):
    return ("linear", name)


def problem(seed: int, layers: int = 4) -> dict:
    """Random times and noises; some choices are slower than float, whose noise is 0."""
    draw = random.Random(seed)
    choices = ("static", "dynamic", "sage_b")
    return {
        key(f"l{i}"): {"float": Cost(1.0), **{c: Cost(draw.uniform(0.2, 1.3), draw.uniform(0, 1)) for c in choices}}
        for i in range(layers)
    }


def all_float(costs: dict) -> Assignment:
    return Assignment(dict.fromkeys(costs, "float"))


def noise(assignment: Assignment, costs: dict) -> float:
    return sum(costs[key][choice].noise for key, choice in assignment.items())


@pytest.mark.parametrize("seed", range(8))
def test_no_assignment_beats_a_prefix_of_the_ladder_in_both_time_and_noise(seed: int) -> None:
    costs = problem(seed)
    parts = rungs(all_float(costs), ladder(costs))
    every = [Assignment(zip(costs, each, strict=True)) for each in itertools.product(*costs.values())]
    for part in parts:
        time_, noise_ = total_time(part, costs), noise(part, costs)
        better = [a for a in every if total_time(a, costs) < time_ - 1e-12 and noise(a, costs) < noise_ - 1e-12]
        assert not better
    assert total_time(parts[-1], costs) == pytest.approx(min(total_time(a, costs) for a in every))


@pytest.mark.parametrize("seed", range(8))
def test_each_prefix_of_the_ladder_is_optimal_for_some_multiplier(seed: int) -> None:
    """The lower convex hull of (time, noise): no assignment has a lower Lagrangian at the multiplier of a step."""
    costs = problem(seed, layers=3)
    steps = ladder(costs)
    parts = rungs(all_float(costs), steps)
    every = [Assignment(zip(costs, each, strict=True)) for each in itertools.product(*costs.values())]
    for before, after in itertools.pairwise(parts):
        saved = total_time(before, costs) - total_time(after, costs)
        price = (noise(after, costs) - noise(before, costs)) / saved
        least = min(noise(a, costs) + price * total_time(a, costs) for a in every)
        assert saved > 0
        assert noise(after, costs) + price * total_time(after, costs) == pytest.approx(least)


def test_a_slower_choice_is_never_taken() -> None:
    costs = {key("a"): {"float": Cost(1.0), "static": Cost(1.0, 0.0), "dynamic": Cost(2.0, -1.0)}}
    assert ladder(costs) == []


def test_the_ladder_skips_choices_above_the_convex_hull() -> None:
    """``dynamic`` saves half as much as ``static`` for nearly all of its noise."""
    costs = {key("a"): {"float": Cost(3.0), "dynamic": Cost(2.0, 0.9), "static": Cost(1.0, 1.0)}}
    assert ladder(costs) == [(key("a"), "static")]
    costs[key("a")]["dynamic"] = Cost(2.0, 0.1)
    assert ladder(costs) == [(key("a"), "dynamic"), (key("a"), "static")]


STEPS = [(key(name), "static") for name in "abcdefgh"]
START = Assignment({key(name): "float" for name in "abcdefgh"})


def quantized(assignment: Assignment) -> str:
    return "".join(name for (_, name), choice in assignment.items() if choice == "static")


class Fits:
    """Whether a set of layers fits; records the queries."""

    def __init__(self, fits) -> None:
        self.fits, self.asked = fits, []

    def __call__(self, assignment: Assignment) -> bool:
        self.asked.append(quantized(assignment))
        return self.fits(self.asked[-1])


@pytest.mark.parametrize("length", range(9))
def test_the_longest_prefix_that_fits_is_found_by_bisection(length: int) -> None:
    fits = Fits(lambda names: len(names) <= length)
    assert quantized(climb(START, STEPS, fits, refinements=0)) == "abcdefgh"[:length]
    assert len(fits.asked) <= 4  # the whole ladder, then log2(8)


def test_steps_beyond_one_that_does_not_fit_are_tried() -> None:
    fits = Fits(lambda names: "c" not in names and len(names) <= 6)
    assert quantized(climb(START, STEPS, fits, refinements=8)) == "abdefg"
    fits = Fits(lambda names: "c" not in names)
    assert quantized(climb(START, STEPS, fits, refinements=2)) == "abd"


def test_the_start_is_returned_if_nothing_fits() -> None:
    assert climb(START, STEPS, Fits(lambda names: False), refinements=3) == START
    assert climb(START, [], Fits(lambda names: False), refinements=3) == START


def test_pareto() -> None:
    #        speed, drop
    points = [(1.0, 0.0), (2.0, 0.5), (2.0, 0.4), (1.5, 0.5), (3.0, 2.0), (2.5, 2.0), (1.0, -0.1)]
    assert pareto(points) == [4, 2, 6]
