"""Measurements kept in a file as they are made, so that what was interrupted goes on where it stopped.

One JSON object to a line: first the settings that all measurements depend on, then ``{"key": ..., "value": ...}``.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from qframework.errors import QFrameworkError
from qframework.files import open_regular, write_text

Value = TypeVar("Value")


class Journal:
    """``journal(key, measure)`` gives the value of ``key``: the one on file, or else what ``measure()`` returns.

    Args:
        path: the file, made with its folder where it is missing; None keeps nothing.
        settings: JSON-able; what the measurements depend on.

    Raises:
        QFrameworkError: the file is no journal, or one of other settings.
    """

    def __init__(self, path: Path | None = None, settings: Mapping[str, Any] | None = None) -> None:
        self._path = path
        self._values: dict[str, Any] = {}
        if path is None:
            return
        settings = json.loads(json.dumps(settings or {}))
        if path.exists():
            whole = _read(path)
            _check(path, whole, settings)
            self._values = {entry["key"]: entry["value"] for entry in whole[1:]}
            _write(path, whole)  # without the line that was cut off
        else:
            _write(path, [{"settings": settings}])

    def __call__(self, key: str, measure: Callable[[], Value]) -> Value:
        if key not in self._values:
            value = measure()
            self._values[key] = value
            self._append({"key": key, "value": value})
        return self._values[key]

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    def _append(self, entry: Mapping[str, Any]) -> None:
        if self._path is None:
            return
        line = (json.dumps(entry) + "\n").encode()
        with self._path.open("ab", buffering=0) as file:
            end = file.tell()
            try:
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(self._path))
                os.fsync(file.fileno())
            except BaseException:
                file.truncate(end)  # or the next entry would continue half a line
                raise


def _read(path: Path) -> list[dict[str, Any]]:
    """The objects of all whole lines; the last line may have been cut off."""
    entries = []
    with open_regular(path) as file:
        *lines, rest = file.read().decode(errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        try:
            entries.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise QFrameworkError(f"{path}, line {number}: no journal of measurements: {error}") from error
    if not entries and rest:
        raise QFrameworkError(f"{path} is no journal of measurements; name another file or remove it")
    return entries


def _check(path: Path, entries: list[Any], settings: Mapping[str, Any]) -> None:
    if not entries:
        entries.append({"settings": settings})  # cut off before its first line was whole
    if not isinstance(entries[0], dict) or "settings" not in entries[0]:
        raise QFrameworkError(f"{path} is no journal of measurements; name another file or remove it")
    if not all(isinstance(entry, dict) and {"key", "value"} == set(entry) for entry in entries[1:]):
        raise QFrameworkError(f"{path} holds lines that are no measurements; name another file or remove it")
    before = entries[0]["settings"]
    names = sorted(set(before) | set(settings))
    changed = [name for name in names if before.get(name) != settings.get(name)]
    if changed:
        told = "; ".join(f"{name} was {before.get(name)!r}, is {settings.get(name)!r}" for name in changed)
        raise QFrameworkError(
            f"{path} holds measurements of other settings ({told}); name another file, remove it, or use its settings"
        )


def _write(path: Path, entries: list[Any]) -> None:
    write_text(path, "".join(json.dumps(entry) + "\n" for entry in entries))
