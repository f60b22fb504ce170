"""Replays of calls that only allocate and launch: one look into a table for the addresses of all tensors of the call.

A replay of replay.py repeats step after step, and each launch compares the addresses of its own tensors. Here all
allocations come first, and a call whose tensors lie where those of an earlier call did repeats its launches at once.

What a call computes between its launches lies in memory that the next call on the same stream overwrites: calls on one
stream run in order, and no thread shares it. That saves an allocation for each such tensor.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from qframework.compat.dispatch import current_stream, empty_strided_cuda
from qframework.compat.triton import launch_hooks_are_set
from qframework.kernels.runtime.replay import _ALLOCATIONS as ALLOCATIONS
from qframework.kernels.runtime.replay import Recording, Replay
from qframework.kernels.runtime.replay import _Descriptor as Descriptor
from qframework.kernels.runtime.replay import _Group as Group
from qframework.kernels.runtime.replay import _Place as Place

_MAX_ADDRESSES = 256  # of each kind of calls
_ALIGNMENT = 16  # bytes; what the choice of a kernel depends on
_BLOCK = 512  # bytes; PyTorch's allocator aligns to as much
_MAX_KEPT = 2**25  # bytes that are kept for a stream; a call that needs more takes longer on the GPU than on the host
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
        """None if there are steps of other kinds, or launches that cannot be bound to addresses."""
        if not isinstance(result, Tensor):
            return None
        wanted = self._place(result).at
        needed = list(self._needed(wanted))
        launches = [self._launched[number] for number in needed if number in self._launched]
        made = [self._allocated[number] for number in needed if number in self._allocated]
        if len(launches) + len(made) < len(needed) or not all(hasattr(run, "bind") for run, _ in launches):
            return None
        if wanted not in made:
            return None
        made.remove(wanted)
        places = {place: i for i, place in enumerate([*range(self._operands), wanted, *made])}
        renumbered = [(run, [_renumbered(x, places) for x in given]) for run, given in launches]
        between = _Between([self._tensors[place] for place in made], result.device)
        return _replay(_allocator(result), between, renumbered)

    def _needed(self, result: int) -> Iterator[int]:
        """The numbers of the steps without which the call would not be the same, in order."""
        wanted, numbers = {result}, []
        for number, step in reversed(list(enumerate(self._steps))):
            if step.lasting or step.makes & wanted:
                numbers.append(number)
                wanted |= step.needs
        return reversed(numbers)


_Block = tuple[int, int, Tensor]


class _Kept(threading.local):
    """Memory of this thread that calls leave to the next ones, by device and stream: its address, size and tensor."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[torch.device, int], _Block] = {}


_kept = _Kept()


class _Between:
    """Memory for tensors that exist from one launch of a call to another."""

    def __init__(self, tensors: list[Tensor], device: torch.device) -> None:
        self.device, self.size = device, 0
        self._views: list[tuple[int, int, Tensor]] = []  # begin and end in bytes; on "meta" what lies there
        for x in tensors:
            elements = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
            end = self.size + elements * x.element_size()
            self._views.append((self.size, end, x.to("meta")))
            self.size = math.ceil(end / _BLOCK) * _BLOCK

    def block(self, stream: int) -> _Block:
        """Memory that is free on ``stream``, the current one."""
        kept = _kept.blocks.get((self.device, stream))
        if kept is not None and kept[1] >= self.size:
            return kept
        made = torch.empty(self.size, dtype=torch.uint8, device=self.device)
        found = made.data_ptr(), self.size, made
        if self.size <= _MAX_KEPT:
            _kept.blocks[self.device, stream] = found
        return found

    def tensors(self, block: Tensor) -> list[Tensor]:
        """The tensors in a block."""
        return [
            block[begin:end].view(like.dtype).as_strided(like.shape, like.stride()) for begin, end, like in self._views
        ]


def _no_stream() -> int:
    return 0


def _replay(make: Callable[[], Tensor], between: _Between, launches: list[_Launch]) -> Replay:
    bound: dict[tuple[int, ...], list[Callable[[int], None]]] = {}  # none for addresses that were seen once
    possible = True
    stream_of = functools.partial(current_stream, between.device.index) if between.device.type == "cuda" else _no_stream

    def run(operands: Sequence[Tensor]) -> Any:
        stream = stream_of()
        if stream and torch.cuda.is_current_stream_capturing():
            return None  # a CUDA graph would write into the memory of later calls
        result = make()
        begin, _, block = between.block(stream)
        addresses = (*map(_data_ptr, operands), _data_ptr(result), begin)
        again = bound.get(addresses)
        if again and not launch_hooks_are_set():
            for launch in again:
                launch(stream)
            return result
        if misaligned(operands):
            return None
        launch_at((*operands, result, *between.tensors(block)), addresses)
        return result

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
