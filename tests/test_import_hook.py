"""import_hook.py: a function is called once, when a module is imported, whatever the order."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qframework.import_hook import watch, when_imported

NAME = "a_module_of_another_library"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield tmp_path
    sys.meta_path[:] = finders
    sys.modules.pop(NAME, None)


def test_before_and_after_the_import(folder: Path) -> None:
    (folder / f"{NAME}.py").write_text("value = 3\n")
    finders, seen = list(sys.meta_path), []
    when_imported(NAME, lambda: seen.append(("first", sys.modules[NAME].value)))
    when_imported(NAME, lambda: seen.append(("second", sys.modules[NAME].value)))
    assert not seen
    module = importlib.import_module(NAME)
    assert seen == [("first", 3), ("second", 3)]
    assert sys.meta_path == finders
    when_imported(NAME, lambda: seen.append(("third", 3)))
    assert seen[2:] == [("third", 3)]

    assert type(module.__loader__) is type(module.__spec__.loader) is importlib.machinery.SourceFileLoader
    assert inspect.getsource(module) == "value = 3\n"
    importlib.reload(module)
    assert len(seen) == 3


def test_a_module_that_is_being_imported(folder: Path) -> None:
    """A module that it imports asks for it, before it is complete."""
    (folder / f"{NAME}.py").write_text("import sys\nsys.ask()\nvalue = 3\n")
    seen: list[int] = []
    watch(NAME)
    sys.ask = lambda: when_imported(NAME, lambda: seen.append(sys.modules[NAME].value))  # type: ignore[attr-defined]
    try:
        importlib.import_module(NAME)
    finally:
        del sys.ask  # type: ignore[attr-defined]
    assert seen == [3]


def test_asking_for_the_module_is_no_import(folder: Path) -> None:
    (folder / f"{NAME}.py").write_text("value = 3\n")
    seen: list[int] = []
    when_imported(NAME, lambda: seen.append(1))
    spec = importlib.util.find_spec(NAME)
    assert spec is not None
    assert spec.loader is not None
    assert spec.loader.get_source(NAME) == "value = 3\n"  # type: ignore[attr-defined]
    assert not seen
    importlib.import_module(NAME)
    assert seen == [1]


def test_an_import_that_fails_can_be_tried_again(folder: Path) -> None:
    seen: list[int] = []
    when_imported(NAME, lambda: seen.append(1))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(NAME)
    (folder / f"{NAME}.py").write_text("raise OSError('at first')\n")
    importlib.invalidate_caches()
    with pytest.raises(OSError, match="at first"):
        importlib.import_module(NAME)
    assert not seen
    (folder / f"{NAME}.py").write_text("value = 'now it works'\n")
    importlib.invalidate_caches()
    importlib.import_module(NAME)
    assert seen == [1]
