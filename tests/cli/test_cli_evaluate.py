"""``qframework evaluate``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runs import run, run_json

from qframework.evaluation import digits, top1
from qframework.evaluation.models import load_classifier


def test_evaluate_a_float_model() -> None:
    expected = top1(load_classifier("digits").model, digits.loader(digits.load_digits().held_out))
    # no layer is quantized; compiled sums may round otherwise, which moves one image of 599 at most
    assert run_json("evaluate", "digits")["top1"] == pytest.approx(expected, abs=0.2)


def test_evaluate_a_saved_model() -> None:
    run_json("quantize", "digits", "--output", "digits.pt2")
    result = run_json("evaluate", "digits.pt2")
    # quantization moves logits by about 1 %, and this model is hardly trained
    assert result["top1"] == pytest.approx(run_json("evaluate", "digits", "--eager")["top1"], abs=5)


def test_evaluate_fails_below_min_top1() -> None:
    result = run("evaluate", "digits", "--eager", "--min-top1", "99.9", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["top1"] < 99.9
    assert "check failed: top-1" in result.stderr
    assert "below 99.9 %" in result.stderr


# Bad usage and bad input: exit code 2, one line on stderr


def not_ours(path: Path) -> str:
    path.write_text("a text")
    return str(path)


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    result = run("evaluate", not_ours(tmp_path / "foreign.pt2"))
    assert result.exit_code == 2
    assert "not written by qframework.save" in result.stderr
