"""Attention with a mask whose blocks are known (masked_attention.py)."""

from __future__ import annotations

import pytest
import torch

from qframework.errors import QFrameworkError
from qframework.kernels.attention.arguments import Canonical, without_repeated_heads
from qframework.kernels.attention.auto import hopper_of, reads_blocks
from qframework.kernels.attention.hopper import specialized
from qframework.kernels.attention.mask_blocks import MaskSizes

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def operands(device: str, tokens: int = 300, heads: int = 4, key_heads: int = 2, channels: int = 64):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, n, tokens, channels, generator=generator).half().to(device)
        for n in (heads, key_heads, key_heads)
    )
    mask = (torch.arange(tokens) < torch.tensor([tokens, tokens // 3])[:, None])[:, None, None]
    return q, k, v, mask.to(device)


def blocks(mask, tokens: int, causal: bool = False, key_heads: int = 0):
    return torch.ops.qframework.mask_blocks(mask, [*MaskSizes.of(mask)], tokens, tokens, causal, key_heads)


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_equals_attention_with_the_mask(causal: bool, lse: bool) -> None:
    q, k, v, mask = operands("cpu")
    given = (causal, 0.2, True, "sage_b", False, lse, 5.0 if lse else None)
    found = torch.ops.qframework.masked_attention(q, k, v, mask, *blocks(mask, 300, causal), *given)
    expected = torch.ops.qframework.sage_attention(q, k, v, mask, *given[:-1], softcap=given[-1])
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()
    assert found[1].shape == ((2, 4, 300) if lse else (0,))


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
        found, _ = torch.ops.qframework.masked_attention(q, k, v, mask, *shared, *given)
        assert torch.equal(found, expected)
    others = blocks(mask.flip(0), tokens, causal, 16 if seen else 0)
    differs = not torch.equal(torch.ops.qframework.masked_attention(q, k, v, mask, *others, *given)[0], expected)
    reads = ON_HOPPER and tokens >= specialized.LEAST_TOKENS and variant != "sage_t"
    assert differs == (reads and (seen or variant == "unquantized"))


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("channels", "variant"), [
    (64, "unquantized"), (80, "unquantized"), (128, "unquantized"), (64, "integer_exp"), (80, "sage2_int8"),
])  # fmt: skip
def test_the_log_sum_exp_is_of_the_given_blocks(variant, channels, causal, softcap) -> None:
    """The same bits as when the kernel finds the blocks; ``reads_blocks`` says which calls read them."""
    tokens = 1024
    q, k, v, mask = operands("cuda", tokens, heads=32, key_heads=16, channels=channels)
    given = (causal, None, True, variant, True, True)
    expected = torch.ops.qframework.sage_attention(q, k, v, mask, *given, softcap=softcap)
    shared, others = blocks(mask, tokens, causal), blocks(mask.flip(0), tokens, causal)
    for _ in range(4):  # recorded and replayed
        found = torch.ops.qframework.masked_attention(q, k, v, mask, *shared, *given, softcap=softcap)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    found = torch.ops.qframework.masked_attention(q, k, v, mask, *others, *given, softcap=softcap)
    chip = hopper_of(q.device)
    row, capped = not causal, softcap is not None
    reads = chip is not None and reads_blocks(q, k, v, variant, chip, row, capped, return_lse=True) == "mask"
    assert reads == (ON_HOPPER and variant != "sage2_int8" and not (capped and variant == "integer_exp"))
    assert torch.equal(found[1], expected[1]) != reads


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
        found, _ = torch.ops.qframework.masked_attention(q, k_all, v_all, mask, *shared, *given)
    assert not any("_quantized_attention_kernel" in event.key for event in profile.key_averages())
    assert torch.equal(found, torch.ops.qframework.masked_attention(q, k, v, mask, *shared, *given)[0])


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
    for more in ((), (True, True)):
        torch.library.opcheck(torch.ops.qframework.masked_attention.default, given + more)


def test_has_no_gradient() -> None:
    q, k, v, mask = operands("cpu", 40)
    out, _ = torch.ops.qframework.masked_attention(
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
