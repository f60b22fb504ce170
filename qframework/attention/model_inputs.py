"""How a batch becomes the arguments of a module."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from qframework.errors import CalibrationError


def call_model(model: nn.Module, batch: Any) -> Any:
    """Run one batch: a mapping as keyword arguments, or the leading items of a tuple or list that forward requires.

    Of a tuple or list that begins with a mapping, such as ``(inputs, labels)``, the mapping counts. Items that are left
    out although ``forward`` has a parameter for them are logged once, unless they look like the labels of classes.

    Raises:
        CalibrationError: the batch does not match the signature of ``model.forward``.
    """
    args, kwargs = _arguments(model, batch)
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        given = f"the keys {', '.join(map(repr, kwargs))}" if kwargs else f"{len(args)} inputs"
        signature = f"{type(model).__name__}.forward{inspect.signature(model.forward)}"
        raise CalibrationError(f"the batch must match {signature}, got {given}: {error}") from error
    return model(*args, **kwargs)


def _arguments(model: nn.Module, batch: Any) -> tuple[list[Any], dict[str, Any]]:
    if isinstance(batch, tuple | list) and batch and isinstance(batch[0], Mapping):
        batch = batch[0]
    if isinstance(batch, Mapping):
        return [], dict(batch)
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        first = max(_required(model), 1)
        _report_left_out(model, batch, first)
        return list(batch[:first]), {}
    if not isinstance(batch, Tensor):
        raise CalibrationError(f"a batch must be a tensor, tuple, list or mapping, got {type(batch).__name__}")
    return [batch], {}


def _required(model: nn.Module) -> int:
    """Positional parameters of forward without a default."""
    return sum(each.default is inspect.Parameter.empty for each in _positional(model))


def _positional(model: nn.Module) -> list[inspect.Parameter]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each for each in inspect.signature(model.forward).parameters.values() if each.kind in kinds]


def _report_left_out(model: nn.Module, batch: Sequence[Any], first: int) -> None:
    pairs = zip(_positional(model)[first:], batch[first:], strict=False)
    names = [repr(each.name) for each, value in pairs if value is not None and not _may_be_classes(value)]
    if names:
        _warn_once(
            f"a batch of {len(batch)} items: forward of {type(model).__name__} requires {first} and gets no more, so "
            f"{', '.join(names)} keep their defaults. If the other items are inputs, pass a mapping of names to inputs"
        )


def _may_be_classes(value: Any) -> bool:
    return not isinstance(value, Tensor) or (
        value.ndim < 2 and not value.is_floating_point() and value.dtype != torch.bool
    )


@cache
def _warn_once(message: str) -> None:
    logging.getLogger("qframework").warning("qframework: %s (logged once)", message)
