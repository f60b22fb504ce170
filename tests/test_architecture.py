"""What docs/architecture.md and CONTRIBUTING.md say about the files is true."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "qframework"
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def tree() -> list[str]:
    """Paths, relative to the package, that the tree in architecture.md names, in its order."""
    block = re.search(r"```(?:text)?\nqframework/\n(.*?)```", ARCHITECTURE, re.DOTALL)
    assert block is not None
    paths, room = [], ""
    for line in block[1].splitlines():
        indent, word = len(line) - len(line.lstrip()), line.split()[0]
        if indent == 2:
            room = word if word.endswith("/") else ""
            paths.append(word)
        elif indent == 6 and word.endswith(".py"):
            paths.append(room + word)
    return paths


ROOMS = [path.removesuffix("/").removesuffix(".py") for path in tree() if path.count("/") == path.endswith("/")]


def imported_rooms(module: Path) -> Iterator[str]:
    """First name after ``qframework.`` of everything a module imports, inside functions as well."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith("qframework."))


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", tree())
def test_the_tree_names_files_that_exist(path: str) -> None:
    assert (PACKAGE / path).exists()


def test_the_tree_names_every_room() -> None:
    actual = {path.stem for path in PACKAGE.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert set(ROOMS) == actual - {"__init__", "__pycache__"}


@pytest.mark.parametrize("module", MODULES, ids=relative)
def test_a_room_imports_only_from_the_rooms_above(module: Path) -> None:
    own = ROOMS.index(module.relative_to(PACKAGE).parts[0].removesuffix(".py"))
    below = {room for room in imported_rooms(module) if room in ROOMS[own + 1 :]}
    assert not below


def test_the_stem_table_names_files_that_exist() -> None:
    rows = [line for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if line.startswith("| `")]
    paths = [path for row in rows for path in re.findall(r"`([\w/]+\.py)`", row)]
    assert len(paths) >= 6
    missing = [path for path in paths if not (PACKAGE / path).exists() and not (ROOT / path).exists()]
    assert not missing
