"""Output files are checked before the work starts, and the checks leave no files behind."""

from __future__ import annotations

import argparse
import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import training_parity
from benchmarks.harness import argument_parser
from demos.comparison_script import comparison_parser
from demos.comparison_script import run_script as compare
from demos.training_loop import RunConfig
from demos.training_script import run_training, training_parser
from qframework import cli
from qframework.errors import QFrameworkError
from qframework.evaluation import checkpoint, digits_vit
from qframework.outputs import check_output_file, check_output_folder, output_file, output_folder

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in a folder with a file, a folder and a pipe."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("kept")
    Path("folder").mkdir()
    os.mkfifo("pipe")


def refuse_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a file system that refuses even root."""

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)


IMPOSSIBLE = {
    "folder": "it is a folder",
    ".": "it is a folder",
    "pipe": "not a regular file",
    "missing/x.json": "the folder missing does not exist",
    "missing/deeper/x.json": "the folder missing/deeper does not exist",
    "file/x.json": "file is not a folder",
    "file/deeper/x.json": "file is not a folder",
    "x" * 300: "File name too long",
    "x" * 250: "File name too long",
}


@pytest.mark.parametrize(("path", "reason"), IMPOSSIBLE.items(), ids=[path[:20] for path in IMPOSSIBLE])
def test_paths_that_cannot_be_written_are_refused(path: str, reason: str) -> None:
    with pytest.raises(QFrameworkError, match=f"--output: cannot write .*{reason}.* Name a file in an existing"):
        check_output_file(Path(path), "--output")


def test_a_folder_without_permission_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_writing(monkeypatch)
    with pytest.raises(QFrameworkError, match=r"--output: cannot write x.json: Permission denied"):
        check_output_file(Path("x.json"), "--output")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc")
def test_a_read_only_file_system_is_refused() -> None:
    with pytest.raises(QFrameworkError, match=r"cannot write /proc/x.json"):
        check_output_file(Path("/proc/x.json"), "--output")


def test_the_check_leaves_files_unchanged() -> None:
    before = sorted(Path().rglob("*"))
    check_output_file(Path("file"), "--output")
    check_output_file(Path("folder/new.json"), "--output")
    assert sorted(Path().rglob("*")) == before
    assert Path("file").read_text() == "kept"


def test_missing_folders_are_created_on_request() -> None:
    check_output_file(Path("a/b/x.json"), "--output", make_folder=True)
    check_output_folder(Path("c/d"), "--output")
    assert sorted(map(str, Path().glob("[acd]/*"))) == ["a/b", "c/d"]
    assert not list(Path("a/b").iterdir())


@pytest.mark.parametrize("path", ["file", "pipe", "file/deeper"])
def test_paths_that_are_not_folders_are_refused(path: str) -> None:
    with pytest.raises(QFrameworkError, match=r"--output: cannot write .*not a folder"):
        check_output_folder(Path(path), "--output")


def test_argparse_types(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=output_file)
    parser.add_argument("--build", type=output_folder)
    assert parser.parse_args(["--output", "a/x.json", "--build", "b"]).output == Path("a/x.json")
    for arguments in (["--output", "folder"], ["--output", "x" * 300], ["--build", "file"]):
        with pytest.raises(SystemExit):
            parser.parse_args(arguments)
        assert f"argument {arguments[0]}: cannot write" in capsys.readouterr().err


# Commands and scripts that check their outputs


def fail(*_: Any, **__: Any) -> Any:
    raise AssertionError("the work began")


@pytest.mark.parametrize("output", ["folder", "file/x.json", "pipe", "x" * 300, "."])
@pytest.mark.parametrize("command", ["quantize", "sensitivity", "tune"])
def test_commands_check_the_output_before_a_model_is_loaded(
    command: str, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digits_vit, "load_or_train", fail)
    result = CliRunner().invoke(cli.app, [command, "digits", "--output", output])
    assert result.exit_code == 2, result.output
    assert "--output: cannot write" in result.stderr
    assert result.stderr.count("\n") == 1


def test_quantize_into_a_missing_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits_vit, "load_or_train", fail)
    result = CliRunner().invoke(cli.app, ["quantize", "digits", "--output", "missing/digits.pt2"])
    assert result.exit_code == 2
    assert "the folder missing does not exist" in result.stderr
    assert not Path("missing").exists()


@pytest.mark.parametrize("beside", ["x.png", "x.journal.jsonl"])
@pytest.mark.parametrize("command", ["sensitivity", "tune"])
def test_commands_check_their_other_output_files_too(
    command: str, beside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digits_vit, "load_or_train", fail)
    Path(beside).mkdir()
    result = CliRunner().invoke(cli.app, [command, "digits", "--output", "x.json"])
    assert result.exit_code == 2
    assert f"cannot write {beside}: it is a folder" in result.stderr


@pytest.mark.parametrize("command", ["sensitivity", "tune"])
def test_a_plot_does_not_replace_its_results(command: str) -> None:
    result = CliRunner().invoke(cli.app, [command, "digits", "--output", "x.png"])
    assert result.exit_code == 2
    assert "--output must not be the name of its own plot, got x.png" in result.stderr


@pytest.mark.parametrize("command", ["quantize", "evaluate", "sensitivity", "tune", "benchmark"])
def test_the_digits_checkpoint_is_checked_before_training(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits_vit, "train", fail)
    result = CliRunner().invoke(cli.app, [command, "digits", "--checkpoint", "folder"])
    assert result.exit_code == 2, result.output
    assert "checkpoint: folder must be a regular file, got a folder" in result.stderr


def test_an_existing_checkpoint_need_not_be_writable(monkeypatch: pytest.MonkeyPatch) -> None:
    config = digits_vit.TrainingConfig(embed_dim=24, depth=1)
    build = digits_vit.build_model
    checkpoint.load_or_train("model.safetensors", config, build, build)
    monkeypatch.setattr(checkpoint, "check_output_file", fail)
    checkpoint.load_or_train("model.safetensors", config, build, fail)


@pytest.mark.parametrize(("output", "message"), [("folder", "it is a folder"), ("x.md", "the Markdown goes beside it")])
def test_comparisons(output: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = comparison_parser(None).parse_args(["--output", output])
    assert compare(fail, options) == 2
    assert message in capsys.readouterr().err


def test_comparisons_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.md").mkdir()
    assert compare(fail, comparison_parser(None).parse_args(["--output", "x.json"])) == 2
    assert "cannot write x.md" in capsys.readouterr().err


def test_training(capsys: pytest.CaptureFixture[str]) -> None:
    defaults = RunConfig(steps=1, batch_size=1, learning_rate=1e-3)
    options = training_parser(None, defaults).parse_args(["--output", "file"])
    task: Any = None
    assert run_training(task, defaults, options) == 2
    assert "--output: cannot write into file: it is not a folder" in capsys.readouterr().err


SCRIPTS = sorted([*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "examples").glob("*.py")])
WRITTEN = r"--(output|output-dir|build|page|table|cprofile)"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_check_outputs_when_they_parse_options(script: Path) -> None:
    for option in re.findall(rf'add_argument\(\s*"{WRITTEN}",\s*type=(\w+)', script.read_text()):
        assert option[1] in ("output_file", "output_folder"), option


@pytest.mark.parametrize("option", ["--output", "--build"])
def test_training_parity_checks_its_output(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        training_parity.parse_arguments([option, "file"])
    assert f"argument {option}: cannot write into file" in capsys.readouterr().err


def test_every_benchmark_checks_its_output(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        argument_parser("int8_linear", None).parse_args(["--output", "folder"])
    assert "argument --output: cannot write folder: it is a folder" in capsys.readouterr().err
