"""Packages that import their public names at first use, so that importing one module does not import its siblings."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, module_of: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package: imports the module of a name when the name is first asked for.

    Args:
        package: the package's ``__name__``.
        module_of: the module of each public name, relative to the package.
    """

    def getattr_(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it offers {', '.join(module_of)}")
        return getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)

    return getattr_
