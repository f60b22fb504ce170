"""use_sage_attention quantizes every SDPA inside the scope and falls back to PyTorch for unsupported calls."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_helpers import (
    Attention,
    Operators,
    assert_within,
    count_operators,
    exact_attention,
    expected_error,
    heads,
    qkv,
)
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils.checkpoint import checkpoint

from qframework import sage_attention, use_sage_attention
from qframework.attention import fallbacks
from qframework.errors import QFrameworkError, UnsupportedError

OP_INFO = next(op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
SDPA = F.scaled_dot_product_attention
pytestmark = pytest.mark.usefixtures("no_fallbacks_yet")


# PyTorch's own samples ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_samples_of_pytorch(dtype: torch.dtype, device: torch.device) -> None:
    """Results are within the noise of 8 bits; dropout and float64 fall back to PyTorch's and are counted."""
    quantized = 0
    for sample in OP_INFO.sample_inputs(device.type, dtype, requires_grad=False):
        tensors = (sample.input, *sample.args)
        expected = OP_INFO.op(*tensors, **sample.kwargs)
        with use_sage_attention(), Operators() as operators:
            actual = OP_INFO.op(*tensors, **sample.kwargs)
        if sample.kwargs.get("dropout_p") or dtype == torch.float64:
            assert operators.count() == 0
            assert torch.equal(actual, expected)
            continue
        quantized += 1
        assert operators.count() == 1
        assert actual.shape == expected.shape
        assert actual.dtype == expected.dtype
        mask, causal = sample.kwargs.get("attn_mask"), sample.kwargs.get("is_causal", False)
        exact, _, p = exact_attention(*tensors, mask, causal)
        assert_within(actual, exact, expected_error(*tensors, p))
    assert quantized == (0 if dtype == torch.float64 else 13)
    assert fallbacks["dropout"] == 12
    assert fallbacks["dtype torch.float64"] == (13 if dtype == torch.float64 else 0)


def test_gradients_of_pytorchs_samples(device: torch.device) -> None:
    for sample in OP_INFO.sample_inputs(device.type, torch.float32, requires_grad=True):
        mask = sample.kwargs.get("attn_mask")
        leaves = [sample.input, *sample.args, *([] if mask is None else [mask])]
        expected = torch.autograd.grad(OP_INFO.op(sample.input, *sample.args, **sample.kwargs).sum(), leaves)
        with use_sage_attention():
            out = OP_INFO.op(sample.input, *sample.args, **sample.kwargs)
        for got, want in zip(torch.autograd.grad(out.sum(), leaves), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)  # 3-D: another of SDPA's kernels


# The scope ------------------------------------------------------------------------------------------------------------


def test_all_arguments_reach_the_operator() -> None:
    query, key, value = qkv()
    mask = torch.randn(20, 30)
    with use_sage_attention("sage_vb", smooth_k=False):
        out = SDPA(query, key[:, :1], value[:, :1], mask, scale=0.3, enable_gqa=True)
        causal = SDPA(query, key, value, is_causal=True)
    expected = sage_attention(
        query, key[:, :1], value[:, :1], mask, scale=0.3, enable_gqa=True, variant="sage_vb", smooth_k=False
    )
    assert torch.equal(out, expected)
    assert torch.equal(causal, sage_attention(query, key, value, is_causal=True, variant="sage_vb", smooth_k=False))


def test_the_scope_ends() -> None:
    tensors = qkv()
    expected = SDPA(*tensors)
    with use_sage_attention():
        assert not torch.equal(SDPA(*tensors), expected)
    assert torch.equal(SDPA(*tensors), expected)


def test_the_scope_ends_after_an_error() -> None:
    tensors = qkv()
    expected = SDPA(*tensors)
    with pytest.raises(KeyError), use_sage_attention():
        raise KeyError
    assert torch.equal(SDPA(*tensors), expected)


def test_the_innermost_scope_applies() -> None:
    tensors = qkv()
    with use_sage_attention("sage_vb") as scope:
        with use_sage_attention("sage_t"):
            inner = SDPA(*tensors)
        with use_sage_attention("off"):
            off = SDPA(*tensors)
        with scope:
            again = SDPA(*tensors)
        outer = SDPA(*tensors)
    assert torch.equal(inner, sage_attention(*tensors, variant="sage_t"))
    assert torch.equal(off, SDPA(*tensors))
    assert torch.equal(outer, sage_attention(*tensors, variant="sage_vb"))
    assert torch.equal(again, outer)
    assert not fallbacks


def test_an_outer_scope_does_not_intercept_a_fallback() -> None:
    tensors = qkv(dtype=torch.float64)
    with use_sage_attention("sage_vb"), use_sage_attention("sage_t"):
        assert torch.equal(SDPA(*tensors), torch.ops.aten.scaled_dot_product_attention(*tensors))
    assert fallbacks == {"dtype torch.float64": 1}


def test_a_scope_belongs_to_its_thread() -> None:
    tensors = qkv()
    results: dict[str, Tensor] = {}

    def other() -> None:
        results["without"] = SDPA(*tensors)
        with use_sage_attention("sage_t"):
            entered.set()
            left.wait(30)
            results["within"] = SDPA(*tensors)

    entered, left = threading.Event(), threading.Event()
    thread = threading.Thread(target=other)
    with use_sage_attention("sage_vb"):
        thread.start()
        assert entered.wait(30)
        mine = SDPA(*tensors)
    after = SDPA(*tensors)  # the other thread is inside its scope now
    left.set()
    thread.join(30)
    assert torch.equal(mine, sage_attention(*tensors, variant="sage_vb"))
    assert torch.equal(results["without"], after)
    assert torch.equal(results["within"], sage_attention(*tensors, variant="sage_t"))


@pytest.mark.parametrize("variant", ["sage9", "8-per_block"])
def test_an_unknown_variant_raises_when_the_scope_is_created(variant: str) -> None:
    with pytest.raises(UnsupportedError, match=f"variant must be auto, sage_t.*, got '{variant}'"):
        use_sage_attention(variant)


def test_other_functions_are_left_alone() -> None:
    x = torch.randn(2, 6, 4)
    with use_sage_attention():
        assert torch.equal(x.unflatten(1, (2, 3)), x.view(2, 2, 3, 4))
        assert torch.equal(F.softmax(x, -1), x.softmax(-1))


def test_bad_shapes_stay_errors() -> None:
    query, key, value = qkv()
    with use_sage_attention(), pytest.raises(QFrameworkError, match="as many tokens as key, 30, got 29"):
        SDPA(query, key, value[:, :, :29])
    assert not fallbacks


def test_a_dropout_that_pytorch_refuses_stays_an_error() -> None:
    with use_sage_attention(), pytest.raises(RuntimeError, match="dropout"):
        SDPA(*qkv(), None, -0.1)


# Modules that call SDPA in their own ways -----------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_multi_head_attention(grad: bool, masked: bool) -> None:
    """PyTorch passes F.multi_head_attention_forward to a mode as a whole and disables the mode inside."""
    layer = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    x = torch.randn(2, 20, 32)
    padding = torch.zeros(2, 20, dtype=torch.bool)
    padding[:, 15:] = masked

    def run() -> Tensor:
        return layer(x, x, x, key_padding_mask=padding if masked else None, need_weights=False)[0]

    with torch.set_grad_enabled(grad):
        expected = run()
        with use_sage_attention(), Operators() as operators:
            actual = run()
        with use_sage_attention("sage_vb"), use_sage_attention("off"):
            off = run()
    assert operators.count() == 1
    assert not torch.equal(actual, expected)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0.02)
    assert torch.equal(off, expected) or not grad  # without gradients PyTorch has another, fused kernel
    assert not fallbacks


def test_transformer_encoder() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2).eval()
    x = torch.randn(2, 20, 32)
    with torch.no_grad(), use_sage_attention(), Operators() as operators:
        encoder(x)
    assert operators.count() == 2


def test_multi_head_attention_with_weights_calls_no_sdpa() -> None:
    layer, x = nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 20, 32)
    expected = layer(x, x, x)
    with use_sage_attention():
        actual = layer(x, x, x)
    for got, want in zip(actual, expected, strict=True):
        assert torch.equal(got, want)


def test_exported_graphs() -> None:
    tensors = qkv()
    exported = torch.export.export(Attention(), tensors).module()
    with use_sage_attention():
        assert torch.equal(exported(*tensors), sage_attention(*tensors) * 2)


# Fallbacks ------------------------------------------------------------------------------------------------------------


class Wrapped(Tensor):
    """A tensor subclass, which may define its own attention."""


GROUPED = {"enable_gqa": True}
UNABLE = {
    "dropout": ((*qkv(), None, 0.5), {}),
    "dtype torch.float64": (qkv(dtype=torch.float64), {}),
    "tensor subclass Wrapped": (tuple(x.as_subclass(Wrapped) for x in qkv()), {}),
    "a head dimension outside 1 to 256": (tuple(torch.randn(1, 1, 5, 300) for _ in range(3)), {}),
    "enable_gqa with other heads in value than in key": (tuple(heads(1, n, 5, 16) for n in (8, 2, 4)), GROUPED),
    "tensors of fewer than 3 or more than 5 dimensions": (tuple(torch.randn(5, 8) for _ in range(3)), {}),
}


@pytest.mark.parametrize("reason", UNABLE)
def test_fallbacks_give_pytorchs_result_and_are_counted_and_logged(
    reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    args, kwargs = UNABLE[reason]
    torch.manual_seed(1)
    expected = SDPA(*args, **kwargs)
    for _ in range(3):
        torch.manual_seed(1)
        with use_sage_attention():
            assert torch.equal(SDPA(*args, **kwargs), expected)
    assert fallbacks == {reason: 3}
    assert [record.getMessage().count(reason) for record in caplog.records] == [1]


def test_what_a_variant_refuses_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the operator knows which devices and chips it supports."""
    from qframework.attention import drop_in

    def refuse(*_: Any, **options: Any) -> None:
        raise UnsupportedError("variant='sage2_int8' needs another chip")

    tensors = qkv()
    monkeypatch.setattr(drop_in, "attend", refuse)
    with use_sage_attention():
        assert torch.equal(SDPA(*tensors), torch.ops.aten.scaled_dot_product_attention(*tensors))
    assert fallbacks == {"variant='sage2_int8' needs another chip": 1}


def test_nested_tensors_fall_back() -> None:
    jagged = torch.nested.nested_tensor([heads(5, 2, 8), heads(9, 2, 8)], layout=torch.jagged).transpose(1, 2)
    with use_sage_attention():
        out = SDPA(jagged, jagged, jagged)
    assert [x.shape for x in out.transpose(1, 2).unbind()] == [(5, 2, 8), (9, 2, 8)]
    assert fallbacks == {"tensor subclass NestedTensor": 1}


def test_attn_mask_with_is_causal_falls_back() -> None:
    """PyTorch raises an error or applies both, depending on kernel and version."""
    query, key, value = qkv(20, 20)

    def outcome() -> Tensor | str:
        try:
            return SDPA(query, key, value, torch.randn(20, 20), is_causal=True)
        except RuntimeError as error:
            return str(error)

    torch.manual_seed(1)
    expected = outcome()
    torch.manual_seed(1)
    with use_sage_attention():
        actual = outcome()
    assert torch.equal(actual, expected) if isinstance(expected, Tensor) else actual == expected
    assert fallbacks == {"attn_mask together with is_causal": 1}


def test_transforms_of_torch_func_fall_back() -> None:
    query, key, value = qkv()
    with use_sage_attention():
        found = torch.func.grad(lambda x: SDPA(x, key, value).sum())(query)
        batched = torch.vmap(SDPA)(query, key, value)
    assert torch.equal(found, torch.func.grad(lambda x: SDPA(x, key, value).sum())(query))
    torch.testing.assert_close(batched, SDPA(query, key, value))
    assert fallbacks == {"a transform of torch.func": 2}


def test_forward_mode_derivatives_fall_back() -> None:
    """Only PyTorch's math kernel supports them; the operator would drop the tangent."""
    query, key, value = qkv()

    def tangent(attention: Any) -> Tensor:
        with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
            return forward_ad.unpack_dual(attention(forward_ad.make_dual(query, key[:, :, :20]), key, value)).tangent

    expected = tangent(SDPA)
    with use_sage_attention():
        assert torch.equal(tangent(SDPA), expected)
    assert fallbacks == {"a forward-mode derivative": 1}
    with pytest.raises(UnsupportedError, match=r"sage_attention: the call must be .*, got a forward-mode derivative"):
        tangent(sage_attention)


@pytest.mark.parametrize("backward", [lambda x: x.backward(), torch.autograd.backward, "grad"])
def test_checkpointing_runs_the_forward_again_inside_the_scope(backward: Any) -> None:
    """PyTorch runs a backward pass with the mode disabled unless the scope enables it."""
    query, key, value = qkv()
    query.requires_grad_()

    def gradient(attention: Any) -> Tensor:
        out = checkpoint(lambda x: attention(x, key, value).sin(), query, use_reentrant=False).sum()
        if backward == "grad":
            return torch.autograd.grad(out, query)[0]
        query.grad = None
        backward(out)
        assert query.grad is not None
        return query.grad

    expected = gradient(sage_attention)
    with use_sage_attention(), Operators() as operators:
        assert torch.equal(gradient(SDPA), expected)
    assert operators.count() == 2


@pytest.mark.parametrize("strict", [False, True])
def test_export_inside_a_scope_keeps_the_operator(strict: bool) -> None:
    tensors = qkv()
    with use_sage_attention("sage_t"):
        exported = torch.export.export(Attention(), tensors, strict=strict)
    assert count_operators(exported.graph_module) == 1
    assert torch.equal(exported.module()(*tensors), sage_attention(*tensors, variant="sage_t") * 2)


def test_autocast_decides_the_dtype() -> None:
    query, key, value = qkv()
    with use_sage_attention(), torch.autocast("cpu", torch.bfloat16), Operators() as operators:
        out = SDPA(query.bfloat16(), key, value)
    assert out.dtype == torch.bfloat16
    assert operators.count() == 1
