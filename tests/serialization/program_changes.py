"""Changes to the program of a saved model, for the tests of what its grammar refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile_files import PROGRAM, changed, code_ran, write

import qframework
from qframework.errors import FileFormatError


def node(program: Any, name: str = "linear") -> Any:
    nodes = program["graph_module"]["graph"]["nodes"]
    return next(each for each in nodes if each["name"].startswith(name))


def tensor(program: Any) -> Any:
    return program["graph_module"]["graph"]["tensor_values"]["x"]


def call(program: Any) -> Any:
    return program["graph_module"]["module_call_graph"][0]["signature"]


def structure(kind: str, context: str) -> str:
    leaf = {"type": None, "context": None, "children_spec": []}
    return json.dumps([1, {"type": kind, "context": context, "children_spec": [leaf]}])


def rename(program: Any, old: str, new: str) -> Any:
    return json.loads(json.dumps(program).replace(json.dumps(old), json.dumps(new)))


def operand(program: Any, **value: Any) -> None:
    node(program)["inputs"][0]["arg"] = value


def check_refused(folder: Path, attack: Callable[[Any], Any]) -> None:
    """``load`` refuses the saved model with this change to its program, by name, and runs nothing."""

    def change(program: Any) -> Any:
        before = json.dumps(program)
        result = attack(program)
        result = program if not isinstance(result, dict | list) else result
        assert json.dumps(result) != before
        return result

    write(folder / "m.pt2", changed(PROGRAM, change))
    with pytest.raises(FileFormatError, match=r"m\.pt2"):
        qframework.load(folder / "m.pt2")
    assert not code_ran()
