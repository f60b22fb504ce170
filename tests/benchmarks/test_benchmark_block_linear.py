"""Linears of INT8 training: wrong results of any of the three products are detected and never timed."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from benchmarks import block_linear, block_linear_cases
from benchmarks.block_linear_cases import PROVIDERS, check_result, operands
from benchmarks.harness import WrongResultError
from benchmarks.torchao_training import quantize_for_training

SHAPE = (256, 96, 64)


@pytest.mark.parametrize("name", ["y", "dx", "dw"])
def test_a_missing_tile_is_detected(name):
    """An eighth of the columns of the last rows."""
    given = operands(SHAPE, "cpu")
    x, weight, grad = given.x.float(), given.weight, given.grad.float()
    right = {"y": x @ weight.t(), "dx": grad @ weight, "dw": grad.t() @ x}[name]
    assert check_result(given, name, right, block_linear_cases.BF16_TOLERANCE) < 1e-3
    right[-16:, : right.shape[1] // 8] = 0
    with pytest.raises(WrongResultError):
        check_result(given, name, right, block_linear_cases.FP8_TOLERANCE)


def test_the_fp8_tolerance_covers_e5m2_gradients_and_nothing_coarser():
    """The products of torchao's FP8 training, with one scale per tensor."""
    given = operands((1024, 1024, 1024), "cpu")

    def rounded(x, dtype):
        scale = torch.finfo(dtype).max / x.abs().max()
        return (x * scale).to(dtype).float() / scale

    grad = rounded(given.grad.float(), torch.float8_e5m2)
    weights = {dtype: rounded(given.weight, dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)}
    tolerance = block_linear_cases.FP8_TOLERANCE
    error = check_result(given, "dx", grad @ weights[torch.float8_e4m3fn], tolerance)
    assert error == pytest.approx(0.061, rel=0.05)
    with pytest.raises(WrongResultError):
        check_result(given, "dx", grad @ weights[torch.float8_e5m2], tolerance)


@pytest.mark.parametrize(
    "provider",
    [
        "qframework_blocks_32",
        "qframework_blocks_1x128",
        "qframework_floats_1x128",
        "qframework_per_token",
        "torch_bf16",
    ],
)
def test_three_products_are_checked_and_written(provider, tmp_path):
    output = tmp_path / "out.json"
    arguments = ["--smoke", "--device", "cpu", "--providers", provider, "--output", str(output)]
    assert block_linear.main(arguments) == 0
    records = json.loads(output.read_text())["records"]
    assert [record["shape"] for record in records] == [list(shape) for shape in block_linear.SMOKE_SHAPES]
    for record in records:
        m, n, k = record["shape"]
        assert record["status"] == "ok"
        assert record["tflops"] == pytest.approx(6 * m * n * k / record["p50_ms"] / 1e9, rel=2e-3)


@pytest.mark.parametrize("kind", ["qframework_blocks_{}", "block_linear_{}"])
def test_every_block_size_is_measured(kind):
    for size in ("32", "64", "128", "32x128", "1x128"):
        assert kind.format(size) in PROVIDERS


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in PROVIDERS if name.startswith("block_linear")])
def test_kernels_are_right(name):
    """Each kernel for each block size, with whole and partial tiles."""
    if torch.cuda.get_device_capability() != (9, 0) and name.endswith(("cooperative", "single")):
        pytest.skip("compiled for Hopper only")
    for shape in (SHAPE, (1000, 400, 1040)):
        case = block_linear_cases.setup(shape, name, "cuda")
        assert case.check(operands(shape, "cuda")) < block_linear_cases.INT8_TOLERANCE


def test_torchao_multiplies_in_int8():
    """torchao 0.18 multiplies in 16 bit unless its linear is registered; compiled without graph breaks."""
    given = operands((256, 128, 64), "cpu")
    layers = quantize_for_training(torch.nn.Sequential(block_linear_cases.float_layer(given, torch.bfloat16)))
    layer = torch.compile(layers, backend="aot_eager", fullgraph=True)
    case = block_linear_cases.training_case(layer, given.x, given.grad, block_linear_cases.INT8_TOLERANCE, "int8")
    assert case.check(given) > block_linear_cases.INT8_LEAST


def test_a_provider_that_quantizes_nothing_is_wrong(monkeypatch):
    """As torchao 0.18, whose tensor subclass multiplies in 16 bit."""
    right = PROVIDERS["torch_bf16"]
    monkeypatch.setitem(PROVIDERS, "torchao_int8", lambda given: dataclasses.replace(right(given), dtype="int8"))
    record = block_linear.check(SHAPE, "torchao_int8", "cpu")
    assert record.status == "wrong"
    assert "not quantized" in record.reason


def test_a_wrong_result_is_never_timed(monkeypatch):
    right = PROVIDERS["torch_bf16"]
    calls = []

    def wrong(given):
        case = right(given)

        def results():
            calls.append(1)
            return {name: 1.1 * result for name, result in case.results().items()}

        return dataclasses.replace(case, results=results)

    monkeypatch.setitem(PROVIDERS, "torch_bf16", wrong)
    measurement = block_linear.Measurement(block_linear.Plan(("torch_bf16",), (SHAPE,), "cpu"))
    assert [record.status for record in measurement("check")] == ["wrong"]
    assert list(measurement("time")) == []
    assert len(calls) == 1


def test_gradients_do_not_accumulate_over_steps():
    """After two steps, gradients are those of one."""
    case = block_linear_cases.setup(SHAPE, "torch_bf16", "cpu")
    case.fn()
    first = case.results()["dw"].clone()
    case.fn()
    assert torch.equal(case.results()["dw"], first)
