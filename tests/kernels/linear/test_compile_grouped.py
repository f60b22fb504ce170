"""int8_grouped_linear's kernel compiles for every chip: INT8 tensor cores, no spills, within shared memory."""

from __future__ import annotations

import re

import pytest
from test_compile_targets import CHIPS, compile_for, pytestmark, stack_bytes  # noqa: F401

from qframework.kernels.linear.grouped import _int8_grouped_linear_kernel, choose_tile

ROOM = {"sm_80": 163, "sm_90": 227, "sm_100": 227}  # KiB of shared memory, 99 on other chips
POINTERS = {"a": "*i8", "a_scale": "*fp32", "b": "*i8", "b_scale": "*fp32", "offsets": "*i32", "out": "*bf16"}
TYPES = {f"{name}_ptr": kind for name, kind in POINTERS.items()} | dict.fromkeys(
    ("T", "N", "K", "E", "stride_a"), "i32"
)


@pytest.mark.sample(1 / 2)
@pytest.mark.parametrize("inputs", [4096, 2896, 2900], ids=["whole steps", "a step in part", "rows of single bytes"])
@pytest.mark.parametrize("rows", [64, 2048, 32768])
@pytest.mark.parametrize("chip", CHIPS)
def test_product(chip, rows, inputs, tmp_path):
    tile = choose_tile(rows, 32, 4096, inputs, CHIPS[chip][1])
    even, multiples = inputs % tile.block_k == 0, ("N",) if inputs % 16 else ("N", "K", "stride_a")
    constants = {"EXPERTS": 32, "EVEN_K": even, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    compiled = compile_for(
        chip, _int8_grouped_linear_kernel, TYPES, constants | {"BLOCK_K": tile.block_k}, multiples, False, **options
    )
    ptx = compiled.asm["ptx"]
    assert re.search(CHIPS[chip][2], ptx) or re.search(CHIPS["sm_80"][2], ptx), "no INT8 tensor-core instruction"
    assert stack_bytes(compiled, tmp_path) <= 8
    assert compiled.metadata.shared <= ROOM.get(chip, 99) * 1024
