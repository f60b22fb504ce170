"""``sage_attention`` with a soft cap: the function, its gradients and what it refuses. Its kernels are tested apart."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_helpers import assert_within, exact_attention, expected_error, gradients, heads
from torch import Tensor

from qframework import sage_attention, sage_attention_varlen
from qframework.attention import fallbacks, left_to_pytorch
from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.attention.auto import Hopper, pytorch_is_faster

# Float32 against FP64: sums of at most 40 terms of order 1.
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


@pytest.fixture(autouse=True)
def auto_chooses(monkeypatch: pytest.MonkeyPatch, auto_is_a_variant: None) -> None:
    """By its own rule, as for users."""
    monkeypatch.setattr(left_to_pytorch, "pytorch_is_faster", pytorch_is_faster)


def large(heads_of_keys: int = 4, queries: int = 20, keys: int = 30) -> list[Tensor]:
    """Operands whose logits have a standard deviation of about 5."""
    q, k = heads(2, 4, queries, 16) * 2.5, heads(2, heads_of_keys, keys, 16) * 2 + 1
    return [q, k, heads(2, heads_of_keys, keys, 24)]


def repeated(x: Tensor, like: Tensor) -> Tensor:
    return x.repeat_interleave(like.shape[-3] // x.shape[-3], -3)


def exact(q, k, v, mask=None, is_causal=False, scale=None, softcap=None) -> Tensor:
    return exact_attention(q, repeated(k, q), repeated(v, q), mask, is_causal, scale, softcap)[0]


MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"is_causal": True},
    "bool": {"mask": torch.arange(600).reshape(20, 30) % 7 > 2},
    "float": {"mask": torch.linspace(-3, 3, 600).reshape(20, 30)},
    "empty row": {"mask": (torch.arange(20) != 3)[:, None].expand(20, 30)},
}


def settings_of(name: str) -> dict[str, Any]:
    given = dict(MASKS[name])
    mask = given.pop("mask", None)
    return given if mask is None else given | {"attn_mask": mask}


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("mask", MASKS)
def test_auto_on_a_cpu_is_exact(mask: str, softcap: float) -> None:
    operands = large(2)
    before = sum(fallbacks.values())
    out = sage_attention(*operands, enable_gqa=True, softcap=softcap, **settings_of(mask))
    assert sum(fallbacks.values()) == before + 1, "it is counted as left to PyTorch"
    torch.testing.assert_close(out.double(), exact(*operands, **MASKS[mask], softcap=softcap), **CLOSE)


@pytest.mark.parametrize("softcap", [5.0, 50.0])
@pytest.mark.parametrize("mask", MASKS)
def test_a_variant_is_within_what_rounding_explains(mask: str, softcap: float) -> None:
    operands = large()
    out = sage_attention(*operands, variant="8-per_block-fp16-fp32", softcap=softcap, **settings_of(mask))
    expected, _, p = exact_attention(*operands, softcap=softcap, **MASKS[mask])
    assert_within(out, expected, expected_error(*operands, p))


def test_the_cap_is_of_scaled_logits() -> None:
    operands = large()
    out = sage_attention(*operands, sm_scale=0.7, softcap=5.0)
    torch.testing.assert_close(out.double(), exact(*operands, scale=0.7, softcap=5.0), **CLOSE)


@pytest.mark.parametrize("variant", ["auto", "unquantized"])
def test_other_layouts_and_ranks(variant: str) -> None:
    q, k, v = large()
    expected = sage_attention(q, k, v, softcap=5.0, variant="unquantized")
    exchanged = sage_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), softcap=5.0, variant=variant, tensor_layout="NHD"
    )
    torch.testing.assert_close(exchanged.transpose(1, 2), expected, **CLOSE)
    out = sage_attention(q[0], k[0], v[0], softcap=5.0, variant=variant)
    torch.testing.assert_close(out, expected[0], **CLOSE)
    out = sage_attention(*(x[:, None] for x in (q, k, v)), softcap=5.0, variant=variant)
    torch.testing.assert_close(out, expected[:, None], **CLOSE)


def test_float16_does_not_overflow() -> None:
    q, k, v = (torch.full((1, 1, 4, 256), size, dtype=torch.float16) for size in (60.0, 60.0, 1.0))
    assert (sage_attention(q, k, v, softcap=50.0) == 1).all()


@pytest.mark.parametrize("masking", ["none", "causal", "bool", "float"])
def test_on_a_gpu_pytorch_has_no_kernel_for_it(masking: Any) -> None:
    """Whatever it would take without the cap. The device "meta" stands for a GPU."""
    query = torch.empty(1, 8, 512, 128, dtype=torch.float16, device="meta")
    for gradients_needed in (False, True):
        given = (query, 512, 128, masking, Hopper(132, True), gradients_needed)
        assert not pytorch_is_faster(*given, True)
    assert pytorch_is_faster(query, 512, 128, "causal", Hopper(132, True), True)


def test_a_call_without_a_cap_is_no_model_for_one_with_it() -> None:
    """Repeated calls that are left to PyTorch are recognised by their kind."""
    operands = large()
    plain = sage_attention(*operands)
    assert left_to_pytorch.known_kinds
    capped = sage_attention(*operands, softcap=5.0)
    assert float((capped - plain).norm() / plain.norm()) > 0.3
    assert torch.equal(sage_attention(*operands), plain)


def test_the_log_sum_exp_is_of_capped_logits() -> None:
    operands = large()
    _, lse = sage_attention(*operands, variant="unquantized", softcap=5.0, return_lse=True)
    torch.testing.assert_close(lse.double(), exact_attention(*operands, softcap=5.0)[1], **CLOSE)


# Gradients ------------------------------------------------------------------------------------------------------------


# The log-sum-exp of an empty row is -inf.
@pytest.mark.parametrize(("kind", "lse"), [(kind, lse) for kind in MASKS for lse in (False, True)][:-1])
@pytest.mark.parametrize("softcap", [1.0, 5.0, 50.0])
@pytest.mark.parametrize("variant", ["auto", "sage_b"])
def test_gradients_are_those_of_exact_attention(variant: str, kind: str, softcap: float, lse: bool) -> None:
    operands = large()
    added, causal = [MASKS[kind]["mask"]] if "mask" in MASKS[kind] else [], "is_causal" in MASKS[kind]

    def ours(q, k, v, mask=None):
        return sage_attention(q, k, v, mask, is_causal=causal, variant=variant, softcap=softcap, return_lse=lse)

    def expected(q, k, v, mask=None):
        out, sums, _ = exact_attention(q, k, v, mask, causal, softcap=softcap)
        return (out, sums) if lse else out

    doubles = [x.double() if x.is_floating_point() else x for x in (*operands, *added)]
    for got, want in zip(gradients(ours, *operands, *added), gradients(expected, *doubles), strict=True):
        torch.testing.assert_close(got.double(), want, **CLOSE)


def test_gradients_of_grouped_heads() -> None:
    operands = large(2)

    def ours(q, k, v):
        return sage_attention(q, k, v, enable_gqa=True, variant="sage_b", softcap=5.0)

    def expected(q, k, v):
        return exact(q, k, v, softcap=5.0)

    for got, want in zip(gradients(ours, *operands), gradients(expected, *(x.double() for x in operands)), strict=True):
        torch.testing.assert_close(got.double(), want, **CLOSE)


def test_a_saturated_logit_has_no_gradient() -> None:
    q, v = torch.full((1, 1, 1, 16), 10.0, requires_grad=True), heads(1, 1, 4, 16)
    k = torch.tensor([1.0, 1.02, 0.98, 1.01])[None, None, :, None].expand(1, 1, 4, 16)
    found = {}
    for softcap in (1.0, 50.0):  # of logits around 40
        out = sage_attention(q, k, v, variant="unquantized", softcap=softcap)
        (found[softcap],) = torch.autograd.grad(out[..., 0].sum(), q)
    assert float(found[1.0].abs().max()) < 1e-6 < float(found[50.0].abs().max())


def test_second_derivatives() -> None:
    operands = [x[:1, :2, :7] for x in large()]

    def twice(attend, inputs):
        leaves = [x.detach().requires_grad_() for x in inputs]
        first = torch.autograd.grad(attend(*leaves).square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), leaves)

    got = twice(lambda q, k, v: sage_attention(q, k, v, variant="unquantized", softcap=5.0), operands)
    want = twice(lambda q, k, v: exact(q, k, v, softcap=5.0), [x.double() for x in operands])
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5 * float(y.abs().max()))


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences_and_their_gradients(is_causal: bool) -> None:
    lengths = [9, 14]
    starts = torch.tensor([0, 9, 23], dtype=torch.int32)
    operands = [x[0, :, :23].transpose(0, 1).contiguous() for x in large(2, 30, 30)]

    def ours(q, k, v):
        return sage_attention_varlen(q, k, v, starts, starts, 14, 14, is_causal, variant="unquantized", softcap=5.0)

    def expected(q, k, v):
        parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
        return torch.cat(
            [
                exact(*(x.transpose(0, 1) for x in part), is_causal=is_causal, softcap=5.0).transpose(0, 1)
                for part in parts
            ]
        )

    doubles = [x.double() for x in operands]
    torch.testing.assert_close(ours(*operands).double(), expected(*doubles), **CLOSE)
    for got, want in zip(gradients(ours, *operands), gradients(expected, *doubles), strict=True):
        torch.testing.assert_close(got.double(), want, **CLOSE)


@pytest.mark.parametrize("variant", ["auto", "sage_b"])
def test_compiled_with_its_gradient(variant: str) -> None:
    operands = large()

    def attend(q, k, v):
        return sage_attention(q, k, v, is_causal=True, variant=variant, softcap=5.0)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*operands), attend(*operands), **CLOSE)
    for got, want in zip(gradients(compiled, *operands), gradients(attend, *operands), strict=True):
        torch.testing.assert_close(got, want, **CLOSE)


def test_opcheck() -> None:
    q, k, v = (x.requires_grad_() for x in large())
    torch.library.opcheck(torch.ops.qframework.sage_attention.default, (q, k, v), {"softcap": 5.0})
    packed = [heads(9, 4, 16).requires_grad_() for _ in range(3)]
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    arguments = (*packed, starts, starts, 5, 5)
    torch.library.opcheck(torch.ops.qframework.sage_attention_varlen.default, arguments, {"softcap": 5.0})


# Refused --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [0.0, -50.0, math.inf, math.nan, "50", True])
@pytest.mark.parametrize("variant", ["auto", "sage_b"])
def test_what_is_no_cap_is_refused(variant: str, softcap: Any) -> None:
    operands = large()
    with pytest.raises(QFrameworkError, match=rf"sage_attention: softcap must be .*, got {softcap!r}$"):
        sage_attention(*operands, variant=variant, softcap=softcap)
    packed = [x[0].transpose(0, 1) for x in large(4, 20, 20)]
    starts = torch.tensor([0, 20], dtype=torch.int32)
    with pytest.raises(QFrameworkError, match=rf"sage_attention_varlen: softcap must be .*, got {softcap!r}$"):
        sage_attention_varlen(*packed, starts, starts, 20, 20, variant=variant, softcap=softcap)


@pytest.mark.parametrize("backward", ["int8", "mixed"])
def test_gradients_in_8_bit_take_no_cap(backward: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"sage_attention: softcap must be None with backward=.*, got 50.0"):
        sage_attention(*large(), softcap=50.0, backward=backward)
    packed = [x[0].transpose(0, 1) for x in large(4, 20, 20)]
    starts = torch.tensor([0, 20], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match=r"sage_attention_varlen: softcap must be None .*, got 50.0"):
        sage_attention_varlen(*packed, starts, starts, 20, 20, softcap=50.0, backward=backward)
