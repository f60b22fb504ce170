"""quantized_attention.py and tiles.py: errors and tiles; test_attention_matrix.py tests the kernel itself."""

from __future__ import annotations

import pytest
import torch

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels import attention_quantize, quantized_attention, value_quantize
from qframework.kernels.attention.tiles import choose_attention_tile
from qframework.kernels.attention.variants import KEYS_PER_FP16_SUM, QUERY_BLOCK, VARIANTS, AttentionVariant, resolve


def wide(q, k):
    return {"q": q.repeat(1, 1, 1, 17), "k": k.repeat(1, 1, 1, 17)}


def test_errors_name_the_argument():
    x = torch.zeros(1, 2, 70, 16)
    (q, q_scale), (k, k_scale) = (attention_quantize(x, None, 1.0, "per_block", role) for role in ("query", "key"))
    v8, v_scale, _ = value_quantize(x, "fp8", 448.0)
    for changes, message in [
        ({"v": x[:, :, :60].half()}, r"v must have shape \(B, Hkv, 70, Dv\) .*, got \(1, 2, 60, 16\)"),
        ({"v": x[:, :1].half()}, "v must have shape"),
        ({"v": v8[..., :64], "v_scale": v_scale, "variant": "8-per_block-fp8-fp32"}, "128.* from value_quantize"),
        ({"v": v8, "variant": "8-per_block-fp8-fp32"}, "v_scale must be value_quantize's scale .*, got None"),
        ({"attn_mask": torch.zeros(70, 70)}, "attn_mask must have 4 dimensions"),
        ({"q_scale": q_scale[..., :0]}, "q_scale must have shape"),
        (wide(q, k), r"q must have a head dimension of at most 256, got shape \(1, 2, 70, 272\)"),
        (wide(q, k) | {"channels": 16}, "q must have a head dimension of at most 256"),
        ({"channels": 257}, "q must have a head dimension of at most 256"),
        ({"variant": "unquantized"}, "variant must quantize Q and K, got 'unquantized'. Call sage_attention"),
    ]:
        arguments = {"q": q, "q_scale": q_scale, "k": k, "k_scale": k_scale, "v": x.half()} | changes
        with pytest.raises(QFrameworkError, match=message):
            quantized_attention(**arguments)


REFUSED_VARIANTS = {
    "pv must be 'fp16' and accumulator 'fp32' with exponential='integer', got pv='int8' and accumulator='fp32'": {
        "pv": "int8"
    },
    "pv must be 'fp16' .* got pv='fp16' and accumulator='fp16'": {"accumulator": "fp16"},
    "granularity 'per_block' with qk_bits=16, .* got smooth_q=False and granularity='per_warp'": {
        "qk_bits": 16,
        "granularity": "per_warp",
        "exponential": "exact",
    },
    "smooth_q must be False .* got smooth_q=True and granularity='per_block'": {"qk_bits": 16, "smooth_q": True},
}


@pytest.mark.parametrize("message", REFUSED_VARIANTS)
def test_formats_that_exclude_each_other_are_refused(message):
    with pytest.raises(UnsupportedError, match=message):
        AttentionVariant(**({"exponential": "integer"} | REFUSED_VARIANTS[message]))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_spec_is_read_back(name):
    variant = resolve(name)
    assert resolve(variant.spec) == variant


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_tiles_meet_the_constraints_of_the_numerics(capability):
    for queries in (1, 33, 197, 4096):
        for channels in (32, 64, 80, 128, 256):
            for pv in ("fp16", "fp32", "int8", "fp8", "int8_dequantized"):
                tile = choose_attention_tile(queries, channels, pv, capability)
                assert QUERY_BLOCK % tile.block_m == 0
                assert tile.block_n <= KEYS_PER_FP16_SUM


def test_opcheck(device):
    x = torch.randn(1, 2, 70, 16, device=device)
    q, q_scale = attention_quantize(x, None, 0.3, "per_block", "query")
    k, k_scale = attention_quantize(x, None, 1.0, "per_block", "key")
    torch.library.opcheck(torch.ops.qframework.quantized_attention.default, (q, q_scale, k, k_scale, x.half()))
