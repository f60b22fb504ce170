"""The pass for packed sequences before Hopper's kernel: each as if it were a dense call, and when "auto" takes it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qframework.kernels.attention import auto
from qframework.kernels.attention.hopper import packed as hopper_packed
from qframework.kernels.attention.hopper import specialized
from qframework.kernels.attention.hopper.prepare import prepare_triton
from qframework.kernels.attention.hopper.prepare_packed import prepare_packed_triton
from qframework.kernels.attention.operands import Lengths
from qframework.kernels.attention.variants import resolve

VARIANT = resolve("integer_exp")


def starts_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.mark.interpreter
@pytest.mark.parametrize("implementation", ["triton"], indirect=True)
@pytest.mark.parametrize("smooth_k", [False, True])
@pytest.mark.parametrize(("lengths", "heads", "key_heads", "width", "values", "dtype"), [
    ([(5, 300), (0, 40), (130, 130), (257, 0), (64, 1800)], 4, 2, 48, 32, torch.float16),
    ([(128, 128)] * 2 + [(1, 1)] * 130, 1, 1, 16, 16, torch.bfloat16),
])  # fmt: skip
def test_each_sequence_is_a_dense_call(lengths, heads, key_heads, width, values, dtype, smooth_k, place) -> None:
    of_queries, of_keys = ([pair[i] for pair in lengths] for i in (0, 1))
    q = torch.randn(sum(of_queries) + 3, heads, width).to(dtype).to(place)
    k = (torch.randn(sum(of_keys) + 7, key_heads, width) + 2).to(dtype).to(place)
    v = torch.randn(sum(of_keys) + 7, key_heads, values).to(dtype).to(place)
    k[sum(of_keys) :] = torch.nan  # belongs to no sequence
    starts = [starts_of(x).to(place) for x in (of_queries, of_keys)]
    packed = Lengths(*starts, max(of_queries), max(of_keys))
    qk, v16 = prepare_packed_triton(q, k, v, VARIANT, 0.3, smooth_k, packed)
    for i, (n, m) in enumerate(lengths[:8]):
        rows, keys = (slice(int(x[i]), int(x[i]) + size) for x, size in zip(starts, (n, m), strict=True))
        if not n or not m:
            assert m or not qk.k_norm[i].any()
            assert m or qk.k_scale[i, :, :2].isfinite().all()  # the kernel reads those of a block
            continue
        dense = [x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys])]
        expected, expected_v = prepare_triton(*dense, VARIANT, 0.3, smooth_k)
        assert torch.equal(qk.q[rows].transpose(0, 1)[None], expected.q)
        assert torch.equal(qk.q_scale[i, :, : expected.q_scale.shape[2]], expected.q_scale[0])
        assert torch.equal(v16[keys].transpose(0, 1)[None], expected_v.v)
        # Sums of keys may be added in another order.
        torch.testing.assert_close(
            qk.k_scale[i, :, : expected.k_scale.shape[2]], expected.k_scale[0], rtol=1e-5, atol=0
        )
        torch.testing.assert_close(qk.k_norm[i], expected.k_norm[0], rtol=1e-2, atol=0)
        differ = qk.k[keys].transpose(0, 1)[None].int() - expected.k.int()
        assert differ.abs().max() <= 1
        assert differ.float().abs().mean() < 0.01


def test_auto_for_packed_sequences(monkeypatch) -> None:
    """Without a GPU: the integer exponential where most work is in long sequences."""
    monkeypatch.setattr(auto, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(hopper_packed, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(hopper_packed, "chip_of", lambda device: ((9, 0), 132))
    monkeypatch.setattr(specialized, "HAS_GLUON", True)

    def integer(lengths: list[int], width: int = 64, heads: int = 16, causal: bool = False, longest: int = 0) -> bool:
        q = torch.empty(sum(lengths), heads, width, dtype=torch.float16)
        longest = longest or max(lengths)
        given = Lengths(starts_of(lengths), starts_of(lengths), longest, longest)
        return auto.choose_packed_variant(q, q, q, given, causal) == VARIANT.spec

    mixed = [8192, 4096, 4096, *[2048] * 3, *[1024] * 4, *[512] * 6]
    assert integer(mixed)
    assert integer(mixed, width=128)
    assert integer([4096] * 4)
    assert integer([8192] * 2, causal=True)
    assert integer(mixed, causal=True)
    assert not integer(mixed, width=128, causal=True)  # half of the work, for the same pass
    assert not integer(mixed, width=72)
    assert not integer(mixed, width=160)
    assert not integer(mixed, heads=1)
    assert not integer([2048] * 16)
    assert not integer([512] * 64, longest=32768)  # the longest is not known
    assert not integer([4096, *[64] * 100])
