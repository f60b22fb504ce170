"""The benchmark on the CPU refuses wrong models (vit_cpu.py, models.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import models, vit_cpu
from benchmarks.harness import WrongResultError


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def zero_one_row(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    value[5] = 0
    return value


FEW = ("fp32_eager", "x86_inductor_static", "qframework_static", "qframework_dynamic_float")


@pytest.mark.slow
@pytest.mark.parametrize("providers", [FEW, pytest.param(tuple(vit_cpu.PROVIDERS), marks=pytest.mark.full)])
def test_vit_cpu_smoke(providers, tmp_path, fresh_dynamo):
    output = tmp_path / "out.json"
    assert vit_cpu.main(["--smoke", "--providers", ",".join(providers), "--output", str(output)]) == 0
    records = {record["provider"]: record for record in read(output)["records"]}
    assert tuple(records) == providers
    assert records["fp32_eager"]["sqnr_db"] == "inf"
    for name in ("qframework_static", "qframework_dynamic_float"):
        record = records[name]
        assert record["runs"] == 2
        assert record["first_call_s"] > 0
        assert models.SQNR_FLOOR_DB["int8"] < record["worst_sqnr_db"] <= record["sqnr_db"] < 60


def test_vit_cpu_refuses_a_wrong_provider(monkeypatch, tmp_path):
    wrong = vit_cpu.Provider("float32", "float32", compile=lambda module: lambda images: 2 * module(images))
    monkeypatch.setitem(vit_cpu.PROVIDERS, "fp32_inductor", wrong)
    output = tmp_path / "out.json"
    assert vit_cpu.main(["--smoke", "--providers", "fp32_eager,fp32_inductor", "--output", str(output)]) == 1
    status = {record["provider"]: record["status"] for record in read(output)["records"]}
    assert status == {"fp32_eager": "ok", "fp32_inductor": "wrong"}


def test_accuracy_checks_every_image():
    """If one image of 64 has zero logits, the SQNR over all is 18 dB, the image's own 0 dB."""
    logits = torch.randn(64, 1000)
    assert models.accuracy(logits * 1.01, logits, "float16")["worst_sqnr_db"] == pytest.approx(40, abs=0.1)
    with pytest.raises(WrongResultError, match=r"SQNR of the worst image must be at least 12 dB, got 0\.0 dB"):
        models.accuracy(zero_one_row(logits), logits, "int8")
    with pytest.raises(WrongResultError, match="nan dB"):
        models.accuracy(logits * torch.nan, logits, "int8")


def test_int8_that_was_never_quantized_is_refused():
    """A quantizer that annotates nothing gives exact results at float speed, which must not become an INT8 row."""
    logits = torch.randn(4, 10)
    with pytest.raises(WrongResultError, match="too exact for int8"):
        models.accuracy(logits, logits, "int8")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).eval()
    with pytest.raises(WrongResultError, match="got 2 of 2 in float: linear, linear_1"):
        models.require_quantized(torch.export.export(model, (torch.randn(2, 4),)).module())


def test_layers_that_choose_need_not_be_quantized():
    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.head = torch.nn.Linear(4, 8), torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.head(x), self.router(x).topk(2).indices

    with pytest.raises(WrongResultError, match=r"got 1 of 1 in float: linear$"):
        models.require_quantized(torch.export.export(Experts().eval(), (torch.randn(2, 4),)).module())


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_x86_inductor_quantizer_quantizes_every_linear(is_dynamic):
    model = models.build_model(models.SMOKE_MODEL, smoke=True)
    models.require_quantized(models.quantize_x86(model, models.random_images(model, 2), is_dynamic=is_dynamic))


def test_unknown_providers_are_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        vit_cpu.main(["--providers", "fp32_eager,magic"])
    assert "must be chosen from fp32_eager, fp32_inductor, " in capsys.readouterr().err
