"""``sage_attention`` with sinks: the function, its gradients and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_helpers import assert_within, expected_error, heads
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qframework import sage_attention
from qframework.attention import fallbacks, left_to_pytorch
from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.attention.auto import pytorch_is_faster

CLOSE = {"rtol": 1e-4, "atol": 2e-5}  # float32 against FP64
OF_HEADS = torch.tensor([-2.0, 0.5, 4.0, 1.0])
OF_TOKENS = torch.linspace(-3, 5, 2 * 4 * 20).reshape(2, 4, 20)


@pytest.fixture(autouse=True)
def auto_chooses(monkeypatch: pytest.MonkeyPatch, auto_is_a_variant: None) -> None:
    """By its own rule, as for users."""
    monkeypatch.setattr(left_to_pytorch, "pytorch_is_faster", pytorch_is_faster)


def operands(heads_of_keys: int = 4) -> list[Tensor]:
    return [heads(2, 4, 20, 16), heads(2, heads_of_keys, 30, 16) + 1, heads(2, heads_of_keys, 30, 24)]


def weights(q: Tensor, k: Tensor, sinks: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Those of the keys in FP64, in a softmax over one more logit."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    logits = q.double() @ k.double().mT * q.shape[-1] ** -0.5
    if causal:
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    of_rows = sinks.double() if sinks.ndim == 3 else sinks.double().view(1, -1, 1)
    last = of_rows.expand(logits.shape[:-1]).unsqueeze(-1)
    return torch.cat([logits, last], -1).softmax(-1)[..., :-1]


def exact(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, **masking: Any) -> Tensor:
    return weights(q, k, sinks, **masking) @ v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)


MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": torch.arange(600).reshape(20, 30) % 7 > 2},
    "float": {"attn_mask": torch.linspace(-3, 3, 600).reshape(20, 30)},
    "empty row": {"attn_mask": (torch.arange(20) != 3)[:, None].expand(20, 30)},
}


def of(mask: str) -> dict[str, Any]:
    return {"mask": MASKS[mask].get("attn_mask"), "causal": MASKS[mask].get("is_causal", False)}


@pytest.mark.parametrize("sinks", [OF_HEADS, OF_TOKENS], ids=["of heads", "of tokens"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("variant", ["auto", "unquantized"])
def test_without_quantization_it_is_exact(variant: str, mask: str, sinks: Tensor) -> None:
    x = operands(2)
    before = sum(fallbacks.values())
    out = sage_attention(*x, enable_gqa=True, sinks=sinks, variant=variant, **MASKS[mask])
    torch.testing.assert_close(out.double(), exact(*x, sinks, **of(mask)), **CLOSE)
    assert sum(fallbacks.values()) - before == (variant == "auto"), "it is counted as left to PyTorch"


@pytest.mark.parametrize("mask", MASKS)
def test_a_variant_is_within_what_rounding_explains(mask: str) -> None:
    x = operands()
    out = sage_attention(*x, variant="8-per_block-fp16-fp32", sinks=OF_HEADS, **MASKS[mask])
    p = weights(*x[:2], OF_HEADS, **of(mask))
    assert_within(out, exact(*x, OF_HEADS, **of(mask)), expected_error(*x, p))


@pytest.mark.parametrize("variant", ["auto", "unquantized", "sage_b"])
def test_a_sink_that_is_off_changes_nothing(variant: str) -> None:
    """Rows without keys stay zero, and get no gradient of NaN."""
    x, mask = [each.requires_grad_() for each in operands()], MASKS["empty row"]["attn_mask"]
    sinks = torch.full((4,), -torch.inf, requires_grad=True)
    out = sage_attention(*x, mask, sinks=sinks, variant=variant)
    torch.testing.assert_close(out, sage_attention(*x, mask, variant=variant), **CLOSE)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.sum(), [*x, sinks]))


def test_they_matter_and_are_those_of_their_heads() -> None:
    x = operands()
    out = sage_attention(*x, sinks=OF_HEADS)
    for others in (OF_HEADS.flip(0), OF_HEADS - 100):
        assert float((sage_attention(*x, sinks=others) - out).norm() / out.norm()) > 0.1
    torch.testing.assert_close(sage_attention(*x, sinks=OF_HEADS - 100), sage_attention(*x), **CLOSE)


@pytest.mark.parametrize("variant", ["auto", "unquantized"])
def test_other_layouts_ranks_and_broadcasting(variant: str) -> None:
    q, k, v = operands()
    expected = sage_attention(q, k, v, sinks=OF_HEADS, variant="unquantized")
    exchanged = [x.transpose(1, 2) for x in (q, k, v)]
    out = sage_attention(*exchanged, sinks=OF_HEADS, variant=variant, tensor_layout="NHD")
    torch.testing.assert_close(out.transpose(1, 2), expected, **CLOSE)
    out = sage_attention(q[0], k[0], v[0], sinks=OF_HEADS, variant=variant)
    torch.testing.assert_close(out, expected[0], **CLOSE)
    out = sage_attention(q[0], k[0, :2], v[0, :2], sinks=OF_HEADS, variant=variant, enable_gqa=True)
    assert out.shape == (4, 20, 24)
    out = sage_attention(q, k, v, sinks=OF_HEADS[:, None], variant=variant)
    torch.testing.assert_close(out, expected, **CLOSE)


@pytest.mark.parametrize("variant", ["auto", "unquantized"])
def test_gradients_reach_the_sinks_too(variant: str) -> None:
    given = [x.requires_grad_() for x in (*operands(2), OF_HEADS.clone())]
    direction = heads(2, 4, 20, 24).double()
    q, k, v, sinks = given
    out = sage_attention(q, k, v, enable_gqa=True, sinks=sinks, variant=variant, is_causal=True)
    actual = torch.autograd.grad(out.double(), given, direction)
    expected = torch.autograd.grad(exact(q, k, v, sinks, causal=True), given, direction)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


class Results(TorchDispatchMode):
    """All results of one shape that operators allocate."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape, self.found = shape, dict[int, Tensor]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [x for x in (result if isinstance(result, tuple) else (result,)) if x.shape == self.shape]
        self.found |= {x.data_ptr(): x for x in given}
        return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_result_is_scaled_in_place(dtype: torch.dtype) -> None:
    """Without a copy in float32, and with the values that one has, rounded once."""
    x = [each.to(dtype) for each in operands()]
    sinks = OF_HEADS.clone().requires_grad_()
    with torch.no_grad(), Results(2, 4, 20, 24) as results:
        out, lse = sage_attention(*x, sinks=sinks, variant="unquantized", return_lse=True)
    assert [x.dtype for x in results.found.values()] == [dtype]
    plain, of_keys = sage_attention(*x, variant="unquantized", return_lse=True)
    assert torch.equal(lse, of_keys)
    assert torch.equal(out, (plain * torch.sigmoid(lse - OF_HEADS[:, None]).unsqueeze(-1)).to(dtype))
    with_gradient = sage_attention(*x, sinks=sinks, variant="unquantized")
    assert with_gradient.requires_grad
    assert torch.equal(out, with_gradient)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [64, 80])
@pytest.mark.parametrize("window", [False, True])
def test_scaling_in_place_leaves_later_calls_alone(window: bool, channels: int) -> None:
    """Calls are recorded and replayed, and a result that is kept is not written again."""
    q, k, v = (torch.randn(4, 12, 600, channels, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    at, sinks = torch.arange(600, device="cuda"), torch.linspace(-2, 6, 12, device="cuda")
    mask = (at <= at[:, None]) & (at > at[:, None] - 90) & (at[:, None] != 9) if window else None
    results = [sage_attention(q, k, v, mask, sinks=sinks) for _ in range(5)]
    with torch.no_grad():
        expected = exact(q, k, v, sinks, mask=mask)
    for out in results:
        assert torch.equal(out, results[0])
    assert len({out.data_ptr() for out in results}) == 5
    assert float((results[0].double() - expected).norm() / expected.norm()) < 0.01


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("variant", ["auto", "sage_b"])
def test_compiled_it_is_the_same(variant: str) -> None:
    x = operands()
    compiled = torch.compile(lambda *x: sage_attention(*x, sinks=OF_HEADS, variant=variant), fullgraph=True)
    torch.testing.assert_close(compiled(*x), sage_attention(*x, sinks=OF_HEADS, variant=variant), **CLOSE)


@pytest.mark.parametrize(
    ("sinks", "got"),
    [
        (torch.zeros(3), r"torch.float32 of shape \(3,\)"),
        (torch.zeros(2, 4, 30), r"torch.float32 of shape \(2, 4, 30\)"),
        (torch.zeros(1, 2, 4, 20), r"torch.float32 of shape \(1, 2, 4, 20\)"),
        (torch.zeros(4, dtype=torch.int64), r"torch.int64 of shape \(4,\)"),
    ],
    ids=["heads", "tokens", "dimensions", "dtype"],
)
def test_others_are_refused(sinks: Tensor, got: str) -> None:
    accepted = r"sinks must be floating point, of shape \(4,\) or \(2, 4, 20\), on cpu"
    with pytest.raises(QFrameworkError, match=f"sage_attention: {accepted}, got {got} on cpu"):
        sage_attention(*operands(), sinks=sinks)


def test_no_tensor_and_other_gradients_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"sage_attention: sinks must be a tensor, got 1.0"):
        sage_attention(*operands(), sinks=1.0)  # type: ignore[call-overload]
    with pytest.raises(UnsupportedError, match=r"sinks must be None with backward='int8', got .*Pass backward='exact'"):
        sage_attention(*operands(), sinks=OF_HEADS, backward="int8")
