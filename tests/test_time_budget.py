"""The plugin for tests within a time: what it leaves out, keeps and puts last."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from time_budget import Budget, names, tree

REPOSITORY = Path(__file__).parents[1]
TESTS = """
import time, pytest

def test_fails():
    assert 1 + 1 == 3

def test_skips():
    pytest.skip("no second GPU")

@pytest.mark.parametrize("number", range(4))
def test_sleeps(number):
    time.sleep(0.3)
"""


def run(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """The record, and what was printed."""
    (folder / "test_first.py").write_text(TESTS)
    (folder / "test_second.py").write_text("def test_quick():\n    pass\n")
    (folder / "pytest.ini").write_text("[pytest]\n")
    record = folder / "record.json"
    files = ["--rootdir", str(folder), "-c", str(folder / "pytest.ini"), "--record", str(record), str(folder)]
    plugins = ["-p", "no:cacheprovider", "-p", "tests.time_budget"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, *files, *arguments]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert record.exists(), result.stdout + result.stderr
    return json.loads(record.read_text()), result.stdout


def test_a_file_that_takes_too_long_leaves_time_for_the_next(tmp_path: Path) -> None:
    record, said = run(tmp_path, "--file-limit", "0.5")
    assert record["passed"] == {"test_first.py": {"test_sleeps": ["0", "1"]}, "test_second.py": {"test_quick": [""]}}
    assert record["skipped"] == {"test_first.py": {"test_skips": [""]}}
    assert record["not_reached"] == {"test_first.py": {"test_sleeps": ["2", "3"]}}
    assert "assert (1 + 1) == 3" in record["failed"]["test_first.py::test_fails"]
    assert "not reached: 2 of 7 tests" in said
    assert "    2 test_first.py" in said


def test_tests_that_passed_before_come_last_in_several_processes_too(tmp_path: Path) -> None:
    (tmp_path / "known.json").write_text(json.dumps({"passed": {"test_first.py": {"test_sleeps": ["0", "1", "2"]}}}))
    record, _ = run(tmp_path, "--known", str(tmp_path / "kn*.json"), "--file-limit", "0.5", "-n", "1")
    assert record["passed"] == {"test_first.py": {"test_sleeps": ["3", "0"]}, "test_second.py": {"test_quick": [""]}}
    assert record["not_reached"] == {"test_first.py": {"test_sleeps": ["1", "2"]}}


@pytest.mark.parametrize(("left", "answer"), [(60.0, None), (-1.0, True)])
def test_nothing_starts_after_the_end(left: float, answer: bool | None) -> None:
    session: Any = SimpleNamespace(_setupstate=SimpleNamespace(teardown_exact=lambda nextitem: None))
    item: Any = SimpleNamespace(nodeid="a.py::test_x", session=session)
    assert Budget(time.time() + left, 60.0).pytest_runtest_protocol(item, None) is answer


def test_names_survive_being_sorted_into_a_tree() -> None:
    found = ["a.py::test_x[1-y[2]]", "a.py::test_x[2]", "b.py::TestY::test_z"]
    assert list(names(tree(found))) == found
