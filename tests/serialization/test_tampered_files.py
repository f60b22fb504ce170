"""Random changes to a saved file: it loads or raises FileFormatError, and no code from it runs."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_files import (
    CODE,
    OFFSET,
    PROGRAM,
    Members,
    X,
    changed,
    code_ran,
    members,
    pickled_bomb,
    torch_bomb,
    write,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import qframework
from qframework.errors import FileFormatError

VALUES = [CODE, f"'{CODE}'", "", "torch.ops.aten.from_file.default", "__class__", "a\nb", "u9", "\ud800", "x" * 5000]
VALUES += [None, True, False, 0, -1, 1, 7, 2**31, 2**63, -(2**63), 10**40, 0.5, float("nan"), float("inf")]
VALUES += [[], {}, [[]], [CODE], {CODE: CODE}, {"as_expr": {"expr_str": CODE, "hint": None}}, {"as_string": CODE}]
VALUES += [{"as_operator": "torch.hub.load"}, {"as_int": 2**60}, [{"as_int": -1}], {"as_none": True}]
DATA = [b"", b"0", b"{}", b"[", pickled_bomb(), torch_bomb(), b"\xff" * 64, b"PK\x05\x06" + bytes(18)]
NAMES = ["archive/data/weights/model.pt", "archive/data/constants/opaque_obj_0", "archive/version", "../x", "a" * 300]


def test_the_canary_sees_code_that_runs() -> None:
    eval(CODE)
    assert code_ran()
    torch.load(io.BytesIO(torch_bomb()), weights_only=False)
    assert code_ran()
    assert not code_ran()


def test_the_unchanged_file_loads(tmp_path: Path) -> None:
    write(tmp_path / "m.pt2", changed(PROGRAM, lambda program: program))
    qframework.load(tmp_path / "m.pt2")


def places(document: Any) -> list[tuple[Any, Any]]:
    """Every container in a document with each of its keys."""
    found, rest = [], [document]
    while rest:
        container = rest.pop()
        keys = list(container) if isinstance(container, dict) else range(len(container))
        found += [(container, key) for key in keys]
        rest += [container[key] for key in keys if isinstance(container[key], dict | list)]
    return found


def tampered_document(data: bytes, draw: Callable[[Any], Any]) -> bytes:
    document = json.loads(data)
    for _ in range(draw(st.integers(1, 2))):
        container, key = draw(st.sampled_from(places(document)))
        if isinstance(container, dict) and draw(st.integers(0, 3)) == 0:
            container[draw(st.sampled_from([CODE, "__class__", key.upper(), key + "_", ""]))] = container.pop(key)
        else:
            container[key] = draw(st.sampled_from(VALUES))
    return json.dumps(document).encode()


@st.composite
def tampered(draw: Callable[[Any], Any]) -> Members:
    """The members of a saved model with one or two changes to their names, number or content."""
    content = members()
    documents = [index for index, (name, _) in enumerate(content) if name.endswith(".json")]
    for _ in range(draw(st.integers(1, 2))):
        index = draw(st.integers(0, len(content) - 1))
        name, data = content[index]
        kind = draw(st.sampled_from(["document"] * 5 + ["name", "case", "repeat", "remove", "add", "data", "cut"]))
        if kind == "document":
            index = draw(st.sampled_from(documents))
            name, data = content[index]
            try:
                content[index] = (name, tampered_document(data, draw))
            except ValueError:  # was cut before
                continue
        elif kind == "name":
            content[index] = (draw(st.sampled_from([*NAMES, name + "_", name[1:]])), data)
        elif kind == "case":
            at = draw(st.integers(0, len(name)))
            content[index] = (name[:at] + name[at:].swapcase(), data)
        elif kind == "repeat":
            content.insert(draw(st.integers(0, len(content))), (name, draw(st.sampled_from([data, *DATA]))))
        elif kind == "remove" and len(content) > 1:
            del content[index]
            documents = [index for index, (name, _) in enumerate(content) if name.endswith(".json")] or [0]
        elif kind == "add":
            content.append((draw(st.sampled_from(NAMES)), draw(st.sampled_from(DATA))))
        elif kind == "data":
            content[index] = (name, draw(st.sampled_from(DATA)))
        else:
            content[index] = (name, data[: draw(st.integers(0, len(data)))])
    return content


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=80, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(tampered())
def test_tampered_files_load_or_are_refused_and_run_nothing(tmp_path_factory: Any, content: Members) -> None:
    path = tmp_path_factory.getbasetemp() / "tampered.pt2"
    try:
        write(path, content)
    except (ValueError, UnicodeEncodeError):
        return
    try:
        model = qframework.load(path)
    except FileFormatError:
        assert not code_ran()
        return
    assert not code_ran()
    with contextlib.suppress(Exception):  # a program on tensors may fail in any way
        model(X, offset=OFFSET)
    assert not code_ran()
