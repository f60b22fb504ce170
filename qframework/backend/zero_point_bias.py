"""Biases of layers whose input has a zero point, computed when a model is compiled and again when a parameter changes.

From::

    qframework::zero_point_bias (bias, scale, zero point, int8 weight, scale) -> int8_linear

To::

    buffer -> int8_linear

where the values of all operands are known. Otherwise the operator stays, and each call sums the weight.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from qframework.backend.lowering import Lowering, erase_unused
from qframework.compat.dispatch import writes_of_all
from qframework.compat.dynamo import guard_identity
from qframework.graph.nodes import Constants

_zero_point_bias = torch.ops.qframework.zero_point_bias.default


def keep_zero_point_biases(lowering: Lowering) -> None:
    """Replace every ``zero_point_bias`` of known operands by a buffer; ``lowering.checks`` keeps it up to date.

    With frozen weights, later writes have no effect, and another parameter compiles the model again.
    """
    watched = WatchedBiases()
    for node in list(lowering.gm.graph.nodes):
        if node.target is not _zero_point_bias:
            continue
        operands = [_Operand(each, lowering.constants) for each in node.args]
        if any(each.value is None and each.node is not None for each in operands):
            continue
        values = [each.value for each in operands]
        with torch.no_grad():
            buffer = lowering.scales.buffer(_zero_point_bias(*values))
        if lowering.options.freeze_weights:
            for each in operands:
                if each.node is not None:
                    guard_identity(each.node)
        else:
            watched.add(lowering.constants.value(buffer), operands)
        node.replace_all_uses_with(buffer)
        erase_unused(lowering.gm, node)
    if watched:
        lowering.checks.append(watched.check)


class _Operand:
    """An operand of the operator: its value now, None if that is unknown, and where to find it in later calls."""

    def __init__(self, node: Any, constants: Constants) -> None:
        self.node: Node | None = node
        self.value = constants.value(node)
        self.index = None if node is None else constants.input_index(node)

    def now(self, args: Sequence[Any]) -> Any:
        return self.value if self.index is None else args[self.index]


class WatchedBiases:
    """Buffers that are computed from a graph's inputs, again when one of these was replaced or written.

    Misses in-place writes through ``.data`` and to tensors created in inference mode.
    """

    def __init__(self) -> None:
        self._watched: list[tuple[Tensor, list[_Operand]]] = []
        self._operands: list[_Operand] = []
        self._known: list[Tensor] = []
        self._accepted: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._watched)

    def add(self, buffer: Tensor | None, operands: list[_Operand]) -> None:
        """Watch what ``buffer`` was computed from."""
        assert buffer is not None
        self._watched.append((buffer, operands))
        self._operands += [each for each in operands if each.value is not None]
        self._accept([each.value for each in self._operands])

    def check(self, args: Sequence[Any]) -> None:
        """Compute the buffers again, in place, if necessary. ``args`` are the inputs of a call."""
        values = [each.now(args) for each in self._operands]
        if all(map(operator.is_, values, self._known)) and self._state() == self._accepted:
            return
        with torch.no_grad():
            for buffer, operands in self._watched:
                buffer.copy_(_zero_point_bias(*(each.now(args) for each in operands)))
        self._accept(values)

    def _accept(self, values: list[Any]) -> None:
        self._known = values
        self._counted = [value for value in values if not value.is_inference()]  # inference tensors count no writes
        self._accepted = self._state()

    def _state(self) -> list[int]:
        """Where the values are, and how often they were written. Part of every call's host time."""
        return [*map(Tensor.data_ptr, self._known), *writes_of_all(self._counted)]
