"""Handles names of names.py that are gone: an error, or one warning for each name that has a replacement."""

from __future__ import annotations

import functools
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from qframework.errors import QFrameworkError

if TYPE_CHECKING:
    from qframework.compat.names import Name

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger("qframework")

replaced: Counter[str] = Counter()
"""How often a replacement was used for a name that is gone, by name. Each name is logged once."""


class explained:
    """Turns errors on missing names of names.py inside the block or function into QFrameworkError; others pass."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, ImportError | AttributeError) and (name := _name_of(error)) is not None:
            raise QFrameworkError(sentence(name)) from error

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except (ImportError, AttributeError):
                with self:
                    raise

        return run


def gone(path: str) -> QFrameworkError:
    """The error for a name that is gone."""
    from qframework.compat.names import NAMES

    return QFrameworkError(sentence(NAMES[path]))


def sentence(name: Name) -> str:
    """The message: what is missing, what breaks, and what to do."""
    from qframework.compat.names import KNOWN  # imported only if a name is missing: the table takes milliseconds

    library = name.library
    version = getattr(sys.modules.get(library), "__version__", "of an unknown version")
    known = f"{library} {' to '.join(KNOWN[library])}"
    start = f"{library} {version} has no {name.path}, without which {name.breaks}"
    if name.instead:
        return f"{start}; instead, {name.instead}. Known to work: {known}"
    return f"{start}. Known to work: {known}; install one of these, or a newer qframework"


def optional(owner: Any, path: str, instead: Any) -> Any:
    """The attribute of ``owner`` named by the end of ``path``; ``instead``, with a warning, if it is gone."""
    name = path.rpartition(".")[2]
    if not hasattr(owner, name):
        note_missing(path)
    return getattr(owner, name, instead)


def note_missing(path: str) -> None:
    """Count that ``path`` is replaced, and log it the first time."""
    from qframework.compat.names import NAMES

    replaced[path] += 1
    if replaced[path] == 1:
        logger.warning("qframework: %s (logged once)", sentence(NAMES[path]))


def note_error(error: ImportError | AttributeError) -> None:
    """``note_missing`` for the name that an import did not find; other errors are raised again."""
    name = _name_of(error)
    if name is None:
        raise error
    note_missing(name.path)


def _name_of(error: ImportError | AttributeError) -> Name | None:
    """The row of the name that an error misses; for a module, the first row inside it."""
    from qframework.compat.names import NAMES

    path = _path_of(error)
    if path in NAMES:
        return NAMES[path]
    return next((name for name in NAMES.values() if path and name.path.startswith(f"{path}.")), None)


def _path_of(error: ImportError | AttributeError) -> str:
    if isinstance(error, ModuleNotFoundError):
        module = error.name or ""
        return module if "." in module else ""  # a library that is not installed: the error says it all
    if isinstance(error, ImportError):
        name = re.match(r"cannot import name '(\w+)'", str(error))
        return f"{error.name}.{name[1]}" if name else ""
    owner = error.obj
    if isinstance(owner, ModuleType):
        return f"{owner.__name__}.{error.name}"
    kind = owner if isinstance(owner, type) else type(owner)
    return f"{kind.__module__}.{kind.__qualname__}.{error.name}"
