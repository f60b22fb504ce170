"""The command line: results, exit codes and messages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

from qframework import __version__, cli, diagnosis
from qframework.evaluation import digits, digits_vit, top1
from qframework.evaluation.models import load_classifier
from qframework.serialization import read_metadata

TINY = digits_vit.TrainingConfig(embed_dim=24, depth=1, epochs=1)
# A timm model of half a million weights for images of 160 x 160.
TIMM_MODEL = "test_vit"


@pytest.fixture(autouse=True)
def small_digits_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh_dynamo: None) -> None:
    """In an empty directory; ``digits`` is a small model, trained for one epoch."""
    monkeypatch.chdir(tmp_path)
    original = digits_vit.load_or_train
    monkeypatch.setattr(digits_vit, "load_or_train", lambda path: original(path, TINY, show_progress=False))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


def run_json(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two of ImageNet's classes, two images each."""
    for label in ("n01440764", "n01443537"):
        (tmp_path / "images" / label).mkdir(parents=True)
        for index in range(2):
            pixels = torch.randint(0, 256, (40, 50, 3), dtype=torch.uint8).numpy()
            Image.fromarray(pixels).save(tmp_path / "images" / label / f"{index}.png")
    return tmp_path / "images"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    import timm

    path = tmp_path / "weights.pth"
    torch.save(timm.create_model(TIMM_MODEL).state_dict(), path)
    return path


# quantize


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


@pytest.mark.parametrize("scales", ["--static", "--dynamic"])
@pytest.mark.parametrize("attention", ["static", "sage_b"])
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


# evaluate


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


# benchmark


def test_benchmark_a_float_model() -> None:
    rows = run_json("benchmark", "digits", "--repeats", "2", "--batch-size", "4")
    assert [row["configuration"] for row in rows] == [
        "float, eager",
        "float, compiled",
        "static INT8",
        "dynamic INT8",
    ]
    for row in rows:
        assert row["images_per_second"] > 0
        assert row["milliseconds_per_batch"] == pytest.approx(4000 / row["images_per_second"])


def test_benchmark_a_saved_model() -> None:
    run_json("quantize", "digits", "--output", "digits.pt2")
    result = run("benchmark", "digits.pt2", "--repeats", "1")
    assert result.exit_code == 0, result.output
    assert "saved, compiled" in result.stdout


# doctor


def test_doctor() -> None:
    from qframework.kernels import cpu_implementation

    report = run_json("doctor")
    assert report["software"]["torch"] == __import__("importlib.metadata").metadata.version("torch")
    assert report["cpu"]["int8_linear"] == cpu_implementation()
    assert report["problems"] == []
    assert [name for name in report if name.startswith("cuda")] == [
        f"cuda:{index}" for index in range(torch.cuda.device_count())
    ]


def test_doctor_says_why_the_cpu_multiplies_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    from qframework import diagnosis
    from qframework.kernels.linear.cpu import CpuChoice

    choice = CpuChoice("float32", {"int_mm": "it is not exact on this processor"})
    monkeypatch.setattr(diagnosis, "cpu_choice", lambda: choice)
    report = run_json("doctor")
    assert report["cpu"]["int8_linear"] == "float32"
    assert report["cpu"]["int8_linear_not_int_mm"] == "it is not exact on this processor"
    assert report["problems"] == [], "slow, and right"


def test_doctor_prints_tables() -> None:
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert "int8 linear" in result.stdout


def test_doctor_fails_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "cpp_compiler", lambda: None)
    result = run("doctor")
    assert result.exit_code == 1
    assert "no C++ compiler" in result.stderr


@pytest.mark.parametrize(
    ("capability", "hip", "supported"),
    [((7, 5), None, False), ((8, 0), None, True), ((9, 0), None, True), ((9, 4), "7.0", False)],
)
def test_doctor_says_which_gpus_are_supported(
    capability: tuple[int, int], hip: str | None, supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Properties:
        name, total_memory = "a GPU", 16 * 2**30
        major, minor = capability

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    gpu = diagnosis.diagnose()["cuda:0"]
    assert gpu["capability"] == f"sm_{capability[0]}{capability[1]}"
    assert gpu["supported"] is supported
    assert gpu["memory_gib"] == 16.0


# Bad usage and bad input: exit code 2, one line on stderr


def not_ours(path: Path) -> str:
    path.write_text("a text")
    return str(path)


BAD_INPUT = {
    "unknown model": (("quantize", "vit_bas_patch16_224"), "got 'vit_bas_patch16_224'. Did you mean vit_"),
    "random weights": (("quantize", TIMM_MODEL), "would have random weights"),
    "missing checkpoint": (
        ("quantize", TIMM_MODEL, "--checkpoint", "none.pth", "--data", "."),
        "none.pth does not exist",
    ),
    "unknown observer": (("quantize", "digits", "--observer", "max"), "observer='max' is unknown; accepted: minmax"),
    "observer of a dynamic scale": (
        ("quantize", "digits", "--dynamic", "--observer", "mse"),
        "--observer must be minmax with --dynamic",
    ),
    "unknown attention": (
        ("quantize", "digits", "--attention", "sage9"),
        "variant='sage9' is unknown; accepted: auto, sage_t",
    ),
    "missing file": (("evaluate", "none.pt2"), "none.pt2"),
    "no folder": (("evaluate", "digits", "--data", "none"), "'none' does not fit model 'digits'"),
    "no device": (("evaluate", "digits", "--device", "gpu0"), "'gpu0' is not a device"),
    "device that is not there": (("evaluate", "digits", "--device", "cuda:99"), "this machine has"),
    "random weights, evaluated": (("evaluate", TIMM_MODEL), "would have random weights"),
    "data of another model": (
        ("quantize", TIMM_MODEL, "--checkpoint", "none.pth"),
        f"data 'digits' does not fit model '{TIMM_MODEL}'",
    ),
}


COMMANDS = ("quantize", "evaluate", "sensitivity", "tune", "benchmark")
WITH_DATA = [command for command in COMMANDS if command != "benchmark"]


def expect_bad_input(message: str, *arguments: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def never_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("qframework.evaluation.models.load_classifier", fail)


@pytest.mark.parametrize("device", ["meta", "nonsense", "", "mps", "xpu", "cuda:99", "cuda:-1", "cpu:1"])
@pytest.mark.parametrize("command", COMMANDS)
def test_devices_are_checked_first(command: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    never_load(monkeypatch)
    expect_bad_input(f"--device '{device}' ", command, "digits", "--device", device)


@pytest.mark.parametrize("command", COMMANDS)
def test_cuda_without_a_gpu(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    never_load(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    expect_bad_input("--device 'cuda' is not there, this machine has 0", command, "digits", "--device", "cuda")


@pytest.mark.parametrize("command", COMMANDS)
def test_unknown_models_are_named_first(command: str) -> None:
    expect_bad_input("got 'test_vitt'. Did you mean test_vit", command, "test_vitt")


@pytest.mark.parametrize("data", ["missing", "file", ""])
@pytest.mark.parametrize("command", WITH_DATA)
def test_data_is_looked_for_first(command: str, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    never_load(monkeypatch)
    Path("file").touch()
    expect_bad_input(
        f"data must be 'digits' or a folder of class folders, got '{data}'",
        command,
        TIMM_MODEL,
        "--pretrained",
        "--data",
        data,
    )
    expect_bad_input(f"data '{data}' does not fit model 'digits'", command, "digits", "--data", data)


@pytest.mark.parametrize("command", ["sensitivity", "tune"])
def test_calibration_data_is_looked_for_first(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    never_load(monkeypatch)
    expect_bad_input("data 'missing' does not fit", command, "digits", "--calibration-data", "missing")


@pytest.mark.parametrize("command", COMMANDS)
def test_batches_of_no_images(command: str) -> None:
    assert run(command, "digits", "--batch-size", "0").exit_code == 2


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output


def test_a_file_that_is_not_ours(tmp_path: Path) -> None:
    result = run("evaluate", not_ours(tmp_path / "foreign.pt2"))
    assert result.exit_code == 2
    assert "not written by qframework.save" in result.stderr


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


def test_debug_keeps_the_traceback() -> None:
    result = CliRunner().invoke(cli.app, ["--debug", "evaluate", "none.pt2"])
    assert isinstance(result.exception, FileNotFoundError)


@pytest.mark.parametrize("arguments", [("quantise",), ("quantize", "digits", "--weight", "int4"), ("evaluate",)])
def test_bad_usage(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


@pytest.mark.parametrize("command", ["quantize", "evaluate", "benchmark", "doctor"])
def test_help_has_examples(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"qframework {command}" in result.stdout.split("Examples")[1]


def test_version() -> None:
    assert run("--version").stdout.strip() == f"qframework {__version__}"


_LEAN = """
import sys
import qframework.cli
heavy = {"torchao", "timm", "torchvision", "sklearn", "transformers"} & set(sys.modules)
assert not heavy, heavy
sys.argv = ["qframework", "evaluate", "none.pt2"]
qframework.cli.main()
"""


def test_the_command_in_a_process_of_its_own() -> None:
    result = subprocess.run([sys.executable, "-c", _LEAN], capture_output=True, text=True, check=False)
    assert result.returncode == 2, result.stderr
    assert "none.pt2" in result.stderr
    assert "Traceback" not in result.stderr
