"""One pass for Hopper's kernel: the same as quantizing Q, K and V one by one."""

from __future__ import annotations

import pytest
import torch
from oracle import UNIT

from qframework.kernels.attention.hopper.prepare import SAMPLE, Rounded, can_prepare, prepare_triton, stride_of
from qframework.kernels.attention.operands import LOG2_E
from qframework.kernels.attention.padding import without_hidden
from qframework.kernels.attention.quantize_qk import quantize_tokens_ref
from qframework.kernels.attention.quantize_v import quantize_values_ref
from qframework.kernels.attention.variants import (
    PAIRED,
    VARIANTS,
    AttentionVariant,
    fp8_ranges,
    resolve,
    token_groups,
)
from qframework.kernels.runtime.triton import INTERPRET

pytestmark = pytest.mark.interpreter
kernel_only = pytest.mark.parametrize("implementation", ["triton"], indirect=True)
SIZES = [(2, 4, 2, 40, 200, 64, 48), (1, 3, 3, 130, 64, 40, 72), (1, 2, 1, 5, 2300, 16, 16)]


def operands(size, place, dtype=torch.float16):
    """Q, K with a mean of its own, and V, tokens before heads in memory."""
    batch, heads, key_heads, queries, keys, channels, values = size
    shapes = [(batch, queries, heads, channels), (batch, keys, key_heads, channels), (batch, keys, key_heads, values)]
    q, k, v = (torch.randn(shape).to(dtype).to(place).transpose(1, 2) for shape in shapes)
    return q, k + 2, v


def steps_apart(a: torch.Tensor, b: torch.Tensor) -> int:
    return int((a.int() - b.int()).abs().max())


@kernel_only
@pytest.mark.parametrize("smooth_k", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("granularity", ["per_block", "per_warp"])
@pytest.mark.parametrize("size", SIZES)
def test_agrees_with_the_references(size, granularity, dtype, smooth_k, place):
    q, k, v = operands(size, place, dtype)
    variant = AttentionVariant(8, granularity, exponential="integer")
    got, values = prepare_triton(q, k, v, variant, 0.3, smooth_k)
    v16 = values.v
    sample = k[:, :, :: stride_of(k.shape[2], False)]
    mean = sample.float().mean(2, keepdim=True) if smooth_k else None
    q8, q_scale = quantize_tokens_ref(q, None, 0.3 * LOG2_E, granularity, "query")
    k8, k_scale = quantize_tokens_ref(k, mean, 1.0, granularity, "key")
    torch.testing.assert_close(got.q_scale, q_scale, rtol=2.0**-20, atol=0)
    torch.testing.assert_close(got.k_scale, k_scale, rtol=2.0**-16, atol=0)  # sums in another order
    assert steps_apart(got.q, q8) <= 1
    assert steps_apart(got.k, k8) <= 1
    assert ((got.k != k8).float().mean() + (got.q != q8).float().mean()) < 0.01
    index = token_groups(granularity, "key").index(k.shape[2], k.device)
    norms = got.k.double().norm(dim=-1) * got.k_scale[:, :, index]
    torch.testing.assert_close(got.k_norm.double(), norms.amax(-1), rtol=2.0**-20, atol=0)
    assert v16.dtype == torch.bfloat16
    truncated = 2 if INTERPRET else 1  # by the interpreter, instead of rounded
    torch.testing.assert_close(v16.float(), v.float(), rtol=truncated * UNIT[torch.bfloat16], atol=0)


@kernel_only
@pytest.mark.parametrize("smooth_k", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_rounded_operands_of_a_gradient(size, dtype, smooth_k, place):
    """The pass's integers times its scales, with NaN where a query has one, in places with gaps; and the mean."""
    q, k, v = operands(size, place, dtype)
    q[0, 1, 3, 5] = torch.nan
    channels = q.shape[3]
    places = [torch.full((*x.shape[:2], x.shape[2] + 7, channels), -1.0).to(x) for x in (q, k)]
    mean = torch.full((*k.shape[:2], 1, channels), torch.nan, device=place)
    given = Rounded(places[0][:, :, : q.shape[2]], places[1][:, :, : k.shape[2]], mean)
    got, _ = prepare_triton(q, k, v, resolve("integer_exp"), 0.3, smooth_k, rounded=given)
    plain, _ = prepare_triton(q, k, v, resolve("integer_exp"), 0.3, smooth_k)
    assert torch.equal(got.q, plain.q)
    assert torch.equal(got.k, plain.k)
    sample = k[:, :, :: stride_of(k.shape[2], False)].float().mean(2, keepdim=True)
    torch.testing.assert_close(mean, sample if smooth_k else torch.zeros_like(mean), rtol=2.0**-20, atol=0)
    truncated = 2 if INTERPRET and dtype == torch.bfloat16 else 1.01
    for x, integers, scale, role, back in (
        (given.query, got.q, got.q_scale, "query", 1 / (0.3 * LOG2_E)),
        (given.key, got.k, got.k_scale, "key", 1.0),
    ):
        index = token_groups("per_block", role).index(x.shape[2], x.device)
        expected = integers.double() * scale[:, :, index, None] * back
        if role == "query":
            expected[0, 1, 3] = torch.nan
        torch.testing.assert_close(x.double(), expected, rtol=truncated * UNIT[dtype], atol=2.0**-25, equal_nan=True)
    assert all(bool((x[:, :, -7:] == -1).all()) for x in places)


@kernel_only
@pytest.mark.parametrize("smooth_k", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_keys_that_nobody_sees_change_nothing(size, dtype, smooth_k, place):
    """As if they held the mean, and their values 0; here they hold NaN."""
    q, k, v = operands(size, place, dtype)
    seen = (torch.rand(k.shape[0], 1, k.shape[2]) < 0.6).to(place)
    seen[:, :, : k.shape[2] // 4] = False
    hidden = ~seen[..., None].expand(-1, k.shape[1], -1, -1)
    clean_k, clean_v = without_hidden(k, hidden, smooth_k), without_hidden(v, hidden, False)
    k, v = k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.nan)
    got, values = prepare_triton(q, k, v, resolve("integer_exp"), 0.3, smooth_k, seen.int())
    v16 = values.v
    mean = (clean_k.float() * seen[..., None]).sum(2, keepdim=True) / seen.sum(2).view(-1, 1, 1, 1)
    centred = torch.where(hidden, 0.0, clean_k.float() - (mean if smooth_k else 0.0))
    k8, k_scale = quantize_tokens_ref(centred, None, 1.0, "per_block", "key")
    torch.testing.assert_close(got.k_scale, k_scale, rtol=2.0**-16, atol=0)
    assert steps_apart(got.k, k8) <= 1
    assert (got.k != k8).float().mean() < 0.01
    assert got.k_norm.isfinite().all()
    truncated = 2 if INTERPRET else 1
    torch.testing.assert_close(v16.float(), clean_v.float(), rtol=truncated * UNIT[torch.bfloat16], atol=0)


@kernel_only
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite(bad, place):
    """It marks a query, and gives the group of a key the scale NaN and its head an infinite norm."""
    q, k, v = operands(SIZES[0], place)
    q[0, 1, 7, 3], k[1, 0, 70, 5] = bad, bad
    got, _ = prepare_triton(q, k, v, resolve("integer_exp"), 0.3, True)
    assert (got.q == -128).all(-1).nonzero().tolist() == [[0, 1, 7]]
    assert got.q_scale.isfinite().all()
    assert got.k_scale.isnan().nonzero().tolist() == [[1, 0, 1]]
    assert got.k_norm.isinf().nonzero().tolist() == [[1, 0]]


def in_order(v: torch.Tensor) -> torch.Tensor:
    """Values ``(B, H, Dv, P)`` whose keys are PAIRED, in the order of the keys."""
    out = torch.empty_like(v)
    out[..., torch.arange(v.shape[3], device=v.device).view(-1, 16)[:, list(PAIRED)].flatten()] = v
    return out


@kernel_only
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("size", "granularity", "smooth_k"),
    [(SIZES[0], "per_thread", True), (SIZES[1], "per_thread", False), (SIZES[2], "per_block", True)],
)
@pytest.mark.parametrize("accumulator", ["fp32", "fp16"])
def test_fp8_values_agree_with_the_references(size, granularity, smooth_k, masked, accumulator, place):
    q, k, v = operands(size, place)
    variant = AttentionVariant(8, granularity, "fp8", accumulator)
    seen = torch.ones(1, 1, k.shape[2], dtype=torch.int32, device=place)
    if masked:
        seen[:, :, -k.shape[2] // 3 :] = 0
        v[:, :, -k.shape[2] // 3 :] = torch.nan
    got, values = prepare_triton(q, k, v, variant, 0.3, smooth_k, seen if masked else None)
    hidden = (seen == 0)[..., None]
    k, v = k.float().masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
    if smooth_k:
        mean = k.sum(2, keepdim=True) / seen.sum()
        if not masked:
            mean = k[:, :, :: stride_of(k.shape[2], False)].mean(2, keepdim=True)
        k = (k - mean).masked_fill(hidden, 0.0)
    k8, k_scale = quantize_tokens_ref(k, None, 1.0, granularity, "key")
    q8, q_scale = quantize_tokens_ref(q, None, 0.3 * LOG2_E, granularity, "query")
    torch.testing.assert_close(got.q_scale, q_scale, rtol=2.0**-20, atol=0)
    torch.testing.assert_close(got.k_scale, k_scale, rtol=2.0**-16, atol=0)
    assert steps_apart(got.q, q8) <= 1
    assert steps_apart(got.k, k8) <= 1
    assert got.k_norm is None
    expected, scale, _ = quantize_values_ref(v, "fp8", fp8_ranges(accumulator)[1])
    torch.testing.assert_close(values.scale, scale, rtol=2.0**-20, atol=0)
    assert values.paired
    given, expected = in_order(values.v.float()), expected.float()
    assert given.abs().max() <= fp8_ranges(accumulator)[1]
    torch.testing.assert_close(given, expected, rtol=2.0**-3, atol=2.0**-9)  # a step: scales differ in their last bit
    assert (given != expected).float().mean() < 0.01


@kernel_only
def test_values_that_are_not_finite(place):
    """They give their channel the scale NaN."""
    q, k, v = operands(SIZES[0], place)
    v[1, 0, 70, 5], v[0, 1, 199, 40] = torch.nan, -torch.inf
    _, values = prepare_triton(q, k, v, resolve("sage2_int8"), 0.3, True)
    assert values.scale.isnan().nonzero().tolist() == [[0, 1, 40], [1, 0, 5]]


def test_the_sample() -> None:
    """At least SAMPLE keys and fewer than four times as many, the columns of an image alike."""
    for keys in (1, 255, 511, 768, 1000, 4096, 8192, 16384, 1000000):
        stride = stride_of(keys, False)
        sampled = -(-keys // stride)
        assert min(keys, SAMPLE) <= sampled < 4 * SAMPLE
        assert stride % 2 == 1
        assert stride_of(keys, True) == 1


@kernel_only
def test_a_sample_smooths_as_well_as_all_keys(place):
    """The error of dequantized keys, of which a bias of 10 standard deviations would make ten times as much."""
    k = torch.randn(1, 2, 4096, 64)
    k = (k + 10 * torch.randn(1, 2, 1, 64)).half().to(place)
    errors = []
    for mean in (k.float().mean(2, keepdim=True), None):
        if mean is None:
            got, _ = prepare_triton(k, k, k, resolve("integer_exp"), 1.0, True)
            k8, scale = got.k, got.k_scale
            mean = k[:, :, :: stride_of(4096, False)].float().mean(2, keepdim=True)
        else:
            k8, scale = quantize_tokens_ref(k, mean, 1.0, "per_block", "key")
        index = token_groups("per_block", "key").index(4096, k.device)
        errors.append(float((k8.float() * scale[:, :, index, None] + mean - k.float()).norm()))
    assert errors[1] < 1.05 * errors[0]


def test_which_variants():
    assert can_prepare(resolve("integer_exp"))
    assert can_prepare(resolve("sage2_int8"))
    assert can_prepare(resolve("sage2pp_int8"))
    assert can_prepare(AttentionVariant(8, "per_warp", exponential="integer"))
    for name in ("qattn", "sage2_int4", "sage2pp_int4", "sage_b", "unquantized"):
        assert not can_prepare(VARIANTS[name])
