"""Gluon kernels assign no Python constants in loops, which Triton 3.6 miscompiles."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from qframework import kernels

SOURCES = [path for path in sorted(Path(kernels.__file__).parent.rglob("*.py")) if "gluon.jit" in path.read_text()]


def constants_assigned_in_loops(source: str) -> list[str]:
    loops = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.For, ast.While))]
    assigned = [node for loop in loops for node in ast.walk(loop) if isinstance(node, (ast.Assign, ast.AnnAssign))]
    return [ast.unparse(node) for node in assigned if node.value is not None and holds_a_constant(node.value)]


def holds_a_constant(value: ast.expr) -> bool:
    """A number, possibly signed, in a tuple, or in ``gl.constexpr``."""
    if isinstance(value, ast.Tuple):
        return any(map(holds_a_constant, value.elts))
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).endswith("constexpr")
    return isinstance(value, (ast.Constant, ast.UnaryOp))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_loops_assign_no_constants(path):
    """Triton 3.6 compiles such a loop as if the variable kept its previous value."""
    assert constants_assigned_in_loops(path.read_text()) == []


@pytest.mark.parametrize("assignment", ["begin = 0", "begin, end = k, -1", "begin: int = 0", "begin = gl.constexpr(0)"])
def test_an_assigned_constant_is_found(assignment):
    loop = f"for tile in tiles:\n    for k in range(begin, 9):\n        pass\n    {assignment}"
    assert len(constants_assigned_in_loops(loop)) == 1
    assert constants_assigned_in_loops("for tile in tiles:\n    begin = gl.where(tile > 0, 0, 1)") == []
    assert len(SOURCES) >= 3
