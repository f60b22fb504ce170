"""Fixtures of the attention tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qframework.attention import fallbacks, left_to_pytorch


@pytest.fixture
def no_fallbacks_yet() -> Iterator[None]:
    """The counter of fallbacks is the process's own; each test begins with an empty one."""
    fallbacks.clear()
    yield
    fallbacks.clear()


@pytest.fixture(autouse=True)
def auto_is_a_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are about what is quantized; ``"auto"`` leaves nearly all calls on a CPU to PyTorch."""
    monkeypatch.setattr(left_to_pytorch, "pytorch_is_faster", lambda *call: False)
    monkeypatch.setattr(left_to_pytorch, "known_kinds", set())
