"""sage_attention_varlen: sequences that follow each other, their offsets, errors."""

from __future__ import annotations

import pytest
import torch
from attention_helpers import heads
from torch import Tensor

from qframework import sage_attention, sage_attention_varlen
from qframework.errors import QFrameworkError, UnsupportedError


def packed(lengths_q: list[int], lengths_k: list[int], q_heads: int = 4, k_heads: int = 2) -> tuple[Tensor, ...]:
    query = heads(sum(lengths_q), q_heads, 16)
    key, value = (heads(sum(lengths_k), k_heads, 16) for _ in range(2))
    starts = [torch.tensor([0, *n], dtype=torch.int32).cumsum(0, dtype=torch.int32) for n in (lengths_q, lengths_k)]
    return query, key, value, *starts


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_varlen_sequences_attend_only_to_themselves(causal: bool) -> None:
    lengths_q, lengths_k = [5, 1, 0, 40], [9, 3, 2, 33]
    query, key, value, starts_q, starts_k = packed(lengths_q, lengths_k)
    out = sage_attention_varlen(query, key, value, starts_q, starts_k, 40, 33, causal)
    one_by_one = [
        sage_attention(q, k, v, is_causal=causal, enable_gqa=True, tensor_layout="NHD")
        for q, k, v in zip(query.split(lengths_q), key.split(lengths_k), value.split(lengths_k), strict=True)
    ]
    torch.testing.assert_close(out, torch.cat(one_by_one), rtol=0, atol=1e-6)


WRONG_OFFSETS = {  # offsets of queries and keys, which have 14 and 11 tokens
    "decreasing": ([0, 9, 5], [0, 7, 11], r"cu_seqlens_q\[2\] must be from 9 to 14, got 5"),
    "negative": ([0, 5, 14], [0, -3, 11], r"cu_seqlens_k\[1\] must be from 0 to 11, got -3"),
    "out of range": ([0, 5, 14], [0, 7, 12], r"cu_seqlens_k\[2\] must be from 7 to 11, got 12"),
    "not from 0": ([1, 5, 14], [0, 7, 11], r"cu_seqlens_q\[0\] must be 0, got 1"),
    "too long": (
        [0, 14, 14],
        [0, 7, 11],
        r"sequence 0 of cu_seqlens_q must have at most max_seqlen_q=9 tokens, got 14",
    ),
}


@pytest.mark.parametrize("what", WRONG_OFFSETS)
def test_varlen_names_invalid_offsets(what: str) -> None:
    starts_q, starts_k, message = WRONG_OFFSETS[what]
    query, key, value, *_ = packed([5, 9], [7, 4])
    starts = (torch.tensor(x, dtype=torch.int32) for x in (starts_q, starts_k))
    with pytest.raises(QFrameworkError, match=message):
        sage_attention_varlen(query, key, value, *starts, 9, 7)


def test_varlen_gives_zeros_after_the_last_sequence() -> None:
    query, key, value, starts_q, starts_k = packed([5, 9], [7, 4])
    shorter = torch.tensor([0, 5, 8], dtype=torch.int32)
    out = sage_attention_varlen(query, key, value, shorter, starts_k, 9, 7)
    assert (out[8:] == 0).all()
    torch.testing.assert_close(out[:5], sage_attention_varlen(query, key, value, starts_q, starts_k, 9, 7)[:5])


def test_varlen_takes_both_names_of_the_scale() -> None:
    arguments = (*packed([5, 9], [7, 4]), 9, 7)
    expected = sage_attention_varlen(*arguments, scale=0.3)
    assert torch.equal(sage_attention_varlen(*arguments, sm_scale=0.3), expected)
    with pytest.raises(QFrameworkError, match=r"sage_attention_varlen: scale or its alias sm_scale must be None"):
        sage_attention_varlen(*arguments, scale=0.3, sm_scale=0.3)


def test_offsets_that_are_no_tensors_are_named() -> None:
    x = torch.zeros(8, 4, 16)
    with pytest.raises(UnsupportedError, match=r"cu_seqlens_k must be a tensor, got .* of type list"):
        sage_attention_varlen(x, x, x, torch.tensor([0, 8], dtype=torch.int32), [0, 8], 8, 8)  # type: ignore[arg-type]


@pytest.mark.usefixtures("fresh_dynamo")
def test_varlen_compiles_without_a_break() -> None:
    arguments = (*packed([5, 9], [7, 4]), 9, 7)
    compiled = torch.compile(sage_attention_varlen, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*arguments), sage_attention_varlen(*arguments))
