"""Identities of everything a model consists of, to check that it did not change."""

from __future__ import annotations

from typing import Any

from torch import nn


def everything(model: nn.Module) -> dict[str, Any]:
    """For each name of each module: the object, its class, attributes, parameters, buffers, children and hooks."""
    return {
        name: (id(module), type(module), {key: _identity(value) for key, value in module.__dict__.items()})
        for name, module in model.named_modules(remove_duplicate=False)
    }


def _identity(value: Any) -> Any:
    return [(key, id(item)) for key, item in value.items()] if isinstance(value, dict) else id(value)
