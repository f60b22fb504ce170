"""Operators between blocks: wrong results are detected, and bytes are counted."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch.nn import functional as F

from benchmarks import block_operators, block_operators_cases
from benchmarks.block_operators_cases import OPERATORS, PROVIDERS, Case, operands
from benchmarks.harness import Record, WrongResultError
from qframework.kernels import block_dequantize, block_quantize

SHAPE = (70, 96)
EAGER = [name for name in PROVIDERS if name != "inductor_fp16"]


def test_smoke(tmp_path):
    output = tmp_path / "out.json"
    assert block_operators.main(["--smoke", "--device", "cpu", "--output", str(output)]) == 0
    records = json.loads(output.read_text())["records"]
    assert {record["status"] for record in records} == {"ok"}
    directions = sum(1 if operator.backward is None else 2 for operator in OPERATORS.values())
    assert len(records) == len(EAGER) * directions
    for record in records:
        width = 1 if record["provider"].startswith("qframework") else 2
        name, direction = record["op"].split()
        moved = OPERATORS[name].moved[direction == "backward"] * width * 70 * 96
        assert record["gbps"] == pytest.approx(moved / record["p50_ms"] / 1e6, rel=2e-3)
        assert record["error"] < (0.08 if width == 1 else 8 * 2.0**-11)


@pytest.mark.parametrize("name", sorted(OPERATORS))
@pytest.mark.parametrize("provider", EAGER)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_check_detects_wrong_results(name, provider, direction):
    """A row, a column, or everything changed a little."""
    if direction == "backward" and OPERATORS[name].backward is None:
        return
    case = PROVIDERS[provider](name, direction, operands(SHAPE, "cpu"))
    right = list(case.fn())
    case.check(right)
    for spoil in (zero_a_row, shift_rows, halve):
        with pytest.raises(WrongResultError):
            case.check([spoil(right[0].detach().clone()), *right[1:]])


def test_block_sizes_choose_our_providers(tmp_path, capsys):
    """Peers stay in the comparison."""
    output = tmp_path / "out.json"
    arguments = ["--smoke", "--device", "cpu", "--operators", "add", "--output", str(output)]
    assert block_operators.main([*arguments, "--block-size", "64", "1x128"]) == 0
    records = json.loads(output.read_text())["records"]
    assert [record["provider"] for record in records] == ["qframework_b64", "qframework_b1x128", "torch_fp16"]
    assert [record["dtype"] for record in records] == ["int8, blocks of 64", "int8, blocks of 1x128", "float16"]
    with pytest.raises(SystemExit):
        block_operators.main([*arguments, "--block-size", "48"])
    assert "block size must be one of 32, 64, 128, 32x128, 1x128, 1x256, jetfire, got '48'" in capsys.readouterr().err


def zero_a_row(x: torch.Tensor) -> torch.Tensor:
    x[3] = 0
    return x


def shift_rows(x: torch.Tensor) -> torch.Tensor:
    return x.roll(1, 0)


def halve(x: torch.Tensor) -> torch.Tensor:
    return (x / 2).to(x.dtype)


@pytest.mark.parametrize("size", [32, (1, 128)])
@pytest.mark.parametrize("name", ["gelu", "silu", "swiglu"])
def test_the_error_of_the_hardware_tanh_is_tolerated(name, size):
    """A relative error of 2^-11, as documented for PTX, can exceed a step if the other values of a row are small."""
    given = operands((256, 1024), "cpu")
    case = block_operators_cases.in_blocks(name, "forward", given, size)

    def computed(off):
        """``f(x) = x / 2 (1 + tanh)`` with a tanh that is larger by such a share of itself."""
        x, up = (block_dequantize(*block_quantize(each, size), size).double() for each in given.inputs)
        y = F.gelu(x) if name == "gelu" else F.silu(x)
        y = y + off * (y - x / 2)
        return block_quantize((y * up if name == "swiglu" else y).float(), size)

    case.check(computed(2.0**-11))
    with pytest.raises(WrongResultError):
        case.check(computed(2.0**-8))


def test_wrong_gradients_of_parameters_are_detected():
    case = PROVIDERS["qframework_b32"]("layer_norm", "backward", operands(SHAPE, "cpu"))
    dx, scale, dweight, dbias = case.fn()
    with pytest.raises(WrongResultError, match="error of a parameter's gradients must be"):
        case.check([dx, scale, dweight, 1.01 * dbias])


def test_a_wrong_result_is_never_timed(monkeypatch, tmp_path):
    calls = []

    def wrong(name, direction, given):
        case = PROVIDERS["qframework_b32"](name, direction, given)

        def fn():
            calls.append(1)
            q, scale = case.fn()
            return q, 2 * scale

        return Case(fn, case.check, "wrong")

    monkeypatch.setitem(PROVIDERS, "torch_fp16", wrong)
    output = tmp_path / "out.json"
    arguments = ["--smoke", "--device", "cpu", "--operators", "gelu", "--providers", "torch_fp16"]
    assert block_operators.main([*arguments, "--output", str(output)]) == 1
    assert [record["status"] for record in json.loads(output.read_text())["records"]] == ["wrong"] * 2
    assert len(calls) == 2


def test_speedups_are_ratios_of_medians():
    def record(provider: str, took: float) -> Record:
        return dataclasses.replace(block_operators.identify("gelu", "forward", SHAPE, provider), p50_ms=took)

    records = [record("qframework_b32", 1.0), record("torch_fp16", 2.0), record("inductor_fp16", 1.5)]
    (line,) = block_operators.speedups(records)
    assert line.split()[-4:] == ["2.00", "torch_fp16,", "1.50", "inductor_fp16"]


def test_shapes_are_those_of_the_paper():
    assert {hidden for _, hidden in block_operators.SHAPES} == {1024, 2048, 4096, 8192}
    assert block_operators_cases.P == 0.1


@pytest.mark.gpu
def test_every_provider_on_a_gpu(tmp_path):
    output = tmp_path / "out.json"
    assert block_operators.main(["--shapes", "300,1000 512,1024", "--output", str(output)]) == 0
    records = json.loads(output.read_text())["records"]
    assert {record["status"] for record in records} == {"ok"}
    assert {record["provider"] for record in records} == set(PROVIDERS)
