"""Tampered files for the tests of loading, and a canary that shows whether code from one ran."""

from __future__ import annotations

import io
import json
import pickle
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CANARY = "qframework_canary"
CODE = f"__import__('sys').__setattr__('{CANARY}', True)"
MODEL = Path(__file__).parent.parent / "data" / "saved_by_torch_2.15.pt2"
PROGRAM, WEIGHTS, CONSTANTS = (
    "archive/models/model.json",
    "archive/data/weights/model_weights_config.json",
    "archive/data/constants/model_constants_config.json",
)
Members = list[tuple[str, bytes]]
# Inputs of the model.
OFFSET = {"by": torch.ones(16)}
X = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))


class Bomb:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return exec, (CODE.replace("__setattr__", "__dict__.__setitem__"),)


def pickled_bomb() -> bytes:
    return pickle.dumps(Bomb(), protocol=2)


def torch_bomb() -> bytes:
    buffer = io.BytesIO()
    torch.save(Bomb(), buffer, pickle_protocol=2)
    return buffer.getvalue()


def code_ran() -> bool:
    """Whether the canary is set; clears it."""
    return sys.__dict__.pop(CANARY, False)


def members() -> Members:
    with zipfile.ZipFile(MODEL) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


def write(path: Path, content: Members) -> None:
    """Write an archive of these members in this order; names may repeat."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content:
            info = zipfile.ZipInfo("x")
            info.filename = name  # as it is, without ZipInfo's corrections
            archive.writestr(info, data)


def with_member(name: str, data: bytes, before: str | None = None) -> Members:
    """All members, with one replaced or added; ``before`` ("first" or "last") adds a duplicate there instead."""
    content = members()
    if before is not None:
        return [(name, data), *content] if before == "first" else [*content, (name, data)]
    return [(n, data if n == name else d) for n, d in content] + ([] if name in dict(content) else [(name, data)])


def changed(name: str, change: Callable[[Any], Any]) -> Members:
    """All members, with one JSON document changed in place, or replaced by the result of ``change``."""
    document = json.loads(dict(members())[name])
    replaced = change(document)
    return with_member(name, json.dumps(document if replaced is None else replaced).encode())
