"""Packed sequences in the Triton kernels: each attends only to itself, and nothing outside of the tensors is read."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from qframework.errors import QFrameworkError
from qframework.kernels.attention import pipeline as module

pytestmark = pytest.mark.interpreter
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VARIANTS = ["sage_b", "sage_vt", "sage2_int8", "sage2_int4"]
LENGTHS_Q, LENGTHS_K = [5, 0, 40, 1], [9, 3, 70, 0]


def surrounded(tokens: int, heads: int) -> Tensor:
    """``(tokens, heads, 16)`` surrounded by NaN, which reads outside of it return."""
    whole = torch.full((tokens + 400, heads, 16), math.nan, dtype=torch.float16)
    whole[200:-200] = torch.randn(tokens, heads, 16)
    return whole.to(DEVICE)[200:-200]


def operands() -> tuple[Tensor, Tensor, Tensor]:
    return surrounded(sum(LENGTHS_Q), 2), surrounded(sum(LENGTHS_K), 1), surrounded(sum(LENGTHS_K), 1)


def starts_of(*ends: int) -> Tensor:
    return torch.tensor([0, *ends], dtype=torch.int32, device=DEVICE)


RIGHT_Q, RIGHT_K = (torch.tensor(x).cumsum(0).tolist() for x in (LENGTHS_Q, LENGTHS_K))


def attend(
    q: Tensor, k: Tensor, v: Tensor, ends_q=RIGHT_Q, ends_k=RIGHT_K, variant="sage_b", longest=(40, 70)
) -> Tensor:
    starts = (starts_of(*ends_q), starts_of(*ends_k))
    return module.SAGE_ATTENTION_VARLEN.cuda(q, k, v, *starts, *longest, variant=variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_sequence_attends_only_to_itself(variant):
    q, k, v = operands()
    out = attend(q, k, v, variant=variant)
    for i, (rows, keys) in enumerate(zip(q.split(LENGTHS_Q), k.split(LENGTHS_K), strict=True)):
        values = v.split(LENGTHS_K)[i]
        got = out.split(LENGTHS_Q)[i].transpose(0, 1)[None]
        if not rows.numel() or not keys.numel():
            assert (got == 0).all()
            continue
        dense = (x.transpose(0, 1)[None] for x in (rows, keys, values))
        expected = module.SAGE_ATTENTION.cuda(*dense, enable_gqa=True, variant=variant)[0]
        # Means are summed in another order, which may change how a tie is rounded.
        assert (got - expected).abs().max() <= 2.0**-5 * values.abs().max()


@pytest.mark.parametrize("variant", ["sage_b", "sage2_int4"])
@pytest.mark.parametrize(
    ("ends_k", "longest"),
    [
        ((9, 3, 82, 82), 70),  # decreasing
        ((-5, 12, 82, 82), 70),  # before the first token
        ((9, 12, 82, 180), 110),  # after the last one
        ((9, 12, 2**31 - 1, 82), 70),
        ((9, 12, 82, 82), 30),  # a sequence longer than the longest
    ],
)
def test_nothing_outside_of_keys_and_values_is_read(variant, ends_k, longest):
    q, k, v = operands()
    out = attend(q, k, v, ends_k=ends_k, variant=variant, longest=(40, longest))
    assert out.isfinite().all()
    if ends_k[:2] == (9, 12):  # sequences that overlap overwrite each other's integers
        assert torch.equal(out[:5], attend(q, k, v, variant=variant, longest=(40, longest))[:5])


@pytest.mark.parametrize("ends_q", [(5, -3, 45, 46), (5, 5, 45, 300), (5, 400, 45, 46)])
def test_nothing_outside_of_queries_is_read(ends_q):
    q, k, v = operands()
    out = attend(q, k, v, ends_q=ends_q)
    assert out[:40].isfinite().all()
    if ends_q[1] > 0:
        torch.testing.assert_close(out[:5], attend(q, k, v)[:5])


def test_tokens_after_the_last_sequence_are_zero():
    q, k, v = operands()
    out = attend(q, k, v, ends_q=(2, 2, 4, 4), longest=(2, 70))
    assert out[:2].any()
    assert (out[4:] == 0).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a CPU offsets are always checked")
def test_offsets_are_checked_on_a_gpu_where_asked_for(monkeypatch):
    monkeypatch.setattr(module, "_CHECK_ON_GPU", True)
    with pytest.raises(QFrameworkError, match=r"cu_seqlens_k\[2\] must be from 9 to 82, got 3"):
        attend(*operands(), ends_k=(9, 3, 82, 82))
