"""INT8 training has first derivatives in reverse mode; all others raise an error that names the operator."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from training_models import inputs, vit

import qframework.training
from qframework.attention import sage_attention
from qframework.errors import UnsupportedError
from qframework.kernels.attention.rope import rope_mean
from qframework.kernels.blocks.linear.block_linear import block_linear
from qframework.kernels.linear.int8_linear import int8_linear
from qframework.quantizer.fake_quantize import fake_quantize
from qframework.training import convert_to_int8_training, quantize_blocks
from qframework.training.activation import Int8Activation, gated_activation
from qframework.training.check_finite import CheckFinite
from qframework.training.dropout import Int8Dropout
from qframework.training.function import Int8Function
from qframework.training.joined_linears import linears_in_blocks
from qframework.training.linear import Int8Conv1D, Int8Linear
from qframework.training.linear_baselines import PerTensorLinear, PerTokenConv1D
from qframework.training.norm import Int8LayerNorm, Int8RMSNorm
from qframework.training.scale import Int8DropPath, Int8LayerScale

WEIGHTS = [torch.randn(256, 8, requires_grad=True) for _ in range(2)]
OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "QuantizeBlocks": quantize_blocks,
    "DequantizeBlocks": lambda x: quantize_blocks(x).dequantize(),
    "Int8Linear": Int8Linear(8, 8, output="float"),
    "Int8Linear ": Int8Conv1D(8, 8),
    "Int8Linears": lambda x: linears_in_blocks(x, WEIGHTS, [None, None], (1, 128), torch.float32)[0],
    "PerTensorLinear": PerTensorLinear(8, 8),
    "PerTokenLinear": PerTokenConv1D(8, 8),
    "Int8LayerNorm": Int8LayerNorm(8),
    "Int8RMSNorm": Int8RMSNorm(8),
    "Int8Activation": Int8Activation("gelu"),
    "Int8GatedActivation": lambda x: gated_activation(x, x),
    "Int8Dropout": Int8Dropout(0.5),
    "Int8LayerScale": Int8LayerScale(nn.Parameter(torch.ones(8))),
    "Int8DropPath": Int8DropPath(0.5),
    "CheckFinite": lambda x: CheckFinite.apply(x, "layer", "output"),
}


def functions() -> set[type]:
    """Every autograd function of qframework.training."""
    for module in pkgutil.iter_modules(qframework.training.__path__, "qframework.training."):
        importlib.import_module(module.name)
    found, kinds = set(), [torch.autograd.Function]
    while kinds:
        kinds += (below := kinds.pop().__subclasses__())
        found |= {kind for kind in below if kind.__module__.startswith("qframework.training.")}
    return found - {Int8Function}


def test_every_function_is_here() -> None:
    assert {kind.__name__.removesuffix("Function") for kind in functions()} == {name.strip() for name in OPERATORS}
    assert all(issubclass(kind, Int8Function) for kind in functions())


@pytest.mark.parametrize("name", OPERATORS)
def test_second_derivatives_are_refused(name: str) -> None:
    """Also if the incoming gradient is a constant, and if only one gradient is requested."""
    x = torch.randn(4, 8, requires_grad=True)
    y = OPERATORS[name](x)
    gradient = torch.ones_like(y)  # in blocks where the result is
    with pytest.raises(UnsupportedError, match=rf"^{name.strip()}: .*create_graph=True asks for second derivatives"):
        torch.autograd.grad(y, x, gradient, create_graph=True)
    assert torch.autograd.grad(y, x, gradient)[0].isfinite().all()


@pytest.mark.parametrize("name", OPERATORS)
def test_transforms_and_forward_mode_are_refused(name: str) -> None:
    x, refused = (
        torch.randn(4, 8),
        "(it was called in a transform of torch.func|an input has a forward-mode derivative)",
    )
    name, call = name.strip(), OPERATORS[name]
    said = rf"^({name}|QuantizeBlocks): derivatives must be first ones.* but {refused}"
    for transform in (
        lambda: torch.func.grad(lambda x: call(x).sum())(x),
        lambda: torch.func.grad(lambda x: torch.func.grad(lambda x: call(x).sum())(x).sum())(x),
        lambda: torch.func.jvp(call, (x,), (x,)),
        lambda: torch.func.vmap(call, randomness="same")(x[None]),
    ):
        with pytest.raises(UnsupportedError, match=said):
            transform()
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match=said):
        call(forward_ad.make_dual(x, x))


def penalty(model: Callable[[Tensor], Tensor], x: Tensor) -> None:
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()


def batched(model: Callable[[Tensor], Tensor], x: Tensor) -> None:
    y = model(x)
    torch.autograd.grad(y, x, torch.ones(3, *y.shape), is_grads_batched=True)


def batched_by_vmap(model: Callable[[Tensor], Tensor], x: Tensor) -> None:
    y = model(x)
    torch.vmap(lambda v: torch.autograd.grad(y, x, v, retain_graph=True)[0])(torch.ones(3, *y.shape))


def weight_in_forward_mode(model: Any, x: Tensor) -> None:
    weight = model.blocks[0].mlp.fc1.weight
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(weight.detach(), torch.ones_like(weight))
        torch.func.functional_call(model, {"blocks.0.mlp.fc1.weight": dual}, (x,))


@pytest.mark.parametrize("mode", ["per_block", "per_token"])
@pytest.mark.parametrize(
    "differentiate",
    [
        penalty,
        batched,
        batched_by_vmap,
        weight_in_forward_mode,
        lambda model, x: torch.autograd.functional.hvp(lambda x: model(x).sum(), x, x),
        lambda model, x: torch.autograd.functional.jvp(model, x, x),
        lambda model, x: torch.func.jacrev(model)(x),
    ],
)
def test_whole_models_refuse_other_derivatives(differentiate: Any, mode: Any) -> None:
    model, x = convert_to_int8_training(vit(), mode=mode), inputs("vit").requires_grad_()
    with pytest.raises(UnsupportedError, match="derivatives must be first ones"):
        differentiate(model, x)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models_refuse_second_derivatives(backend: str, fresh_dynamo: None) -> None:
    """AOTAutograd refuses to differentiate twice."""
    model, x = convert_to_int8_training(vit()), inputs("vit").requires_grad_()
    with pytest.raises(RuntimeError if backend == "aot_eager" else UnsupportedError, match=r"double backward|second"):
        penalty(torch.compile(model, backend=backend), x)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"transform of torch\.func"):  # wrapped by Dynamo's own error under "eager"
        torch.compile(lambda x: torch.func.grad(lambda x: model(x).sum())(x), backend=backend)(x)


def test_layers_after_the_blocks_have_second_derivatives() -> None:
    """Layers that stay float, such as a head."""
    model, x = convert_to_int8_training(vit()), inputs("vit")
    features = model.forward_features(x)
    (gradient,) = torch.autograd.grad(model.forward_head(features).square().sum(), features, create_graph=True)
    gradient.square().sum().backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if name != "head.bias")


# Operators of the package's other rooms


def int8_linear_of(bias: Tensor) -> Tensor:
    a, b, one = torch.ones(4, 8, dtype=torch.int8), torch.ones(6, 8, dtype=torch.int8), torch.ones(1)
    return int8_linear(a, one, b, one, bias, out_dtype=torch.float32)


def block_linear_of(bias: Tensor) -> Tensor:
    a, b, one = torch.ones(4, 8, dtype=torch.int8), torch.ones(6, 8, dtype=torch.int8), torch.ones(1, 1)
    return block_linear(a, one, b, one, bias, out_dtype=torch.float32)[0]


def rope_mean_of(x: Tensor) -> Tensor:
    cos = sin = torch.ones(1, 4)
    return rope_mean(x[:4].expand(1, 1, 1, 4), cos, sin)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("fake_quantize", lambda x: fake_quantize(x, torch.full((1,), 0.05))),
        ("int8_linear", int8_linear_of),
        ("block_linear", block_linear_of),
        ("rope_mean", rope_mean_of),
        ("sage_attention", lambda x: sage_attention(x.expand(1, 1, 4, 6), x.expand(1, 1, 4, 6), x.expand(1, 1, 4, 6))),
    ],
)
def test_other_operators_refuse_transforms_by_name(name: str, call: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(6)
    for transform in (
        lambda: torch.func.grad(lambda x: call(x).sum())(x),
        lambda: torch.func.jvp(call, (x,), (x,)),
        lambda: torch.func.vmap(call)(x[None]),
    ):
        with pytest.raises(UnsupportedError, match=rf"^{name}: the call must be .*, got a transform of torch\.func"):
            transform()
    with (
        forward_ad.dual_level(),
        pytest.raises(UnsupportedError, match=rf"^{name}: the call must be .*, got a forward-mode derivative"),
    ):
        call(forward_ad.make_dual(x, x))


@pytest.mark.parametrize("transform", [torch.func.jvp, lambda call, x, tangents: torch.func.vmap(call)(*x)])
def test_compiled_attention_refuses_transforms(transform: Any, fresh_dynamo: None) -> None:
    """Otherwise the tangent would be zero."""
    x = torch.randn(1, 1, 4, 6)
    compiled = torch.compile(lambda x: transform(lambda x: sage_attention(x, x, x), (x,), (x,)), backend="eager")
    with pytest.raises(UnsupportedError, match=r"sage_attention: the call must be .*, got a transform of torch\.func"):
        compiled(x)


def raw_operators() -> dict[str, Callable[[Tensor], Any]]:
    ops = torch.ops.qframework
    one, seed = torch.ones(1), None
    return {
        "sage_attention": lambda x: ops.sage_attention(x, x, x, None, False, None, False, "auto", True, False),
        "block_quantize": lambda x: ops.block_quantize(x, (32, 32), seed),
        "dynamic_quantize": lambda x: ops.dynamic_quantize(x, "per_token"),
        "quantize": lambda x: ops.quantize(x, one),
        "dequantize": lambda x: ops.dequantize(torch.ones(1, 1, 4, 6, dtype=torch.int8), x[0, 0, 0, :1]),
        "quantize_weights": lambda x: ops.quantize_weights([x[0, 0]]),
        "value_quantize": lambda x: ops.value_quantize(x, "int8", 127.0),
    }


@pytest.mark.parametrize("name", raw_operators())
def test_raw_operators_refuse_forward_mode(name: str) -> None:
    """Below autograd, operators would drop a tangent."""
    call, x = raw_operators()[name], torch.randn(1, 1, 4, 6)
    with forward_ad.dual_level():
        call(x)  # without a tangent
        with pytest.raises(UnsupportedError, match=rf"^{name}: the call must be .*, got a forward-mode derivative"):
            call(forward_ad.make_dual(x, x))
    with pytest.raises(UnsupportedError, match=rf"^{name}: the call must be .*, got torch\.func\.jvp"):
        torch.func.jvp(call, (x,), (x,))


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_given_a_tangent_refuses_it(backend: str, warm: bool, fresh_dynamo: None) -> None:
    compiled = torch.compile(lambda x: sage_attention(x, x, x, variant="sage_b"), backend=backend)
    x = torch.randn(1, 1, 4, 6)
    if warm:
        compiled(x)
    with (
        forward_ad.dual_level(),
        pytest.raises(Exception, match=r"sage_attention: the call must be .*, got a forward-mode derivative"),
    ):
        compiled(forward_ad.make_dual(x, x))
    with pytest.raises(Exception, match=r"sage_attention: .* got (torch\.func\.jvp|a transform of torch\.func)"):
        torch.func.jvp(compiled, (x,), (x,))


def test_fake_quantization_has_second_derivatives() -> None:
    """Its gradient is a mask, so those of a cube after it are 6 y where nothing is clipped."""
    x, scale = torch.tensor([0.5, -1.0, 100.0], requires_grad=True), torch.tensor([0.5])
    y = fake_quantize(x, scale)
    (first,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second, torch.tensor([3.0, -6.0, 0.0]))
