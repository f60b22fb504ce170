"""Quantization of queries, keys and values: groups, rounding, packing and padding, against NumPy in float64."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from oracle import numpy64
from torch import Tensor

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels import attention_quantize, quantized_attention, value_quantize
from qframework.kernels.attention.quantize_qk import pack_int4, unpack_int4
from qframework.kernels.attention.tiles import choose_attention_tile
from qframework.kernels.attention.variants import KEYS_PER_FP16_SUM, QUERY_BLOCK, resolve, values_dtype
from qframework.kernels.runtime.chip import capability_of

qk_module = sys.modules["qframework.kernels.attention.quantize_qk"]
v_module = sys.modules["qframework.kernels.attention.quantize_v"]
sage_module = sys.modules["qframework.kernels.attention.pipeline"]


def quantize_qk(implementation: str, *args) -> tuple[Tensor, Tensor]:
    call = {"cpu": attention_quantize, "triton": qk_module.ATTENTION_QUANTIZE.cuda}[implementation]
    return call(*args)


def groups_of(granularity: str, role: str, tokens: int) -> list[list[int]]:
    """The tokens of each group, written out from the papers' definitions."""
    if granularity in ("per_tensor", "per_head"):
        return [list(range(tokens))]
    if granularity == "per_token":
        return [[n] for n in range(tokens)]
    span = {"per_block": (128, 64), "per_warp": (32, 64), "per_thread": (32, 64)}[granularity][role == "key"]
    blocks = [list(range(start, min(start + span, tokens))) for start in range(0, tokens, span)]
    if granularity != "per_thread":
        return blocks
    if role == "query":
        return [[n for n in block if n % 8 == thread] for block in blocks for thread in range(8)]
    return [[n for n in block if (n % 8) // 2 == thread] for block in blocks for thread in range(4)]


@pytest.mark.parametrize("tokens", [1, 50, 197])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("role", ["query", "key"])
@pytest.mark.parametrize("granularity", ["per_tensor", "per_head", "per_token", "per_block", "per_warp", "per_thread"])
def test_groups_share_a_scale(implementation, place, granularity, role, bits, tokens):
    channels, qmax = 35, 127 if bits == 8 else 7
    x = torch.randn(2, 2, tokens, channels, device=place) * 10 ** torch.randn(2, 2, tokens, 1, device=place)
    mean = torch.randn(2, 2, 1, channels, device=place)
    q, scale = quantize_qk(implementation, x, mean, 0.25, granularity, role, bits)
    unpacked = unpack_int4(q, channels) if bits == 4 else q
    y, got_q, got_scale = (numpy64(x) - numpy64(mean)) * 0.25, numpy64(unpacked), numpy64(scale)
    groups = groups_of(granularity, role, tokens)
    assert scale.shape == (2, 2, len(groups))
    for g, members in enumerate(groups):
        amax = np.abs(y[:, :, members]).max((2, 3)) if members else np.zeros((2, 2))
        if granularity == "per_tensor":
            amax = np.full_like(amax, amax.max())
        expected = np.maximum(amax / qmax, 2.0**-60)
        np.testing.assert_allclose(got_scale[:, :, g], expected, rtol=2.0**-20)
        steps = y[:, :, members] / expected[:, :, None, None]
        assert np.abs(got_q[:, :, members] - steps).max(initial=0) <= 0.5 + qmax * 2.0**-20


def test_means_of_blocks_of_queries(implementation, place):
    x = torch.randn(1, 2, 300, 16, device=place)
    means = torch.randn(1, 2, 3, 16, device=place)
    q, scale = quantize_qk(implementation, x, means, 1.0, "per_token", "query", 8)
    shifted = x - means.repeat_interleave(128, 2)[:, :, :300]
    assert (q.float() * scale[..., None] - shifted).abs().max() <= 0.51 * scale.max()


@pytest.mark.interpreter
def test_keys_smooth_themselves():
    """The kernel that computes the mean of its head agrees with the mean given to it."""
    x = torch.randn(2, 2, 200, 40, device="cuda" if torch.cuda.is_available() else "cpu") + 5
    q, scale = qk_module.quantize_tokens_triton(x, None, 1.0, "per_block", "key", smooth=True)
    mean = x.mean(2, keepdim=True)
    expected, expected_scale = qk_module.quantize_tokens_triton(x, mean, 1.0, "per_block", "key")
    torch.testing.assert_close(scale, expected_scale, rtol=1e-5, atol=0)
    assert (q.int() - expected.int()).abs().max() <= 1
    assert (q != expected).float().mean() < 0.01


@pytest.mark.parametrize("channels", [1, 7, 64])
def test_int4_packs_two_to_a_byte(channels):
    q = torch.randint(-7, 8, (3, 5, channels), dtype=torch.int8)
    packed = pack_int4(q)
    assert packed.shape == (3, 5, (channels + 1) // 2)
    assert torch.equal(unpack_int4(packed, channels), q)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_reaches_the_scale(implementation, place, bad):
    x = torch.randn(1, 1, 130, 16, device=place)
    x[0, 0, 70, 3] = bad
    _, scale = quantize_qk(implementation, x, None, 1.0, "per_block", "key", 8)
    assert scale.isnan().tolist() == [[[False, True, False]]]


@pytest.mark.parametrize(("kind", "v_range"), [("int8", 127.0), ("fp8", 448.0), ("fp8", 4.5)])
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize(("tokens", "channels"), [(1, 72), (50, 40), (197, 64)])
def test_values(implementation, place, kind, v_range, smooth, tokens, channels):
    v = torch.randn(2, 2, tokens, channels, device=place) + 3
    call = {"cpu": value_quantize, "triton": v_module.VALUE_QUANTIZE.cuda}[implementation]
    q, scale, mean = call(v, kind, v_range, smooth)
    exact = numpy64(v) - (numpy64(v).mean(2, keepdims=True) if smooth else 0)
    np.testing.assert_allclose(numpy64(mean), numpy64(v).mean(2) if smooth else 0 * numpy64(mean), atol=1e-5)
    amax = np.abs(exact).max(2)
    np.testing.assert_allclose(numpy64(scale), np.maximum(amax / v_range, 2.0**-60), rtol=1e-5, atol=2e-6 / v_range)
    assert q.shape == (2, 2, channels, -(-tokens // 64) * 64)
    assert (q[..., tokens:].float() == 0).all(), "padding is not zero"
    got = numpy64(q.float())[..., :tokens].swapaxes(2, 3) * numpy64(scale)[:, :, None]
    step = 0.5 * numpy64(scale)[:, :, None]
    allowed = step if kind == "int8" else np.maximum(np.abs(exact) * 2.0**-4, step * 2.0**-9)
    assert (np.abs(got - exact) <= 1.001 * allowed + 1e-5).all()


@pytest.mark.parametrize("packed", [False, True])
def test_bfloat16_values_fit_float16(packed):
    """Every bfloat16 comes back as it was, though float16 reaches from 2**-24 to 65504 alone."""
    v = torch.randn(2, 3, 50, 8).bfloat16()
    v *= torch.tensor([1.0, 1e5, 1e30, 3.3e38 / 8, 1e-12, 1e-35, 0.0, 65504.0], dtype=torch.bfloat16)
    v = v[0].transpose(0, 1) if packed else v
    low, scale = v_module.values_in_fp16(v, packed)
    assert low.dtype == torch.float16
    assert scale.shape == ((1, 3, 8) if packed else (2, 3, 8))
    assert torch.equal(low.double() * (scale if packed else scale[:, :, None]).double(), v.double())
    assert low.abs().max() < 2**15  # the largest sum of 64 products with P of 1/64


def test_values_that_are_not_finite_stay_so():
    v = torch.ones(1, 1, 50, 2, dtype=torch.bfloat16)
    v[0, 0, 7, 1] = torch.nan
    _, scale = v_module.values_in_fp16(v)
    assert scale.isnan().tolist() == [[[False, True]]]


@pytest.mark.parametrize("size", [1.0, 1e6, 1e-20])
@pytest.mark.parametrize("variant", ["sage_t", "sage_b"])
def test_bfloat16_attention_multiplies_in_float16(implementation, place, variant, size):
    """P has 11 bits: rounded to 8, weights of 1/3 would be off by 2**-9, and so would their sum."""
    q, k = (torch.zeros(1, 1, n, 16, dtype=torch.bfloat16, device=place) for n in (2, 3))
    v = torch.full((1, 1, 3, 16), size, dtype=torch.bfloat16, device=place)
    mask = torch.tensor([[0.0, -1.0986123, -1.0986123], [0.0, -0.6931472, -0.6931472]], device=place)  # 1, 1/3, 1/2
    call = {"cpu": torch.ops.qframework.sage_attention, "triton": sage_module.SAGE_ATTENTION.cuda}[implementation]
    v[0, 0, 1:] *= -1
    out = call(q, k, v, mask, variant=variant)[0].double() / v[0, 0, 0].double()
    expected = torch.tensor([(1 - 2 / 3) / (5 / 3), 0.0], dtype=torch.float64, device=place)
    bits = {torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}  # and the result's own rounding
    dtype = values_dtype(resolve(variant), v.dtype, capability_of(v.device))
    assert (out[0, 0, :, 0] - expected).abs().max() <= bits[dtype]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: attention_quantize(x[0], None, 1.0, "per_block", "key"), "x must have shape"),
        (lambda x: attention_quantize(x, None, 1.0, "per_row", "key"), "got 'per_row' and 'key'"),
        (lambda x: attention_quantize(x, None, 1.0, "per_block", "value"), "got 'per_block' and 'value'"),
        (lambda x: attention_quantize(x, None, 1.0, "per_block", "key", 5), "bits must be 8 or 4, got 5"),
        (
            lambda x: attention_quantize(x, torch.zeros(1, 1, 7, 8), 1.0, "per_block", "key"),
            "mean must have shape",
        ),
        (
            lambda x: attention_quantize(x.double(), None, 1.0, "per_block", "key"),
            "must have dtype .*, got torch.float64",
        ),
        (lambda x: value_quantize(x, "int4", 7.0), "kind must be int8 or fp8, got 'int4'"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(UnsupportedError, match=message):
        call(torch.zeros(1, 1, 4, 8))


def wide(q, k):
    return {"q": q.repeat(1, 1, 1, 17), "k": k.repeat(1, 1, 1, 17)}


def test_quantized_attention_names_what_does_not_fit():
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
    ]:
        arguments = {"q": q, "q_scale": q_scale, "k": k, "k_scale": k_scale, "v": x.half()} | changes
        with pytest.raises(QFrameworkError, match=message):
            quantized_attention(**arguments)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_tiles_keep_what_the_numerics_promise(capability):
    for queries in (1, 33, 197, 4096):
        for channels in (32, 64, 80, 128, 256):
            for pv in ("fp16", "fp32", "int8", "fp8", "int8_dequantized"):
                tile = choose_attention_tile(queries, channels, pv, capability)
                assert QUERY_BLOCK % tile.block_m == 0
                assert tile.block_n <= KEYS_PER_FP16_SUM


def test_opcheck(device):
    x = torch.randn(1, 2, 70, 16, device=device)
    operators = torch.ops.qframework
    for granularity in ("per_tensor", "per_thread"):
        torch.library.opcheck(operators.attention_quantize.default, (x, None, 1.0, granularity, "query", 4))
    torch.library.opcheck(operators.value_quantize.default, (x, "fp8", 448.0, True))
    q, q_scale = attention_quantize(x, None, 0.3, "per_block", "query")
    k, k_scale = attention_quantize(x, None, 1.0, "per_block", "key")
    torch.library.opcheck(operators.quantized_attention.default, (q, q_scale, k, k_scale, x.half()))
