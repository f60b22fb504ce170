"""Buffers that are computed from parameters when a model is compiled, and again when one of these changes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from qframework.backend.lowering import Lowering
from qframework.compat.dispatch import writes_of_all
from qframework.graph.nodes import Constants
from qframework.graph.writes import written_between


class Operand:
    """What a buffer is computed from: its value now, None if that is unknown, and where to find it in later calls."""

    def __init__(self, node: Any, constants: Constants) -> None:
        self.node: Node | None = node
        self.value = constants.value(node)
        self.index = None if node is None else constants.input_index(node)

    def now(self, args: Sequence[Any]) -> Any:
        """The value in a call with the inputs ``args``."""
        return self.value if self.index is None else args[self.index]


def is_followed(node: Node, lowering: Lowering) -> bool:
    """Whether a tensor is known now, and later writes to it will be noticed."""
    value = lowering.constants.value(node)
    if value is None or value.is_inference():
        return False
    return lowering.scales.owns(node) or lowering.constants.input_index(node) is not None


def is_written(nodes: Iterable[Node], lowering: Lowering) -> bool:
    """Whether the graph itself may write one of these tensors of the model."""
    graph = lowering.gm.graph
    given = [each for each in nodes if not lowering.scales.owns(each)]
    return written_between(next(iter(graph.nodes)), graph.output_node(), given) is not None


class _Watched(NamedTuple):
    """A buffer, and how it is computed."""

    buffer: Tensor
    compute: Callable[..., Tensor]
    operands: list[Operand]


class WatchedTensors:
    """Tensors as they were when they were accepted.

    Misses in-place writes through ``.data`` and to tensors created in inference mode.
    """

    def __init__(self) -> None:
        self._known: list[Tensor] = []
        self._accepted: list[int] = []

    def _is_unchanged(self, values: list[Any]) -> bool:
        """Whether these are the accepted tensors, and none was written since. Part of every call's host time."""
        return all(map(operator.is_, values, self._known)) and self._state() == self._accepted

    def _accept(self, values: list[Any]) -> None:
        self._known = values
        self._counted = [value for value in values if not value.is_inference()]  # inference tensors count no writes
        self._accepted = self._state()

    def _state(self) -> list[int]:
        """Where the values are, and how often they were written."""
        return [*map(Tensor.data_ptr, self._known), *writes_of_all(self._counted)]


class WatchedValues(WatchedTensors):
    """Buffers that are computed from a graph's inputs, again when one of these was replaced or written."""

    def __init__(self) -> None:
        super().__init__()
        self._watched: list[_Watched] = []
        self._operands: list[Operand] = []

    def __bool__(self) -> bool:
        return bool(self._watched)

    def add(self, buffer: Tensor | None, compute: Callable[..., Tensor], operands: list[Operand]) -> None:
        """Watch what ``buffer`` was computed from, ``compute`` of the operands' values."""
        assert buffer is not None
        self._watched.append(_Watched(buffer, compute, operands))
        self._operands += [each for each in operands if each.value is not None]
        self._accept([each.value for each in self._operands])

    def check(self, args: Sequence[Any]) -> None:
        """Compute the buffers again, in place, if necessary. ``args`` are the inputs of a call."""
        # written out: a call of `now` for each takes a fifth of the check's time
        values = [each.value if each.index is None else args[each.index] for each in self._operands]
        if self._is_unchanged(values):
            return
        with torch.no_grad():
            for watched in self._watched:
                watched.buffer.copy_(watched.compute(*(each.now(args) for each in watched.operands)))
        self._accept(values)
