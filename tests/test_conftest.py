"""The test suite itself: ``--require-gpu`` fails on skips, and a sample covers every parameter's values."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).with_name("conftest.py").read_text()
PRETEND = "\n\ndef why_no_gpu() -> str | None:\n    return {reason!r}\n"
TESTS = """
import pytest

def test_runs():
    pass

def test_skips():
    pytest.skip("needs two GPUs")
"""


SAMPLED = """
import pytest

@pytest.mark.sample(1 / 3)
@pytest.mark.parametrize("letter", "abcdef")
@pytest.mark.parametrize(("number", "square"), [(1, 1), (2, 4), (3, 9), (4, 16)])
def test_sampled(letter, number, square):
    pass

@pytest.mark.parametrize("letter", "ab")
def test_whole(letter):
    pass
"""


def run_pytest(
    folder: Path, *arguments: str, reason: str | None, tests: str = TESTS
) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST + PRETEND.format(reason=reason))
    (folder / "test_example.py").write_text(tests)
    markers = "".join(f"\n    {name}: ..." for name in ("gpu", "interpreter", "sample", "full"))
    (folder / "pytest.ini").write_text(f"[pytest]\naddopts = --strict-markers\nmarkers ={markers}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_require_gpu_turns_a_skip_into_a_failure(tmp_path: Path) -> None:
    result = run_pytest(tmp_path, "--require-gpu", reason=None)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "1 failed, 1 passed" in result.stdout
    assert "skipped under --require-gpu: Skipped: needs two GPUs" in result.stdout


def test_without_the_option_a_skip_is_a_skip(tmp_path: Path) -> None:
    result = run_pytest(tmp_path, reason=None)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 passed, 1 skipped" in result.stdout


def test_require_gpu_refuses_a_machine_without_one(tmp_path: Path) -> None:
    result = run_pytest(tmp_path, "--require-gpu", reason="no CUDA device")
    assert result.returncode == 4, result.stdout + result.stderr
    assert "--require-gpu: no CUDA device" in result.stderr


def test_a_sample_holds_every_value_and_the_rest_is_marked(tmp_path: Path) -> None:
    def collected(*arguments: str) -> list[str]:
        result = run_pytest(tmp_path, "--collect-only", *arguments, reason="none", tests=SAMPLED)
        assert result.returncode == 0, result.stdout + result.stderr
        return [line for line in result.stdout.splitlines() if "::" in line]

    sample = collected("-m", "not full")
    assert len(sample) == 8 + 2
    for value in (*(f"-{letter}]" for letter in "abcdef"), *(f"[{n}-{n * n}-" for n in range(1, 5))):
        assert any("test_sampled" in line and value in line for line in sample), value
    rest = collected("-m", "full")
    assert len(rest) == 16
    assert not set(sample) & set(rest)
