"""``sage_attention`` and ``use_sage_attention`` with a gradient in 8 bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_helpers import Operators, exact_attention, gradients, heads
from torch import Tensor, nn

from qframework import sage_attention, sage_attention_varlen, use_sage_attention
from qframework.attention import fallbacks
from qframework.errors import QFrameworkError, UnsupportedError

FORMS = ("int8", "mixed")


def close(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], allowed: float = 0.03) -> bool:
    """Whether the norms of all differences are within ``allowed``: normal logits are off by about 0.01."""
    pairs = zip(actual, expected, strict=True)
    return all(bool((a.double() - e).norm() <= allowed * e.norm()) for a, e in pairs)


def exact(query: Tensor, key: Tensor, value: Tensor, return_lse: bool = False, **kwargs: Any) -> Any:
    group = query.shape[-3] // key.shape[-3]
    key, value = (x.repeat_interleave(group, -3) for x in (key, value))
    out, lse, _ = exact_attention(query, key, value, **kwargs)
    return (out, lse) if return_lse else out


@pytest.mark.parametrize("backward", FORMS)
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"is_causal": True}, {"scale": 0.3}, {"return_lse": True}, {"return_lse": True, "is_causal": True}],
    ids=str,
)
def test_gradients_are_close_to_exact_ones(kwargs: dict[str, Any], backward: str, device: torch.device) -> None:
    bias = 2 * torch.randn(2, 2, 1, 32, device=device)
    inputs = (
        heads(2, 4, 70, 32, device=device),
        heads(2, 2, 90, 32, device=device) + bias,
        heads(2, 2, 90, 48, device=device),
    )
    found = gradients(sage_attention, *inputs, backward=backward, enable_gqa=True, **kwargs)
    assert close(found, gradients(exact, *(x.double() for x in inputs), **kwargs))


@pytest.mark.parametrize("backward", FORMS)
@pytest.mark.parametrize("shape", [(3, 40, 32), (2, 3, 2, 40, 32)], ids=["3-D", "5-D"])
def test_int8_backward_of_other_ranks(shape: tuple[int, ...], backward: str) -> None:
    inputs = [heads(*shape) for _ in range(3)]
    found = gradients(sage_attention, *inputs, backward=backward)
    expected = gradients(lambda *x: exact_attention(*x)[0], *(x.double() for x in inputs))
    assert close(found, expected)


def test_int8_backward_in_the_other_layout_and_broadcast() -> None:
    query, key = heads(2, 40, 4, 32), heads(1, 40, 4, 32)
    found = gradients(sage_attention, query, key, key, tensor_layout="NHD", backward="int8")
    swapped = [x.double().transpose(1, 2) for x in (query, key, key)]
    expected = gradients(lambda q, k, v: exact_attention(q, k, v)[0], *swapped)
    weights = torch.linspace(-1, 1, 2 * 40 * 4 * 32).view(2, 40, 4, 32).transpose(1, 2)  # those of this layout
    leaves = [x.requires_grad_() for x in swapped]
    expected = torch.autograd.grad(exact_attention(*leaves)[0], leaves, weights.double())
    assert close(found, tuple(x.transpose(1, 2) for x in expected))


def test_the_exact_gradient_is_the_default_and_8_bit_is_asked_for() -> None:
    query = heads(1, 2, 40, 32).requires_grad_()
    ran = {}
    for backward in ("exact", *FORMS):
        with Operators() as operators:
            sage_attention(query, query, query, variant="sage_b", backward=backward).sum().backward()
        ran[backward] = operators
    assert ran["exact"].count("int8_gradient_attention_backward") == 0
    assert ran["exact"].count("sage_attention_backward") == 1
    for backward in FORMS:
        assert ran[backward].count("int8_gradient_attention_backward") == 1
        assert ran[backward].count("sage_attention_backward") == 0


def test_backward_changes_nothing_where_no_gradient_is_needed() -> None:
    query = heads(1, 2, 40, 32)
    with Operators() as operators:
        sage_attention(query, query, query, variant="sage_b", backward="int8")
        with torch.no_grad():
            sage_attention(query.requires_grad_(), query, query, variant="sage_b", backward="int8")
    assert operators.count("sage_attention") == 2
    assert operators.count("int8_gradient_attention") == 0


@pytest.mark.parametrize("backward", FORMS)
def test_int8_backward_under_autocast(backward: str) -> None:
    inputs = [heads(1, 2, 40, 32) for _ in range(3)]
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(sage_attention, *inputs, backward=backward)
    assert all(x.dtype == torch.float32 for x in found)
    expected = gradients(lambda *x: exact_attention(*x)[0], *(x.double() for x in inputs))
    assert close(found, expected)


@pytest.mark.parametrize("backward", FORMS)
def test_int8_backward_compiles_whole(backward: str) -> None:
    inputs = [heads(1, 2, 40, 32) for _ in range(3)]

    def attention(*x: Tensor) -> Tensor:
        return sage_attention(*x, is_causal=True, backward=backward) * 2

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for mine, theirs in zip(gradients(compiled, *inputs), gradients(attention, *inputs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"backward": "fp8"}, "backward must be exact, int8 or mixed, got 'fp8'"),
        ({"backward": "int8", "attn_mask": True}, r"attn_mask must be None with backward='int8', got shape \(4, 4\)"),
        ({"backward": "int8", "variant": "sage_t"}, "variant must quantize Q and K to 8 bits per block"),
        ({"dropout_p": 0.1}, "dropout_p must be 0.0 with backward='exact', got 0.1"),
        (
            {"backward": "int8", "dropout_p": 0.1, "variant": "sage_vb"},
            "variant must multiply P and V in 16 bit with dropout, .* got 'sage_vb'",
        ),
    ],
)
def test_what_a_gradient_in_8_bit_refuses(kwargs: dict[str, Any], message: str) -> None:
    query = heads(1, 2, 4, 16).requires_grad_()
    if "attn_mask" in kwargs:
        kwargs = kwargs | {"attn_mask": torch.ones(4, 4, dtype=torch.bool)}
    with pytest.raises(UnsupportedError, match=message):
        sage_attention(query, query, query, **kwargs)


@pytest.mark.parametrize("backward", FORMS)
def test_dropout_comes_from_torchs_generator(backward: str) -> None:
    """The same seed, the same result and gradients; a share of weights is dropped, and the mean stays."""
    query, key = heads(1, 2, 60, 32), heads(1, 2, 60, 32)
    ones = torch.ones(1, 2, 60, 32)

    def run(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        leaves = [x.clone().requires_grad_() for x in (query, key, ones)]
        out = sage_attention(*leaves, dropout_p=0.25, backward=backward)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    first, again, other = run(0), run(0), run(1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    sums = first[0][..., 0]  # of weights that are kept, over 1 - p
    assert abs(float(sums.mean()) - 1) < 0.03
    assert float(sums.std()) > 0.05


def test_dropout_without_a_gradient_drops_too() -> None:
    query = heads(1, 2, 60, 32)
    with torch.no_grad():
        out = sage_attention(query, query, torch.ones_like(query), dropout_p=0.5, backward="mixed")
    assert float(out.std()) > 0.05


def test_all_weights_dropped_give_zeros() -> None:
    query = heads(1, 2, 20, 32).requires_grad_()
    out = sage_attention(query, query, query, dropout_p=1.0, backward="int8")
    assert torch.equal(out, torch.zeros_like(out))
    out.sum().backward()
    assert torch.equal(query.grad, torch.zeros_like(query))


@pytest.mark.parametrize("backward", FORMS)
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(causal: bool, backward: str) -> None:
    """Each as a dense call, bit for bit; an empty one and tokens after the last get zeros."""
    starts_q, starts_k = (torch.tensor(x, dtype=torch.int32) for x in ((0, 30, 30, 75), (0, 50, 55, 90)))
    query, key, value = heads(80, 4, 32), heads(95, 2, 32), heads(95, 2, 48)

    def packed(*x: Tensor) -> Tensor:
        return sage_attention_varlen(*x, starts_q, starts_k, 45, 50, causal, backward=backward)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options = {"is_causal": causal, "enable_gqa": True, "tensor_layout": "NHD", "backward": backward}
        first = sage_attention(q[None, :30], k[None, :50], v[None, :50], **options)[0]
        last = sage_attention(q[None, 30:75], k[None, 55:90], v[None, 55:90], **options)[0]
        return torch.cat([first, last, torch.zeros(5, 4, 48)])

    for mine, theirs in zip(gradients(packed, query, key, value), gradients(dense, query, key, value), strict=True):
        assert torch.equal(mine, theirs)
    query.requires_grad_()
    assert torch.equal(packed(query, key, value), dense(query, key, value))


def test_packed_sequences_refuse_wrong_offsets() -> None:
    query = heads(10, 2, 16).requires_grad_()
    starts = torch.tensor([0, 7, 4], dtype=torch.int32)
    with pytest.raises(QFrameworkError, match=r"cu_seqlens_q\[2\] must be from 7 to 10, got 4"):
        sage_attention_varlen(query, query, query, starts, starts, 7, 7, backward="int8")


class Model(nn.Module):
    """An attention layer of 2 heads, with or without a mask."""

    def __init__(self, masked: bool = False) -> None:
        super().__init__()
        self.qkv, self.masked = nn.Linear(64, 192), masked

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() if self.masked else None
        return F.scaled_dot_product_attention(q, k, v, mask)


@pytest.mark.parametrize("masked", [False, True])
def test_a_scope_with_a_gradient_in_8_bit(masked: bool) -> None:
    """Calls with a mask run in PyTorch, counted."""
    model, x = Model(masked), torch.randn(2, 20, 64)
    before = fallbacks.total()
    with Operators() as operators, use_sage_attention(backward="int8"):
        model(x).square().mean().backward()
    assert operators.count("int8_gradient_attention_backward") == (0 if masked else 1)
    assert fallbacks.total() - before == (1 if masked else 0)
    found = model.qkv.weight.grad
    model.zero_grad()
    model(x).square().mean().backward()
    assert (found - model.qkv.weight.grad).norm() <= 0.02 * model.qkv.weight.grad.norm()


def test_a_scope_refuses_variants_without_such_a_gradient() -> None:
    with pytest.raises(UnsupportedError, match="variant must quantize Q and K to 8 bits per block"):
        use_sage_attention("sage2_int8", backward="int8")
    with pytest.raises(UnsupportedError, match="backward must be exact, int8 or mixed"):
        use_sage_attention(backward="half")


def test_large_logits_need_no_other_scale() -> None:
    """Weights of 1 and 0: exponentials of differences never overflow."""
    query = 40 * heads(1, 1, 64, 32)
    found = gradients(sage_attention, query, query, heads(1, 1, 64, 32), backward="int8")
    assert all(bool(x.isfinite().all()) for x in found)
    assert math.isfinite(float(found[0].norm()))
