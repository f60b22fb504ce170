"""Attention with a mask whose blocks are known (masked_attention.py)."""

from __future__ import annotations

import pytest
import torch

from qframework.errors import QFrameworkError
from qframework.kernels.attention.arguments import Canonical, without_repeated_heads
from qframework.kernels.attention.hopper import specialized
from qframework.kernels.attention.mask_blocks import MaskSizes

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def operands(device: str, tokens: int = 300, heads: int = 4, key_heads: int = 2):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, n, tokens, 64, generator=generator).half().to(device) for n in (heads, key_heads, key_heads)
    )
    mask = (torch.arange(tokens) < torch.tensor([tokens, tokens // 3])[:, None])[:, None, None]
    return q, k, v, mask.to(device)


def blocks(mask, tokens: int, causal: bool = False, key_heads: int = 0):
    return torch.ops.qframework.mask_blocks(mask, [*MaskSizes.of(mask)], tokens, tokens, causal, key_heads)


@pytest.mark.parametrize("causal", [False, True])
def test_equals_attention_with_the_mask(causal: bool) -> None:
    q, k, v, mask = operands("cpu")
    found = torch.ops.qframework.masked_attention(
        q, k, v, mask, *blocks(mask, 300, causal), causal, 0.2, True, "sage_b", False
    )
    expected = torch.ops.qframework.sage_attention(q, k, v, mask, causal, 0.2, True, "sage_b", False)[0]
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()


@pytest.mark.gpu
@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("variant", ["unquantized", "integer_exp", "sage2_int8", "sage_t"])
def test_the_kernel_reads_the_given_blocks(variant: str, causal: bool, seen: bool, monkeypatch) -> None:
    """The same bits as when it finds them, and others with the blocks of another mask."""
    tokens = 1024
    q, k, v, mask = operands("cuda", tokens, heads=32, key_heads=16)
    given = (causal, None, True, variant)
    expected = torch.ops.qframework.sage_attention(q, k, v, mask, *given)[0]
    shared = blocks(mask, tokens, causal, 16 if seen else 0)
    for _ in range(4):  # recorded and replayed
        found = torch.ops.qframework.masked_attention(q, k, v, mask, *shared, *given)
        assert torch.equal(found, expected)
    others = blocks(mask.flip(0), tokens, causal, 16 if seen else 0)
    differs = not torch.equal(torch.ops.qframework.masked_attention(q, k, v, mask, *others, *given), expected)
    reads = ON_HOPPER and tokens >= specialized.LEAST_TOKENS and variant != "sage_t"
    assert differs == (reads and (seen or variant == "unquantized"))


@pytest.mark.gpu
@pytest.mark.skipif(not ON_HOPPER, reason="its kernel reads by TMA")
def test_one_head_of_keys_that_is_expanded_is_read_by_the_fast_kernel() -> None:
    """As in Gemma 3, whose single head is a view of stride 0."""
    tokens = 1024
    q, k, v, mask = operands("cuda", tokens, heads=32, key_heads=1)
    given = (False, None, True, "unquantized")
    shared = blocks(mask, tokens)
    k_all, v_all = k.expand(2, 32, tokens, 64), v.expand(2, 32, tokens, 64)
    with torch.profiler.profile() as profile:
        found = torch.ops.qframework.masked_attention(q, k_all, v_all, mask, *shared, *given)
    assert not any("_quantized_attention_kernel" in event.key for event in profile.key_averages())
    assert torch.equal(found, torch.ops.qframework.masked_attention(q, k, v, mask, *shared, *given))


@pytest.mark.parametrize("variant", ["unquantized", "sage_b", "integer_exp"])
def test_expanded_heads_are_the_head_itself(variant: str) -> None:
    q, k, v, mask = operands("cpu", 64, heads=4, key_heads=1)
    given = (False, 0.2, True, variant, True, True)
    out, lse = torch.ops.qframework.sage_attention(q, k.expand(2, 4, 64, 64), v.expand(2, 4, 64, 64), mask, *given)
    expected, sums = torch.ops.qframework.sage_attention(q, k, v, mask, *given)
    assert torch.equal(out, expected)
    assert torch.equal(lse, sums)
    repeated = Canonical(q, k.expand(2, 4, 64, 64), v.expand(2, 4, 64, 64), None, None, None)
    assert without_repeated_heads(repeated).k.shape == k.shape
    assert without_repeated_heads(repeated._replace(v=v.repeat(1, 4, 1, 1))).k.shape[1] == 4


def test_opcheck() -> None:
    q, k, v, mask = operands("cpu", 40)
    given = (q, k, v, mask, *blocks(mask, 40), False, None, True, "sage_b")
    torch.library.opcheck(torch.ops.qframework.masked_attention.default, given)


def test_has_no_gradient() -> None:
    q, k, v, mask = operands("cpu", 40)
    out = torch.ops.qframework.masked_attention(
        q.requires_grad_(), k, v, mask, *blocks(mask, 40), False, None, True, "sage_b"
    )
    with pytest.raises(QFrameworkError, match="masked_attention: inference only"):
        out.sum().backward()


Q, K, V, MASK = operands("cpu", 40)
BITS, ORDER, COUNTS, SEEN = blocks(MASK, 40)
ERRORS = [
    ({"attn_mask": MASK.float()}, "attn_mask must"),
    ({"softcap": 0.0}, "masked_attention: softcap must be None or a positive number"),
    ({"key": K[..., :32]}, "masked_attention: key must have query's head dimension 64, got 32"),
    (
        {"query": Q[0], "key": Q[0], "value": Q[0], "attn_mask": MASK[0, 0]},
        r"query must have 4 dimensions, got shape \(4, 40",
    ),
    ({"order": ORDER[..., :0]}, r"order must have shape \(2, 1, 1, 1\), got \(2, 1, 1, 0\)"),
    ({"order": ORDER.expand(2, 1, 3, 1)}, r"order must be mask_blocks' for 40 queries, got shape \(2, 1, 3, 1\)"),
    ({"counts": COUNTS[..., :1]}, "counts must have shape"),
    ({"bits": BITS.long()}, "bits must"),
    ({"query": Q[:, :, :30], "is_causal": True}, "key must have at most query's 30 tokens if causal, got 40"),
]


@pytest.mark.parametrize(("given", "message"), ERRORS)
def test_errors(given: dict, message: str) -> None:
    arguments = {
        "query": Q, "key": K, "value": V, "attn_mask": MASK, "bits": BITS, "order": ORDER, "counts": COUNTS,
        "seen": SEEN, "enable_gqa": True, "variant": "sage_b",
    }  # fmt: skip
    with pytest.raises(QFrameworkError, match=message):
        torch.ops.qframework.masked_attention(**(arguments | given))
