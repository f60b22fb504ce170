"""The kernels of decode_attention and cache_append compile for every supported chip without a GPU, without spills."""

from __future__ import annotations

import re

import pytest
from test_compile_targets import CHIPS, compile_for, stack_bytes

from qframework.kernels.attention.decode.cache_append import _cache_append_kernel
from qframework.kernels.attention.decode.decode import choose_plan
from qframework.kernels.attention.decode.triton import (
    _combine_kernel,
    _combine_rows_kernel,
    _decode_attention_kernel,
)
from qframework.kernels.runtime.launch import power_of_2
from qframework.kernels.runtime.triton import HAS_TRITON, INTERPRET

pytestmark = pytest.mark.skipif(INTERPRET or not HAS_TRITON, reason="interpreted kernels cannot be compiled")

SHARED = {"sm_80": 163 * 1024, "sm_89": 99 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "sm_120": 99 * 1024}
PLAIN = {"MASK": "none", "MASK_PER_ROW": False, "CAUSAL": False, "WINDOW": False, "SPLIT": True}
PLAIN |= {"softcap": None, "key_mean_ptr": None, "sinks_ptr": None}
KINDS = {
    "plain": PLAIN,
    "whole": {**PLAIN, "SPLIT": False},
    "padding": {**PLAIN, "MASK": "bool"},
    "window": {**PLAIN, "CAUSAL": True, "WINDOW": True},
    "float_mask": {**PLAIN, "MASK": "float", "MASK_PER_ROW": True, "CAUSAL": True},
    "capped": {name: value for name, value in PLAIN.items() if name not in ("softcap", "key_mean_ptr")},
    "sinks": {name: value for name, value in PLAIN.items() if name not in ("sinks_ptr", "key_mean_ptr")},
}


@pytest.mark.sample(1 / 10)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [4, 64])
@pytest.mark.parametrize(
    ("channels", "dtype"), [(64, "bf16"), (80, "fp16"), (128, "fp16"), (128, "bf16"), (256, "fp32")]
)
@pytest.mark.parametrize("chip", CHIPS)
def test_decode_attention(chip, channels, dtype, rows, kind, tmp_path):
    """Keys and values are copied asynchronously, 16 bytes at a time, and no byte is moved alone."""
    flags = KINDS[kind]
    block = power_of_2(channels)
    plan = choose_plan(rows, 8, 16384, (channels, channels), 132, flags["MASK_PER_ROW"])
    constants = {"D": channels, "DV": channels, "STRIDE_KN": channels, "STRIDE_VN": channels, "LENGTHS": True}
    constants |= {"READ_D": channels, "READ_DV": channels}
    constants |= {"BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n, "BLOCK_D": block, "BLOCK_DV": block}
    constants |= {"STAGES": plan.stages, "QUERIES": rows // 4, "BF16": dtype == "bf16", **flags}
    types = dict.fromkeys(_decode_attention_kernel.arg_names, "i32")
    types |= {"q_ptr": f"*{dtype}", "k_ptr": "*i8", "v_ptr": "*i8", "scales_ptr": "*bf16", "lengths_ptr": "*i32"}
    types |= {"key_mean_ptr": "*fp32", "softcap": "fp32", "sinks_ptr": "*bf16"}
    types |= {"mask_ptr": "*fp16" if flags["MASK"] == "float" else "*i8", "top_ptr": "*fp32", "sum_ptr": "*fp32"}
    types |= {"out_ptr": "*fp32" if flags["SPLIT"] else f"*{dtype}", "logit_scale": "fp32"}
    compiled = compile_for(chip, _decode_attention_kernel, types, constants, num_warps=plan.warps)
    # Tiles of 32 and 64 rows spill: at most 104 bytes, by Triton 3.9 for sm_120.
    assert stack_bytes(compiled, tmp_path) <= (64 if plan.block_m == 16 else 112)
    assert compiled.metadata.shared <= SHARED[chip]
    copies = set(re.findall(r"cp\.async\.\w+\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", compiled.asm["ptx"]))
    assert "0x10" in copies


@pytest.mark.sample(1 / 4)
@pytest.mark.parametrize("chip", CHIPS)
def test_padded_rows_are_copied_whole(chip, tmp_path):
    """16 bytes at a time, as rows of 80 channels."""
    types = dict.fromkeys(_decode_attention_kernel.arg_names, "i32")
    types |= {"q_ptr": "*fp16", "k_ptr": "*i8", "v_ptr": "*i8", "scales_ptr": "*bf16", "lengths_ptr": "*i32"}
    types |= {"mask_ptr": "*i8", "out_ptr": "*fp32", "top_ptr": "*fp32", "sum_ptr": "*fp32", "logit_scale": "fp32"}
    plan = choose_plan(4, 8, 16384, (72, 72), 132)
    constants = {"D": 72, "DV": 72, "READ_D": 80, "READ_DV": 80, "STRIDE_KN": 80, "STRIDE_VN": 80, "LENGTHS": True}
    constants |= {"BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n, "BLOCK_D": 128, "BLOCK_DV": 128}
    constants |= {"STAGES": plan.stages, "QUERIES": 1, "BF16": False, **PLAIN}
    compiled = compile_for(chip, _decode_attention_kernel, types, constants, num_warps=plan.warps)
    copies = set(re.findall(r"cp\.async\.\w+\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", compiled.asm["ptx"]))
    assert "0x10" in copies
    assert "0x8" not in copies


@pytest.mark.sample(1 / 4)
@pytest.mark.parametrize("units", [False, True])
@pytest.mark.parametrize(("splits", "block"), [(2, 128), (64, 32), (256, 16)])
@pytest.mark.parametrize("chip", CHIPS)
def test_combine(chip, splits, block, units, tmp_path):
    types = dict.fromkeys(("part_ptr", "top_ptr", "sum_ptr", "unit_ptr"), "*fp32") | {"out_ptr": "*bf16"}
    types |= {"part_ptr": "*fp16"} if units else {}
    types |= dict.fromkeys(("HKV", "GROUP", "N", "splits"), "i32")
    constants = {"DV": 128, "QUERIES": 1, "BLOCK_S": splits, "BLOCK_DV": block, "HAS_UNITS": units}
    compiled = compile_for(chip, _combine_kernel, types, constants, num_warps=max(1, min(4, splits * block // 512)))
    assert stack_bytes(compiled, tmp_path) == 0


@pytest.mark.sample(1 / 4)
@pytest.mark.parametrize(("channels", "units"), [(64, True), (128, True), (80, False), (256, True)])
@pytest.mark.parametrize("chip", CHIPS)
def test_combine_rows(chip, channels, units, tmp_path):
    """Shares are read 16 bytes at a time, and those of all splits of a step before the first is used."""
    types = dict.fromkeys(("part_ptr", "top_ptr", "sum_ptr", "unit_ptr"), "*fp32") | {"out_ptr": "*bf16"}
    types |= {"part_ptr": "*fp16"} if units else {}
    types |= dict.fromkeys(("HKV", "GROUP", "N", "splits"), "i32")
    block = power_of_2(channels)
    constants = {"DV": channels, "QUERIES": 16, "STEP": 16, "BLOCK_R": max(1, 512 // block), "BLOCK_DV": block}
    constants |= {"HAS_UNITS": units}
    compiled = compile_for(chip, _combine_rows_kernel, types, constants, num_warps=2)
    assert stack_bytes(compiled, tmp_path) == 0
    assert len(re.findall(r"ld\.global\.v4\.b32", compiled.asm["ptx"])) >= 16


@pytest.mark.sample(1 / 3)
@pytest.mark.parametrize(("channels", "tile", "dtype"), [(128, 1, "fp16"), (80, 32, "bf16"), (256, 32, "fp32")])
@pytest.mark.parametrize("chip", CHIPS)
def test_cache_append(chip, channels, tile, dtype, tmp_path):
    types = dict.fromkeys(_cache_append_kernel.arg_names, "i32")
    types |= {"key_ptr": f"*{dtype}", "value_ptr": f"*{dtype}", "k_mean_ptr": "*fp32", "k_cache_ptr": "*i8"}
    types |= {"v_cache_ptr": "*i8", "scales_ptr": "*bf16", "length_ptr": "*i32"}
    block = power_of_2(channels)
    constants = {"D": channels, "DV": channels, "TILE": tile, "BLOCK_D": block, "BLOCK_DV": block}
    compiled = compile_for(chip, _cache_append_kernel, types, constants, num_warps=1 if tile == 1 else 4)
    assert stack_bytes(compiled, tmp_path) == 0
