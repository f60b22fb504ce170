"""Calls operators' GPU implementations without PyTorch's dispatcher, where a module makes the same call again.

A module that is not compiled calls several operators with weights that stay the same. Passing each call through the
dispatcher, and finding its replay, costs the host more than the launches. Here all calls of a module are one recording
(replay.py), found by one check in C++ of the operands and of the state in which the dispatcher would do more than call
the implementations: autocast, transforms, tracing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qframework.compat.dispatch import (
    dispatch_modes,
    forward_level,
    function_modes,
    metadata_check,
    only_usual_keys,
    profiler_enabled,
)
from qframework.kernels.runtime.address_replay import AddressRecording, misaligned
from qframework.kernels.runtime.recognition import kind_of
from qframework.kernels.runtime.replay import NotReplayableError, Replay, recording

_MAX_KINDS = 32  # of calls of one module


class _Known(NamedTuple):
    check: Callable[..., bool]
    device: int | None  # that must be the current one; None: there is only one
    replay: Replay


class DirectCalls:
    """The repeated calls of one module: recorded in the second call of a kind, replayed from the third on.

    Copies and pickles are empty.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, list[_Known]] = {}
        self._seen: dict[Hashable, bool] = {}  # kinds of calls; whether they can be recorded

    def __reduce__(self) -> tuple[type[DirectCalls], tuple[()]]:
        return DirectCalls, ()

    def repeat(self, operands: tuple[Tensor, ...], others: Hashable) -> Any:
        """The result of a call that is known; ``others`` is all that is not a tensor.

        None for other calls, and where the dispatcher has something to do.
        """
        known = self._known.get(others)
        if known is None or _observed(operands):
            return None
        for each in known:
            if each.check(*operands):
                if each.device is not None and each.device != torch.cuda.current_device():
                    return None
                return each.replay(operands)
        return None

    def run(
        self,
        operands: tuple[Tensor, ...],
        others: Hashable,
        dispatched: Callable[..., Any],
        direct: Callable[..., Any],
    ) -> Any:
        """The result of ``dispatched(*operands)``, which calls operators; recorded in the second call of a kind.

        ``direct(*operands)`` calls the operators' GPU implementations, with the same result.
        """
        if not _recordable(operands):
            return dispatched(*operands)
        kind = _kind(operands, others)
        seen = self._seen.get(kind)
        if not seen:
            result = dispatched(*operands)  # raises the errors of wrong arguments
            if len(self._seen) >= _MAX_KINDS:
                self._seen.clear()
                self._known.clear()
            self._seen.setdefault(kind, True)
            return result
        check = metadata_check(list(operands))
        with AddressRecording(operands) as recorded:
            result = direct(*operands)
        self._seen[kind] = False  # from now on it is found, or it cannot be
        try:
            replay = recorded.finish(result)
        except NotReplayableError:
            return result
        if check is not None:
            device = operands[0].device
            several = device.type == "cuda" and torch.cuda.device_count() > 1
            self._known.setdefault(others, []).append(_Known(check, device.index if several else None, replay))
        return result


def _observed(operands: tuple[Tensor, ...]) -> bool:
    """Whether modes, derivatives or a profiler take part in a call, which the check in C++ does not see."""
    if dispatch_modes() or function_modes() or forward_level() >= 0 or profiler_enabled():
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in operands)


def _kind(operands: tuple[Tensor, ...], others: Hashable) -> Hashable:
    """Everything that the check in C++ may tell apart, and what ``kind_of`` does."""
    more = [(type(x), x.is_inference()) for x in operands]
    return kind_of((*operands, others), ())[0], *more, torch.is_inference_mode_enabled()


def _recordable(operands: tuple[Tensor, ...]) -> bool:
    """Whether the dispatcher would call the GPU's implementations with these tensors and do nothing else."""
    if not all(type(x) in (Tensor, torch.nn.Parameter) for x in operands):  # subclasses see operators
        return False
    device = operands[0].device
    return (
        only_usual_keys()
        and recording() is None
        and not _observed(operands)
        and not torch.is_autocast_enabled(device.type)
        and (device.type != "cuda" or device.index == torch.cuda.current_device())
        and not misaligned(operands)
    )
