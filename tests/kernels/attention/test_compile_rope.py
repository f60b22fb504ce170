"""rope_quantize and rope_mean compile for every supported chip without a GPU and keep their registers."""

from __future__ import annotations

import pytest
from test_compile_targets import CHIPS, compile_for, stack_bytes

from qframework.kernels.attention.rope import _rope_quantize_kernel, choose_tile, sum_tile
from qframework.kernels.attention.variants import token_groups
from qframework.kernels.runtime.triton import HAS_TRITON, INTERPRET

pytestmark = pytest.mark.skipif(INTERPRET or not HAS_TRITON, reason="interpreted kernels cannot be compiled")

# D, rotary_dim, whether the tables have a column for each channel, whether pairs are interleaved
HEADS = {
    "64": (64, 64, False, False),
    "128_full": (128, 128, True, False),
    "128_interleaved": (128, 128, False, True),
    "256": (256, 256, False, False),
    "80_partial": (80, 32, False, True),
}
MODES = {
    "sum": ("sum", "key", "per_token", False),
    "query": ("both", "query", "per_block", False),
    "smooth_key": ("both", "key", "per_thread", True),
}


@pytest.mark.sample(1 / 3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("chip", CHIPS)
def test_rope_quantize(chip, head, mode, tmp_path):
    channels, rotary_dim, full, interleaved = HEADS[head]
    what, role, granularity, has_mean = MODES[mode]
    groups = token_groups(granularity, role)
    tile, warps = sum_tile(channels) if mode == "sum" else choose_tile(channels, groups.span)
    if groups.span > tile:
        what = "quantize"
    types = dict.fromkeys(("x_ptr", "cos_ptr", "sin_ptr"), "*fp16")
    types |= {"mean_ptr": "*fp32", "scale_ptr": "*fp32", "q_ptr": "*fp32" if what == "sum" else "*i8", "factor": "fp32"}
    types |= dict.fromkeys(("H", "N", "D", "pairs", "G", "MEANS"), "i32")
    types |= {f"stride_{x}{d}": "i32" for x in "xc" for d in "bhn"}
    constants = {"MIN_SCALE": 2.0**-60, "INTERLEAVED": interleaved, "FULL": full, "PARTIAL": rotary_dim < channels}
    constants |= {"HAS_MEAN": has_mean, "MODE": what, "QUERIES": role == "query", "TILE": tile, "QUERY_BLOCK": 128}
    constants |= {"SPAN": groups.span, "GROUPS": groups.groups, "MODULO": groups.modulo, "DIVISOR": groups.divisor}
    constants |= {"BLOCK_P": rotary_dim // 2, "BLOCK_R": 64 if rotary_dim < channels else 8}
    compiled = compile_for(chip, _rope_quantize_kernel, types, constants, num_warps=warps)
    assert stack_bytes(compiled, tmp_path) == 0
    assert compiled.metadata.shared <= 48 * 1024
