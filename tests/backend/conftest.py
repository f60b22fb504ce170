"""Backend tests compile, so each starts with an empty cache."""

import pytest
from fake_hopper import compiled, hopper  # noqa: F401  (fixtures)

import qframework.backend.float_linear  # noqa: F401  (the conftest of all tests patches it if it is imported)
from qframework.backend import linear_gain, outline_blocks


@pytest.fixture(autouse=True)
def _fresh_dynamo(fresh_dynamo: None) -> None:
    pass


@pytest.fixture(autouse=True)
def _without_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantize small models on a Hopper GPU too, where INT8 does not pay for them; test_linear_gain.py estimates."""
    monkeypatch.setattr(linear_gain, "_multiprocessors", lambda device: None)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outline the blocks of small models too."""
    monkeypatch.setattr(outline_blocks, "_LEAST_SAVED", 4)
