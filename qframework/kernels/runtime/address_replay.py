"""Replays of calls that only allocate and launch: one look into a table for the addresses of all tensors of the call.

A replay of replay.py repeats step after step, and each launch compares the addresses of its own tensors. Here all
allocations come first, and a call whose tensors lie where those of an earlier call did repeats its launches at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from qframework.compat.dispatch import empty_strided_cuda
from qframework.compat.triton import launch_hooks_are_set
from qframework.kernels.runtime.replay import _ALLOCATIONS as ALLOCATIONS
from qframework.kernels.runtime.replay import Recording, Replay
from qframework.kernels.runtime.replay import _Descriptor as Descriptor
from qframework.kernels.runtime.replay import _Group as Group
from qframework.kernels.runtime.replay import _Place as Place

ENABLED = False  # a third less Python on a CPU with empty launches; not run on a GPU yet
_MAX_ADDRESSES = 256  # of each kind of calls
_ALIGNMENT = 16  # bytes; what the choice of a kernel depends on
_data_ptr = Tensor.data_ptr
_Launch = tuple[Any, list[Any]]  # a function that launches, and what stands for its arguments


def misaligned(operands: Sequence[Tensor]) -> bool:
    """Whether an operand begins elsewhere than at a multiple of 16 bytes."""
    return sum([x.data_ptr() % _ALIGNMENT for x in operands]) > 0


class AddressRecording(Recording):
    """A recording of a call with aligned operands; its replay returns None, and does nothing, for others."""

    def __init__(self, operands: Sequence[Tensor]) -> None:
        super().__init__(list(operands))
        self._operands = len(operands)
        self._allocated: dict[int, int] = {}  # places by the number of the step
        self._launched: dict[int, _Launch] = {}

    def finish(self, result: Any) -> Replay:
        replay = super().finish(result)
        return self._by_addresses(result) or (lambda operands: None if misaligned(operands) else replay(operands))

    def _operation(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        super()._operation(func, args, kwargs, result)
        if func in ALLOCATIONS:
            self._allocated[len(self._steps) - 1] = self._place(result).at

    def _launch(self, run: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        super()._launch(run, arguments)
        self._launched[len(self._steps) - 1] = run, [self._argument(x, hasattr(run, "bind")) for x in arguments]

    def _by_addresses(self, result: Any) -> Replay | None:
        """None if there are steps of other kinds, launches that cannot be bound to addresses, or not ``ENABLED``."""
        if not ENABLED or not isinstance(result, Tensor):
            return None
        needed = list(self._needed(self._place(result).at))
        launches = [self._launched[number] for number in needed if number in self._launched]
        made = [self._allocated[number] for number in needed if number in self._allocated]
        if len(launches) + len(made) < len(needed) or not all(hasattr(run, "bind") for run, _ in launches):
            return None
        places = {place: i for i, place in enumerate([*range(self._operands), *made])}
        if self._place(result).at not in made:
            return None
        renumbered = [(run, [_renumbered(x, places) for x in given]) for run, given in launches]
        makes = [_allocator(self._tensors[place]) for place in made]
        return _replay(makes, renumbered, made.index(self._place(result).at))

    def _needed(self, result: int) -> Iterator[int]:
        """The numbers of the steps without which the call would not be the same, in order."""
        wanted, numbers = {result}, []
        for number, step in reversed(list(enumerate(self._steps))):
            if step.lasting or step.makes & wanted:
                numbers.append(number)
                wanted |= step.needs
        return reversed(numbers)


def _replay(makes: list[Callable[[], Tensor]], launches: list[_Launch], result: int) -> Replay:
    bound: dict[tuple[int, ...], list[Callable[[], None]]] = {}  # none for addresses that were seen once
    possible = True

    def run(operands: Sequence[Tensor]) -> Any:
        made = [make() for make in makes]
        tensors = (*operands, *made)
        addresses = tuple(map(_data_ptr, tensors))
        again = bound.get(addresses)
        if not again or launch_hooks_are_set():
            if misaligned(operands):
                return None
            launch_at(tensors, addresses)
            return made[result]
        for launch in again:
            launch()
        return made[result]

    def launch_at(tensors: tuple[Tensor, ...], addresses: tuple[int, ...]) -> None:
        nonlocal possible
        given = [(launch, tuple([_actual(x, tensors) for x in arguments])) for launch, arguments in launches]
        for launch, arguments in given:
            launch(*arguments)
        seen = bound.get(addresses)
        if seen is None:
            if len(bound) >= _MAX_ADDRESSES:
                bound.clear()
            bound[addresses] = []
        elif not seen and possible:
            calls = [launch.bind(arguments) for launch, arguments in given]
            possible = None not in calls
            bound[addresses] = calls if possible else []

    return run


def _allocator(x: Tensor) -> Callable[[], Tensor]:
    """A function that allocates tensors like ``x`` on the current device."""
    if x.is_cuda and empty_strided_cuda is not None:
        return functools.partial(empty_strided_cuda, tuple(x.shape), x.stride(), x.dtype)
    return functools.partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _renumbered(x: Any, places: dict[int, int]) -> Any:
    """What stands for a kernel argument, with other numbers for the tensors."""
    if isinstance(x, Place):
        return Place(places[x.at])
    if isinstance(x, Descriptor):
        return Descriptor(x.make, places[x.at])
    return Group(x.kind, [_renumbered(member, places) for member in x.members]) if isinstance(x, Group) else x


def _actual(x: Any, tensors: tuple[Tensor, ...]) -> Any:
    """The kernel argument that ``x`` stands for."""
    if isinstance(x, Place):
        return tensors[x.at]
    if isinstance(x, Descriptor):
        return x.make(tensors[x.at])
    if isinstance(x, Group):
        return tuple.__new__(x.kind, [_actual(member, tensors) for member in x.members])
    return x
