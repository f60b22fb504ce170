"""Fixtures of the tests of saved models."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hostile_files import CODE
from saved_models import DYNAMIC_BATCH, convert

import qframework


@pytest.fixture
def converted() -> torch.fx.GraphModule:
    return convert()


@pytest.fixture
def saved(converted: torch.fx.GraphModule, tmp_path: Path) -> Path:
    path = tmp_path / "model.pt2"
    qframework.save(converted, path, (torch.randn(4, 5, 16),), dynamic_shapes=DYNAMIC_BATCH, config={"note": "kept"})
    return path


@pytest.fixture
def canary_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An importable module that sets the canary."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "canary_module.py").write_text(f"import enum\n{CODE}\nA = enum.Enum('A', 'A')\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "canary_module", raising=False)
