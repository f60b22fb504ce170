"""What kernels in Gluon may not do."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from qframework import kernels

SOURCES = [path for path in sorted(Path(kernels.__file__).parent.glob("*.py")) if "gluon.jit" in path.read_text()]


def constants_assigned_in_loops(source: str) -> list[str]:
    loops = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.For, ast.While))]
    assigned = [node for loop in loops for node in ast.walk(loop) if isinstance(node, ast.Assign)]
    return [ast.unparse(node) for node in assigned if isinstance(node.value, (ast.Constant, ast.UnaryOp))]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_loops_assign_no_constants(path):
    """Triton 3.6 compiles such a loop as if the name kept the value it had before."""
    assert constants_assigned_in_loops(path.read_text()) == []


def test_it_would_be_found():
    assert constants_assigned_in_loops("for tile in tiles:\n    for k in range(begin, 9):\n        pass\n    begin = 0")
    assert len(SOURCES) >= 3
