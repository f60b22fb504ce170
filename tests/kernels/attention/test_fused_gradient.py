"""Gradients of a quantized forward pass by cuDNN's backward pass, and what it starts from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_int8_gradient import Call, cosine
from torch import Tensor

from qframework import sage_attention
from qframework.compat import fused_attention
from qframework.kernels.attention.hopper import specialized
from qframework.kernels.attention.int8_gradient import int8_gradient
from qframework.kernels.attention.int8_gradient.int8_gradient import (
    INT8_GRADIENT_ATTENTION,
    INT8_GRADIENT_ATTENTION_BACKWARD,
    PER_BLOCK,
    Int8GradientArguments,
    attend_cpu,
    gradient_operands_cpu,
    gradients,
)
from qframework.kernels.attention.int8_gradient.reference import gradients_ref
from qframework.kernels.attention.int8_gradient.triton import tokens_last
from qframework.kernels.attention.operands import Bias, Values
from qframework.kernels.attention.pipeline import TORCH_STEPS, TRITON_STEPS, quantized_qk
from qframework.kernels.attention.reference import quantized_attention_ref
from qframework.kernels.attention.round_tokens import round_tokens_ref, round_tokens_triton
from qframework.kernels.attention.variants import VARIANTS, AttentionVariant, token_groups
from qframework.kernels.runtime.replay import Recording

LOG2_E = 1.4426950408889634


def where_kernels_run() -> str:
    """Interpreted kernels read the CPU's memory."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("tokens", [1, 64, 130, 256, 300])
def test_rounded_queries_and_keys_are_their_integers_times_scales(tokens: int) -> None:
    """Rounded once, whether or not the last group of tokens is whole."""
    call = Call(tokens, tokens, dtype=torch.bfloat16)
    x = gradient_operands_cpu(call.backward("mixed", *attend_cpu(call.arguments("mixed"))))
    q_group, k_group = (token_groups("per_block", role).index(tokens, "cpu") for role in ("query", "key"))
    q = x.q.float() * (x.q_scale * (1.0 / (x.scale * LOG2_E)))[:, :, q_group, None]
    assert torch.equal(x.q_float, q.bfloat16())
    assert torch.equal(x.k_float, (x.k.float() * x.k_scale[:, :, k_group, None]).bfloat16())
    assert (x.q_float.double() - call.query.double()).norm() <= 0.02 * call.query.double().norm()


@pytest.mark.interpreter
@pytest.mark.parametrize("role", ["query", "key"])
@pytest.mark.parametrize(
    ("tokens", "channels", "dtype", "heads_first"),
    [
        *((300, 64, torch.float16, False), (64, 72, torch.float32, False), (300, 64, torch.float16, True)),
        *((70, 130, torch.float16, False), (70, 136, torch.float16, False)),  # strides that 2 or 8 divides
    ],
)
def test_the_kernel_rounds_as_the_reference(
    tokens: int, channels: int, dtype: torch.dtype, heads_first: bool, role: str
) -> None:
    """Bit for bit, with both orders of memory, a row of NaN and one of zeros."""
    place = where_kernels_run()
    x = torch.randn(2, tokens, 3, channels, device=place, dtype=dtype).transpose(1, 2)
    x = x.contiguous() if heads_first else x
    x[0, 1, 7, 3], x[1, 2, :64] = torch.nan, 0.0
    mean = torch.randn(2, 3, 1, channels, device=place) if role == "key" else None
    found = round_tokens_triton(x, mean, 0.18, 1 / 0.18, role).cpu()
    # on a CPU: a GPU divides by a number as it multiplies by its reciprocal
    expected = round_tokens_ref(x.cpu(), None if mean is None else mean.cpu(), 0.18, 1 / 0.18, role)
    assert found.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert int(expected.isnan().sum()) == channels * (1 if role == "query" else 64)
    there = fused_attention.place_of_keys(x)
    again = round_tokens_triton(x, mean, 0.18, 1 / 0.18, role, there)
    assert again.data_ptr() == there.data_ptr()
    torch.testing.assert_close(again.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.interpreter
@pytest.mark.parametrize(("tokens", "channels"), [(1, 32), (130, 72), (256, 64)])
def test_tokens_are_last_and_padded_with_zeros(tokens: int, channels: int) -> None:
    place = where_kernels_run()
    x = torch.randint(-127, 128, (2, 3, tokens, channels), dtype=torch.int8, device=place)
    found = tokens_last(x)
    assert found.shape[3] % 64 == 0
    assert torch.equal(found[..., :tokens], x.mT)
    assert not found[..., tokens:].any()


def in_float64(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool, scale: float) -> Any:
    """What a fused backward pass computes."""
    grad, q, k, v, out, lse = (t.double() for t in (grad, q, k, v, out, lse))
    group = q.shape[1] // k.shape[1]
    every_k, every_v = (t.repeat_interleave(group, 1) for t in (k, v))
    logits = q @ every_k.mT * scale
    if causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:], device=q.device).triu(1) > 0, -torch.inf)
    p = torch.exp(logits - lse[..., None])
    ds = p * (grad @ every_v.mT - (grad * out).sum(-1, keepdim=True)) * scale
    dk, dv = (t.unflatten(1, (-1, group)).sum(2) for t in (ds.mT @ q, p.mT @ grad))
    return tuple(t.to(torch.float16) for t in (ds @ every_k, dk, dv))


@pytest.mark.parametrize(("causal", "keys"), [(False, 150), (True, 150), (False, 90), (True, 200)])
def test_a_fused_kernel_gets_the_rounded_operands(causal: bool, keys: int) -> None:
    """Its result is the reference's: the logits are those of the forward pass, and unreached keys have no gradient."""
    call = Call(150, keys, key_heads=1, causal=causal)
    arguments = call.backward("mixed", *attend_cpu(call.arguments("mixed")))
    steps = int8_gradient._TORCH
    asked: list[tuple[Any, ...]] = []
    found = gradients(arguments, steps._replace(fused=lambda *given: asked.append(given) or in_float64))
    assert asked
    for mine, theirs in zip(found, gradients(arguments, steps), strict=True):
        assert mine.shape == theirs.shape
        assert (mine.double() - theirs.double()).norm() <= 2.0**-9 * theirs.double().norm()


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU as on a GPU whose cuDNN computes the backward pass."""
    monkeypatch.setattr(Int8GradientArguments, "keeps_rounded", property(lambda x: x.gradient == "mixed"))


@pytest.mark.parametrize(("causal", "key_heads"), [(False, 2), (True, 1)])
def test_kept_queries_and_keys_are_not_rounded_again(causal: bool, key_heads: int, keeping: None) -> None:
    """The fused kernel reads what the forward pass returned, and its result is that of rounding again."""
    call = Call(150, 150, key_heads=key_heads, causal=causal)
    results = attend_cpu(call.arguments("mixed"))
    kept, again = call.backward("mixed", *results), call.backward("mixed", *results[:3])
    assert kept.rounded
    assert not again.rounded
    asked: list[tuple[Any, ...]] = []
    steps = int8_gradient._TORCH._replace(fused=lambda *given: lambda *x: asked.append(x) or in_float64(*x))
    refused: Any = steps._replace(rounded=lambda *given: pytest.fail("rounded again"))
    for mine, theirs in zip(gradients(kept, refused), gradients(again, steps), strict=True):
        assert torch.equal(mine, theirs)
    assert asked[0][1].data_ptr() == results[3].data_ptr()
    assert asked[0][2].data_ptr() == results[4].data_ptr()


@pytest.mark.parametrize(("dtype", "most"), [(torch.float16, 1.01), (torch.bfloat16, 1.15)])
def test_kept_queries_and_keys_where_no_fused_kernel_runs(dtype: torch.dtype, most: float, keeping: None) -> None:
    """A gradient of the log-sum-exp, or deterministic algorithms: the integers are found again.

    Bfloat16 has fewer digits than integers of 8 bits and their sign: some are found a step away.
    """
    call = Call(150, 150, dtype=dtype)
    results = attend_cpu(call.arguments("mixed"))
    grad_lse = torch.randn(2, 2, 150)
    found = gradients(call.backward("mixed", *results, grad_lse=grad_lse), int8_gradient._TORCH)
    again = gradients(call.backward("mixed", *results[:3], grad_lse=grad_lse), int8_gradient._TORCH)
    for mine, theirs, exact in zip(found, again, call.exact(grad_lse)[1], strict=True):
        assert (mine - exact).norm() <= most * (theirs - exact).norm()


@pytest.mark.parametrize("shape", [(2, 40, 64), (2, 3, 40, 64), (2, 2, 3, 40, 64)], ids=["3-D", "4-D", "5-D"])
@pytest.mark.parametrize("tokens_first", [False, True])
def test_autograd_keeps_the_rounded_instead_of_the_given(
    shape: tuple[int, ...], tokens_first: bool, keeping: None
) -> None:
    """Queries and keys are free after the forward pass; sizes and strides are those of meta tensors."""
    inputs = [torch.randn(shape) for _ in range(3)]
    if tokens_first:
        inputs = [x.transpose(-3, -2).contiguous().transpose(-3, -2) for x in inputs] if len(shape) > 3 else inputs
    leaves = [x.requires_grad_() for x in inputs]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out, lse, _, *rounded = torch.ops.qframework.int8_gradient_attention(*leaves, gradient="mixed")
    addresses = {x.data_ptr() for x in kept}
    assert addresses >= {x.data_ptr() for x in (*rounded, leaves[2], out, lse)}
    assert not addresses & {x.data_ptr() for x in leaves[:2]}
    if len(shape) == 4:  # the order of the result's gradient that is expected
        assert rounded[1].stride(0) == (40 + (7 if tokens_first else 9)) * 3 * 64
    arguments = Int8GradientArguments(*inputs, gradient="mixed")
    for real, fake in zip((*rounded,), arguments.empty_result()[3:], strict=True):
        assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    logits = exact[0] @ exact[1].mT / 8
    expected = torch.autograd.grad((logits.softmax(-1) @ exact[2]).square().sum(), exact)
    for mine, theirs in zip(torch.autograd.grad(out.square().sum(), leaves), expected, strict=True):
        assert (mine - theirs).norm() <= 0.03 * theirs.norm()


def test_compiled_calls_keep_the_rounded(keeping: None, fresh_dynamo: None) -> None:
    """The strides of what is kept, which has gaps, are those that the graph was compiled for."""
    leaves = [torch.randn(2, 40, 3, 64).half().transpose(1, 2).requires_grad_() for _ in range(3)]

    def attention(*x: Tensor) -> Tensor:
        return sage_attention(*x, is_causal=True, backward="mixed") * 2

    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    expected = torch.autograd.grad(attention(*leaves).square().sum(), leaves)
    for mine, theirs in zip(torch.autograd.grad(compiled(*leaves).square().sum(), leaves), expected, strict=True):
        assert torch.equal(mine, theirs)


def test_nothing_is_kept_where_no_fused_kernel_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on a CPU, in 8 bit, with dropout, and for sizes that cuDNN does not compute."""
    call = Call(40, 40)
    assert not call.arguments("mixed").keeps_rounded
    assert [x.numel() for x in attend_cpu(call.arguments("mixed"))[3:]] == [0, 0]
    monkeypatch.setattr(int8_gradient, "has_kernel", lambda *given: True)
    on_gpu: Any = SimpleNamespace(is_cuda=True, shape=(1, 2, 40, 64))
    asked = Int8GradientArguments(on_gpu, on_gpu, on_gpu, gradient="mixed")
    assert asked.keeps_rounded
    assert not asked._replace(gradient="int8").keeps_rounded
    assert not asked._replace(dropout_p=0.1, seed=torch.tensor([1])).keeps_rounded
    assert not asked._replace(scale=-0.1).keeps_rounded
    monkeypatch.setattr(int8_gradient, "has_kernel", lambda *given: False)
    assert not asked.keeps_rounded


@pytest.mark.parametrize(
    ("change", "variant"),
    [
        ({}, PER_BLOCK),
        ({"variant": "integer_exp"}, VARIANTS["integer_exp"]),
        ({"variant": "integer_exp", "gradient": "int8"}, PER_BLOCK),
        ({"variant": "integer_exp", "dropout_p": 0.5, "seed": torch.tensor([1])}, PER_BLOCK),
    ],
    ids=["auto", "integer", "in 8 bit", "with dropout"],
)
def test_where_the_exponential_is_exact(change: dict[str, Any], variant: AttentionVariant) -> None:
    assert Int8GradientArguments(*Call(4, 4).inputs, gradient="mixed")._replace(**change).forward == variant


def test_the_pass_before_the_integer_exponential_rounds(keeping: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator returns what that pass fills in: its places have the strides that the backward pass reads."""
    asked: list[Any] = []

    def prepare(q: Tensor, k: Tensor, v: Tensor, variant: Any, scale: float, smooth_k: bool, rounded: Any) -> Any:
        asked.append(variant)
        qk, mean = quantized_qk(q, k, variant, scale, smooth_k, TORCH_STEPS, None)
        rounded.mean.copy_(mean)
        round_tokens_ref(q, None, scale * LOG2_E, 1 / (scale * LOG2_E), "query", rounded.query)
        round_tokens_ref(k, mean, 1.0, 1.0, "key", rounded.key)
        return qk, Values(v)

    monkeypatch.setattr(int8_gradient, "prepare_triton", prepare)
    call = Call(150, 150)
    expected = attend_cpu(call.arguments("mixed", variant="integer_exp"))
    monkeypatch.setattr(int8_gradient.specialized, "fits", lambda *given: True)
    for variant in ("auto", "integer_exp"):
        found = attend_cpu(call.arguments("mixed", variant=variant))
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    assert asked == [VARIANTS["integer_exp"]] * 2
    attend_cpu(call.arguments("mixed", variant="sage_b"))
    attend_cpu(call.arguments("int8"))
    assert len(asked) == 2


def test_a_log_sum_exp_for_the_caller_is_exact(keeping: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the integer exponential is off by up to 0.04 where few keys have most of the weight."""
    monkeypatch.setattr(int8_gradient.specialized, "fits", lambda *given: True)
    monkeypatch.setattr(int8_gradient, "prepare_triton", lambda *given, **named: pytest.fail("integer exponential"))
    call = Call(150, 150)
    query = call.query.requires_grad_()
    _, lse = sage_attention(query, call.key, call.value, backward="mixed", return_lse=True)
    logits = call.query.double() @ call.key.double().mT / 8
    torch.testing.assert_close(lse.double(), logits.logsumexp(-1), rtol=0, atol=0.05)


@pytest.mark.parametrize("causal", [False, True])
def test_the_log_sum_exp_of_integer_exponentials(causal: bool, implementation: str, place: torch.device) -> None:
    """Off by what single weights are, but not in the mean: their sums are larger by 4 percent, which is subtracted."""
    q, k, v = (torch.randn(1, 2, 200, 64, device=place) for _ in range(3))
    steps = TORCH_STEPS if implementation == "cpu" else TRITON_STEPS
    integer = VARIANTS["integer_exp"]
    qk, _ = quantized_qk(q, k, integer, 0.5, False, steps, None)
    _, lse = steps.attend(qk, Values(v.half()), Bias(causal=causal), integer, torch.float16, True, None)
    logits = q.double() @ k.double().mT * 0.5
    if causal:
        logits = logits.masked_fill(torch.ones(200, 200, device=place).triu(1) > 0, -torch.inf)
    difference = lse.double() - logits.logsumexp(-1)
    assert float(difference.abs().max()) < 0.15
    assert abs(float(difference.mean())) < 0.01


@pytest.mark.parametrize("variant", ["auto", "integer_exp"])
@pytest.mark.parametrize(("channels", "spread"), [(64, 1.0), (64, 4.0), (128, 3.5)])
def test_gradients_behind_the_integer_exponential(channels: int, spread: float, variant: str) -> None:
    """As close as the paper's, as test_int8_gradient.py asks of exact weights; for small logits much closer."""
    call = Call(256, 256, channels, channels, causal=True, spread=spread)
    results = attend_cpu(call.arguments("mixed", variant=variant))
    found = gradients(call.backward("mixed", *results), int8_gradient._TORCH)
    least = (0.966, 0.954, 0.9985) if spread > 1 else (0.9995, 0.9995, 0.9995)
    for mine, theirs, similar in zip(found, call.exact()[1], least, strict=True):
        assert cosine(mine, theirs) > similar


def test_a_fused_kernel_gets_contiguous_channels_of_the_gradient() -> None:
    """The gradient of a sum is one number, expanded."""
    call = Call(40, 40)
    results = attend_cpu(call.arguments("mixed"))
    call.grad = torch.ones(()).half().expand(call.grad.shape)
    strides: list[int] = []

    def fused(grad: Any, *rest: Any) -> Any:
        strides.append(grad.stride(-1))
        return in_float64(grad, *rest)

    gradients(call.backward("mixed", *results), int8_gradient._TORCH._replace(fused=lambda *given: fused))
    assert strides == [1]


@pytest.mark.parametrize("batch", [1, 2])
def test_every_call_of_cudnn_with_the_same_strides_has_the_same_layout(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch finds a plan by the strides of query, key and value; it must fit the result and its gradient, too.

    Keys have strides that no dense tensor has, so that other calls of attention have other plans; these tell which
    order the gradient has, which is copied where the forward pass expected another one.
    """
    asked: list[tuple[Tensor, ...]] = []
    monkeypatch.setattr(fused_attention, "_CUDNN", lambda *call, scale: asked.append(call[:5]) or call[1:4])
    lse = torch.randn(batch, 3, 20)
    plain = [torch.randn(batch, 3, 20, 16) for _ in range(5)]
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain]
    padded = [torch.cat([x, x], 1)[:, :3] for x in plain]
    for grad, query, key, value, out in (plain, turned, padded, [plain[0], *turned[1:]], [turned[0], *plain[1:]]):
        fused_attention._by_cudnn(grad, query, key, value, out, lse, True, 0.25)
        for given, wanted in zip(asked[-1], plain, strict=True):
            assert torch.equal(given, wanted)
        copied = grad is padded[0] and batch > 1
        assert (asked[-1][0].data_ptr() != grad.data_ptr()) == copied
    for heads_first in (True, False):
        placed = fused_attention.place_of_keys(plain[1], heads_first).copy_(plain[1])
        for grad in (plain[0], turned[0]):
            fused_attention._by_cudnn(grad, plain[1], placed, plain[3], plain[4], lse, True, 0.25)
            assert asked[-1][2] is placed
            expected = (grad is plain[0]) == heads_first
            assert (asked[-1][0].data_ptr() == grad.data_ptr()) == expected
            assert torch.equal(asked[-1][0], grad)
    strides = {True: (20 * 48, 320, 16, 1), False: (20 * 48, 16, 48, 1)}
    seen = set()
    for grad, query, key, _, out in asked:
        assert all(x.stride()[batch == 1 :] == strides[False][batch == 1 :] for x in (query, out))
        heads_first = key.stride() == (29 * 48, 16, 48, 1)
        assert heads_first or key.stride() == (27 * 48, 16, 48, 1)
        assert grad.stride()[batch == 1 :] == strides[heads_first][batch == 1 :]
        seen.add(heads_first)
    assert seen == {True, False}


@pytest.mark.parametrize("why", ["int8", "dropout", "lse"])
def test_what_no_fused_kernel_computes(why: str) -> None:
    call = Call(40, 40)
    dropout = {"dropout_p": 0.3, "seed": torch.tensor([7])} if why == "dropout" else {}
    form = "int8" if why == "int8" else "mixed"
    results = attend_cpu(call.arguments(form, **dropout))
    arguments = call.backward(form, *results)._replace(**dropout)
    if why == "lse":
        arguments = arguments._replace(grad_lse=torch.randn(2, 2, 40))
    refused: Any = int8_gradient._TORCH._replace(fused=lambda *given: pytest.fail("asked"))
    assert all(t.isfinite().all() for t in gradients(arguments, refused))


def test_the_choice_of_a_kernel_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It depends on PyTorch's settings, which may change between calls. Elsewhere there is no choice."""
    monkeypatch.setattr(int8_gradient, "fused_backward", lambda *call: None)
    on_gpu: Any = SimpleNamespace(is_cuda=True)
    with Recording([]) as recorded:
        assert int8_gradient._on_gpu(*Call(40, 40).inputs, False) is None
    recorded.finish(())
    with Recording([]) as recorded:
        assert int8_gradient._on_gpu(on_gpu, on_gpu, on_gpu, False) is None
    with pytest.raises(Exception, match="PyTorch's settings decide"):
        recorded.finish(())


@pytest.mark.parametrize(
    ("why", "capability", "deterministic"),
    [("", (9, 0), False), ("another chip", (8, 0), False), ("an order of sums", (9, 0), True)],
)
def test_when_cudnn_computes_gradients(
    why: str, capability: tuple[int, int], deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where results must repeat: it adds to dQ in any order."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    monkeypatch.setattr(fused_attention, "can_use_cudnn_attention", lambda params: True)
    found = fused_attention.fused_backward(*Call(40, 40).inputs, False)
    assert found is (None if why else fused_attention._by_cudnn)


@pytest.mark.parametrize(
    ("shapes", "dtype", "causal"),
    [
        (((1, 2, 64, 64), (1, 2, 64, 64), (1, 2, 64, 48)), torch.float16, False),
        (((1, 2, 64, 60), (1, 2, 64, 60), (1, 2, 64, 60)), torch.float16, False),
        (((1, 2, 64, 64), (1, 2, 32, 64), (1, 2, 32, 64)), torch.float16, True),
        (((1, 2, 64, 64), (1, 2, 64, 64), (1, 2, 64, 64)), torch.float32, False),
    ],
    ids=["values of another width", "60 channels", "causal, other lengths", "float32"],
)
def test_calls_left_to_the_kernels_of_this_package(shapes: Any, dtype: torch.dtype, causal: bool) -> None:
    assert fused_attention.fused_backward(*(torch.empty(s, dtype=dtype) for s in shapes), causal) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs PyTorch's kernels for a GPU")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("channels", "key_heads"), [(64, 2), (64, 1), (128, 2), (72, 2)])
def test_cudnn_agrees_with_the_reference(
    channels: int, key_heads: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes the weights at the rounded queries and keys from the log-sum-exp that it is given."""
    ran: list[str] = []
    run = fused_attention._by_cudnn
    monkeypatch.setattr(fused_attention, "_by_cudnn", lambda *x: ran.append("cudnn") or run(*x))
    call = Call(1000, 1000, channels, channels, key_heads, causal, torch.bfloat16, device="cuda")
    results = INT8_GRADIENT_ATTENTION.cuda(*call.arguments("mixed"))
    arguments = call.backward("mixed", *results)
    found = INT8_GRADIENT_ATTENTION_BACKWARD.cuda(*arguments)
    assert ran == (["cudnn"] if torch.cuda.get_device_capability() >= (9, 0) else [])
    x = gradient_operands_cpu(arguments)
    if ran:
        expected = in_float64(x.grad, x.q_float, x.k_float, x.v, results[0], results[1], causal, x.scale)
    else:
        expected = gradients_ref(x)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape
        assert (mine - theirs).norm() <= 2.0**-7 * theirs.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "key_heads", "causal"),
    [((2, 40, 900, 64), 40, True), ((1, 80, 1000, 128), 20, False), ((2, 40, 777, 96), 40, True)],
)
def test_the_forward_pass_of_mixed_gradients_on_hopper(shape, key_heads, causal, dtype, monkeypatch) -> None:
    """The integer exponential: L is the exact one's up to what single weights are off, and less in the mean."""
    ran: list[Any] = []
    launch = specialized.attention_hopper
    monkeypatch.setattr(specialized, "attention_hopper", lambda *given: ran.append(given[2]) or launch(*given))
    q, k, v = (torch.randn(shape[0], h, *shape[2:], device="cuda", dtype=dtype) for h in (shape[1], *[key_heads] * 2))
    k = k + 3
    arguments = Int8GradientArguments(q, k, v, causal, enable_gqa=True, gradient="mixed")
    out, lse, mean, q_kept, k_kept = INT8_GRADIENT_ATTENTION.cuda(*arguments)
    q, k, v = (x.double() for x in (q, k, v))
    group = shape[1] // key_heads
    logits = q @ (k - mean).repeat_interleave(group, 1).mT * shape[3] ** -0.5
    if causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:], device="cuda").triu(1) > 0, -torch.inf)
    expected = logits.softmax(-1) @ v.repeat_interleave(group, 1)
    assert (out.double() - expected).norm() <= 0.03 * expected.norm()
    difference = lse.double() - logits.logsumexp(-1)
    assert float(difference.abs().max()) < 0.12
    assert abs(float(difference.mean())) < 2e-3
    if torch.cuda.get_device_capability() == (9, 0):
        assert ran == [VARIANTS["integer_exp"]]
        assert (q_kept.double() - q).norm() <= 0.02 * q.norm()
        assert (k_kept.double() - (k - mean)).norm() <= 0.02 * (k - mean).norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("shape", "causal"), [((2, 40, 900, 64), True), ((1, 80, 1000, 128), False)])
def test_the_log_sum_exp_of_hoppers_kernel(shape, causal, dtype, monkeypatch) -> None:
    """Eight weights are summed in 16 bit, so the sum of a row is off by up to half a step.

    The integers are the kernel's own: on a GPU the reference divides by other rules, and some integers differ.
    """
    ran: list[bool] = []
    launch = specialized.attention_hopper
    monkeypatch.setattr(specialized, "attention_hopper", lambda *given: ran.append(given[-1]) or launch(*given))
    q, k, v = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3))
    q[0, 1, 5, 0] = torch.nan
    arguments = int8_gradient.Int8GradientArguments(q, k, v, causal)
    found = INT8_GRADIENT_ATTENTION.cuda(*arguments)
    qk, _ = quantized_qk(q, k, PER_BLOCK, shape[3] ** -0.5, True, TRITON_STEPS, None)
    expected = quantized_attention_ref(qk, Values(v), Bias(causal=causal), PER_BLOCK, qk.factor)
    assert bool(found[1][0, 1, 5].isnan())
    assert int(found[1].isnan().sum()) == 1
    step = 2.0**-11 if dtype == torch.float16 else 2.0**-8
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=2 * step, equal_nan=True)
    different = (found[0].double() - expected[0].double()).nan_to_num(0)
    assert different.norm() <= 3 * step * expected[0].double().nan_to_num(0).norm()
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        assert ran == [True]
