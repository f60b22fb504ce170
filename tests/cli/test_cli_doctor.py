"""``qframework doctor``, and the diagnosis it prints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cli_runs import run, run_json

from qframework import diagnosis
from qframework.kernels.linear.local_tiles import FOLDER, Chip, tile_path


def test_doctor() -> None:
    from qframework.kernels import cpu_implementation

    report = run_json("doctor")
    assert report["software"]["torch"] == __import__("importlib.metadata").metadata.version("torch")
    assert report["cpu"]["int8_linear"] == cpu_implementation()
    assert report["problems"] == []
    assert [name for name in report if name.startswith("cuda")] == [
        f"cuda:{index}" for index in range(torch.cuda.device_count())
    ]


def test_doctor_explains_why_the_cpu_multiplies_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    from qframework import diagnosis
    from qframework.kernels.linear.cpu import CpuChoice

    choice = CpuChoice("float32", {"int_mm": "it is not exact on this processor"})
    monkeypatch.setattr(diagnosis, "cpu_choice", lambda: choice)
    report = run_json("doctor")
    assert report["cpu"]["int8_linear"] == "float32"
    assert report["cpu"]["int8_linear_not_int_mm"] == "it is not exact on this processor"
    assert report["problems"] == [], "slow, and right"


@pytest.mark.parametrize(("int8_ms", "slower"), [(1.5, True), (1.05, False), (0.5, False)])
def test_doctor_says_where_int8_is_slower_than_float(
    int8_ms: float, slower: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "milliseconds", lambda _, choice, *__, **___: 1.0 if choice == "float" else int8_ms)
    report = run_json("doctor")
    assert (report["cpu"]["float_ms"], report["cpu"]["int8_ms"]) == (1.0, int8_ms)
    sentence = "INT8 is slower than float32 on cpu: a linear (197 x 768 x 3072, one thread) takes 1.5 ms in INT8 "
    sentence += "and 1 ms in float32"
    assert report["notes"] == ([sentence] if slower else [])
    assert report["cpu"]["threads"] == torch.get_num_threads(), "as before"
    assert (sentence in run("doctor").stdout) is slower


def test_doctor_fails_where_int8_linear_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> float:
        raise RuntimeError("no kernel image\nand more")

    monkeypatch.setattr(diagnosis, "milliseconds", broken)
    result = run("doctor")
    assert result.exit_code == 1
    assert "int8_linear does not run on cpu: no kernel image" in result.stderr


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
    capability: tuple[int, int], hip: str | None, supported: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))

    class Properties:
        name, total_memory = "a GPU", 16 * 2**30
        major, minor = capability

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    monkeypatch.setattr(diagnosis, "milliseconds", lambda *_, **__: 1.0)
    monkeypatch.setattr(diagnosis, "this_chip", lambda _: Chip("a GPU", capability, 100))
    report = diagnosis.diagnose()
    gpu = report["cuda:0"]
    measured = capability == (9, 0)
    heuristic = "heuristic, no measured table of this chip"
    assert gpu.get("int8_linear_tiles") == (None if not supported else "shipped table" if measured else heuristic)
    assert any("tune-kernels" in note for note in report["notes"]) is (supported and not measured)
    if supported:
        tile_path(Chip("a GPU", capability, 100)).write_text("{")
        report = diagnosis.diagnose()
        assert "is not a file of qframework tune-kernels" in report["cuda:0"]["int8_linear_tiles_not_read"]
        assert report["cuda:0"]["int8_linear_tiles_not_read"] in report["notes"]
        assert report["problems"] == [], "slow, and right"
    assert gpu["capability"] == f"sm_{capability[0]}{capability[1]}"
    assert gpu["supported"] is supported
    assert gpu["memory_gib"] == 16.0
