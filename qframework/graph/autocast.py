"""The scopes of ``torch.autocast`` in a captured graph, in which its operations must be run to get the same dtypes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch.fx import Node

from qframework.compat.dispatch import AUTOCAST_SCOPES


def scopes_before(node: Node) -> list[Node]:
    """The scopes that a graph is in at ``node``, the innermost last."""
    scopes: list[Node] = []
    for each in itertools.takewhile(lambda each: each is not node, node.graph.nodes):
        follow_scope(scopes, each)
    return scopes


def follow_scope(scopes: list[Node], node: Node) -> None:
    """Add the scope that ``node`` enters to ``scopes``, or remove the one that it leaves."""
    enter, leave = AUTOCAST_SCOPES
    if node.target is enter:
        scopes.append(node)
    elif node.target is leave:
        scopes.remove(node.args[0])  # type: ignore[arg-type]


@contextlib.contextmanager
def autocast_of(scopes: Sequence[Node]) -> Iterator[None]:
    """Run in these scopes."""
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(torch.autocast(*scope.args))  # type: ignore[arg-type]
        yield
