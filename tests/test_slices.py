"""Slices of the cases outside of samples: each case is in one, and each commit has one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from slices import SLICES, slice_of

REPOSITORY = Path(__file__).parents[1]
TESTS = """
import pytest

@pytest.mark.parametrize("number", range(200))
def test_even(number):
    assert number % 2 == 0
"""


def run(folder: Path, *arguments: str) -> str:
    """What pytest prints about 200 cases, every second of which fails."""
    (folder / "test_example.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\n")
    files = ["--rootdir", str(folder), "-c", str(folder / "pytest.ini"), str(folder)]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.slices", *files, *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("processes", [(), ("-n", "2")])
def test_a_run_has_the_cases_of_its_slice_and_says_how_to_repeat_it(tmp_path: Path, processes: tuple[str, ...]) -> None:
    said = run(tmp_path, "-rA", "--slice", "c", *processes)
    assert "again: make test-slice SLICE=c" in said
    expected = {name for n in range(200) if slice_of(name := f"test_example.py::test_even[{n}]") == "c"}
    ran = {line.split()[1] for line in said.splitlines() if line.startswith(("PASSED ", "FAILED "))}
    assert {test.rpartition("/")[2] for test in ran} == expected


def test_slices_are_about_equal_and_do_not_depend_on_the_process() -> None:
    names = [f"tests/kernels/test_norm.py::test_compiles[{n}]" for n in range(1600)]
    counts = [sum(slice_of(name) == digit for name in names) for digit in SLICES]
    assert sum(counts) == len(names)
    assert 60 <= min(counts) <= max(counts) <= 140
    assert slice_of("tests/test_slices.py::test_example[1]") == "9"


@pytest.mark.parametrize("clone", ["whole", "without commits", "without history"])
def test_make_takes_the_last_digit_of_the_commit_or_zero(tmp_path: Path, clone: str) -> None:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, tmp_path)
    # not the repository around the temporary folder
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "MAKE"))}
    environment |= {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
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
    assert f"--slice {digit} " in said("make", "--dry-run", "test-slice")
    assert "--slice e " in said("make", "--dry-run", "test-slice", "SLICE=e")
