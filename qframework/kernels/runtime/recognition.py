"""Recognises operator calls of the same kind: what determines which steps a call takes, in full and by a shortcut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from qframework.compat.dispatch import metadata_check

Value = TypeVar("Value")

_MAX_KINDS = 16  # that differ in nothing but their tensors


def kind_of(values: tuple[Any, ...], names: tuple[str, ...]) -> tuple[Any, list[Tensor]]:
    """Everything that may determine what a call does, and its tensors; ``names`` of the last ``values``."""
    key: list[Any] = [names]
    operands, pointers = [], []
    if values and type(values[0]) is list and values[0] and isinstance(values[0][0], Tensor):
        key.append(len(values[0]))
        values = (*values[0], *values[1:])
    for value in values:
        if isinstance(value, Tensor):
            pointer = value.data_ptr()
            key += (value.shape, value.stride(), value.dtype, value.device, pointer % 16)
            operands.append(value)
            pointers.append(pointer)
        else:
            key.append(tuple(value) if isinstance(value, list) else value)
    if len(set(pointers)) < len(pointers):  # which of them are the same
        key.append(tuple(map(pointers.index, pointers)))
    return tuple(key), operands


class _Known(NamedTuple, Generic[Value]):
    """A kind of calls: a check of its tensors' metadata, and their addresses modulo 16."""

    check: Callable[..., bool]
    alignment: tuple[int, ...]
    value: Value


class Shortcut(Generic[Value]):
    """Finds what was remembered for a call's kind by one check in C++ instead of ``kind_of``."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[Any, ...], list[_Known[Value]]] = {}

    def find(self, values: tuple[Any, ...]) -> tuple[Value, list[Tensor]] | None:
        """The value remembered for calls such as this one, and the call's tensors."""
        key, operands = _parts(values)
        known = self._kinds.get(key)
        if known is None:
            return None
        addresses = [x.data_ptr() for x in operands]
        if len(set(addresses)) < len(addresses):
            return None
        alignment = tuple([address % 16 for address in addresses])
        for each in known:
            if alignment == each.alignment and each.check(*operands):
                return each.value, operands
        return None

    def remember(self, values: tuple[Any, ...], value: Value) -> None:
        """Let ``find`` give ``value`` for calls like this one, unless it begins with a list or repeats an address."""
        if not values or isinstance(values[0], list):
            return
        key, operands = _parts(values)
        addresses = [x.data_ptr() for x in operands]
        if len(set(addresses)) < len(addresses):  # the check in C++ refuses a tensor that is given twice
            return
        check = metadata_check(operands)
        if check is not None:
            known = self._kinds.setdefault(key, [])
            if len(known) >= _MAX_KINDS:
                known.clear()
            known.append(_Known(check, tuple([address % 16 for address in addresses]), value))

    def clear(self) -> None:
        self._kinds.clear()


def _parts(values: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Tensor]]:
    """A call's arguments with a mark for each tensor, and the tensors."""
    operands: list[Tensor] = []
    key: list[Any] = []
    for value in values:
        if type(value) is Tensor or isinstance(value, Tensor):  # the first is faster, and usual
            operands.append(value)
            key.append(...)
        else:
            key.append(tuple(value) if type(value) is list else value)
    return tuple(key), operands
