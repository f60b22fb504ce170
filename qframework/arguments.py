"""Checks of arguments that several parts of the package take: models and calibration batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

import torch

from qframework.errors import CalibrationError, QFrameworkError


def described(value: object) -> str:
    """A value in an error: what it is and of which type."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{value!r:.60} of type {type(value).__name__}"


def check_module(value: object, argument: str) -> None:
    """Raise QFrameworkError unless ``value``, of the argument ``argument``, is a module."""
    if isinstance(value, torch.export.ExportedProgram):
        raise QFrameworkError(f"{argument} is an ExportedProgram; accepted: an nn.Module, such as its .module()")
    if not isinstance(value, torch.nn.Module):
        raise QFrameworkError(f"{argument} is {described(value)}; accepted: an nn.Module")


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether ``value`` is an int or a float. A bool is neither, though Python counts with it."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_count(value: object) -> TypeGuard[int]:
    """Whether ``value`` is an int of 1 or more, and no bool."""
    return is_number(value) and isinstance(value, int) and value >= 1


def check_batches(data: object, what: str) -> None:
    """Raise CalibrationError unless ``data`` can be gone through and is not a batch by itself."""
    if isinstance(data, Mapping | str | bytes):
        raise CalibrationError(f"{what}: data is one {type(data).__name__}; accepted: a list or DataLoader of batches")
    try:
        iter(data)  # type: ignore[call-overload]
    except TypeError as error:
        raise CalibrationError(
            f"{what}: data is {described(data)}; accepted: an iterable of batches, such as a list or a DataLoader"
        ) from error


def check_number_of_batches(batches: object) -> None:
    """Raise CalibrationError unless ``batches`` is None or a positive number."""
    if batches is not None and not is_count(batches):
        raise CalibrationError(f"batches={batches!r}; accepted: None or a positive number")


def no_data(what: str, data: Iterable[Any]) -> CalibrationError:
    """The error of a step for which ``data`` had no batch."""
    used_up = " (an iterator: was it used up before?)" if iter(data) is data else ""
    return CalibrationError(f"{what} saw no data: data yielded no batch{used_up}; accepted: at least one")


def check_can_be_read_again(data: object, what: str) -> None:
    """Raise CalibrationError unless ``data`` holds batches that can be gone through more than once."""
    check_batches(data, what)
    if iter(data) is data:  # type: ignore[call-overload]
        raise CalibrationError(
            f"{what}: data is an iterator ({type(data).__name__}), which the first step would use up; "
            "accepted: a list or a DataLoader"
        )
