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
    finder = next((each for each in sys.meta_path if isinstance(each, _Finder) and each.module == module), None)
    if finder is None and module in sys.modules:
        function()
        return
    if finder is None:
        finder = _Finder(module)
        sys.meta_path.insert(0, finder)
    finder.functions.append(function)


def watch(*modules: str) -> None:
    """Let ``when_imported`` know when these modules are imported, even if it is called in the middle of that."""
    for module in modules:
        if module not in sys.modules:
            sys.meta_path.insert(0, _Finder(module))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as the other finders do, until that module is imported."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.functions: list[Callable[[], None]] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's spec with a loader that calls ``imported`` after it; None for other modules."""
        if fullname != self.module:
            return None
        specs = (finder.find_spec(fullname, path, target) for finder in tuple(sys.meta_path) if finder is not self)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec

    def imported(self) -> None:
        """Call the functions, once."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            for function in self.functions:
                function()


class _Loader(importlib.abc.Loader):
    """Loads a module with its own loader, which it gives back to the module."""

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As the module's own loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As the module's own loader does; then tells the finder. A module that fails can be imported again."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._finder.imported()
