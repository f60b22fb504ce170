"""Calls of operators in code that Inductor generated, past PyTorch's dispatcher and the recognition of calls.

At one place in generated code, sizes, strides, dtypes, devices and all arguments but tensors never change: Dynamo's
guards saw to it. What may change is where tensors lie in memory, so that is all that is compared before the steps of an
earlier call are repeated (see replay.py).
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from qframework.compat.dispatch import profiler_enabled
from qframework.kernels.runtime.operator import OPERATORS
from qframework.kernels.runtime.recognition import kind_of
from qframework.kernels.runtime.replay import Replay

IMPORT = "from qframework.kernels.runtime.call_site import call_site"
"""The line that generated code needs; PyTorch's caches keep such code, so that the name must not change."""

_MAX_ADDRESSES = 1024  # remembered by each place; a repeated layer has one place for all of its repetitions
_data_ptr = Tensor.data_ptr


def register_call_sites() -> None:
    """Let code that Inductor generates from now on call all operators with kernels for GPUs by ``call_site``."""
    from qframework.compat.call_sites import call_at_sites

    names = [name for name, operator in OPERATORS.items() if operator.replayed is not None]
    call_at_sites([(overload_of(name), name) for name in names], IMPORT, "call_site")


def overload_of(name: str) -> Any:
    """The operator's ``OpOverload``."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.qframework, packet), overload or "default")


def call_site(name: str) -> Callable[..., Any]:
    """The operator ``name`` on a GPU, to be called at one place only: without keywords, with arguments of one kind.

    The current device must be that of the tensors, as generated code makes it. Under PyTorch's profiler the operator
    itself is called, which shows its name.
    """
    implementation = OPERATORS[name].replayed
    assert implementation is not None
    return repeating(overload_of(name), implementation)


def repeating(operator: Callable[..., Any], implementation: Any) -> Callable[..., Any]:
    """``implementation`` at one place, whose replays of a kind of calls are called directly once there are any.

    The operator itself is not what makes them: the dispatcher drops arguments that have their default value, so that
    they would be of another kind.
    """
    by_addresses: dict[tuple[int, ...], Replay] = {}
    by_kind: dict[tuple[int, ...], Replay] = {}
    pick: Callable[[tuple[Any, ...]], tuple[Tensor, ...]] | None = None

    def run(*args: Any) -> Any:
        if pick is None:
            return first(args)
        if profiler_enabled():
            return operator(*args)
        operands = pick(args)
        addresses = tuple(map(_data_ptr, operands))
        again = by_addresses.get(addresses)
        return again(operands) if again is not None else elsewhere(args, operands, addresses)

    def first(args: tuple[Any, ...]) -> Any:
        nonlocal pick
        if any(isinstance(x, list) and any(isinstance(member, Tensor) for member in x) for x in args):
            return implementation(*args)
        places = [i for i, x in enumerate(args) if isinstance(x, Tensor)]
        pick = itemgetter(*places) if len(places) > 1 else lambda args: (args[places[0]],)
        return implementation(*args)

    def elsewhere(args: tuple[Any, ...], operands: tuple[Tensor, ...], addresses: tuple[int, ...]) -> Any:
        kind = (*[address % 16 for address in addresses], *map(addresses.index, addresses))
        again = by_kind.get(kind)
        if again is None:
            found = implementation.replays.get(kind_of(args, ())[0])
            if not callable(found):
                return implementation(*args)
            again = by_kind[kind] = found
        if len(by_addresses) >= _MAX_ADDRESSES:
            by_addresses.clear()
        by_addresses[addresses] = again
        return again(operands)

    return run
