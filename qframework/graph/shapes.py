"""Shapes of captured graphs, whose sizes may be symbols: comparisons without adding a guard, and sizes when traced."""

from __future__ import annotations

import re

import torch

from qframework.compat.graphs import statically_known_true

Size = int | torch.SymInt
_SYMBOL = re.compile(r"\b[su]\d+\b")
_FUNCTION = re.compile(r"\b(?:floor|ceiling|\w*Div|\w*Mod|Max|Min|Piecewise|Eq|Ne|True|False)\b")
_WORD = re.compile(r"[a-z]{2}")
_READABLE = 12  # characters of a size


def same(a: Size, b: Size) -> bool:
    """Whether two sizes are known to be equal."""
    return bool(statically_known_true(a == b))


def same_shape(a: torch.Size, b: torch.Size) -> bool:
    """Whether two shapes are known to be equal."""
    return len(a) == len(b) and all(map(same, a, b))


def splits_first(fine: torch.Size, coarse: torch.Size) -> bool:
    """Whether ``fine`` is ``coarse`` with its first dimension split in two."""
    return (
        len(fine) == len(coarse) + 1
        and same_shape(fine[2:], coarse[1:])
        and len(coarse) > 0
        and same(fine[0] * fine[1], coarse[0])
    )


def traced_size(size: Size) -> int:
    """A size when the graph was captured, 0 if that is unknown: an example, not a fact about other inputs."""
    hint = size if isinstance(size, int) else size.node.hint
    return hint if isinstance(hint, int) else 0


def short_shapes(text: str) -> str:
    """``text`` with ``*`` for each long expression of symbols in its shapes: ``(s77, *, 64)``.

    Sizes that follow from inputs of any size are formulas over several lines, which say nothing to a reader.
    """
    found, start = [], 0
    while (opened := text.find("(", start)) >= 0:
        closed = _closing(text, opened)
        if closed is None:
            break
        inside = _short_sizes(text[opened + 1 : closed])
        found += [text[start : opened + 1], short_shapes(text[opened + 1 : closed]) if inside is None else inside]
        start = closed
    return "".join([*found, text[start:]])


def _closing(text: str, opened: int) -> int | None:
    """The place of the parenthesis that closes the one at ``opened``."""
    depth = 0
    for place in range(opened, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place
    return None


def _short_sizes(inside: str) -> str | None:
    """The sizes between the parentheses of a shape, None for other text."""
    sizes, depth, start = [], 0, 0
    for place, letter in enumerate(inside):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            sizes.append(inside[start:place])
            start = place + 1
    sizes.append(inside[start:])
    if len(sizes) == 1 or not any(map(_SYMBOL.search, sizes)) or _WORD.search(_FUNCTION.sub("", inside)):
        return None
    return ", ".join("*" if len(size.strip()) > _READABLE and _SYMBOL.search(size) else size.strip() for size in sizes)
