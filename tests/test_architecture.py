"""What docs/architecture.md and CONTRIBUTING.md say about the files is true."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "qframework"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


spec = importlib.util.spec_from_file_location("tree", ROOT / "docs" / "tree.py")
assert spec is not None
assert spec.loader is not None
tree = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tree)
FOLDERS = {PACKAGE: tree.ROOMS} | {PACKAGE / room: rooms for room, rooms in tree.ROOMS_OF.items()}


def imported(module: Path) -> Iterator[str]:
    """Everything a module imports, inside functions as well, with the names it takes."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_the_page_holds_the_tree() -> None:
    page = tree.PAGE.read_text()
    assert tree.written(page) == page, "run python docs/tree.py"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_order_names_every_room(folder: Path) -> None:
    actual = {path.stem for path in folder.iterdir() if (path / "__init__.py").exists() or path.suffix == ".py"}
    assert set(FOLDERS[folder]) == actual - {"__init__"}


@pytest.mark.parametrize("module", MODULES, ids=relative)
def test_a_room_imports_only_from_the_rooms_above(module: Path) -> None:
    checked = 0
    for folder, rooms in FOLDERS.items():
        if folder not in module.parents or module == folder / "__init__.py":
            continue
        own = rooms.index(module.relative_to(folder).parts[0].removesuffix(".py"))
        prefix = ".".join(folder.relative_to(ROOT).parts) + "."
        inside = {name.removeprefix(prefix).split(".")[0] for name in imported(module) if name.startswith(prefix)}
        assert not inside & set(rooms[own + 1 :])
        checked += 1
    assert checked or module == PACKAGE / "kernels" / "__init__.py"


def test_the_stem_table_names_files_that_exist() -> None:
    rows = [line for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if line.startswith("| `")]
    paths = [path for row in rows for path in re.findall(r"`([\w/]+\.py)`", row)]
    assert len(paths) >= 6
    missing = [path for path in paths if not (PACKAGE / path).exists() and not (ROOT / path).exists()]
    assert not missing
