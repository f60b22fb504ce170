"""Fixtures of the attention tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qframework.attention import fallbacks


@pytest.fixture
def no_fallbacks_yet() -> Iterator[None]:
    """The counter of fallbacks is the process's own; each test begins with an empty one."""
    fallbacks.clear()
    yield
    fallbacks.clear()
