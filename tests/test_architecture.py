"""docs/architecture.md and CONTRIBUTING.md match the files; there are no import circles and no conflicting names."""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest

from qframework.compat.operators import registered

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
    """All names that a module imports, including those imported in functions."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_architecture_page_is_up_to_date() -> None:
    page = tree.PAGE.read_text()
    assert tree.written(page) == page, "run python docs/tree.py"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_import_order_names_every_module(folder: Path) -> None:
    actual = {path.stem for path in folder.iterdir() if (path / "__init__.py").exists() or path.suffix == ".py"}
    assert set(FOLDERS[folder]) == actual - {"__init__"}


@pytest.mark.parametrize("module", MODULES, ids=relative)
def test_a_module_imports_only_from_modules_above_it(module: Path) -> None:
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


def test_the_table_of_operators_is_complete() -> None:
    """Every operator and overload, and no other."""
    for module in ("kernels", "training"):
        importlib.import_module(f"qframework.{module}")
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("## Operators")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`([\w.]+)\(", row)]
    assert sorted(named) == sorted(registered("qframework"))


def test_stem_table_names_existing_files() -> None:
    rows = [line for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if line.startswith("| `")]
    paths = [path for row in rows for path in re.findall(r"`([\w/]+\.py)`", row)]
    assert len(paths) >= 6
    missing = [path for path in paths if not (PACKAGE / path).exists() and not (ROOT / path).exists()]
    assert not missing


# Import circles -------------------------------------------------------------------------------------------------------


def module_name(path: Path, folder: Path) -> str:
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).removeprefix("typing.") == "TYPE_CHECKING"


def import_statements(node: ast.AST, skip_type_checking: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """All import statements, including those in functions and classes."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node
    elif isinstance(node, ast.If) and skip_type_checking and for_type_checkers(node):
        for child in node.orelse:
            yield from import_statements(child, skip_type_checking)
    else:
        for child in ast.iter_child_nodes(node):
            yield from import_statements(child, skip_type_checking)


def imports(package: Path) -> dict[str, set[str]]:
    """The other modules of a package that each module imports.

    Imports for type checkers count, but for a package's own: there they declare what ``__getattr__`` imports later.
    """
    files = {module_name(path, package.parent): path for path in package.rglob("*.py")}
    found = {}
    for name, path in files.items():
        is_package = path.name == "__init__.py"
        named = set()
        for statement in import_statements(ast.parse(path.read_text()), skip_type_checking=is_package):
            if isinstance(statement, ast.Import):
                named |= {alias.name for alias in statement.names}
                continue
            package = name if is_package else name.rpartition(".")[0]
            above = ".".join(package.split(".")[: len(package.split(".")) - statement.level + 1])
            parts = [above] * (statement.level > 0) + [statement.module] * (statement.module is not None)
            base = ".".join(parts)
            full = {alias.name: f"{base}.{alias.name}" for alias in statement.names}
            named |= {full[each] if full[each] in files else base for each in full}
        found[name] = (named & files.keys()) - {name}
    return found


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """The modules of an import circle, with the first repeated at the end; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


@pytest.mark.parametrize("package", ["qframework", "benchmarks", "examples/demos"])
def test_there_are_no_import_circles(package: str) -> None:
    assert not circle(imports(ROOT / package))


def test_the_package_imports_no_demos_and_no_benchmarks() -> None:
    for path in MODULES:
        statements = import_statements(ast.parse(path.read_text()), skip_type_checking=False)
        names = {s.module if isinstance(s, ast.ImportFrom) else s.names[0].name for s in statements}
        assert not {name for name in names if name is not None and name.partition(".")[0] in ("demos", "benchmarks")}


@pytest.mark.parametrize(
    "lines",
    [
        "from package import b",
        "import package.b",
        "from . import b",
        "from .b import y",
        "def f():\n    from package.b import y",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from package.b import y",
    ],
)
def test_an_import_circle_is_detected(tmp_path: Path, lines: str) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("from package import b\n")
    (package / "a.py").write_text(f"{lines}\n")
    (package / "b.py").write_text("from package.c import z\ny = 1\n")
    (package / "c.py").write_text("z = 1\n")
    assert not circle(imports(package))
    (package / "c.py").write_text("def f():\n    from package.a import x\nz = 1\n")
    assert set(circle(imports(package))) == {"package.a", "package.b", "package.c"}


# Names ----------------------------------------------------------------------------------------------------------------


def public_classes(folder: Path) -> dict[str, list[str]]:
    """The modules that define each public class of a package."""
    found = defaultdict(list)
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(module_name(path, folder.parent))
    return found


def test_no_two_public_classes_share_a_name() -> None:
    homes = public_classes(PACKAGE)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def hidden_modules(package: ModuleType) -> Iterator[str]:
    """Modules hidden by an attribute of their package with the same name."""
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if found.name.endswith(".__main__"):
            continue
        module = importlib.import_module(found.name)
        parent, _, leaf = found.name.rpartition(".")
        if getattr(importlib.import_module(parent), leaf) is not module:
            yield found.name


def test_no_name_hides_a_module() -> None:
    assert list(hidden_modules(importlib.import_module("qframework"))) == []


def test_a_hidden_module_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package_that_hides"
    package.mkdir()
    (package / "__init__.py").write_text("from package_that_hides.act import act\n")
    (package / "act.py").write_text("def act(): pass\n")
    (package / "other.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert list(hidden_modules(importlib.import_module("package_that_hides"))) == ["package_that_hides.act"]
