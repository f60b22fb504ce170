"""Backend tests compile, so each starts with an empty cache."""

import pytest

import qframework.backend.float_linear  # noqa: F401  (the conftest of all tests patches it if it is imported)


@pytest.fixture(autouse=True)
def _fresh_dynamo(fresh_dynamo: None) -> None:
    pass
