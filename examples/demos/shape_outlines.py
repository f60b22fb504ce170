"""Outlines of the shapes that :mod:`demos.shapes` draws: polygons around the origin, of radius one.

Most fill little of their bounding box, so that a mask cannot be guessed from the box.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.float64]
"""(N, 2): x, y of a polygon's corners."""


class Outline(NamedTuple):
    """A polygon and, of a ring, the hole in it."""

    outer: Points
    hole: Points | None = None

    def placed(self, center: Points, radius: float, angle: float) -> Outline:
        """Scaled, turned by ``angle`` (radians) and moved; ``center (2,)`` and ``radius`` in pixels."""
        cos, sin = np.cos(angle), np.sin(angle)
        turn = radius * np.array([[cos, sin], [-sin, cos]])
        return Outline(self.outer @ turn + center, None if self.hole is None else self.hole @ turn + center)


def _circle(radius: float | Points, corners: int = 48) -> Points:
    angles = np.arange(corners) * (2 * np.pi / corners)
    return np.stack([radius * np.cos(angles), radius * np.sin(angles)], axis=1)


def _star(generator: np.random.Generator) -> Outline:
    arms = int(generator.integers(4, 8))
    radii = np.tile([1.0, generator.uniform(0.3, 0.5)], arms)
    return Outline(_circle(radii, 2 * arms))


def _blob(generator: np.random.Generator) -> Outline:
    """A circle whose radius swings with a few random waves."""
    angles = np.arange(48) * (2 * np.pi / 48)
    waves = np.arange(2, 6)[:, None]
    heights = generator.normal(size=(4, 1)) / waves
    radii = 1 + (heights * np.cos(waves * angles + generator.uniform(0, 2 * np.pi, (4, 1)))).sum(axis=0)
    radii = np.clip(radii, 0.2, None)
    return Outline(_circle(radii / radii.max()))


def _crescent(generator: np.random.Generator) -> Outline:
    """The arc of a circle there, and a flatter one back."""
    angles = np.linspace(0.0, np.pi, 24)
    there = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    back = there[::-1] * [1.0, generator.uniform(0.3, 0.7)]
    return Outline(np.concatenate([there, back[1:-1]]) - [0.0, 0.5])


def _ring(generator: np.random.Generator) -> Outline:
    return Outline(_circle(1.0), _circle(generator.uniform(0.45, 0.7)))


def _cross(generator: np.random.Generator) -> Outline:
    w = generator.uniform(0.18, 0.35)
    quarter = np.array([[w, w], [w, 1.0], [-w, 1.0]])
    turns = [np.array([[c, s], [-s, c]]) for c, s in ((1, 0), (0, 1), (-1, 0), (0, -1))]
    return Outline(np.concatenate([quarter @ turn for turn in turns]))


def _bar(generator: np.random.Generator) -> Outline:
    w = generator.uniform(0.15, 0.35)
    return Outline(np.array([[-1.0, -w], [1.0, -w], [1.0, w], [-1.0, w]]))


def _arrow(generator: np.random.Generator) -> Outline:
    w, neck = generator.uniform(0.12, 0.25), generator.uniform(-0.1, 0.3)
    upper = np.array([[1.0, 0.0], [neck, 0.8], [neck, w], [-1.0, w]])
    return Outline(np.concatenate([upper, upper[:0:-1] * [1.0, -1.0]]))


def _corner(generator: np.random.Generator) -> Outline:
    """Two bars at a right angle, as an L."""
    w = generator.uniform(0.35, 0.6)
    return Outline(np.array([[0, 0], [1.5, 0], [1.5, w], [w, w], [w, 1.5], [0, 1.5]]) - 0.6)


OUTLINES: dict[str, Callable[[np.random.Generator], Outline]] = {
    "star": _star,
    "blob": _blob,
    "crescent": _crescent,
    "ring": _ring,
    "cross": _cross,
    "bar": _bar,
    "arrow": _arrow,
    "corner": _corner,
}
"""The categories of the set, in the order of their COCO identifiers, which start at 1."""
