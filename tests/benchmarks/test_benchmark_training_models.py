"""Whole models in training: what is wrong is not timed (training_models.py)."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import report_training, training_models, training_profile, training_widths
from benchmarks.harness import Record, Results
from benchmarks.machine import REPOSITORY
from benchmarks.training_widths import Speed
from qframework.training import plan

ARGUMENTS = ["--smoke", "--eager", "--output"]


def records(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["provider"], row["op"]): row for row in json.loads(path.read_text())["records"]}


def test_models_smoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one kind of kernel for each provider, since profiles take seconds."""

    def one_kind(row: Record, step: Any, device: str) -> list[Record]:
        return [dataclasses.replace(row, benchmark=training_profile.BENCHMARK, op="attention", p50_ms=1.0)]

    monkeypatch.setattr(training_models, "profile_step", one_kind)
    output = tmp_path / "out.json"
    assert training_models.main(["--profile", *ARGUMENTS, str(output)]) == 0
    found = records(output)
    assert (
        found["bf16", "attention"]["benchmark"] == found["qframework", "attention"]["benchmark"] == "training_profile"
    )
    assert {provider for provider, _ in found} == set(training_models.PROVIDERS)
    for provider in ("bf16", "qframework", "qframework_mixed_attention"):
        assert found[provider, "step"]["p50_ms"] > 0
    assert found["qframework", "step"]["error"] > training_models.INT8_LEAST > found["bf16", "step"]["error"]
    assert found["qframework", "step"]["first_call_s"] > 0
    if not torch.cuda.is_available():
        assert found["torchao_fp8", "step"]["status"] == "unsupported"


@pytest.mark.parametrize("what", ["loss", "gradient", "nothing quantized"])
def test_a_wrong_model_is_not_timed(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(model: Any) -> None:
        with torch.no_grad():
            if what == "loss":
                model.lm_head.weight.mul_(20)
            elif what == "gradient":
                model.transformer.h[0].attn.c_proj.weight.mul_(3)

    precision = "int8" if what == "nothing quantized" else "bf16"
    wrong = dataclasses.replace(training_models.PROVIDERS["bf16"], convert=spoil, precision=precision)
    monkeypatch.setitem(training_models.PROVIDERS, "bf16", wrong)
    output = tmp_path / "out.json"
    assert training_models.main(["--providers", "bf16", *ARGUMENTS, str(output)]) == 1
    found = records(output)
    assert {row["status"] for row in found.values()} == {"wrong"}
    assert not any("p50_ms" in row for row in found.values())


def test_every_model_of_the_comparison_has_blocks_to_convert() -> None:
    """On a meta device, two blocks each; the first weight is one of a block."""
    from qframework.training import conversion_report, convert_to_int8_training
    from qframework.training.plan import blocks_of, width_of

    for name, subject in training_models.MODELS.items():
        with torch.device("meta"):
            model = subject.build(2)
        watched = training_models._first_weight(model)
        assert width_of(blocks_of(model)[0]) in model.get_parameter(watched).shape, name
        assert ".0." in watched
        assert len(conversion_report(convert_to_int8_training(model, skip_slower=False)).blocks) == 2


def test_linears_instead_of_conv1d_compute_the_same() -> None:
    """And are the same parameters' values and gradients, transposed."""
    model = training_models.SMOKE["gpt2_medium"].build(None).eval()
    x = torch.randint(0, 8192, (2, 16))
    with torch.no_grad():
        expected, name = model(x).logits, type(model.transformer.h[0].mlp.c_fc).__name__
        training_models.linears_for_conv1d(model)
        assert (name, type(model.transformer.h[0].mlp.c_fc).__name__) == ("Conv1D", "Linear")
        torch.testing.assert_close(model(x).logits, expected)
    assert not any(p.is_meta for p in model.parameters())


def test_a_conversions_limits_are_those_of_the_stored_steps() -> None:
    """Of the newest file of each model; the least faster width above the widest slower one, without CUDA graphs."""
    files = (REPOSITORY / "benchmarks" / "results" / report_training.FOLDER).glob("*-models*.json")
    stored = [Results.load(path) for path in files]
    found = training_widths.speeds((results.machine["date"], results.records) for results in stored)
    assert len(found) >= 16
    assert training_widths.limit(found, many=False) == plan.FASTER_FROM
    assert training_widths.limit(found, many=True) == plan.FASTER_FROM_MANY


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("_block_linear_specialized_kernel", "products in INT8"),
        ("_block_transpose_kernel", "quantization and transposes"),
        ("_block_gated_activation_backward_kernel", "other operators in INT8"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "other products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, cutlass::bfloat16_t>>", "attention"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>", "optimizer"),
        ("triton_poi_fused_add_mul", "Inductor's kernels"),
        ("Memcpy DtoD (Device -> Device)", training_profile.REST),
    ],
)
def test_kinds_of_kernels(kernel: str, kind: str) -> None:
    assert training_profile.kind_of(kernel) == kind


def test_a_profile_holds_the_time_of_a_step() -> None:
    """On a CPU, of PyTorch's operators, which are of no kind."""
    row = Record(benchmark="training_models", provider="bf16", op="step", model="m", batch=1, p50_ms=3.0, runs=9)
    x = torch.randn(64, 64)
    (found,) = training_profile.profile_step(row, lambda: x + x, "cpu")
    assert (found.benchmark, found.op, found.provider, found.runs) == (
        training_profile.BENCHMARK,
        training_profile.REST,
        "bf16",
        None,
    )
    assert 0 < (found.p50_ms or 0) < 100


def test_what_a_profile_says() -> None:
    """30 of 50 ms are products; 10 are attention and optimizer."""
    times = {
        "bf16": {"other products": 30.0, "attention": 6.0, "optimizer": 4.0, "Inductor's kernels": 10.0},
        "qframework": {"products in INT8": 20.0, "attention": 6.0, "optimizer": 4.0, "other operators in INT8": 5.0},
    }
    rows = [
        Record(benchmark=training_profile.BENCHMARK, provider=provider, op=kind, model="m", batch=1, p50_ms=ms)
        for provider, kinds in times.items()
        for kind, ms in kinds.items()
    ]
    text = training_profile.section(rows)
    assert "INT8 is 1.60 times as fast" in text  # 40 / 25
    assert "the whole step would be 1.67 times as fast" in text  # 50 / (15 + 15)
    assert "| all | 50 | 35 |" in text
    assert training_profile.section([]) == ""


def test_one_slow_run_raises_the_limit() -> None:
    found = [Speed("a", 64, False, "step", 1.2), Speed("b", 128, False, "step", 1.1), Speed("c", 96, True, "step", 0.9)]
    assert training_widths.limit(found, many=False) == 64
    assert training_widths.limit([*found, Speed("b", 64, False, "step", 1.02)], many=False) == 128
    assert training_widths.limit([*found, Speed("b", 64, False, "step_in_graph", 0.9)], many=False) == 64
    assert training_widths.limit(found, many=True) is None


def test_the_newest_file_of_a_model_replaces_older_ones_with_all_its_runs() -> None:
    old = Speed("a", 64, False, "step", 0.9, "2026-01-01")
    later = [Speed("a", 64, False, "step", ratio, "2026-01-02") for ratio in (1.1, 1.2)]
    other = Speed("b", 128, False, "step", 1.1, "2026-01-01")
    assert training_widths.limit([old, other], many=False) == 128
    assert training_widths.limit([*later, old, other], many=False) == 64
    slow = Speed("a", 64, False, "step", 0.99, "2026-01-02")
    assert training_widths.limit([slow, *later, old, other], many=False) == 128
    assert training_widths.newest([old, other]) == [old, other]


def test_speeds_pair_a_model_with_its_baseline() -> None:
    row = Record(benchmark="training_models", provider="bf16", op="step", model="llama_2048, 3 blocks", p50_ms=2.0)
    ours = dataclasses.replace(row, provider="qframework", p50_ms=1.6)
    alone = dataclasses.replace(ours, model="vit_base")
    second = [dataclasses.replace(each, run=2, p50_ms=3.0) for each in (row, ours)]
    found = training_widths.speeds([("2026-01-01", [row, ours, alone, *second])])
    assert found == [Speed("llama_2048", 2048, True, "step", ratio, "2026-01-01") for ratio in (1.25, 1.0)]
    assert "| llama_2048 | 2,048 | yes | 1.25 |  |" in training_widths.section([("", [row, ours])])


def test_models_may_have_their_own_number_of_blocks() -> None:
    assert training_models.parse_models("llama_2048:3, vit_large") == [("llama_2048", 3), ("vit_large", None)]
    with pytest.raises(argparse.ArgumentTypeError, match=r"must be chosen from .*, got llama_1"):
        training_models.parse_models("llama_1:3")
