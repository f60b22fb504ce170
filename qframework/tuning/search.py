"""The search for the fastest assignment within a budget.

The search assumes that the noise of layers adds up, as independent noise does, and so do their times. Then each
Lagrange multiplier ``m`` has a best choice for each layer, the one of least ``noise + m * time``. Raising ``m`` from
zero quantizes one layer after the other, first those that save most time for their noise. This sequence of steps is the
*ladder*. Drops are measured, not predicted: a bisection finds the longest prefix of the ladder that is within the
budget, and single steps beyond it are then tried one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from qframework.tuning.assignment import Assignment, Key
from qframework.tuning.layer_times import FLOAT


@dataclass(frozen=True)
class Cost:
    """The cost of a choice for one layer: ``time`` in ms, ``noise`` as relative squared error of the model's output."""

    time: float
    noise: float = 0.0


Costs = Mapping[Key, Mapping[str, Cost]]
Step = tuple[Key, str]


def total_time(assignment: Assignment, costs: Costs) -> float:
    """Time of all layers in ms."""
    return sum(costs[key][choice].time for key, choice in assignment.items())


def ladder(costs: Costs) -> list[Step]:
    """The steps from all layers in float to the fastest choice of each, sorted by noise per time saved.

    The steps of a layer follow the lower convex hull of its choices, so each prefix of the ladder is the best
    assignment for some multiplier.
    """
    steps: list[tuple[float, int, int, Step]] = []
    for order, (key, choices) in enumerate(costs.items()):
        current = choices[FLOAT]
        while faster := [choice for choice in choices if choices[choice].time < current.time]:
            price, _, best = min((_price(current, choices[choice]), choices[choice].time, choice) for choice in faster)
            steps.append((price, order, len(steps), (key, best)))
            current = choices[best]
    return [step for _, _, _, step in sorted(steps, key=lambda each: each[:3])]


def _price(current: Cost, other: Cost) -> float:
    """Noise for each millisecond saved."""
    return (other.noise - current.noise) / (current.time - other.time)


def rungs(start: Assignment, steps: Sequence[Step]) -> list[Assignment]:
    """``start`` and the assignment after each step of a ladder."""
    found = [start]
    for key, choice in steps:
        found.append(found[-1].changed(key, choice))
    return found


def climb(start: Assignment, steps: Sequence[Step], fits: Callable[[Assignment], bool], refinements: int) -> Assignment:
    """The longest prefix of a ladder that fits, then up to ``refinements`` further steps that also fit.

    Drops need not grow along the ladder: the result was measured to fit, unless it is ``start``.
    """
    parts = rungs(start, steps)
    if len(parts) == 1 or fits(parts[-1]):
        return parts[-1]
    low, high = 0, len(parts) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(parts[middle]) else (low, middle)
    found = parts[low]
    for key, choice in steps[low : low + refinements]:
        candidate = found.changed(key, choice)
        if fits(candidate):
            found = candidate
    return found


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the Pareto-optimal points (speed, drop)."""
    best, kept = math.inf, []
    for index in sorted(range(len(points)), key=lambda i: (-points[i][0], points[i][1], i)):
        if points[index][1] < best:
            best = points[index][1]
            kept.append(index)
    return kept
