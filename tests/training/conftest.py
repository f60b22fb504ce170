"""Models of these tests are tiny, and INT8 would not make them faster."""

from __future__ import annotations

import pytest

from qframework.training import plan


@pytest.fixture(autouse=True)
def every_width_is_converted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ``skip_slower=False``, but in tests of that argument."""
    if request.node.path.name != "test_skip_slower.py":
        monkeypatch.setattr(plan, "FASTER_FROM", 0)
        monkeypatch.setattr(plan, "FASTER_FROM_MANY", 0)
