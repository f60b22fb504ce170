"""The journal: resuming, other settings, and damaged files."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from qframework.errors import QFrameworkError
from qframework.tuning.journal import Journal

SETTINGS = {"model": "digits", "limit": None}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "a.jsonl"


def never() -> int:
    raise AssertionError("measured again")


def test_a_value_is_measured_once(path: Path) -> None:
    values = {"a": 0.1, "b": [1, {"c": None}], "c": 1e-300}
    journal = Journal(path, SETTINGS)
    for key, value in values.items():
        assert journal(key, lambda value=value: value) == value
        assert journal(key, never) == value
    again = Journal(path, SETTINGS)
    assert {key: again(key, never) for key in values} == values
    assert len(again) == len(values)
    assert "a" in again
    assert "d" not in again


def test_without_a_file_values_are_kept_in_memory() -> None:
    journal = Journal()
    assert journal("a", lambda: 1) == journal("a", never) == 1


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_truncated_line_is_measured_again(path: Path, cut: int) -> None:
    journal = Journal(path, SETTINGS)
    journal("a", lambda: 1)
    journal("b", lambda: 2)
    path.write_bytes(path.read_bytes()[:-cut])
    resumed = Journal(path, SETTINGS)
    assert resumed("a", never) == 1
    assert resumed("b", lambda: 3) == 3
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"settings": SETTINGS}, {"key": "a", "value": 1}, {"key": "b", "value": 3}]


def test_a_failed_measurement_is_not_kept(path: Path) -> None:
    with pytest.raises(AssertionError):
        Journal(path, SETTINGS)("a", never)
    assert "a" not in Journal(path, SETTINGS)


def test_other_settings_are_refused_by_name(path: Path) -> None:
    Journal(path, SETTINGS)
    with pytest.raises(QFrameworkError, match=r"other settings \(batches was None, is 2; limit was None, is 5\)"):
        Journal(path, {**SETTINGS, "limit": 5, "batches": 2})


@pytest.mark.parametrize(
    "content", ["a text", "a text\n", "[1]\n", '{"key": "a", "value": 1}\n', '{"settings": {}}\n3\n']
)
def test_a_file_that_is_no_journal_is_refused_and_kept(path: Path, content: str) -> None:
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(QFrameworkError, match=r"a\.jsonl"):
        Journal(path, {})
    assert path.read_text() == content


def test_half_a_line_on_a_full_disk_is_removed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(path, SETTINGS)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full_disk)
        with pytest.raises(OSError, match="No space left"):
            journal("a", lambda: 1)
    assert journal("b", lambda: 2) == 2
    assert "b" in Journal(path, SETTINGS)
    assert "a" not in Journal(path, SETTINGS)


def full_disk(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
