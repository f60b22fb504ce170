"""The kernels of the block format compile for every supported chip without a GPU and keep their registers."""

from __future__ import annotations

import pytest
from test_compile_targets import CHIPS, compile_for, stack_bytes

from qframework.kernels._triton import HAS_TRITON, INTERPRET
from qframework.kernels.block_quantize import (
    _block_dequantize_kernel,
    _block_quantize_kernel,
    _block_transpose_kernel,
    tile_of,
)

pytestmark = pytest.mark.skipif(INTERPRET or not HAS_TRITON, reason="interpreted kernels cannot be compiled")

TYPES = {"seed_ptr": "*i64", "q_ptr": "*i8", "qt_ptr": "*i8", "scale_ptr": "*fp32", "scale_t_ptr": "*fp32"}
TYPES |= dict.fromkeys(("R", "C", "stride_xm"), "i32")
# The kernel and its flags.
KERNELS = {
    "quantize": (_block_quantize_kernel, {"STOCHASTIC": False, "BOTH": False}),
    "both_stochastic": (_block_quantize_kernel, {"STOCHASTIC": True, "BOTH": True}),
    "dequantize": (_block_dequantize_kernel, {}),
    "transpose": (_block_transpose_kernel, {}),
}


@pytest.mark.parametrize("block_size", [32, 64, 128])
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("chip", CHIPS)
def test_blocks(chip, name, block_size, tmp_path):
    kernel, flags = KERNELS[name]
    _, constants = tile_of((50432, 768), block_size)
    warps = constants.pop("num_warps") * (2 if flags.get("STOCHASTIC") else 1)
    dtype = "fp32" if block_size == 64 else "bf16"
    compiled = compile_for(chip, kernel, TYPES | {"x_ptr": f"*{dtype}"}, flags | constants, num_warps=warps)
    assert stack_bytes(compiled, tmp_path) == 0
    assert compiled.metadata.shared <= 48 * 1024
