"""The test suite's own promise: with ``--require-gpu`` nothing is skipped silently."""

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


def run_pytest(folder: Path, *arguments: str, reason: str | None) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST + PRETEND.format(reason=reason))
    (folder / "test_example.py").write_text(TESTS)
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
