"""A file of measurements that is written as they are made, so that an interrupted run can resume.

One JSON object per line: first the settings that all measurements depend on, then ``{"key": ..., "value": ...}``.
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
    """``journal(key, measure)`` returns the recorded value of ``key``, or calls ``measure()`` and records the result.

    Args:
        path: the file, created with its folder if missing; None records in memory only.
        settings: JSON-able; everything the measurements depend on.

    Raises:
        QFrameworkError: the file is not a journal, or its settings differ.
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
            _write(path, whole)  # drops a truncated last line
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
                file.truncate(end)  # drop half a line
                raise


def _read(path: Path) -> list[dict[str, Any]]:
    """The objects of all complete lines; the last line may be truncated."""
    entries = []
    with open_regular(path) as file:
        *lines, rest = file.read().decode(errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        try:
            entries.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise QFrameworkError(f"{path}, line {number}: not a journal of measurements: {error}") from error
    if not entries and rest:
        raise QFrameworkError(f"{path} is not a journal of measurements. Choose another file or remove it")
    return entries


def _check(path: Path, entries: list[Any], settings: Mapping[str, Any]) -> None:
    if not entries:
        entries.append({"settings": settings})  # truncated in the first line
    if not isinstance(entries[0], dict) or "settings" not in entries[0]:
        raise QFrameworkError(f"{path} is not a journal of measurements. Choose another file or remove it")
    if not all(isinstance(entry, dict) and {"key", "value"} == set(entry) for entry in entries[1:]):
        raise QFrameworkError(f"{path} has lines that are not measurements. Choose another file or remove it")
    before = entries[0]["settings"]
    names = sorted(set(before) | set(settings))
    changed = [name for name in names if before.get(name) != settings.get(name)]
    if changed:
        told = "; ".join(f"{name} was {before.get(name)!r}, is {settings.get(name)!r}" for name in changed)
        raise QFrameworkError(
            f"{path} holds measurements of other settings ({told}). Choose another file, remove it, or use its settings"
        )


def _write(path: Path, entries: list[Any]) -> None:
    write_text(path, "".join(json.dumps(entry) + "\n" for entry in entries))
