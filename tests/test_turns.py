"""Turns of long tests: which a test runs at, and which a commit has."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from turns import ALL, COSTS, DIGITS, costs_of, is_its_turn, period, runs_at

REPOSITORY = Path(__file__).parents[1]
TESTS = """
import pytest

@pytest.mark.full
@pytest.mark.parametrize("number", range(200))
def test_even(number):
    assert number % 2 == 0

def test_short():
    pass
"""


def run(folder: Path, *arguments: str) -> str:
    """What pytest prints about a short test and 200 cases, every second of which fails."""
    (folder / "test_example.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = full: ...\n")
    files = ["--rootdir", str(folder), "-c", str(folder / "pytest.ini"), str(folder)]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.turns", *files, *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("processes", [(), ("-n", "2")])
def test_a_run_has_the_tests_of_its_turn_and_says_how_to_repeat_it(tmp_path: Path, processes: tuple[str, ...]) -> None:
    said = run(tmp_path, "-rA", "--turn", "c", *processes)
    assert "again: make test TURN=c" in said
    cases = [f"test_example.py::test_even[{n}]" for n in range(200)]
    expected = {name for name in cases if is_its_turn("c", name, 16)} | {"test_example.py::test_short"}
    assert 4 < len(expected) < 30
    ran = {line.split()[1] for line in said.splitlines() if line.startswith(("PASSED ", "FAILED "))}
    assert {test.rpartition("/")[2] for test in ran} == expected


@pytest.mark.parametrize("processes", [(), ("-n", "2")])
def test_costs_of_a_run_are_added_to_a_file(tmp_path: Path, processes: tuple[str, ...]) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"test_other.py": {"test_long": 3.0}}))
    (tmp_path / "test_slow.py").write_text(
        "import time, pytest\n@pytest.mark.parametrize('s', [0.6, 1.0])\ndef test_sleeps(s):\n    time.sleep(s)\n"
    )
    run(tmp_path, "--record-costs", str(costs), *processes)
    written = json.loads(costs.read_text())
    assert written.pop("test_other.py") == {"test_long": 3.0}
    assert list(written) == ["test_slow.py"]
    assert list(written["test_slow.py"]) == ["test_sleeps"]
    assert 0.8 <= written["test_slow.py"]["test_sleeps"] < 2


def test_the_longer_a_test_takes_the_rarer_it_runs() -> None:
    assert [period(seconds) for seconds in (0.0, 0.5, 0.6, 1.0, 1.1, 2.0, 2.1, 100.0)] == [1, 1, 2, 2, 4, 4, 8, 8]
    costs = {"a.py": {"test_f": 1.5}}
    cases = [f"a.py::test_f[{n}]" for n in range(400)]
    ran = {turn: [case for case in cases if runs_at(turn, case, False, costs)] for turn in DIGITS}
    assert all(70 <= len(each) <= 130 for each in ran.values())  # a fourth
    assert all(sum(case in each for each in ran.values()) == 4 for case in cases)
    assert all(runs_at(turn, "a.py::test_f_too[1]", False, costs) for turn in DIGITS)
    assert sum(runs_at(turn, "a.py::test_g[1]", True, costs) for turn in DIGITS) == 1


def test_tests_that_share_a_setup_run_together() -> None:
    setups, cases = {"a.py": 9.0, "b.py": 0.1}, {"a.py::f": 9.1, "a.py::g": 0.0, "b.py::f[0]": 0.9, "b.py::f[1]": 1.5}
    costs = costs_of(cases, setups, {})
    assert costs == {"a.py": {ALL: 9.1}, "b.py": {"f": 1.2}}
    turns = [turn for turn in DIGITS if runs_at(turn, "a.py::f", False, costs)]
    assert len(turns) == 2
    assert turns == [turn for turn in DIGITS if runs_at(turn, "a.py::g", False, costs)]
    assert costs_of({"a.py::f": 3.0}, {}, costs) == costs, "beside the shared setup, one test of a file is none"


def test_a_turn_does_not_depend_on_the_process() -> None:
    assert [turn for turn in DIGITS if is_its_turn(turn, "tests/test_turns.py::test_example[1]", 8)] == ["4", "c"]


def test_stored_costs_are_of_tests_that_exist() -> None:
    costs = json.loads(COSTS.read_text())
    assert len(costs) > 100
    gone = []
    for file, tests in costs.items():
        path = REPOSITORY / file
        defined = set(re.findall(r"^ *(?:def|class) (\w+)", path.read_text(), re.M)) if path.exists() else set()
        gone += [f"{file}::{test}" for test in tests if not set(test.replace(ALL, "").split("::")) - {""} <= defined]
        gone += [file] * (not path.exists())
    assert not gone, "rename them in tests/costs.json, or remove them there"


def own_environment() -> dict[str, str]:
    """Without the repository around a temporary folder, and what make hands on to the tests that it runs."""
    foreign = ("GIT_", "MAKE", "MFLAGS", "TURN")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


@pytest.mark.parametrize("clone", ["whole", "without commits", "without history"])
def test_make_takes_the_last_digit_of_the_commit_or_zero(
    tmp_path: Path, clone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURN", "b")  # as in make test TURN=b
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, tmp_path)
    environment = own_environment() | {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    author = [item for name in ("name", "email") for item in ("-c", f"user.{name}=nobody")]

    def said(*command: str) -> str:
        return subprocess.run(
            command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
        ).stdout.strip()

    digit = "0"
    if clone != "without history":
        said("git", "init", "--quiet")
    if clone == "whole":
        said("git", *author, "commit", "--quiet", "--allow-empty", "--message", "first")
        digit = said("git", "rev-parse", "HEAD")[-1]
    for target in ("test", "test-oldest"):
        assert f"--turn {digit} " in said("make", "--dry-run", target)
        assert "--turn e " in said("make", "--dry-run", target, "TURN=e")
    assert "--turn" not in said("make", "--dry-run", "test-all")


def test_new_costs_replace_the_stored_ones_when_all_tests_have_run() -> None:
    """Tests of this file read the stored ones."""
    command, environment = ["make", "--dry-run", "--no-print-directory", "test-costs"], own_environment()
    said = subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, capture_output=True, text=True).stdout
    (recorded,) = set(re.findall(r"--record-costs ([\w./-]+)", said))
    *before, last = said.splitlines()
    assert last == f"mv {recorded} tests/costs.json"
    assert "tests/costs.json" not in " ".join(before)
