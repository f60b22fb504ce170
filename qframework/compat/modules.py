"""What ``nn.Module`` keeps of a module: public functions give no parameter that is None, no name twice, no hooks."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import nn

from qframework.compat.missing import explained

SPACES = ("_modules", "_parameters", "_buffers")  # also parts of the paths that Dynamo gives to what modules hold
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_KEPT = (*SPACES, *_HOOKS, "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")
_spaces = attrgetter(*SPACES)

with explained():
    attrgetter(*_KEPT)(nn.Module())  # asked here, so that calls need not


def parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own parameters by name, which may be changed."""
    return module._parameters


def submodules(module: nn.Module) -> dict[str, nn.Module | None]:
    """The module's own submodules by name, which may be changed."""
    return module._modules


def names(module: nn.Module) -> set[str]:
    """Of all parameters, buffers and submodules."""
    return {name for space in _spaces(module) for name in space}


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks run where the module is called or differentiated."""
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def remove_hooks(module: nn.Module, kinds: type | tuple[type, ...]) -> None:
    """Remove the forward hooks, and those before it, that are objects of one of ``kinds``."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(hook, kinds):
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)


def with_submodules(module: nn.Module, /, **changed: nn.Module | None) -> None:
    """Give ``module``, a shallow copy, submodules of its own, of which some are changed."""
    module.__dict__["_modules"] = {**module._modules, **changed}


def with_parameters(probe: nn.Module, module: nn.Module, /, **changed: Any) -> None:
    """Give ``probe``, without any, these parameters and copies of the buffers of ``module``."""
    probe.__dict__["_parameters"] = changed
    buffers = module._buffers.items()
    probe.__dict__["_buffers"] = {name: None if each is None else each.clone() for name, each in buffers}


__all__ = [
    "SPACES",
    "has_hooks",
    "names",
    "parameters",
    "remove_hooks",
    "submodules",
    "with_parameters",
    "with_submodules",
]
