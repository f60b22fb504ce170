"""The 8-bit gradient of attention: reference against FP64, kernels against the reference, and the operators."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.attention.dropout import keep_ref
from qframework.kernels.attention.int8_gradient import int8_gradient
from qframework.kernels.attention.int8_gradient import triton as int8_gradient_triton
from qframework.kernels.attention.int8_gradient.int8_gradient import (
    INT8_GRADIENT_ATTENTION,
    INT8_GRADIENT_ATTENTION_BACKWARD,
    Gradient,
    Int8GradientArguments,
    Int8GradientBackwardArguments,
    attend_cpu,
    gradient_operands_cpu,
)
from qframework.kernels.attention.int8_gradient.reference import (
    GradientOperands,
    GradientTile,
    gradients_ref,
    products_of_dq,
)
from qframework.kernels.attention.int8_gradient.triton import choose_gradient_tiles, gradients_triton
from qframework.kernels.runtime.chip import capability_of
from qframework.kernels.runtime.triton import INTERPRET

GRADIENTS = get_args(Gradient)
# The interpreter truncates to BF16: a whole step.
HALF_STEP = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7 if INTERPRET else 2.0**-8, torch.float32: 2.0**-22}


class Call:
    """Inputs of attention, and the exact result and gradients in FP64."""

    def __init__(
        self,
        queries: int = 150,
        keys: int = 150,
        channels: int = 64,
        values: int = 64,
        key_heads: int = 2,
        causal: bool = False,
        dtype: torch.dtype = torch.float16,
        spread: float = 1.5,
        device: Any = "cpu",
    ) -> None:
        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device)

        self.query = (normal(2, 2, queries, channels) * spread).to(dtype)
        bias = 3 * normal(2, key_heads, 1, channels)  # what smoothing removes
        self.key = (spread * (normal(2, key_heads, keys, channels) + bias)).to(dtype)
        self.value = normal(2, key_heads, keys, values).to(dtype)
        self.grad = normal(2, 2, queries, values).to(dtype)
        self.causal = causal

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    def exact(self, grad_lse: Tensor | None = None, kept: Any = 1.0) -> tuple[Tensor, tuple[Tensor, ...]]:
        q, k, v = (x.double().requires_grad_() for x in self.inputs)
        group = q.shape[1] // k.shape[1]
        logits = q @ k.repeat_interleave(group, 1).mT / math.sqrt(q.shape[-1])
        if self.causal:
            logits = logits.masked_fill(
                torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -math.inf
            )
        out = (logits.softmax(-1) * kept) @ v.repeat_interleave(group, 1)
        outputs, grads = [out], [self.grad.double()]
        if grad_lse is not None:
            outputs, grads = [*outputs, logits.logsumexp(-1)], [*grads, grad_lse.double()]
        return out.detach(), torch.autograd.grad(outputs, (q, k, v), grads)

    def arguments(self, gradient: str, **more: Any) -> Int8GradientArguments:
        return Int8GradientArguments(*self.inputs, self.causal, None, True, gradient=gradient, **more)

    def backward(
        self, gradient: str, *results: Tensor, grad_lse: Tensor | None = None
    ) -> Int8GradientBackwardArguments:
        query, key, value = self.inputs
        kept = results[3:] if len(results) > 3 and results[3].numel() else ()
        query, key = kept or (query, key)
        return Int8GradientBackwardArguments(
            *(self.grad, grad_lse, query, key, value, *results[:3], self.causal, None, gradient), rounded=bool(kept)
        )


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0))


CASES = {
    "plain": {},
    "causal": {"causal": True, "key_heads": 1},
    "masked channels, causal": {"causal": True, "key_heads": 1, "channels": 80, "values": 96},
    "more keys, causal": {"causal": True, "queries": 70, "keys": 140, "channels": 80, "values": 96},
    "more queries, causal": {"causal": True, "queries": 140, "keys": 70, "channels": 32, "values": 32},
    "grouped": {"key_heads": 1, "queries": 65, "keys": 130, "channels": 72, "values": 40},
    "one query": {"queries": 1, "keys": 3, "channels": 32, "values": 32},
    "wide": {"queries": 70, "keys": 65, "channels": 256, "values": 256, "causal": True},
    "bfloat16": {"dtype": torch.bfloat16, "causal": True},
    "float32": {"dtype": torch.float32, "queries": 66},
}


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("case", CASES)
def test_close_to_exact_gradients(case: str, gradient: str) -> None:
    """Q and K have 127 steps, so logits with a deviation of 2.25 are off by 0.02, and so are weights and gradients."""
    call = Call(**CASES[case])
    results = INT8_GRADIENT_ATTENTION.cpu(*call.arguments(gradient))
    out, exact = call.exact()
    found = INT8_GRADIENT_ATTENTION_BACKWARD.cpu(*call.backward(gradient, *results))
    assert (results[0] - out).norm() <= 0.03 * out.norm()
    for mine, theirs, like in zip(found, exact, call.inputs, strict=True):
        assert mine.shape == like.shape
        assert mine.dtype == like.dtype
        error = (mine - theirs).norm() / theirs.norm().clamp(min=0.1)
        assert error <= 0.04


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize(("channels", "spread"), [(64, 4.0), (128, 3.5)])
def test_at_least_as_close_as_the_paper_says(channels: int, spread: float, gradient: str) -> None:
    """For logits with a deviation of 16 and 12, where most weights are on a few keys."""
    call = Call(256, 256, channels, channels, causal=True, spread=spread)
    _, exact = call.exact()
    operands = gradient_operands_cpu(call.backward(gradient, *attend_cpu(call.arguments(gradient))))
    similar = [cosine(a, b) for a, b in zip(gradients_ref(operands), exact, strict=True)]
    assert similar[0] > 0.966
    assert similar[1] > 0.954
    assert similar[2] > 0.9985


DROPOUT = {"dropout_p": 0.3, "seed": torch.tensor([2**40 + 12345])}


def test_the_mask_of_dropout_is_even() -> None:
    """By query, by key, by pairs of neighbours and by head, as far as chance allows: five standard deviations."""
    keep = keep_ref(DROPOUT["seed"], 4, torch.arange(256), 256, 0.3).float()
    variance = 0.3 * 0.7
    assert abs(float(keep.mean()) - 0.7) < 5 * math.sqrt(variance / keep.numel())
    for dims in ((0, 1), (0, 2), (1, 2)):
        means = keep.mean(dims)
        assert (means - 0.7).abs().max() < 5 * math.sqrt(variance / (keep.numel() / means.numel()))
    centered = (keep - 0.7) / math.sqrt(variance)
    for pairs in (
        centered[:, 1:] * centered[:, :-1],
        centered[:, :, 1:] * centered[:, :, :-1],
        centered[1:] * centered[:-1],
        centered[:, 1:, 1:] * centered[:, 1:, :-1] * centered[:, :-1, 1:] * centered[:, :-1, :-1],
    ):
        assert abs(float(pairs.mean())) < 5 / math.sqrt(pairs.numel())


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_dropout_is_close_to_exact_gradients_with_the_same_mask(gradient: str) -> None:
    call = Call(causal=True, key_heads=1)
    kept = keep_ref(DROPOUT["seed"], 4, torch.arange(150), 150, 0.3).view(2, 2, 150, 150) / 0.7
    out, exact = call.exact(kept=kept)
    results = INT8_GRADIENT_ATTENTION.cpu(*call.arguments(gradient, **DROPOUT))
    assert (results[0] - out).norm() <= 0.03 * out.norm()
    found = INT8_GRADIENT_ATTENTION_BACKWARD.cpu(*call.backward(gradient, *results)._replace(**DROPOUT))
    for mine, theirs in zip(found, exact, strict=True):
        assert (mine - theirs).norm() <= 0.04 * theirs.norm()


@pytest.mark.interpreter
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("case", ["causal", "grouped"])
def test_kernels_with_dropout_against_the_reference(case: str, gradient: str) -> None:
    """The same mask in the forward pass and in both passes of the backward: one weight more or less would be seen."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    call = Call(**CASES[case], device=device)
    dropout = DROPOUT | {"seed": DROPOUT["seed"].to(device)}
    arguments = call.arguments(gradient, **dropout)
    results = attend_cpu(arguments)
    for mine, theirs in zip(INT8_GRADIENT_ATTENTION.cuda(*arguments), results, strict=True):
        assert (mine.double() - theirs.double()).norm() <= 1.01 * 2.0**-11 * theirs.double().norm()
    operands = gradient_operands_cpu(call.backward(gradient, *results)._replace(**dropout))
    tiles = int8_gradient_triton._INTERPRETED
    if device.type == "cuda":
        tiles = choose_gradient_tiles(max(call.query.shape[3], call.value.shape[3]), operands.int8, (9, 0))
    found, expected = gradients_triton(operands), gradients_ref(operands, tiles, torch.float64)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.double() - theirs).norm() <= 1.01 * 2.0**-11 * theirs.norm()


def reference_inputs(x: GradientOperands) -> GradientOperands:
    """The kernels' operands for the reference: float32 is multiplied in BF16."""
    if x.v.dtype != torch.float32:
        return x
    low = {name: getattr(x, name).bfloat16() for name in ("v", "grad")}
    if not x.int8:
        low |= {name: getattr(x, name).bfloat16() for name in ("q_float", "k_float")}
    return x._replace(**low)


@pytest.mark.interpreter
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize(
    "case", sorted(CASES.keys() - {"more keys, causal"})
)  # the operator drops unreached keys before
def test_kernels_against_the_reference(case: str, gradient: str) -> None:
    """The same integers and exact sums in FP64: left are float32 sums, and P and dS that round the other way."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    call = Call(**CASES[case], device=device)
    operands = gradient_operands_cpu(call.backward(gradient, *attend_cpu(call.arguments(gradient))))
    tiles = int8_gradient_triton._INTERPRETED
    if device == "cuda":
        capability = capability_of(torch.device(device))
        assert capability is not None
        tiles = choose_gradient_tiles(max(call.query.shape[3], call.value.shape[3]), operands.int8, capability)
    found = gradients_triton(operands)
    expected = gradients_ref(reference_inputs(operands), tiles, torch.float64)
    dtype = call.query.dtype
    for mine, theirs in zip(found, expected, strict=True):
        rounding = 1.01 * HALF_STEP[dtype] * theirs.abs()
        low = torch.bfloat16 if dtype == torch.float32 else dtype
        other_way = 2 * HALF_STEP[low] if gradient == "mixed" else 1 / 127  # one step of one weight, of many
        assert ((mine.double() - theirs).abs() <= rounding + other_way * theirs.abs().max()).all()
        average = HALF_STEP[low] if gradient == "mixed" else other_way / 16
        assert (mine.double() - theirs).norm() <= (1.01 * HALF_STEP[dtype] + average) * theirs.norm()


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_gradient_of_the_log_sum_exp(gradient: str) -> None:
    call = Call(causal=True)
    grad_lse = torch.randn(2, 2, 150)
    _, exact = call.exact(grad_lse)
    results = attend_cpu(call.arguments(gradient))
    found = INT8_GRADIENT_ATTENTION_BACKWARD.cpu(*call.backward(gradient, *results, grad_lse=grad_lse))
    scale = 1 / math.sqrt(64)  # the operator's is that of the logits of K - mean(K)
    shift = grad_lse[..., None] * results[2] * scale
    for mine, theirs in zip((found[0].double() + shift, *found[1:]), exact, strict=True):
        assert (mine - theirs).norm() <= 0.04 * theirs.norm()


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("where", ["query", "key", "value", "grad"])
def test_nan_is_not_lost(where: str, gradient: str, implementation: str, place: torch.device) -> None:
    """A gradient that exact attention makes NaN is not a number here either."""
    call = Call(34, 34, 32, 32, device=place)
    getattr(call, where)[0, 0, 20] = torch.nan
    key = {"cpu": "cpu", "triton": "cuda"}[implementation]
    results = getattr(INT8_GRADIENT_ATTENTION, key)(*call.arguments(gradient))
    found = getattr(INT8_GRADIENT_ATTENTION_BACKWARD, key)(*call.backward(gradient, *results))
    _, exact = call.exact()
    for mine, theirs in zip(found, exact, strict=True):
        assert bool((mine.isnan() | ~theirs.isnan()).all())
        assert (mine[1] - theirs[1]).norm() <= 0.04 * theirs[1].norm()


@pytest.mark.parametrize(("gradient", "least"), [("int8", 1.8), ("mixed", 1.0)])
def test_what_a_mean_of_keys_would_add_to_dq_is_error(gradient: str, least: float) -> None:
    """Rows of exact dS sum to zero; those of rounded dS do not, and times a large mean they are most of the error."""
    call = Call(512, 512, causal=True, spread=1.0)
    _, (exact, _, _) = call.exact()
    results = attend_cpu(call.arguments(gradient))
    operands = gradient_operands_cpu(call.backward(gradient, *results))
    found = gradients_ref(operands)[0]
    sums = products_of_dq(operands).sum(-1, keepdim=True)
    assert (found + sums * results[2] * operands.scale - exact).norm() > least * (found - exact).norm()


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_empty_sizes(gradient: str) -> None:
    for shape, keys in (((1, 2, 0, 32), 5), ((1, 2, 5, 32), 0), ((0, 2, 5, 32), 5)):
        query, key = torch.randn(shape), torch.randn(*shape[:2], keys, 32)
        leaves = [x.requires_grad_() for x in (query, key, key.clone())]
        out, *_ = torch.ops.qframework.int8_gradient_attention(*leaves, gradient=gradient)
        found = torch.autograd.grad(out.sum(), leaves)
        assert all(torch.equal(g, torch.zeros_like(x)) for g, x in zip(found, leaves, strict=True))


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_int8_gradient_opcheck(gradient: str) -> None:
    query, key, value = (torch.randn(2, heads, 40, 32, requires_grad=True) for heads in (4, 2, 2))
    arguments = (query, key, value, True, None, True, "auto", gradient)
    torch.library.opcheck(torch.ops.qframework.int8_gradient_attention.default, arguments)
    torch.library.opcheck(torch.ops.qframework.int8_gradient_attention.default, arguments, DROPOUT)
    results = [x.detach() for x in torch.ops.qframework.int8_gradient_attention(*arguments)]
    grads = (torch.randn_like(results[0]), torch.randn_like(results[1]))
    inputs = [x.detach() for x in (query, key, value)]
    backward = torch.ops.qframework.int8_gradient_attention_backward.default
    torch.library.opcheck(backward, (*grads, *inputs, *results[:3], True, None, gradient))


@pytest.mark.parametrize("order", ["heads first", "tokens first", "slices"])
def test_results_of_meta_tensors_have_true_strides(order: str) -> None:
    call = Call(20, 30, 32, 40)
    inputs = list(call.inputs)
    if order != "heads first":
        inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    if order == "slices":  # of a fused projection
        inputs = [torch.cat([x.transpose(1, 2)] * 3, 2)[:, :, : x.shape[1]].transpose(1, 2) for x in inputs]
    call.query, call.key, call.value = inputs
    for operator, arguments in (
        (INT8_GRADIENT_ATTENTION, call.arguments("int8")),
        (INT8_GRADIENT_ATTENTION_BACKWARD, call.backward("int8", *attend_cpu(call.arguments("int8")))),
    ):
        for real, fake in zip(operator.cpu(*arguments), arguments.empty_result(), strict=True):
            assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)
    first = INT8_GRADIENT_ATTENTION_BACKWARD.cpu(*arguments)[0]
    assert (first if order == "heads first" else first.transpose(1, 2)).is_contiguous()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"variant": "sage2_int8"},
            UnsupportedError,
            "variant must quantize Q and K to 8 bits per block, .* got 'sage2",
        ),
        ({"dropout_p": 0.1}, QFrameworkError, "seed must be given with dropout and only then, got dropout_p=0.1"),
        ({"dropout_p": 2.0}, QFrameworkError, "dropout_p must be between 0 and 1, got 2.0"),
        (
            {"dropout_p": 0.1, "seed": torch.zeros(2, dtype=torch.int64)},
            QFrameworkError,
            r"seed must have shape \(1,\), got \(2,\)",
        ),
        ({"gradient": "int4"}, UnsupportedError, "gradient must be int8 or mixed, got 'int4'"),
        (
            {"query": torch.zeros(1, 2, 4, 300)},
            UnsupportedError,
            "query must have a head dimension from 1 to 256, got 300",
        ),
        ({"key": torch.zeros(1, 2, 4, 8)}, QFrameworkError, "key must have query's head dimension 16, got 8"),
        (
            {"query": torch.zeros(3, 2, 4, 16)},
            QFrameworkError,
            r"key must have query's batch dimensions \(3,\), got \(1, 2, 4, 16\)",
        ),
    ],
)
def test_errors_name_the_argument(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {name: torch.zeros(1, 2, 4, 16) for name in ("query", "key", "value")} | change
    with pytest.raises(error, match=message):
        INT8_GRADIENT_ATTENTION.cpu(**arguments)


def test_second_derivatives_are_refused() -> None:
    query = torch.randn(1, 1, 4, 16, requires_grad=True)
    out, *_ = torch.ops.qframework.int8_gradient_attention(query, query, query)
    with pytest.raises(UnsupportedError, match="create_graph must be False"):
        torch.autograd.grad(out.sum(), query, create_graph=True)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("int8", [True, False])
def test_a_block_that_is_summed_over_has_one_scale(int8: bool, head_dim: int, capability: tuple[int, int]) -> None:
    for key_tile, query_tile in (
        choose_gradient_tiles(head_dim, int8, capability),
        (GradientTile(64, 64, 4, 1), GradientTile(64, 64, 4, 1)),
    ):
        assert 64 % key_tile.block_m == 0
        assert 128 % query_tile.block_m == 0
        assert not int8 or 64 % query_tile.block_n == 0


def test_auto_is_a_variant_that_the_backward_pass_takes() -> None:
    assert int8_gradient.check_forward("auto").granularity == "per_block"
