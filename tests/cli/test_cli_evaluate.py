"""``qframework evaluate``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runs import run, run_json
from safetensors.torch import load_file, save_file

from qframework.evaluation import checkpoint, digits, digits_vit, top1
from qframework.evaluation.models import load_classifier


def test_evaluate_a_float_model() -> None:
    expected = top1(load_classifier("digits").model, digits.loader(digits.load_digits().held_out))
    # no layer is quantized; compiled sums may round otherwise, which moves one image of 599 at most
    assert run_json("evaluate", "digits")["top1"] == pytest.approx(expected, abs=0.2)


def test_evaluate_a_saved_model() -> None:
    run_json("quantize", "digits", "--output", "digits.pt2")
    result = run_json("evaluate", "digits.pt2")
    in_float = run_json("evaluate", "digits", "--eager")["top1"]
    # quantization moves logits by about 1 %, and this model is hardly trained
    assert result["top1"] == pytest.approx(in_float, abs=5)
    assert result["float_top1"] == in_float
    assert result["drop"] == pytest.approx(in_float - result["top1"])
    alone = run_json("evaluate", "digits.pt2", "--eager", "--no-compare", "--limit", "7")
    assert "float_top1" not in alone
    assert alone["top1"] * 7 / 100 == pytest.approx(round(alone["top1"] * 7 / 100)), "seven images"


def test_the_float_model_beside_must_be_the_one_that_was_quantized() -> None:
    run_json("quantize", "digits", "--dynamic", "--output", "digits.pt2")
    other = digits_vit.TrainingConfig(embed_dim=24, depth=1, epochs=1, seed=1)
    checkpoint.load_or_train(
        "other.safetensors", other, digits_vit.build_model, lambda config: digits_vit.build_model(config)
    )
    weights = load_file("other.safetensors")
    metadata = checkpoint._read(Path("build/digits_vit.safetensors"))[0]
    metadata["weights"] = checkpoint.state_digest(weights)
    save_file(weights, "other.safetensors", metadata)
    result = run("evaluate", "digits.pt2", "--eager", "--checkpoint", "other.safetensors")
    assert result.exit_code == 2
    assert "other.safetensors holds other weights of 'digits' than those that were quantized" in result.stderr
    Path("build/digits_vit.safetensors").unlink()
    result = run("evaluate", "digits.pt2", "--eager")
    assert result.exit_code == 0, "a float model that is not at hand is no error"
    assert "no float top-1: pass --checkpoint FILE or --pretrained" in result.stderr


def test_the_dtype_of_a_saved_model_is_its_own() -> None:
    run_json("quantize", "digits", "--dynamic", "--output", "digits.pt2")
    result = run("evaluate", "digits.pt2", "--dtype", "bfloat16")
    assert result.exit_code == 2
    assert "--dtype must be that of the saved model, float32, got bfloat16" in result.stderr
    assert run_json("evaluate", "digits", "--eager", "--dtype", "bfloat16", "--limit", "9")["dtype"] == "bfloat16"


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
