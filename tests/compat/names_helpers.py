"""Finds a name of ``qframework/compat/names.py`` in the libraries that are installed."""

from __future__ import annotations

import importlib
import inspect
from types import FunctionType
from typing import Any

import torch

from qframework.compat import functions
from qframework.compat.names import NAMES, Name


def kernel(x_ptr, BLOCK):
    """The source of a Triton kernel."""


def _jit_function() -> Any:
    import triton

    return triton.JITFunction(kernel)


def _driver() -> Any:
    from triton.backends.driver import DriverBase

    return DriverBase


# Objects with attributes that their class does not show, or that do not exist without a GPU.
EXAMPLES = {
    "torch.nn.modules.module.Module": lambda: torch.nn.Module(),
    "torch.fx.graph.Graph": lambda: torch.fx.Graph(),
    "torch.fx.node.Node": lambda: torch.fx.Graph().placeholder("x"),
    "torch._ops.OpOverload": lambda: torch.ops.aten.detach.default,
    "torch._dynamo.eval_frame.OptimizedModule": lambda: torch.compile(torch.nn.Linear(1, 1)),
    "triton.runtime.jit.JITFunction": _jit_function,
    "triton.runtime.driver.active": _driver,
}


def resolve(path: str) -> Any:
    """The object at ``path``. Raises ImportError or AttributeError if there is none."""
    owner, _, last = path.rpartition(".")
    if owner in EXAMPLES:
        return getattr(EXAMPLES[owner](), last)
    parts = path.split(".")
    found: Any = importlib.import_module(parts[0])
    for end, part in enumerate(parts[1:], 2):
        if not hasattr(found, part) and hasattr(found, "__path__"):
            importlib.import_module(".".join(parts[:end]))
        found = getattr(found, part)
    return found


def is_there(name: Name) -> bool:
    """Whether the installed library has the name or its older form."""
    if name.path.startswith("has_torch_function in "):
        function = resolve(name.path.rpartition(" ")[2])
        return isinstance(functions.without_handover(function, name.path.rpartition(" ")[2]), FunctionType)
    if name.source:
        return name.path in inspect.getsource(importlib.import_module(name.source))
    paths = [name.path, name.path.rpartition(".")[0] + "." + name.older] if name.older else [name.path]
    return any(map(_exists, paths))


def _exists(path: str) -> bool:
    try:
        resolve(path)
    except (ImportError, AttributeError) as error:
        if isinstance(error, ImportError) and not (error.name and path.startswith(error.name)):
            raise  # the library itself cannot be imported here: this says nothing of the name
        return False
    return True


def needed() -> list[Name]:
    """The names that the installed versions need."""
    return [name for name in NAMES.values() if not name.until or not _has_reached(name)]


def _has_reached(name: Name) -> bool:
    version = importlib.import_module(name.library).__version__
    return tuple(map(int, version.split(".")[:2])) >= tuple(map(int, name.until.split(".")))
