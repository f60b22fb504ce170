"""The kernels for few rows compile for every chip: INT8 tensor cores, no spills, loads ahead of their use."""

from __future__ import annotations

import math
import re

import pytest
from test_compile_targets import CHIPS, EPILOGUES, OVERLAPPING, compile_for, pytestmark, stack_bytes  # noqa: F401

from qframework.kernels.linear import few_rows_gated
from qframework.kernels.linear.epilogue import EpilogueForm
from qframework.kernels.linear.few_rows import _add_parts_kernel, _int8_linear_few_rows_kernel
from qframework.kernels.linear.launch import ADDED_TILE, few_rows_constants
from qframework.kernels.linear.tile import FewRowsTile
from qframework.kernels.linear.tiles import few_rows_tile, gated_few_rows_tile

ROOM = {"sm_80": 163, "sm_90": 227, "sm_100": 227}  # KiB of shared memory, 99 on other chips
POINTERS = {"a_scale": "*fp32", "b_scale": "*fp32", "bias": "*fp16", "residual": "*fp16"}
POINTERS |= {"out_scale": "*fp32", "zero_point": "*i32"}
SIZES = dict.fromkeys(("M", "N", "K", "PA", "PO", "stride_am", "stride_bn", "stride_rm", "stride_om"), "i32")
OF_WEIGHTS = {"": "*i8", "_scale": "*fp32", "_bias": "*fp16"}
LINEARS = [(2048, 2048), (512, 2048), (4096, 14336), (128256, 2048)]  # N, K


def types_of(out: str, **more: str) -> dict[str, str]:
    return {f"{name}_ptr": kind for name, kind in (POINTERS | {"out": out} | more).items()} | SIZES


def out_of(epilogue: str) -> str:
    return "*fp16" if EPILOGUES[epilogue].out_scale == "none" else "*i8"


def compile_product(chip: str, tile: FewRowsTile, epilogue: str, k: int = 2048):
    """With an inner size of ``k`` and rows that are next to each other."""
    types = types_of(out_of(epilogue) if tile.parts == 1 else "*i32", a="*i8", b="*i8")
    constants = {"EPILOGUE": EPILOGUES[epilogue], "PARTS": tile.parts}
    constants |= few_rows_constants(tile, k, math.gcd(16, k), k % 16 == 0)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    even = k % 16 == 0
    return compile_for(
        chip, _int8_linear_few_rows_kernel, types, constants, ("K",) if even else (), strides=even, **options
    )


@pytest.mark.sample(1 / 4)
@pytest.mark.parametrize("rows", [1, 32, 64])
@pytest.mark.parametrize("linear", LINEARS, ids=str)
@pytest.mark.parametrize("epilogue", ["fp16", "gelu_tanh", "qkv_int8", "gelu_zero_point"])
@pytest.mark.parametrize("chip", CHIPS)
def test_product(chip, epilogue, linear, rows, tmp_path):
    tile = few_rows_tile(rows, *linear, 108)
    compiled = compile_product(chip, tile, epilogue)
    ptx = compiled.asm["ptx"]
    assert re.search(CHIPS[chip][2], ptx) or re.search(CHIPS["sm_80"][2], ptx), "no INT8 tensor-core instruction"
    assert stack_bytes(compiled, tmp_path) <= 8
    assert compiled.metadata.shared <= ROOM.get(chip, 99) * 1024
    assert len(re.findall(r"cp\.async\.cg", ptx)) >= tile.num_stages - 1, "loads are not ahead of their use"


@pytest.mark.parametrize("chip", CHIPS)
def test_the_weight_is_prefetched_before_the_wait(chip):
    ptx = compile_product(chip, few_rows_tile(1, 2048, 2048, 132), "fp16").asm["ptx"]
    prefetch = ptx.find("cp.async.bulk.prefetch.L2")
    assert (prefetch >= 0) == (chip in OVERLAPPING)
    assert prefetch < max(ptx.find("griddepcontrol.wait"), 0)


@pytest.mark.parametrize("k", [1000, 1004])
def test_rows_off_multiples_of_16_bytes_are_loaded_in_vectors(k):
    ptx = compile_product("sm_90", few_rows_tile(1, 2048, k, 132), "fp16", k).asm["ptx"]
    sizes = set(re.findall(r"cp\.async\.\w+\.shared\.global\S* \[[^,]+\], \[[^,]+\], (0x\w+|\d+)", ptx))
    assert {int(size, 0) for size in sizes} == {math.gcd(16, k)}


@pytest.mark.parametrize("parts", [2, 8])
@pytest.mark.parametrize("epilogue", ["fp16", "residual", "gelu_int8", "qkv_int8"])
@pytest.mark.parametrize("chip", CHIPS)
def test_adding_parts(chip, epilogue, parts, tmp_path):
    constants = {"EPILOGUE": EPILOGUES[epilogue], "BLOCK_M": ADDED_TILE[0], "BLOCK_N": ADDED_TILE[1], "PARTS": parts}
    types = types_of(out_of(epilogue), parts="*i32")
    names = _add_parts_kernel.arg_names
    used = {name: kind for name, kind in types.items() if name in names}
    assert stack_bytes(compile_for(chip, _add_parts_kernel, used, constants, num_warps=4), tmp_path) == 0


@pytest.mark.sample(1 / 2)
@pytest.mark.parametrize("rows", [1, 32, 64])
@pytest.mark.parametrize("out", ["*fp16", "*i8"])
@pytest.mark.parametrize("linear", [(8192, 2048), (14336, 4096), (1152, 1000)], ids=str)
@pytest.mark.parametrize("chip", CHIPS)
def test_gated(chip, linear, out, rows, tmp_path):
    n, k = linear
    epilogue = EpilogueForm("row", True, "silu", False, out_scale="none" if out == "*fp16" else "tensor")
    tile = gated_few_rows_tile(rows, n, k, 108)
    constants = {"EPILOGUE": epilogue, **few_rows_constants(tile, k, math.gcd(16, k), k % 16 == 0)}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    sizes = dict.fromkeys(("M", "N", "K", "PA", "stride_am", "stride_gate", "stride_up"), "i32")
    weights = {f"{each}{part}_ptr": kind for each in ("gate", "up") for part, kind in OF_WEIGHTS.items()}
    types = {"a_ptr": "*i8", "a_scale_ptr": "*fp32", **weights, "out_scale_ptr": "*fp32", "zero_point_ptr": "*i32"}
    types |= {"out_ptr": out, **sizes}
    aligned = k % 16 == 0
    compiled = compile_for(
        chip, few_rows_gated.kernel, types, constants, ("K",) if aligned else (), strides=aligned, **options
    )
    ptx = compiled.asm["ptx"]
    assert re.search(CHIPS[chip][2], ptx) or re.search(CHIPS["sm_80"][2], ptx), "no INT8 tensor-core instruction"
    assert stack_bytes(compiled, tmp_path) <= 8
    assert compiled.metadata.shared <= ROOM.get(chip, 99) * 1024
    assert len(re.findall(r"cp\.async", ptx)) >= tile.num_stages - 1, "loads are not ahead of their use"
    assert ("cp.async.bulk.prefetch.L2" in ptx) == (chip in OVERLAPPING and aligned)
