"""Calls a function when a module of another library is imported, now or later, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

def when_imported(module: str, function: Callable[[], None]) -> None:
    """Call ``function`` once ``module`` is imported: now if it is, else right after its import."""
    if module in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _Finder(module, function))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as the other finders do, and removes itself then."""

    def __init__(self, module: str, function: Callable[[], None]) -> None:
        self._module, self._function = module, function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._module or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self._function)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Loads a module with its own loader, which it gives back to the module, and then calls a function."""

    def __init__(self, loader: Any, function: Callable[[], None]) -> None:
        self._loader, self._function = loader, function

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._function()
