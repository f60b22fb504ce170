from __future__ import annotations

from pathlib import Path

import pytest
from cli_runs import TINY

from qframework.evaluation import digits_vit


@pytest.fixture(autouse=True)
def small_digits_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh_dynamo: None) -> None:
    """In an empty directory; ``digits`` is a small model, trained for one epoch."""
    monkeypatch.chdir(tmp_path)
    original = digits_vit.load_or_train
    monkeypatch.setattr(digits_vit, "load_or_train", lambda path: original(path, TINY, show_progress=False))
