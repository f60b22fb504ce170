"""``qframework quantize``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cli_runs import TIMM_MODEL, TINY, run, run_json, write_images

from qframework.serialization import load, read_metadata


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two of ImageNet's classes, two images each."""
    return write_images(tmp_path / "images", "n01440764", "n01443537")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    import timm

    path = tmp_path / "weights.pth"
    torch.save(timm.create_model(TIMM_MODEL).state_dict(), path)
    return path


def test_quantize_digits() -> None:
    result = run_json("quantize", "digits", "--output", "digits.pt2", "--batches", "2")
    assert result["output"] == "digits.pt2"
    assert result["lowered_linears"] == result["linears"] == 5
    assert 0.25 < result["weight_bytes"] / result["weight_bytes_fp32"] < 0.75
    # rounding noise of 8 bits is about 40 dB below the signal; below 15 dB something is broken
    assert 15 < result["worst_sqnr_db"] < 60
    rules = read_metadata("digits.pt2")["config"]["quantizer"]["rules"]
    assert [rule["config"]["activation"]["dynamic"] for rule in rules] == [False]


def test_quantize_options_reach_the_quantizer() -> None:
    run_json("quantize", "digits", "--observer", "percentile", "--weight", "per_tensor", "--output", "a.pt2")
    (rule,) = read_metadata("a.pt2")["config"]["quantizer"]["rules"]
    assert rule["config"]["activation"]["observer"] == "percentile"
    assert rule["config"]["weight"]["granularity"] == "per_tensor"
    run_json("quantize", "digits", "--dynamic", "--activation", "per_tensor", "--output", "b.pt2")
    (rule,) = read_metadata("b.pt2")["config"]["quantizer"]["rules"]
    assert rule["config"]["activation"]["dynamic"]
    assert rule["config"]["activation"]["granularity"] == "per_tensor"


@pytest.mark.parametrize(
    ("attention", "scales"),
    [
        ("static", "--static"),
        ("sage_b", "--dynamic"),
        pytest.param("static", "--dynamic", marks=pytest.mark.full),
        pytest.param("sage_b", "--static", marks=pytest.mark.full),
    ],
)
def test_quantize_attention(attention: str, scales: str) -> None:
    result = run_json("quantize", "digits", scales, "--attention", attention, "--output", "a.pt2", "--batches", "2")
    assert result["lowered_attentions"] == result["attentions"] == TINY.depth
    assert result["lowered_linears"] == result["linears"] == 5
    _, rule = read_metadata("a.pt2")["config"]["quantizer"]["rules"]
    assert rule["config"]["mode"] == attention
    assert run_json("evaluate", "a.pt2")["top1"] == pytest.approx(run_json("evaluate", "digits")["top1"], abs=3)


def test_quantize_prints_a_table_and_names_its_file() -> None:
    result = run("quantize", "digits", "--dynamic")
    assert result.exit_code == 0, result.output
    assert "digits_int8.pt2" in result.stdout
    assert Path("digits_int8.pt2").exists()


def test_quantize_and_evaluate_a_timm_model_on_a_folder(folder: Path, checkpoint: Path) -> None:
    arguments = ("--data", str(folder), "--batch-size", "2")
    result = run_json("quantize", TIMM_MODEL, "--checkpoint", str(checkpoint), "--output", "m.pt2", *arguments)
    assert result["lowered_linears"] == result["linears"] > 0
    kept = read_metadata("m.pt2")["config"]
    assert kept["model"] == TIMM_MODEL
    assert kept["data_config"]["input_size"] == [3, 160, 160]
    accuracy = run_json("evaluate", "m.pt2", "--eager", *arguments)["top1"]
    assert accuracy in (0, 25, 50, 75, 100)


def test_a_folder_without_classes(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "empty").mkdir()
    result = run("quantize", TIMM_MODEL, "--checkpoint", str(checkpoint), "--data", str(tmp_path / "empty"))
    assert result.exit_code == 2
    assert "one folder of images per class" in result.stderr


def test_a_checkpoint_of_another_model(tmp_path: Path, folder: Path) -> None:
    torch.save({"other": torch.zeros(1)}, tmp_path / "other.pth")
    result = run("quantize", TIMM_MODEL, "--checkpoint", str(tmp_path / "other.pth"), "--data", str(folder))
    assert result.exit_code == 2
    assert f"does not fit model '{TIMM_MODEL}'" in result.stderr
    assert "missing: " in result.stderr
    assert "1 unknown: other" in result.stderr


def test_a_checkpoint_with_another_head_names_its_shapes(tmp_path: Path, folder: Path) -> None:
    import timm

    state = timm.create_model(TIMM_MODEL, num_classes=10).state_dict()
    state |= {f"extra.{index}": torch.zeros(1) for index in range(50)}
    torch.save(state, tmp_path / "ten.pth")
    result = run("quantize", TIMM_MODEL, "--checkpoint", str(tmp_path / "ten.pth"), "--data", str(folder))
    assert result.exit_code == 2
    assert (
        "50 unknown: extra.0, extra.1, extra.2, ...; 2 of another shape: head.weight (10, 64) instead of (1000, 64)"
        in (result.stderr)
    )
    assert len(result.stderr) < 500


def written(name: str, text: str) -> str:
    Path(name).write_text(text)
    return name


def test_config_refuses_the_options_it_replaces() -> None:
    result = run("quantize", "digits", "--config", "a.json", "--dynamic", "--observer", "mse")
    assert result.exit_code == 2
    assert "--config must be given without --static/--dynamic, --observer, which it replaces" in result.stderr


def test_a_file_that_is_not_a_config_is_refused() -> None:
    result = run("quantize", "digits", "--config", written("a.json", "{}"))
    assert result.exit_code == 2
    assert "a.json: a plan must have a format and a quantizer" in result.stderr
    assert "none.json" in run("quantize", "digits", "--config", "none.json").stderr


def test_damaged_images_are_counted_and_named(tmp_path: Path) -> None:
    import timm

    folder = write_images(tmp_path / "images", "cat", "dog")
    whole = (folder / "cat" / "0.png").read_bytes()
    (folder / "dog" / "cut.png").write_bytes(whole[: len(whole) // 2])
    torch.save(timm.create_model("test_vit", num_classes=1000).state_dict(), tmp_path / "weights.pth")
    arguments = ("--checkpoint", "weights.pth", "--data", str(folder), "--batch-size", "2")
    result = run("quantize", "test_vit", *arguments, "--output", "a.pt2")
    assert result.exit_code == 0, result.output
    assert "1 damaged images left out: " in result.stderr
    assert "cut.png" in result.stderr


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtype_applies_to_everything_that_is_not_int8(dtype: str) -> None:
    run_json("quantize", "digits", "--dtype", dtype, "--output", "a.pt2", "--batches", "1")
    assert read_metadata("a.pt2")["config"]["dtype"] == dtype
    assert {tensor.dtype for tensor in load("a.pt2").parameters()} == {getattr(torch, dtype)}
    halves, whole = (run_json("evaluate", *target, "--eager")["top1"] for target in (["a.pt2"], ["digits"]))
    # hardly trained, and 8 bits of mantissa at least
    assert halves == pytest.approx(whole, abs=5)
