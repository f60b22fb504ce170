"""Checks of arguments that several parts of the package take: models and calibration batches."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

import torch

from qframework.errors import CalibrationError, QFrameworkError, UnsupportedError

logger = logging.getLogger(__name__)


def described(value: object) -> str:
    """``value`` for an error message: a tensor's shape, or the repr and type of anything else."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{' '.join(repr(value).split()):.60} of type {type(value).__name__}"


def check_module(value: object, argument: str) -> None:
    """Raise QFrameworkError, naming ``argument``, unless ``value`` is a module."""
    if isinstance(value, torch.export.ExportedProgram):
        raise QFrameworkError(f"{argument} must be an nn.Module, got an ExportedProgram. Pass its .module()")
    if not isinstance(value, torch.nn.Module):
        raise QFrameworkError(f"{argument} must be an nn.Module, got {described(value)}")


def check_in_eval_mode(model: torch.nn.Module, argument: str) -> None:
    """Raise UnsupportedError if ``model`` is in training mode, and log the modules in it that are.

    Dropout that stays on while all else is in eval mode may be meant (Monte Carlo dropout), so it is no error.
    """
    if model.training:
        raise UnsupportedError(f"{argument} must be in eval mode, got a model in training mode. Call model.eval()")
    training: list[str] = []
    for name, module in model.named_modules():
        if module.training and not name.startswith(tuple(f"{outer}." for outer in training)):
            training.append(name)
    if training:
        logger.warning(
            "qframework: %s has modules in training mode, whose dropout and batch norms act as in training: %s%s. Call "
            "model.eval() unless that is meant",
            argument,
            ", ".join(f"{name!r} ({type(model.get_submodule(name)).__name__})" for name in training[:3]),
            f" and {len(training) - 3} more" if len(training) > 3 else "",
        )


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a model from its input, a tuple or list of inputs, or a mapping of them."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def names_in(value: Any, argument: str) -> tuple[str, ...]:
    """The names in ``value``, an iterable. Raise UnsupportedError, naming ``argument``, for anything else.

    A single text would be a name for each of its letters.
    """
    if isinstance(value, str):
        raise UnsupportedError(f"{argument} must be a list of names, got {value!r}. Pass [{value!r}]")
    names = tuple(value) if isinstance(value, Iterable) else (None,)
    if not all(isinstance(name, str) for name in names):
        raise UnsupportedError(f"{argument} must be a list of names, got {described(value)}")
    return names


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether ``value`` is an int or a float. A bool is neither."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_count(value: object) -> TypeGuard[int]:
    """Whether ``value`` is an int of 1 or more, and not a bool."""
    return is_number(value) and isinstance(value, int) and value >= 1


def check_batches(data: object, what: str, argument: str = "data") -> None:
    """Raise CalibrationError unless ``data`` is an iterable of batches; a mapping or text would be a single batch."""
    try:
        iter(data)  # type: ignore[call-overload]
        iterable = not isinstance(data, Mapping | str | bytes)
    except TypeError:
        iterable = False
    if not iterable:
        wanted = "an iterable of batches, such as a list or a DataLoader"
        raise CalibrationError(f"{what}: {argument} must be {wanted}, got {described(data)}")


def check_number_of_batches(batches: object) -> None:
    """Raise CalibrationError unless ``batches`` is None or a positive integer."""
    if batches is not None and not is_count(batches):
        raise CalibrationError(f"batches must be None or a positive integer, got {batches!r}")


def no_data(what: str, data: Iterable[Any]) -> CalibrationError:
    """The error for ``data`` without a batch."""
    used_up = ". It is an iterator: was it used up before?" if iter(data) is data else ""
    return CalibrationError(f"{what}: data must hold at least one batch, got none{used_up}")


def check_can_be_read_again(data: object, what: str) -> None:
    """Raise CalibrationError unless ``data`` is an iterable of batches that can be read more than once."""
    check_batches(data, what)
    if iter(data) is data:  # type: ignore[call-overload]
        raise CalibrationError(
            f"{what}: data must be a list or a DataLoader, got an iterator ({type(data).__name__}), "
            "which the first step would use up"
        )
