"""The kernels of the block format compile for every supported chip without a GPU, within their registers."""

from __future__ import annotations

import re

import pytest
from block_oracle import BLOCK_SIZES
from test_compile_targets import CHIPS, compile_for, stack_bytes

from qframework.kernels.blocks.quantize import _block_dequantize_kernel, _block_quantize_kernel, tile_of
from qframework.kernels.blocks.transpose_blocks import _block_transpose_kernel
from qframework.kernels.runtime.triton import HAS_TRITON, INTERPRET

pytestmark = pytest.mark.skipif(INTERPRET or not HAS_TRITON, reason="interpreted kernels cannot be compiled")

TYPES = {"seed_ptr": "*i64", "q_ptr": "*i8", "qt_ptr": "*i8", "scale_ptr": "*fp32", "scale_t_ptr": "*fp32"}
TYPES |= {"partial_ptr": "*fp32"}
TYPES |= dict.fromkeys(("R", "C", "stride_xm", "stride_second", "stride_third", "second_begin", "third_begin"), "i32")
ONE = {"PARTS": "one", "STOCHASTIC": False, "SUMS": False}
# The kernel and its flags.
KERNELS = {
    "quantize": (_block_quantize_kernel, ONE | {"BOTH": False}),
    "both": (_block_quantize_kernel, ONE | {"BOTH": True}),
    "both_stochastic": (_block_quantize_kernel, ONE | {"BOTH": True, "STOCHASTIC": True}),
    "below": (_block_quantize_kernel, ONE | {"BOTH": True, "PARTS": "rows"}),
    "beside": (_block_quantize_kernel, ONE | {"BOTH": True, "PARTS": "columns", "SUMS": True}),
    "dequantize": (_block_dequantize_kernel, {}),
    "transpose": (_block_transpose_kernel, {"SUMS": False}),
    "transpose_sum": (_block_transpose_kernel, {"SUMS": True}),
}


def compiled_for(chip, name, block_size):
    kernel, flags = KERNELS[name]
    turns = kernel is _block_transpose_kernel
    _, tile = tile_of((50432, 768), block_size, transposed=flags.get("BOTH", turns), upright=not turns)
    tile.setdefault("BLOCK_T", tile["BLOCK"])
    warps = tile["num_warps"] * (2 if flags.get("STOCHASTIC") else 1)
    constants = {name: value for name, value in (flags | tile).items() if name in kernel.arg_names}
    dtype = "fp32" if block_size == 64 else "bf16"
    types = TYPES | dict.fromkeys(("x_ptr", "second_ptr", "third_ptr"), f"*{dtype}")
    multiples = ("C", "second_begin", "third_begin")
    return compile_for(chip, kernel, types, constants, multiples, num_warps=warps)


@pytest.mark.sample(1 / 3)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("chip", CHIPS)
def test_blocks(chip, name, block_size, tmp_path):
    compiled = compiled_for(chip, name, block_size)
    assert stack_bytes(compiled, tmp_path) == 0
    assert compiled.metadata.shared <= 48 * 1024


def test_a_row_of_a_block_lies_in_eight_threads():
    """Its largest magnitude takes three shuffles for each of the four rows of a thread, and no shared memory."""
    compiled = compiled_for("sm_90", "quantize", (1, 128))
    assert compiled.asm["ptx"].count("shfl.sync") == 3 * 4
    assert compiled.metadata.shared == 4 * 64  # scales on their way to where they are stored


@pytest.mark.parametrize("name", ["below", "beside"])
def test_parts_are_loaded_as_a_whole_is(name):
    """What chooses a part must not hide from the compiler that rows are aligned."""
    compiled = [compiled_for("sm_90", each, (1, 128)).asm["ptx"] for each in ("both", name)]
    loads = [sorted(re.findall(r"ld\.global\S*", ptx)) for ptx in compiled]
    assert loads[0] == loads[1]
    assert any(load.endswith(".v4.b32") for load in loads[0])


@pytest.mark.parametrize("name", ["quantize", "both", "transpose"])
def test_scales_need_no_division(name):
    """Quotients by fused operations: a division has a branch, which keeps all rows of a thread in registers."""
    ptx = compiled_for("sm_90", name, (1, 128)).asm["ptx"]
    assert "div." not in ptx
    assert "rcp.approx.ftz.f32" in ptx
