"""The private dictionaries of ``nn.Module``: public functions omit shared tensors, hooks and what is None."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from qframework.compat.missing import explained

SPACES = ("_modules", "_parameters", "_buffers")  # also parts of Dynamo's paths to the contents of modules
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_KEPT = (*SPACES, *_HOOKS, "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")
_spaces = attrgetter(*SPACES)

with explained():
    attrgetter(*_KEPT)(nn.Module())  # checked here instead of at every call


def parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own parameters by name, as a mutable dictionary."""
    return module._parameters


def buffers_and_parameters(module: nn.Module) -> tuple[dict[str, Tensor | None], dict[str, nn.Parameter | None]]:
    """The module's own buffers and parameters by name, as mutable dictionaries."""
    return module._buffers, module._parameters


def submodules(module: nn.Module) -> dict[str, nn.Module | None]:
    """The module's own submodules by name, as a mutable dictionary."""
    return module._modules


def names(module: nn.Module) -> set[str]:
    """The names of all parameters, buffers and submodules."""
    return {name for space in _spaces(module) for name in space}


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks run when the module is called or differentiated."""
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def remove_hooks(module: nn.Module, kinds: type | tuple[type, ...]) -> None:
    """Remove the forward hooks and forward pre-hooks that are instances of ``kinds``."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(hook, kinds):
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)


def with_submodules(module: nn.Module, /, **changed: nn.Module | None) -> None:
    """Give ``module``, a shallow copy, its own dictionary of submodules, with some changed."""
    module.__dict__["_modules"] = {**module._modules, **changed}


def with_parameters(probe: nn.Module, module: nn.Module, /, **changed: Any) -> None:
    """Give the empty ``probe`` these parameters, and copies of the buffers of ``module``."""
    probe.__dict__["_parameters"] = changed
    buffers = module._buffers.items()
    probe.__dict__["_buffers"] = {name: None if each is None else each.clone() for name, each in buffers}


__all__ = [
    "SPACES",
    "buffers_and_parameters",
    "has_hooks",
    "names",
    "parameters",
    "remove_hooks",
    "submodules",
    "with_parameters",
    "with_submodules",
]


def share_forward_pre_hooks(source: nn.Module, target: nn.Module) -> None:
    """Let ``target`` run what ``source`` runs before each call."""
    target._forward_pre_hooks = source._forward_pre_hooks
    target._forward_pre_hooks_with_kwargs = source._forward_pre_hooks_with_kwargs
