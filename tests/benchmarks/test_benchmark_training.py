"""The benchmarks of INT8 training: runs go on where they stopped, bounds are judged, wrong results are not timed."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import pytest
import torch

from benchmarks import training_block, training_parity
from benchmarks.harness import WrongResultError
from benchmarks.training_parity import Case
from demos.training_loop import RunConfig
from qframework.errors import QFrameworkError
from qframework.kernels.blocks.format import BLOCK_SIZES

# Parity


def smoke(folder: Path, *more: str) -> int:
    places = ["--output", str(folder / "results"), "--build", str(folder / "build")]
    return training_parity.main(["--smoke", "--tasks", "gpt", "--seeds", "0", *places, *more])


def test_runs_that_are_there_are_not_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configurations = ["--configurations", "bf16,per_block_1x128,per_block_32"]
    assert smoke(tmp_path, *configurations) == 0
    said = capsys.readouterr().out
    assert "gpt,per_block_32,0: loss" in said
    assert "gpt,per_block_1x128,0: loss" in said
    path = Case("gpt", "per_block_32", 0).path(tmp_path / "results")
    document = json.loads(path.read_text())
    assert document["machine"]["torch"] == torch.__version__
    assert document["settings"]["steps"] == 2
    before = path.read_bytes()
    assert smoke(tmp_path, "--configurations", "bf16,per_block_32,per_tensor") == 0
    said = capsys.readouterr().out
    assert "gpt,per_block_32,0" not in said
    assert "gpt,per_tensor,0: loss" in said
    assert path.read_bytes() == before
    table = (tmp_path / "results" / "gpt.md").read_text()
    names = ["| bf16", "| per_block_32", "| per_block_1x128", "| per_tensor"]
    assert [line.split(" | ")[0] for line in table.splitlines()[2:]] == names
    assert (tmp_path / "results" / "gpt.png").read_bytes()[:4] == b"\x89PNG"


def test_every_block_size_is_a_configuration_and_the_most_wanted_ones_come_first() -> None:
    sizes = {settings.get("block_size") for settings in training_parity.CONFIGURATIONS.values()}
    assert sizes == {None, *BLOCK_SIZES}
    assert set(training_parity.DEFAULT) == set(training_parity.CONFIGURATIONS) - {"fp32"}
    assert training_parity.DEFAULT[:4] == ("bf16", "per_block_1x128", "per_block_32", "per_block_128")
    labels = {name: RunConfig(1, 1, 1e-3, **each).label for name, each in training_parity.CONFIGURATIONS.items()}
    assert all(name == label for name, label in labels.items())


def test_a_limit_ends_what_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert smoke(tmp_path, "--configurations", "bf16", "--limit", "0.1") == 0
    assert "gpt,bf16,0 timeout: not done after 0.0" in capfd.readouterr().out
    assert not Case("gpt", "bf16", 0).path(tmp_path / "results").exists()


def test_a_run_that_fails_is_counted_and_the_others_are_made(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    checkpoint = tmp_path / "build" / "gpt" / "bf16-0" / "checkpoint.pt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_bytes(b"damaged")
    assert smoke(tmp_path, "--configurations", "bf16", "--jobs", "2", "--seeds", "0,1") == 1
    said = capfd.readouterr().out
    assert "gpt,bf16,0 failed: the process ended with exit status 1" in said
    assert "gpt,bf16,1: loss" in said


def runs(metric: str, **values: list[float]) -> dict:
    return {
        name: [
            {"seed": seed, "validation": [[1, {metric: 0.0}], [2, {metric: value}]]} for seed, value in enumerate(row)
        ]
        for name, row in values.items()
    }


def test_bounds_are_judged_on_equal_seeds() -> None:
    """The mean distance of pairs, in points or in percent; baselines have no bound."""
    table, kept = training_parity.table(
        "digits", runs("top1", bf16=[98.0, 97.0], per_block_32=[97.8, 96.8], per_tensor=[50.0])
    )
    assert kept
    assert "| per_block_32 | 2 | 97.3 | +0.20 | 0.3 | open: 2 of 3 seeds |" in table
    assert "| per_tensor | 1 | 50 | +48.00 |  |  |" in table
    assert not training_parity.table("digits", runs("top1", bf16=[98.0], per_block_128=[97.6]))[1]
    table, kept = training_parity.table("gpt", runs("loss", bf16=[1.0, 2.0], per_block_32=[1.005, 2.01]))
    assert kept
    assert "+0.50" in table
    assert not training_parity.table("gpt", runs("loss", bf16=[1.0], per_block_32=[1.011]))[1]


def test_runs_of_other_settings_are_not_compared(tmp_path: Path) -> None:
    for seed in (0, 1):
        path = Case("gpt", "bf16", seed).path(tmp_path)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"settings": {"steps": seed}, "seed": seed, "configuration": "bf16"}))
    with pytest.raises(QFrameworkError, match="must have the same settings, got 2 kinds"):
        training_parity.read(tmp_path, "gpt")


def test_the_exit_status_says_that_a_bound_is_missed(tmp_path: Path) -> None:
    for name, top1 in (("bf16", 98.0), ("per_block_32", 90.0)):
        path = Case("digits", name, 0).path(tmp_path)
        path.parent.mkdir(exist_ok=True)
        fields = {"settings": {}, "seed": 0, "configuration": name, "losses": [2.0, 1.0], "losses_every": 10}
        path.write_text(json.dumps({**fields, "validation": [[20, {"loss": 1.0, "top1": top1}]]}))
    assert training_parity.main(["--report", "--tasks", "digits", "--output", str(tmp_path)]) == 1


# Blocks

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
    """One scale a tensor is known to be worse, and no other way may be."""
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


def test_what_quantizes_nothing_is_no_peer_for_int8(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(training_block.PROVIDERS, "qframework_32", training_block.Provider(precision="int8"))
    output = tmp_path / "out.json"
    training_block.main(["--smoke", "--providers", "qframework_32", "--output", str(output)])
    records = json.loads(output.read_text())["records"]
    assert [record["status"] for record in records] == ["wrong", "wrong"]
    assert "not quantized" in records[0]["reason"]


def test_what_fp8_is_off_by_is_accepted() -> None:
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


def test_saved_bytes_counts_each_memory_once_and_no_weights() -> None:
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
