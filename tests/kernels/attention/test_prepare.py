"""One pass for Hopper's integer exponential: the same as quantizing Q, K and V one by one."""

from __future__ import annotations

import pytest
import torch
from oracle import UNIT

from qframework.kernels.attention.operands import LOG2_E
from qframework.kernels.attention.padding import without_hidden
from qframework.kernels.attention.prepare import can_prepare, prepare_triton
from qframework.kernels.attention.quantize_qk import quantize_tokens_ref
from qframework.kernels.attention.variants import VARIANTS, AttentionVariant, resolve, token_groups
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
    got, v16 = prepare_triton(q, k, v, variant, 0.3, smooth_k)
    mean = k.float().mean(2, keepdim=True) if smooth_k else None
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
def test_keys_that_nobody_sees_change_nothing(size, dtype, smooth_k, place):
    """As if they held the mean, and their values 0; here they hold NaN."""
    q, k, v = operands(size, place, dtype)
    seen = (torch.rand(k.shape[0], 1, k.shape[2]) < 0.6).to(place)
    seen[:, :, : k.shape[2] // 4] = False
    hidden = ~seen[..., None].expand(-1, k.shape[1], -1, -1)
    clean_k, clean_v = without_hidden(k, hidden, smooth_k), without_hidden(v, hidden, False)
    k, v = k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.nan)
    got, v16 = prepare_triton(q, k, v, resolve("integer_exp"), 0.3, smooth_k, seen.int())
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


def test_which_variants():
    assert can_prepare(resolve("integer_exp"))
    assert can_prepare(AttentionVariant(8, "per_warp", exponential="integer"))
    for name in ("qattn", "sage2_int8"):
        assert not can_prepare(VARIANTS[name])
