"""``torch.export`` for the callers of this package: with one kind of error, and inputs that stay as they are."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from qframework.arguments import as_call, described
from qframework.compat import pytree
from qframework.errors import UnsupportedError, export_error


def export_program(
    what: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any, advice: str = ""
) -> torch.export.ExportedProgram:
    """``torch.export.export``, whose errors become the QFrameworkError of ``export_error``.

    ``torch.export`` marks axes that vary on the tensors themselves, and leaves the marks there when it fails:
    ``torch.compile`` would then refuse to make these axes constants. So it gets aliases of the inputs.
    """
    args, kwargs = pytree.tree_map_only(Tensor, _alias, (args, kwargs))
    try:
        return torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes)
    except Exception as error:  # PyTorch passes on errors of the model's own code, and raises many kinds itself
        raise export_error(what, error, dynamic_shapes, advice) from error


def example_call(inputs: Any, model: nn.Module, argument: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``as_call`` of an example. Raise UnsupportedError, naming ``argument``, unless it is what ``model`` may take."""
    args, kwargs = as_call(inputs)
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if any(x.is_nested for x in tensors):
        raise UnsupportedError(
            f"{argument} must hold dense tensors, got a nested one, whose sizes torch.export cannot name. Pad it with "
            "torch.nested.to_padded_tensor"
        )
    if not tensors:
        raise UnsupportedError(
            f"{argument} must be a tensor, a tuple of inputs or a mapping of keyword inputs, with at least one tensor, "
            f"got {described(inputs)}. Pass a batch as the model takes it"
        )
    if unnamed := [name for name in kwargs if not isinstance(name, str)]:
        raise UnsupportedError(f"{argument} must have names of inputs as its keys, got {described(unnamed[0])}")
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        accepted = ", ".join(map(str, inspect.signature(model.forward).parameters))
        raise UnsupportedError(
            f"{argument} must be what the {type(model).__name__} takes, forward({accepted}), got "
            f"{', '.join([*map(_kind, args), *(f'{name}={_kind(value)}' for name, value in kwargs.items())])}: {error}"
        ) from None
    return args, kwargs


def _kind(value: object) -> str:
    return described(value) if isinstance(value, Tensor) else type(value).__name__


def _alias(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.requires_grad)
