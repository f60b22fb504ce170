"""All commands: bad input and usage, exit codes, help and version."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runs import TIMM_MODEL, run, write_images
from typer.testing import CliRunner

from qframework import __version__, cli
from qframework.cli import command
from qframework.cli.output import print_rows, print_table
from qframework.cli.targets import device_and_dtype

BAD_INPUT = {
    "unknown model": (("quantize", "vit_bas_patch16_224"), "got 'vit_bas_patch16_224'. Did you mean vit_"),
    "random weights": (("quantize", TIMM_MODEL), "would have random weights"),
    "missing checkpoint": (
        ("quantize", TIMM_MODEL, "--checkpoint", "none.pth", "--data", "."),
        "none.pth does not exist",
    ),
    "unknown observer": (("quantize", "digits", "--observer", "max"), "observer must be one of 'minmax'"),
    "observer of a dynamic scale": (
        ("quantize", "digits", "--dynamic", "--observer", "mse"),
        "--observer must be minmax with --dynamic",
    ),
    "unknown attention": (
        ("quantize", "digits", "--attention", "sage9"),
        "variant must be auto, sage_t",
    ),
    "missing file": (("evaluate", "none.pt2"), "none.pt2"),
    "no folder": (("evaluate", "digits", "--data", "none"), "'none' does not fit model 'digits'"),
    "no device": (("evaluate", "digits", "--device", "gpu0"), "got 'gpu0'"),
    "device that is not there": (("evaluate", "digits", "--device", "cuda:99"), "This machine has"),
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
def test_devices_are_checked_before_a_model_is_loaded(
    command: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_load(monkeypatch)
    expect_bad_input(
        f"--device must be 'cpu', 'cuda' or 'cuda:<index>', got '{device}'", command, "digits", "--device", device
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_cuda_without_a_gpu(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    never_load(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    expect_bad_input("got 'cuda'. This machine has 0", command, "digits", "--device", "cuda")


@pytest.mark.parametrize("command", COMMANDS)
def test_unknown_models_are_named_first(command: str) -> None:
    expect_bad_input("got 'test_vitt'. Did you mean test_vit", command, "test_vitt")


@pytest.mark.parametrize("data", ["missing", "file", ""])
@pytest.mark.parametrize("command", WITH_DATA)
def test_data_is_checked_before_a_model_is_loaded(command: str, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("command", WITH_DATA)
def test_folders_are_looked_into_before_a_model_is_loaded(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    never_load(monkeypatch)
    arguments = (command, TIMM_MODEL, "--pretrained", "--data")
    Path("empty").mkdir()
    expect_bad_input("one folder of images per class, got 'empty': no class folder", *arguments, "empty")
    Path("textual/cats").mkdir(parents=True)
    Path("textual/cats/readme.txt").touch()
    expect_bad_input("got 'textual': no image in cats", *arguments, "textual")
    if command != "quantize":  # which calibrates, with any classes
        write_images(Path("pets"), "cat", "dog")
        expect_bad_input("data 'pets' must hold 1000 class folders, one for each class, got 2", *arguments, "pets")


@pytest.mark.parametrize("command", ["sensitivity", "tune"])
def test_calibration_data_is_checked_before_a_model_is_loaded(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    never_load(monkeypatch)
    expect_bad_input("data 'missing' does not fit", command, "digits", "--calibration-data", "missing")


@pytest.mark.parametrize("command", COMMANDS)
def test_an_empty_batch_size_is_bad_usage(command: str) -> None:
    assert run(command, "digits", "--batch-size", "0").exit_code == 2


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("capabilities", "device", "dtype"),
    [([], "cpu", "float32"), ([(9, 0)], "cuda:0", "float16"), ([(7, 5), (8, 9)], "cuda:1", "float16")],
)
def test_auto_takes_the_first_gpu_that_is_supported(
    capabilities: list[tuple[int, int]], device: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: capabilities[gpu.index])
    monkeypatch.setattr(torch.cuda, "get_device_name", str)
    monkeypatch.setattr(torch.version, "hip", None)
    assert device_and_dtype("auto", "auto") == (torch.device(device), dtype)
    assert device_and_dtype("cpu", "auto") == (torch.device("cpu"), "float32")
    assert device_and_dtype("auto", "bfloat16") == (torch.device(device), "bfloat16")


def test_a_pipe_of_80_columns_keeps_every_digit(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"a_configuration_of_a_long_name" * 2: "x" * 50, "b": 123456789.12, "some_long_name": 987654321.0}] * 2
    print_rows("title", rows, as_json=False)
    print_table("title", {"output": "folder/" * 20, "a number": 1234567.891})
    printed = capsys.readouterr().out
    for number in ("123,456,789.12", "987,654,321.00", "1,234,567.89"):
        assert number in printed
    assert "…" not in printed
    assert "".join(printed.replace("│", "").split()).count("folder/") >= 18


@pytest.mark.parametrize(("typed", "offered"), [("dig", ["digits"]), ("test_vi", ["test_vit"])])
def test_models_are_completed(typed: str, offered: list[str]) -> None:
    Path("dig.pt2").touch()
    assert set(offered) <= set(command._models(typed))
    assert command._targets("dig") == ["dig.pt2", "digits"]
    assert command._targets("./d") == [] or command._targets("") == ["dig.pt2", "digits"]


def test_completion_of_a_shell() -> None:
    environment = {"_QFRAMEWORK_COMPLETE": "complete_bash", "COMP_WORDS": "qframework ev", "COMP_CWORD": "1"}
    result = CliRunner().invoke(cli.app, [], env=environment, prog_name="qframework")
    assert "evaluate" in result.output


def test_debug_keeps_the_traceback() -> None:
    result = CliRunner().invoke(cli.app, ["--debug", "evaluate", "none.pt2"])
    assert isinstance(result.exception, FileNotFoundError)


@pytest.mark.parametrize("arguments", [("quantise",), ("quantize", "digits", "--weight", "int4"), ("evaluate",)])
def test_bad_usage(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


@pytest.mark.parametrize("command", [*COMMANDS, "doctor", "tune-kernels"])
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


_SLOW = ("torchao", "timm", "torchvision", "torch._inductor.compile_fx")
_BAD_ARGUMENTS = """
import json, sys
from typer.testing import CliRunner
import qframework.cli
commands = {commands!r}
results = [CliRunner().invoke(qframework.cli.app, command) for command in commands]
print(json.dumps({{
    "exits": [result.exit_code for result in results],
    "errors": [result.stderr for result in results],
    "imported": [name for name in {slow!r} if name in sys.modules],
}}))
"""


def test_bad_arguments_are_found_before_slow_imports() -> None:
    """A device, file, folder or option that does not exist needs PyTorch alone; torchao and timm take seconds."""
    digits, vit = ("quantize", "digits"), ("quantize", "vit_base_patch16_224", "--pretrained")
    commands = {
        (*digits, "--device", "cuda:99"): "--device must be",
        (*digits, "--output", "missing/digits.pt2"): "the folder missing does not exist",
        (*digits, "--observer", "median"): "observer must be one of",
        (*digits, "--attention", "sage9"): "variant must be",
        (*vit, "--data", "missing"): "data must be 'digits' or a folder",
        ("evaluate", "missing.pt2"): "missing.pt2",
        ("export-onnx", "missing.pt2"): "missing.pt2",
        ("tune", "digits", "--device", "cuda:99"): "--device must be",
        ("sensitivity", "digits", "--observer", "median"): "observer must be one of",
        ("benchmark", "digits", "--device", "cuda:99"): "--device must be",
    }
    source = _BAD_ARGUMENTS.format(commands=[list(each) for each in commands], slow=_SLOW)
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", source], cwd=root, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["exits"] == [2] * len(commands), found["errors"]
    for error, expected in zip(found["errors"], commands.values(), strict=True):
        assert expected in error
    assert not found["imported"]


def test_the_package_runs_as_the_command() -> None:
    command = [sys.executable, "-m", "qframework", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"qframework {__version__}\n"
