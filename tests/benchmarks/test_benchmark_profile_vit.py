"""Profiles: kernels are counted by name, and a block is the difference between two depths."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks import profile_vit
from benchmarks.harness import WrongResultError
from benchmarks.profile_vit import Kernel, Profile, plain_name


def found(**kernels: tuple[float, float]) -> Profile:
    return Profile.of(kernels)


def test_the_kernels_of_a_block_are_the_difference_between_two_depths():
    three = found(gemm=(12, 6.0), patch=(1, 0.5), norm=(7, 0.7))
    four = found(gemm=(16, 8.0), patch=(1, 0.6), norm=(9, 0.9), other=(1, 0.1))
    block = four.beyond(three)
    assert block.kernels == (
        Kernel("gemm", 4, pytest.approx(2.0)), Kernel("norm", 2, pytest.approx(0.2)), Kernel("other", 1, 0.1),
    )  # fmt: skip
    assert block.launches == 7
    assert block.ms == pytest.approx(2.3)


def test_kernel_names_lose_inductors_numbers():
    assert plain_name("triton_per_fused_layer_norm_12") == "triton_per_fused_layer_norm"
    assert plain_name("sm90_xmma_gemm_bf16_2") == "sm90_xmma_gemm_bf16_2"


def event(name: str, device: DeviceType, parent: object = None, annotation: bool = False) -> SimpleNamespace:
    took = SimpleNamespace(elapsed_us=lambda: 5.0)
    return SimpleNamespace(
        name=name, device_type=device, cpu_parent=parent, is_user_annotation=annotation, time_range=took
    )


def test_only_gpu_events_and_outermost_operators_are_launches():
    region = event("Torch-Compiled Region: 0/0", DeviceType.CPU)
    outer = event("aten::linear", DeviceType.CPU, region)
    profiled = SimpleNamespace(
        events=lambda: [
            region,
            outer,
            event("aten::addmm", DeviceType.CPU, outer),
            event("_int8_linear_kernel", DeviceType.CUDA),
            event("## Call CompiledFxGraph", DeviceType.CUDA, annotation=True),
        ]
    )
    assert list(profile_vit._launches(profiled, "cuda")) == [("_int8_linear_kernel", 5.0)]
    assert list(profile_vit._launches(profiled, "cpu")) == [("aten::linear", 5.0)]


def test_launches_are_counted_per_pass():
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.mm(torch.mm(x, x), x) + 1

    kernels = {
        kernel.name: kernel.launches for kernel in profile_vit.profile_forward(forward, torch.eye(3), "cpu").kernels
    }
    assert kernels == {"aten::mm": 2, "aten::add": 1}


def test_a_block_of_a_static_model_has_four_int8_linears(tmp_path, capsys, fresh_dynamo):
    output = tmp_path / "deep" / "out.json"
    arguments = ["--smoke", "--providers", "qframework_static", "--block-only", "--output", str(output)]
    assert profile_vit.main(arguments) == 0
    block = json.loads(output.read_text())["providers"]["qframework_static"]["block"]
    launches = {kernel["name"]: kernel["launches"] for kernel in block["kernels"]}
    if not torch.cuda.is_available():
        assert launches.get("qframework::int8_linear", 0) + launches.get("qframework::int8_product", 0) == 4
    assert block["launches"] == sum(launches.values()) >= 5
    assert f"one block, {block['launches']:g} kernels" in capsys.readouterr().out


def test_a_wrong_model_is_not_profiled(monkeypatch):
    provider = profile_vit.PROVIDERS["fp32"]
    wrong = type(provider)(torch.float32, "float32", compile=lambda module: lambda images: 2 * module(images))
    monkeypatch.setitem(profile_vit.PROVIDERS, "fp32", wrong)
    with pytest.raises(WrongResultError):
        profile_vit.profile_provider("fp32", profile_vit.models.SMOKE_MODEL, 2, "cpu", smoke=True)
