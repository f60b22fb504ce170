"""The grammar of a saved program: names, strings and numbers that PyTorch would write into source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile_files import CODE, PROGRAM, changed, write
from program_changes import call, check_refused, node, operand, rename, tensor

import qframework
from qframework.errors import FileFormatError

VALUES: dict[str, Callable[[Any], Any]] = {
    "name of an input": lambda p: rename(p, "x", f"x, y={CODE}"),
    "name of a value": lambda p: rename(p, node(p)["name"], f"{CODE}; a"),
    "name of a value in a new line": lambda p: rename(p, node(p)["name"], f"a = 1\n    {CODE}\n    b"),
    "keyword as a name": lambda p: rename(p, node(p)["name"], "import"),
    "name between underscores": lambda p: rename(p, node(p)["name"], "__class__"),
    "name of a parameter": lambda p: rename(p, "blocks.0.qkv.bias", f'a", {CODE})#'),
    "parameter between underscores": lambda p: rename(p, "blocks.0.qkv.bias", "__class__.x"),
    "name of an argument": lambda p: call(p).update(forward_arg_names=["x", f"offset={CODE}"]),
    "string with quotes": lambda p: operand(p, as_string=f"' + {CODE} + '"),
    "string where a number belongs": lambda p: operand(p, as_int=CODE),
    "string in a list of numbers": lambda p: operand(p, as_ints=[1, CODE]),
    "constant input": lambda p: p["graph_module"]["signature"]["input_specs"].append(
        {"constant_input": {"name": "flag", "value": {"as_string": f"' or {CODE} or '"}}}
    ),
    "device": lambda p: tensor(p).update(device={"type": CODE, "index": None}),
    "sparse": lambda p: tensor(p).update(layout=1),
    "infinity": lambda p: operand(p, as_int=float("inf")),
    "huge integer": lambda p: operand(p, as_int=10**30),
    "list": lambda p: [p],
    "null": lambda p: p.update(graph_module=None),
}


@pytest.mark.usefixtures("canary_module")
@pytest.mark.parametrize("attack", VALUES.values(), ids=VALUES)
def test_values_that_are_no_plain_names_strings_or_numbers_are_refused(
    tmp_path: Path, attack: Callable[[Any], Any]
) -> None:
    check_refused(tmp_path, attack)


@pytest.mark.parametrize("name", ["self", "torch", "device", "inf", "fx_pytree", "pytree"])
def test_values_named_like_what_generated_source_needs_are_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path / "m.pt2", changed(PROGRAM, lambda p: rename(p, "linear", name)))
    with pytest.raises(FileFormatError, match="source does not need"):
        qframework.load(tmp_path / "m.pt2")
