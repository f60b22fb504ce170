"""NaN and infinity are reported with the layer's name, forward and backward; without the option nothing is added."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from training_models import MODELS, inputs, logits_of, loss_of, vit

from qframework.errors import NonFiniteError
from qframework.kernels.blocks.format import CanonicalSize
from qframework.training import convert_to_int8_training, fallbacks, restore_float

LAYERS = {
    "vit": ("blocks.1.mlp.fc1", "blocks.0.norm1", "patch_embed.proj", "head"),
    "gpt2": ("transformer.h.0.attn.c_attn", "transformer.h.1.ln_2", "transformer.ln_f"),
    "llama": ("model.layers.1.mlp.down_proj", "model.layers.0.input_layernorm", "lm_head"),
}
CASES = [(name, layer, 32) for name, layers in LAYERS.items() for layer in layers]
CASES += [("gpt2", layer, (1, 128)) for layer in LAYERS["gpt2"]]


@pytest.mark.parametrize(("name", "layer", "block_size"), CASES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_error_names_the_first_layer_with_nan_or_infinity(
    name: str, layer: str, block_size: CanonicalSize, value: float
) -> None:
    model, x = convert_to_int8_training(MODELS[name](), block_size, check_finite=True), inputs(name)
    loss_of(model, x).backward()
    with torch.no_grad():
        model.get_submodule(layer).weight.view(-1)[3] = value
    with pytest.raises(NonFiniteError, match=rf"^{layer}: output.* must be finite, got"):
        logits_of(model, x)


class SpoilGradient(torch.autograd.Function):
    """The identity, whose backward pass makes one value infinite."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[0] = torch.inf
        return grad


def test_the_error_names_the_layer_of_a_gradient() -> None:
    """Queries, keys and values are float, so the gradient of the output of qkv is wrong first."""
    model, x = convert_to_int8_training(vit(), check_finite=True), inputs("vit")
    model.blocks[0].attn.qkv.register_forward_hook(lambda module, args, out: SpoilGradient.apply(out))
    loss = loss_of(model, x)
    with pytest.raises(NonFiniteError, match=r"^blocks\.0\.attn\.qkv: gradient of its output.*1 infinite"):
        loss.backward()


def test_nan_in_attention_is_reported_at_the_output_projection() -> None:
    model, x = convert_to_int8_training(vit(), check_finite=True), inputs("vit")
    spoil = lambda module, args: (args[0] + torch.nan,)  # noqa: E731
    model.blocks[1].attn.proj.register_forward_pre_hook(spoil, prepend=True)
    with pytest.raises(NonFiniteError, match=r"^blocks\.1\.attn\.proj: input must be finite"):
        logits_of(model, x)


def test_checks_do_not_change_results() -> None:
    x = inputs("vit")
    plain = convert_to_int8_training(vit())
    wanted = loss_of(plain, x)
    wanted.backward()
    gradients = [parameter.grad.clone() for parameter in plain.parameters()]
    restore_float(plain).zero_grad()
    fallbacks.clear()
    watched = convert_to_int8_training(plain, check_finite=True)
    loss = loss_of(watched, x)
    loss.backward()
    assert torch.equal(loss, wanted)
    for parameter, gradient in zip(watched.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
    assert fallbacks == {}


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_without_checks_nothing_is_added() -> None:
    model = vit()
    assert hooks(model) == 0
    convert_to_int8_training(model)
    assert hooks(model) == 5  # two blocks are entered, with a hook on either side, and the last one is left
    restore_float(model)
    convert_to_int8_training(model, check_finite=True)
    assert hooks(model) > 20
    restore_float(model)
    assert hooks(model) == 0


def test_compiled_models_are_checked_too(fresh_dynamo: None) -> None:
    model, x = convert_to_int8_training(vit(depth=1), check_finite=True), inputs("vit")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss_of(compiled, x).backward()
    with torch.no_grad():
        model.blocks[0].mlp.fc2.weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"blocks\.0\.mlp\.fc2: output"):
        loss_of(compiled, x)


def test_the_operator() -> None:
    x = torch.randn(3, 5)
    y = torch.ops.qframework.check_finite(x, "x")
    assert torch.equal(y, x)
    assert y.data_ptr() != x.data_ptr()
    torch.library.opcheck(torch.ops.qframework.check_finite, (x, "x"))
    x[0, 0], x[1, 1], x[2, 2] = torch.nan, torch.inf, -torch.inf
    with pytest.raises(NonFiniteError, match=r"^x must be finite, got 1 NaN and 2 infinite of 15"):
        torch.ops.qframework.check_finite(x, "x")
