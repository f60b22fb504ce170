"""A pytest plugin that runs one of 16 slices of the selected tests, as ``make test-slice`` does.

    python -m pytest -p tests.slices --slice 5 -m "full and not gpu and not interpreter"

A slice is a hexadecimal digit: the first of the SHA-256 of the tests' ids. So a test stays in its slice when others are
added. ``make test-slice`` takes the last digit of the commit's id.
"""

from __future__ import annotations

import hashlib

import pytest

SLICES = "0123456789abcdef"


def slice_of(test: str) -> str:
    """The slice of the test with this id."""
    return hashlib.sha256(test.encode()).hexdigest()[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slice", choices=list(SLICES), required=True, help="of the selected tests, run this sixteenth")


def pytest_report_header(config: pytest.Config) -> str:
    chosen = config.getoption("--slice")
    return f"slice {chosen} of 0 to f; again: make test-slice SLICE={chosen}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    others = [item for item in items if slice_of(item.nodeid) != config.getoption("--slice")]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if slice_of(item.nodeid) == config.getoption("--slice")]
