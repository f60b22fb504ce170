"""Tensors whose elements follow from their indices: the algebra of positions, masks and fills that models build.

Formulas: a :class:`Line` holds ``start + sum_d steps[d] * index[d]`` (``arange``, positions), a :class:`Piecewise` the
number ``inside`` where all its lines are at least 0 and ``outside`` elsewhere (a causal mask: ``query - key >= 0``). A
constant is a Piecewise without lines. Sizes are no part of a formula, so that it holds for symbolic ones. Where they
are known, :func:`within` drops lines that hold everywhere, as that of a window longer than the text.

A step along a dimension of size 1 must be 0: it then broadcasts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

Number = int | float  # bool among them


@dataclass(frozen=True)
class Line:
    """Integers that are linear in the indices."""

    steps: tuple[int, ...]
    start: int

    def __add__(self, other: Line) -> Line:
        a, b = align(self, other)
        return Line(tuple(x + y for x, y in zip(a.steps, b.steps, strict=True)), a.start + b.start)

    def __sub__(self, other: Line) -> Line:
        return self + other.times(-1)

    def times(self, factor: int) -> Line:
        """All elements multiplied."""
        return Line(tuple(step * factor for step in self.steps), self.start * factor)

    def shifted(self, by: int) -> Line:
        """``by`` added to all elements."""
        return replace(self, start=self.start + by)

    @property
    def is_constant(self) -> bool:
        """Whether all elements are ``start``."""
        return not any(self.steps)

    def bounds(self, sizes: Sequence[int | None]) -> tuple[float, float]:
        """The least and the largest element of a tensor with these sizes, of which unknown ones are None."""
        known = zip(self.steps, sizes, strict=True)
        ends = [step * (math.inf if n is None else n - 1) for step, n in known if step != 0]
        return self.start + sum(min(end, 0) for end in ends), self.start + sum(max(end, 0) for end in ends)

    @property
    def never_negative(self) -> bool:
        """Whether no element of a tensor of any size is negative; False if that depends on the size."""
        return self.start >= 0 and all(step >= 0 for step in self.steps)

    @property
    def always_negative(self) -> bool:
        """Whether every element of a tensor of any size is negative; False if that depends on the size."""
        return self.start < 0 and all(step <= 0 for step in self.steps)


@dataclass(frozen=True)
class Piecewise:
    """``inside`` where all lines are at least 0, else ``outside``."""

    lines: frozenset[Line]
    inside: Number
    outside: Number

    @property
    def is_constant(self) -> bool:
        """Whether all elements are ``inside``."""
        return not self.lines

    def map(self, function: Callable[[Number], Number]) -> Piecewise | None:
        """``function`` of every element; None where it gives NaN, which compares equal to nothing."""
        inside, outside = function(self.inside), function(self.outside)
        return None if math.isnan(inside) or math.isnan(outside) else chosen(self.lines, inside, outside)


Formula = Line | Piecewise


def constant(number: Number) -> Piecewise:
    """A tensor of one number."""
    return Piecewise(frozenset(), number, number)


def chosen(lines: frozenset[Line], inside: Number, outside: Number) -> Piecewise:
    """A Piecewise without lines that hold everywhere."""
    if inside == outside or any(line.always_negative for line in lines):
        return constant(outside)
    lines = frozenset(line for line in lines if not line.never_negative)
    return Piecewise(lines, inside, outside) if lines else constant(inside)


def within(choice: Piecewise, sizes: Sequence[int | None]) -> Piecewise:
    """``choice`` without the lines that are at least 0 in all of a tensor with these sizes, unknown ones None."""
    bounds = {line: line.bounds(sizes) for line in choice.lines}
    if any(largest < 0 for _, largest in bounds.values()):
        return constant(choice.outside)
    lines = frozenset(line for line, (least, _) in bounds.items() if least < 0)
    return chosen(lines, choice.inside, choice.outside)


def align(a: Line, b: Line) -> tuple[Line, Line]:
    """Both with as many dimensions, as they broadcast."""
    ndim = max(len(a.steps), len(b.steps))
    return padded(a, ndim), padded(b, ndim)


def padded(line: Line, ndim: int) -> Line:
    """``line`` with leading dimensions up to ``ndim``."""
    return replace(line, steps=(0,) * (ndim - len(line.steps)) + line.steps)


def as_line(formula: Formula | None) -> Line | None:
    """Integers as a line, None if they are none."""
    if isinstance(formula, Piecewise):
        number = formula.inside
        return Line((), int(number)) if formula.is_constant and isinstance(number, int) else None
    return formula


def as_piecewise(formula: Formula | None) -> Piecewise | None:
    """A piecewise tensor, None if there are more."""
    if isinstance(formula, Line):
        return constant(formula.start) if formula.is_constant else None
    return formula


def at_least_zero(line: Line) -> Piecewise:
    """``line >= 0``."""
    return chosen(frozenset({line}), True, False)


def equals_zero(line: Line) -> Piecewise:
    """``line == 0``."""
    return chosen(frozenset({line, line.times(-1)}), True, False)


def negated(choice: Piecewise) -> Piecewise:
    """``not mask`` of a bool Piecewise."""
    return Piecewise(choice.lines, not choice.inside, not choice.outside)


def both(a: Piecewise, b: Piecewise) -> Piecewise | None:
    """``a and b`` of bool Piecewise tensors, None if that is no Piecewise."""
    lines = [_where_true(choice) for choice in (a, b)]
    if constant(False) in (a, b):
        return constant(False)
    return None if lines[0] is None or lines[1] is None else chosen(lines[0] | lines[1], True, False)


def _where_true(choice: Piecewise) -> frozenset[Line] | None:
    """The lines that are at least 0 where ``choice`` is True, and only there."""
    if choice.inside:
        return choice.lines
    if len(choice.lines) != 1:  # where not all of several hold
        return None
    (line,) = choice.lines
    return frozenset({line.times(-1).shifted(-1)})


def reindexed(formula: Formula, function: Callable[[Line], Line]) -> Formula:
    """``formula`` after an operation on indices alone, such as a permutation: ``function`` of each line."""
    if isinstance(formula, Line):
        return function(formula)
    return chosen(frozenset(map(function, formula.lines)), formula.inside, formula.outside)
