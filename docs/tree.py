"""The tree in docs/architecture.md, from the first line of every module's docstring.

``python docs/tree.py`` writes it, ``python docs/tree.py --check`` fails where the page differs.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "qframework"
PAGE = Path(__file__).parent / "architecture.md"
# A room imports only from those before it; rooms of a room likewise.
ROOMS = (
    *(
        "errors",
        "arguments",
        "outputs",
        "files",
        "import_hook",
        "lazy",
        "listeners",
        "versions",
        "forks",
        "numerics",
        "compat",
    ),
    *("batches", "fallbacks", "kernels", "devices", "attention", "graph", "quantizer", "backend", "training"),
    *("serialization", "export", "conversion", "integrations", "evaluation", "tuning", "diagnosis", "cli", "__main__"),
)
COLUMN = 28  # where descriptions begin
ROOMS_OF = {
    "kernels": (
        *("runtime", "quantize", "transpose", "hadamard", "norm", "add_norm", "depthwise"),
        *("linear", "attention", "blocks", "packaged"),
    )
}


def tree() -> str:
    """All modules of the package, in the order of the rooms, each with what its docstring begins with."""
    lines = ["qframework/", *_entries(PACKAGE, ROOMS, "  ")]
    return "\n".join(lines) + "\n"


def _entries(folder: Path, first: tuple[str, ...], indent: str) -> Iterator[str]:
    def order(path: Path) -> tuple[int, str]:
        return (first.index(path.stem) if path.stem in first else len(first), path.stem)

    modules = [path for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    for path in sorted(modules, key=order):
        if path.name in ("__init__.py", "__main__.py"):
            continue
        if path.is_dir():
            yield f"{indent + path.name + '/':<{COLUMN}} {summary(path / '__init__.py')}"
            yield from _entries(path, ROOMS_OF.get(path.name, ()) if folder == PACKAGE else (), indent + "  ")
        else:
            yield f"{indent + path.name:<{COLUMN}} {summary(path)}"


def summary(path: Path) -> str:
    """The first line of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert text, f"{path} has no docstring"
    return text.splitlines()[0].rstrip(".:")


def written(page: str) -> str:
    """``page`` with this tree in the place of its own."""
    return re.sub(r"```text\nqframework/\n.*?```", lambda _: f"```text\n{tree()}```", page, count=1, flags=re.DOTALL)


if __name__ == "__main__":
    page = PAGE.read_text()
    if "--check" in sys.argv[1:]:
        sys.exit(0 if written(page) == page else f"{PAGE} is out of date: run python docs/tree.py")
    PAGE.write_text(written(page))
