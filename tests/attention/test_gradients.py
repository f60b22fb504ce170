"""Gradients of quantized attention (kernels/attention/backward.py) are those of exact attention."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_helpers import Operators, exact_attention, gradients, heads
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qframework import sage_attention, sage_attention_varlen, use_sage_attention
from qframework.errors import UnsupportedError

# SDPA in float32 against FP64: sums of at most 40 terms of order 1.
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


def operator(query: Tensor, key: Tensor, value: Tensor, *masks: Tensor, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
    """The operator; ``masks`` is attn_mask, or rel_h and rel_w, or all three."""
    names = {0: (), 1: ("attn_mask",), 2: ("rel_h", "rel_w"), 3: ("attn_mask", "rel_h", "rel_w")}[len(masks)]
    out, lse = torch.ops.qframework.sage_attention(query, key, value, **dict(zip(names, masks, strict=True)), **kwargs)
    return (out, lse) if kwargs.get("return_lse") else out


def exact(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *masks: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The same in FP64; it shares only autograd with the operator's backward."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    mask = masks[0].double() if len(masks) % 2 and masks[0].dtype != torch.bool else masks[0] if masks else None
    if len(masks) > 1:
        rel_h, rel_w = (x.double() for x in masks[-2:])
        bias = (rel_h[..., :, None] + rel_w[..., None, :]).flatten(-2)
        if len(masks) == 2:
            mask = bias
        else:
            mask = bias.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else bias + mask
    out, lse, _ = exact_attention(query, key, value, mask, is_causal, scale)
    return (out, lse) if return_lse else out


def qkv(nq: int = 20, nk: int = 30, key_heads: int = 4, device: Any = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    return (
        heads(2, 4, nq, 16, device=device),
        heads(2, key_heads, nk, 16, device=device),
        heads(2, key_heads, nk, 24, device=device),
    )


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (lambda: (), {}),
    "causal": (lambda: (), {"is_causal": True}),
    "scale": (lambda: (), {"scale": 0.5}),
    "bool mask": (lambda: (torch.rand(2, 1, 20, 30) > 0.4,), {}),
    "bool mask, causal": (lambda: (torch.rand(20, 30) > 0.4,), {"is_causal": True}),
    "float mask": (lambda: (torch.randn(2, 4, 20, 30),), {}),
    "float mask by key": (lambda: (torch.randn(4, 1, 30),), {"is_causal": True}),
    "bool mask of keys alone": (lambda: (torch.rand(30) > 0.4,), {}),
    "float mask of keys alone": (lambda: (torch.randn(30),), {}),
    "float mask of keys alone, causal": (lambda: (torch.randn(30),), {"is_causal": True}),
    "bool mask of one value": (lambda: (torch.tensor(True),), {}),
    "float mask of one value": (lambda: (torch.tensor(0.5),), {}),
    "relative": (lambda: (torch.randn(2, 4, 20, 5), torch.randn(2, 4, 20, 6)), {}),
    "relative, causal": (lambda: (torch.randn(2, 4, 20, 5), torch.randn(2, 4, 20, 6)), {"is_causal": True}),
    "relative, float": (lambda: (torch.randn(20, 30), torch.randn(2, 4, 20, 5), torch.randn(2, 4, 20, 6)), {}),
    "relative, bool": (lambda: (torch.rand(20, 30) > 0.4, torch.randn(2, 4, 20, 5), torch.randn(2, 4, 20, 6)), {}),
}


@pytest.mark.parametrize("lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_every_input(case: str, lse: bool, device: torch.device) -> None:
    make, kwargs = CASES[case]
    inputs = (*qkv(device=device), *(x.to(device) for x in make()))
    actual = gradients(operator, *inputs, return_lse=lse, **kwargs)
    expected = gradients(exact, *(x.double() if x.is_floating_point() else x for x in inputs), return_lse=lse, **kwargs)
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got.double(), want, **CLOSE)


@pytest.mark.parametrize("lse", [False, True], ids=["", "lse"])
def test_grouped_heads(lse: bool) -> None:
    inputs = qkv(key_heads=2)
    actual = gradients(operator, *inputs, enable_gqa=True, return_lse=lse)
    expected = gradients(exact, *(x.double() for x in inputs), enable_gqa=True, return_lse=lse)
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got.double(), want, **CLOSE)


@pytest.mark.parametrize("shape", [(3, 20, 16), (2, 2, 3, 20, 16)], ids=["3-D", "5-D"])
def test_other_ranks(shape: tuple[int, ...]) -> None:
    inputs = [heads(*shape) for _ in range(3)]
    for got, want in zip(gradients(operator, *inputs), gradients(exact, *(x.double() for x in inputs)), strict=True):
        torch.testing.assert_close(got.double(), want, **CLOSE)


@pytest.mark.parametrize("lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_fully_masked_row_has_no_gradient(kind: str, lse: bool) -> None:
    query, key, value = qkv()
    mask = torch.ones(20, 30, dtype=torch.bool)
    mask[3] = False
    mask = mask if kind == "bool" else torch.zeros(20, 30).masked_fill(~mask, -math.inf)
    found = gradients(lambda *x: operator(*x, mask, return_lse=lse), query, key, value)
    assert all(bool(x.isfinite().all()) for x in found)
    assert torch.equal(found[0][:, :, 3], torch.zeros_like(found[0][:, :, 3]))


def low_rows(low: float) -> Tensor:
    """Random numbers, with rows of ``low`` for every key, for every key but one of -inf, or for half of the keys."""
    mask = torch.randn(20, 30)
    mask[:2] = low
    mask[1, 3] = -math.inf
    mask[2, :15] = low
    return mask


def softmax_in_float32(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, is_causal: bool = False) -> Tensor:
    """Rounds logits to float32 as a model does; the rest is FP64."""
    logits = (query @ key.mT / 4).float() + mask.float()
    if is_causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    logits = logits - logits.detach().amax(-1, keepdim=True)
    return logits.double().softmax(-1) @ value


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("low", [torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min, -1e38, -1e9])
def test_rows_masked_by_a_low_number(low: float, causal: bool) -> None:
    """The weights are equal; PyTorch's fused kernels would compute a weight of 1 for each key."""
    inputs, mask = qkv(), low_rows(low)
    actual = gradients(lambda *x: operator(*x[:3], mask, is_causal=causal), *inputs)
    expected = gradients(lambda *x: softmax_in_float32(*x, mask, causal), *(x.double() for x in inputs))
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got.double(), want, **CLOSE)


@pytest.mark.gpu
@pytest.mark.parametrize("low", [torch.finfo(torch.float32).min, -1e9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rows_masked_by_a_low_number_on_a_gpu(dtype: torch.dtype, low: float) -> None:
    """There the weights ignore the number: checking the mask would cost a synchronization."""
    inputs, mask = [x.to(dtype) for x in qkv(device="cuda")], low_rows(low).cuda()
    raised = torch.where(mask[:2] == low, 0.0, mask[:2])
    actual = gradients(lambda *x: operator(*x, mask), *inputs)
    expected = gradients(exact, *(x.double() for x in inputs), torch.cat([raised, mask[2:]]).double())
    for got, want in zip(actual, expected[:3], strict=True):
        assert (got - want).abs().max() < 5 * max(torch.finfo(dtype).eps, 2.0**-10) * want.abs().max()


def test_log_sum_exp_of_rows_masked_by_a_low_number() -> None:
    """Its gradient with respect to a query is the mean of the keys that -inf does not mask."""
    query, key, value = qkv()
    query.requires_grad_()
    _, lse = sage_attention(query, key, value, low_rows(torch.finfo(torch.float32).min), return_lse=True)
    (found,) = torch.autograd.grad(lse.sum(), query)
    seen = torch.cat([key[:, :, :3], key[:, :, 4:]], 2)
    torch.testing.assert_close(found[:, :, 0], key.mean(2) / 4, **CLOSE)
    torch.testing.assert_close(found[:, :, 1], seen.mean(2) / 4, **CLOSE)


def test_a_mask_outside_of_the_range_of_float16() -> None:
    """Cast to float16, the lowest float32 would be -inf and the row fully masked."""
    inputs, mask = [x.half() for x in qkv()], torch.full((20, 30), torch.finfo(torch.float32).min)
    expected = inputs[2].float().mean(2, keepdim=True).expand(-1, -1, 20, -1)
    leaves = [x.requires_grad_() for x in inputs]
    out = sage_attention(*leaves, mask, variant="sage_b")
    # Two roundings to float16, of the sum over the only block of keys and of the result; the 30 additions are float32.
    torch.testing.assert_close(out.float(), expected, rtol=2.02 * 2.0**-11, atol=2.0**-19)
    found = torch.autograd.grad(out.sum(), leaves[2])[0]
    torch.testing.assert_close(found.float(), torch.full_like(found, 20 / 30).float(), rtol=2.0**-10, atol=0)


class BackwardArguments(TorchDispatchMode):
    """Records the arguments of the backward operator."""

    seen: tuple[Any, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.qframework.sage_attention_backward.default:
            self.seen = args
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("which", range(3))
def test_only_requested_gradients_are_computed(which: int) -> None:
    """Nor are the N x N logits of the log-sum-exp if it is unused."""
    inputs = list(qkv())
    expected = gradients(operator, *inputs)[which]
    out, _ = operator(*(x.requires_grad_(i == which) for i, x in enumerate(inputs)), return_lse=True)
    weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
    with BackwardArguments() as backward:
        assert torch.equal(torch.autograd.grad(out, inputs[which], weight)[0], expected)
    _, grad_lse, *_, needed = backward.seen
    assert grad_lse is None
    assert needed == [i == which for i in range(6)]


def test_gradient_of_the_log_sum_exp_alone() -> None:
    """Its gradient with respect to the queries is the mean of the keys under P."""
    query, key, value = qkv()
    query.requires_grad_()
    _, lse = sage_attention(query, key, value, return_lse=True)
    (found,) = torch.autograd.grad(lse.sum(), query)
    p = exact_attention(query.detach(), key, value)[2]
    torch.testing.assert_close(found.double(), p @ key.double() / 4, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_keeps_its_dtype(dtype: torch.dtype) -> None:
    inputs = [x.to(dtype) for x in qkv()]
    mask = torch.randn(20, 30, dtype=torch.float32)  # more precise than the queries, as the operator allows
    found = gradients(operator, *inputs, mask)
    assert [x.dtype for x in found] == [dtype, dtype, dtype, torch.float32]
    expected = gradients(exact, *(x.double() for x in inputs), mask.double())
    for got, want in zip(found, expected, strict=True):
        # Five roundings on the way (logits, P, dP, dS, the result), each relative to the largest gradient.
        assert (got - want).abs().max() < 5 * torch.finfo(dtype).eps * want.abs().max()


@pytest.mark.parametrize("variant", ["off", "sage_b"])
def test_second_derivatives(variant: str) -> None:
    """Also inside a scope, which must not quantize the recomputation."""
    query, key, value = (x[:1, :1, :5].double().float() for x in qkv(5, 5))

    def penalty(attention: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        first = torch.autograd.grad(attention(*leaves).square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), leaves)

    # The derivative of the square contains the quantized output, hence the wide tolerance; a cut graph is far off.
    with use_sage_attention(variant), Operators() as operators:
        found = penalty(operator, query, key, value)
    assert operators.count() == 1
    for got, want in zip(found, penalty(exact, *(x.double() for x in (query, key, value))), strict=True):
        assert (got - want).abs().max() < 0.05 * want.abs().max()


@pytest.mark.parametrize("made_from", ["itself", "a linear"])
def test_gradients_for_second_derivatives_where_inputs_depend_on_each_other(made_from: str) -> None:
    """Keys and values are computed from the queries, or are the same tensor: no path counts twice."""
    torch.manual_seed(0)
    x = torch.randn(1, 2, 20, 16, requires_grad=True)
    key, value = (torch.nn.Linear(16, 16) for _ in range(2)) if made_from == "a linear" else (lambda x: x,) * 2

    def first(create_graph: bool) -> Tensor:
        out = operator(x, key(x), value(x))
        return torch.autograd.grad(out.square().sum(), x, create_graph=create_graph)[0]

    plain, twice = first(create_graph=False), first(create_graph=True)
    # Two kernels of the same float32 formula: sums over 20 keys and 16 channels in another order.
    assert (plain - twice).abs().max() < 1e-5 * plain.abs().max()
    (penalty,) = torch.autograd.grad(twice.square().sum(), x)
    out = exact(x.double(), key(x).double(), value(x).double())
    (wanted,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (wanted,) = torch.autograd.grad(wanted.square().sum(), x)
    # The derivative of the square contains the quantized output, as above.
    assert (penalty - wanted).abs().max() < 0.05 * wanted.abs().max()


def test_under_no_grad_nothing_is_saved() -> None:
    query, key, value = (x.requires_grad_() for x in qkv())
    with torch.no_grad():
        assert operator(query, key, value).grad_fn is None


@pytest.mark.parametrize("nested", [False, True])
def test_backward_inside_a_scope_does_not_quantize_its_recomputation(nested: bool) -> None:
    """The recomputation calls SDPA on the same thread."""
    inputs = qkv()
    expected = gradients(F.scaled_dot_product_attention, *inputs)
    with use_sage_attention("sage_vb"), use_sage_attention("sage_b" if nested else "off"), Operators() as operators:
        found = gradients(sage_attention, *inputs)
    assert operators.count() == 1
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("case", ["causal", "float mask", "relative, bool"])
def test_compiled(case: str, backend: str, device: torch.device) -> None:
    make, kwargs = CASES[case]
    inputs = (*qkv(device=device), *(x.to(device) for x in make()))
    function = partial(operator, return_lse=True, **kwargs)
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    for got, want in zip(gradients(compiled, *inputs), gradients(function, *inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


# Packed sequences -----------------------------------------------------------------------------------------------------


def starts(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.usefixtures("fresh_dynamo")
def test_varlen(causal: bool, compile: bool) -> None:
    lengths_q, lengths_k = (5, 0, 9), (7, 2, 6)
    inputs = heads(14, 4, 16), heads(15, 2, 16), heads(15, 2, 16)
    function = partial(
        sage_attention_varlen,
        cu_seqlens_q=starts(*lengths_q),
        cu_seqlens_k=starts(*lengths_k),
        max_seqlen_q=9,
        max_seqlen_k=7,
        is_causal=causal,
    )

    def one_by_one(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tensors = query.split(lengths_q), key.split(lengths_k), value.split(lengths_k)
        return torch.cat(
            [
                exact(*(x.transpose(0, 1) for x in sequence), is_causal=causal, enable_gqa=True).transpose(0, 1)
                for sequence in zip(*tensors, strict=True)
            ]
        )

    if compile:
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    found = gradients(function, *inputs)
    for got, want in zip(found, gradients(one_by_one, *(x.double() for x in inputs)), strict=True):
        torch.testing.assert_close(got.double(), want, **CLOSE)


def test_varlen_has_no_second_derivatives_and_says_so() -> None:
    query, key, value = (heads(5, 2, 16).requires_grad_() for _ in range(3))
    out = sage_attention_varlen(query, key, value, starts(2, 3), starts(2, 3), 3, 3)
    with pytest.raises(UnsupportedError, match=r"create_graph must be False, .*, got True"):
        torch.autograd.grad(out.sum(), query, create_graph=True)


# opcheck --------------------------------------------------------------------------------------------------------------

OPCHECK_CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (lambda: (), {}),
    "causal, lse": (lambda: (), {"is_causal": True, "return_lse": True}),
    "relative, bool": CASES["relative, bool"],
    "float mask": CASES["float mask"],
    "sage2_int4": (lambda: (), {"variant": "sage2_int4", "smooth_k": False}),
}


@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("case", OPCHECK_CASES)
def test_opcheck(case: str, grad: bool, device: torch.device) -> None:
    make, kwargs = OPCHECK_CASES[case]
    names = {0: (), 1: ("attn_mask",), 3: ("attn_mask", "rel_h", "rel_w")}
    masks = [x.to(device) for x in make()]
    tensors = [x.requires_grad_(grad and x.is_floating_point()) for x in (*qkv(device=device), *masks)]
    kwargs = {**kwargs, **dict(zip(names[len(masks)], tensors[3:], strict=True))}
    torch.library.opcheck(torch.ops.qframework.sage_attention.default, tuple(tensors[:3]), kwargs)


def test_opcheck_varlen() -> None:
    query, key, value = (heads(9, 4, 16).requires_grad_() for _ in range(3))
    arguments = (query, key, value, starts(4, 5), starts(4, 5), 5, 5)
    torch.library.opcheck(torch.ops.qframework.sage_attention_varlen.default, arguments, {"is_causal": True})


def test_opcheck_of_the_backward_operators() -> None:
    query, key, value = qkv()
    grad = torch.randn(2, 4, 20, 24)
    tail = (None, None, None, False, None, False, None, [True, False, True, False, False, False])
    torch.library.opcheck(torch.ops.qframework.sage_attention_backward.default, (grad, None, query, key, value, *tail))
    packed = [heads(9, 4, 16) for _ in range(4)]
    torch.library.opcheck(
        torch.ops.qframework.sage_attention_varlen_backward.default,
        (*packed, starts(4, 5), starts(4, 5), False, None, None, [True, True, False]),
    )


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_pytorch_gets_gradients_in_the_memory_order_of_its_result(layout, monkeypatch):
    """Whatever order they come in: its plans of cuDNN are found without the gradient's strides."""
    asked = []
    plain = torch.autograd.grad

    def grad(outputs, inputs, grads, **options):
        asked.extend((out.stride(), g.stride()) for out, g in zip(outputs, grads, strict=True))
        return plain(outputs, inputs, grads, **options)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    x = torch.randn(2, 3, 40, 16) if layout == "HND" else torch.randn(2, 40, 3, 16).transpose(1, 2)
    g = torch.randn(2, 3, 40, 16)
    found = []
    for given in (g, g.transpose(1, 2).contiguous().transpose(1, 2), torch.stack([g, g], 2)[:, :, 1]):
        q = x.detach().requires_grad_()
        sage_attention(q, x, x, variant="sage_b").backward(given)
        found.append(q.grad)
    assert len(asked) == 3
    assert all(out == g for out, g in asked)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
