"""Backend tests compile, so each starts with an empty cache."""

import pytest

import qframework.backend.float_linear  # noqa: F401  (the conftest of all tests patches it if it is imported)
from qframework.backend import linear_gain


@pytest.fixture(autouse=True)
def _fresh_dynamo(fresh_dynamo: None) -> None:
    pass


@pytest.fixture(autouse=True)
def _without_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantize small models on a Hopper GPU too, where INT8 does not pay for them; test_linear_gain.py estimates."""
    monkeypatch.setattr(linear_gain, "_multiprocessors", lambda device: None)
