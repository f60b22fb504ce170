"""Wrong GPT blocks are not timed, and memory is counted once (training_block.py)."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import pytest
import torch

from benchmarks import training_block
from benchmarks.harness import WrongResultError
from qframework.kernels.blocks.format import BLOCK_SIZES

ARGUMENTS = ["--smoke", "--providers", "bf16_eager,torchao_int8_compiled,qframework_32,qframework_1x128_compiled"]


def test_block_smoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uncompiled = dataclasses.replace(training_block.PROVIDERS["qframework_1x128_compiled"], compiled=False)
    monkeypatch.setitem(training_block.PROVIDERS, "qframework_1x128_compiled", uncompiled)
    output = tmp_path / "out.json"
    assert training_block.main([*ARGUMENTS, "--output", str(output)]) == 0
    records = json.loads(output.read_text())["records"]
    found = {(record["provider"], record["op"]): record for record in records}
    for provider in ("bf16_eager", "qframework_32", "qframework_1x128_compiled"):
        for op in ("gpt_block_forward", "gpt_block_forward_backward"):
            assert found[provider, op]["p50_ms"] > 0
            assert 0 < found[provider, op]["error"] < training_block.TOLERANCE["int8"]
            assert found[provider, op]["activation_mb"] > 0
    if not torch.cuda.is_available():
        assert found["torchao_int8_compiled", "gpt_block_forward"]["status"] == "unsupported"


def test_every_way_of_int8_training_is_a_provider() -> None:
    """Only one scale per tensor is allowed to be worse."""
    assert {training_block.compiled_in_blocks(size) for size in BLOCK_SIZES} < set(training_block.PROVIDERS)
    lenient = {name for name, each in training_block.PROVIDERS.items() if each.tolerance > 0.1}
    assert lenient == {"qframework_per_tensor_compiled", "torchao_fp8_compiled"}
    assert "qframework_per_token_compiled" in training_block.PROVIDERS


def test_a_wrong_block_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(model: torch.nn.Module) -> torch.nn.Module:
        with torch.no_grad():
            model[0].mlp.fc1.weight[:8] = 0
        return model

    wrong = dataclasses.replace(training_block.PROVIDERS["bf16_eager"], convert=spoil)
    monkeypatch.setitem(training_block.PROVIDERS, "bf16_eager", wrong)
    output = tmp_path / "out.json"
    assert training_block.main(["--smoke", "--providers", "bf16_eager", "--output", str(output)]) == 1
    records = json.loads(output.read_text())["records"]
    assert [record["op"] for record in records] == list(training_block.OPS)
    assert {record["status"] for record in records} == {"wrong"}
    assert not any("p50_ms" in record for record in records)


def test_every_result_is_checked() -> None:
    values = [torch.randn(8, 8) for _ in range(3)]
    assert training_block.check(values, values, 0.0) == 0
    for index, what in enumerate(("output", "dX", "dW")):
        spoiled = [2 * value if number == index else value for number, value in enumerate(values)]
        with pytest.raises(WrongResultError, match=f"relative error of {what} against FP32 must be at most 0.1, got 1"):
            training_block.check(spoiled, values, 0.1)


def test_a_provider_that_quantizes_nothing_is_wrong(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(training_block.PROVIDERS, "qframework_32", training_block.Provider(precision="int8"))
    output = tmp_path / "out.json"
    training_block.main(["--smoke", "--providers", "qframework_32", "--output", str(output)])
    records = json.loads(output.read_text())["records"]
    assert [record["status"] for record in records] == ["wrong", "wrong"]
    assert "not quantized" in records[0]["reason"]


def test_the_fp8_tolerance_covers_its_rounding() -> None:
    """torchao's, emulated: gradients in E5M2."""
    float8 = pytest.importorskip("torchao.float8")
    config = float8.Float8LinearConfig(emulate=True)
    provider = dataclasses.replace(
        training_block.PROVIDERS["torchao_fp8_compiled"],
        convert=lambda model: float8.convert_to_float8_training(model, config=config),
        compiled=False,
    )
    options = argparse.Namespace(batch=2, tokens=64, layers=2, dropout=0.0)
    subject = training_block.Subject.build(128, options, "cpu")
    forward = provider.prepare(subject.model)
    values = training_block._values(forward, subject.x, subject.grad, subject.model[0].attn.qkv.weight)
    error = training_block.check(values, subject.expected, provider.tolerance)
    assert error > provider.tolerance / 2  # one as wide as twice that would see nothing


def test_saved_bytes_counts_each_storage_once_without_weights() -> None:
    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    assert training_block.saved_bytes(lambda: (x @ weight, x * x), [weight]) == 8 * 4 * 4
    assert training_block.saved_bytes(lambda: x @ weight) == (8 + 4) * 4 * 4


@pytest.mark.gpu
def test_every_provider_on_a_gpu(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    assert training_block.main(["--smoke", "--hidden", "256", "--output", str(output)]) == 0
    found = {record["provider"]: record["status"] for record in json.loads(output.read_text())["records"]}
    assert {name for name, status in found.items() if status == "ok"} >= {
        name for name in training_block.PROVIDERS if not name.startswith("torchao")
    }
