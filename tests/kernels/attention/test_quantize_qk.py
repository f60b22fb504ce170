"""Quantization of queries and keys: groups, rounding and packing, against NumPy in float64."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from oracle import numpy64
from torch import Tensor

from qframework.errors import UnsupportedError
from qframework.kernels import attention_quantize
from qframework.kernels.attention.quantize_qk import pack_int4, unpack_int4

qk_module = sys.modules["qframework.kernels.attention.quantize_qk"]


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
def test_the_kernel_can_compute_the_mean_of_keys():
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
def test_nan_and_infinity_reach_the_scale(implementation, place, bad):
    x = torch.randn(1, 1, 130, 16, device=place)
    x[0, 0, 70, 3] = bad
    _, scale = quantize_qk(implementation, x, None, 1.0, "per_block", "key", 8)
    assert scale.isnan().tolist() == [[[False, True, False]]]


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
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(UnsupportedError, match=message):
        call(torch.zeros(1, 1, 4, 8))


def test_opcheck(device):
    x = torch.randn(1, 2, 70, 16, device=device)
    for granularity in ("per_tensor", "per_thread"):
        arguments = (x, None, 1.0, granularity, "query", 4)
        torch.library.opcheck(torch.ops.qframework.attention_quantize.default, arguments)
