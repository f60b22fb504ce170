"""How a batch becomes the arguments of a module."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from qframework.errors import CalibrationError


def call_model(model: nn.Module, batch: Any) -> Any:
    """Run one batch: a mapping as keyword arguments, or the leading items of a tuple or list that forward requires.

    Of a tuple or list that begins with a mapping, such as ``(inputs, labels)``, the mapping counts.

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
        return list(batch[: max(_required(model), 1)]), {}
    if not isinstance(batch, Tensor):
        raise CalibrationError(f"a batch must be a tensor, tuple, list or mapping, got {type(batch).__name__}")
    return [batch], {}


def _required(model: nn.Module) -> int:
    """Positional parameters of forward without a default."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    return sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters)
