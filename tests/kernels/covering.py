"""Few cases that together hold every pair of values of any two factors (a pairwise covering set)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]


def covering_set(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool] = lambda case: True, tries: int = 20
) -> list[Case]:
    """Greedy: each case holds a pair that is still missing, and of ``tries`` random such cases the most others.

    Pairs that no allowed case can hold are left out. The same factors always give the same set.
    """
    generator = random.Random(0)
    names = list(factors)
    missing = {
        ((a, x), (b, y)): None for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]
    }
    cases = []
    while missing:
        pair = next(iter(missing))
        drawn = [_draw(factors, dict(pair), generator) for _ in range(tries)]
        candidates = [case for case in drawn if allowed(case)]
        if not candidates:  # 20 fillings of the other factors all forbidden: the pair itself is
            del missing[pair]
            continue
        best = max(candidates, key=lambda case: sum(held in missing for held in pairs(case)))
        for held in pairs(best):
            missing.pop(held, None)
        cases.append(best)
    return cases


def pairs(case: Case) -> list[tuple[tuple[str, Any], ...]]:
    """All pairs of (factor, value) in ``case``."""
    return list(itertools.combinations(case.items(), 2))


def _draw(factors: Mapping[str, Sequence[Any]], fixed: Case, generator: random.Random) -> Case:
    return {name: fixed.get(name, generator.choice(values)) for name, values in factors.items()}
