"""Backend tests compile, so each starts with an empty cache."""

import pytest


@pytest.fixture(autouse=True)
def _fresh_dynamo(fresh_dynamo: None) -> None:
    pass
