"""Shapes of captured graphs, whose sizes may be symbols: comparisons without adding a guard, and sizes when traced."""

from __future__ import annotations

import torch

from qframework.compat.graphs import statically_known_true

Size = int | torch.SymInt


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
