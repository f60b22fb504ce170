"""A conversion keeps hooks, attributes, classes and computed weights, or reports why a module stays in float."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_state import everything
from torch import Tensor, nn
from torch.nn.utils import (
    parametrizations,
    parametrize,
    prune,
    remove_spectral_norm,
    remove_weight_norm,
    spectral_norm,
    weight_norm,
)
from training_models import MODELS, gpt2, inputs, llama, logits_of, loss_of, vit

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.training import conversion_report, convert_to_int8_training, fallbacks, restore_float
from qframework.training.linear import Int8Linear

each_mode = pytest.mark.parametrize("mode", ["per_block", "per_token", "per_tensor"])


def distance(got: Tensor, wanted: Tensor) -> float:
    return float((got.detach() - wanted.detach()).norm() / wanted.detach().norm())


def reasons(model: nn.Module) -> dict[str, str]:
    return {row.name: row.reason for row in conversion_report(model).kept if "attention, which" not in row.reason}


def close_in_int8_and_the_same_when_restored(model: nn.Module, x: Tensor, mode: Any = "per_block") -> nn.Module:
    """The bound of test_convert.py for logits: 12 quantizations in each of 2 blocks, 0.01 of the norm each, doubled."""
    model.eval()
    logits_of(model, x)  # what computes weights in hooks has done so
    wanted, before = logits_of(model, x).detach(), everything(model)
    convert_to_int8_training(model, mode=mode)
    assert 1e-5 < distance(logits_of(model, x), wanted) < 0.01 * (2 * 12) ** 0.5 * 2
    loss_of(model, x).backward()
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in model.parameters())
    restore_float(model)
    after = everything(model)
    assert after.keys() == before.keys()
    assert torch.equal(logits_of(model, x), wanted)
    return convert_to_int8_training(model, mode=mode)


# A forward of the module's own


def patch(module: nn.Module, calls: list[str], factor: float = 1.5) -> None:
    """Replaces ``forward`` on the module, as accelerate's hooks and some adapters do."""
    module._old_forward = module.forward

    def new_forward(module: Any, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(type(module).__name__)
        return module._old_forward(*args, **kwargs) * factor

    module.forward = functools.partial(new_forward, module)


LEAVES = {
    "vit": [f"blocks.0.{name}" for name in ("mlp.fc1", "mlp.act", "norm1", "attn.qkv", "attn.proj", "attn.proj_drop")],
    "gpt2": [f"transformer.h.0.{name}" for name in ("ln_2", "attn.c_attn", "mlp.c_fc", "mlp.act", "mlp.dropout")],
    "llama": [f"model.layers.0.{name}" for name in ("mlp.gate_proj", "mlp.act_fn", "input_layernorm")],
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in LEAVES.items() for name in names])
def test_a_replaced_forward_still_runs_in_float(kind: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    model, x, calls = MODELS[kind](), inputs(kind), []
    patch(model.get_submodule(name), calls)
    before = type(model.get_submodule(name))
    with caplog.at_level(logging.WARNING, "qframework"):
        close_in_int8_and_the_same_when_restored(model, x)
    assert reasons(model) == {name: "its forward was replaced on the module itself"}
    assert f"its forward was replaced on the module itself: {name} ({before.__name__})" in caplog.text
    assert type(model.get_submodule(name)) is before
    calls.clear()
    logits_of(model, x)
    assert calls == [before.__name__]


@pytest.mark.parametrize("mode", ["per_tensor", "per_token"])
@pytest.mark.parametrize(("kind", "name"), [("vit", "blocks.0.mlp.fc1"), ("gpt2", "transformer.h.1.mlp.c_proj")])
def test_a_replaced_forward_in_the_baselines(kind: str, name: str, mode: Any) -> None:
    model, calls = MODELS[kind](), []
    patch(model.get_submodule(name), calls)
    close_in_int8_and_the_same_when_restored(model, inputs(kind), mode)
    assert list(reasons(model)) == [name]


@pytest.mark.parametrize("name", ["layers.0.mlp", "layers.0", "layers.1"])
def test_a_replaced_forward_of_a_container_runs_around_int8_layers(name: str) -> None:
    """Also in a gated MLP."""
    model, x, calls = llama(), inputs("llama"), []
    patch(model.model.get_submodule(name), calls, factor=1.0)
    close_in_int8_and_the_same_when_restored(model, x)
    assert not reasons(model)
    calls.clear()
    logits_of(model, x)
    assert len(calls) == 1
    assert isinstance(model.model.layers[0].mlp.up_proj, Int8Linear)


def test_a_conversion_without_modules_to_convert_is_refused() -> None:
    model, calls = vit(), []
    for module in model.modules():
        patch(module, calls)
    before = everything(model)
    with pytest.raises(UnsupportedError, match=r"got none; blocks\.0\.norm1 \(LayerNorm\) stays in float"):
        convert_to_int8_training(model)
    assert everything(model) == before


# Hooks, attributes, classes


def test_hooks_of_every_kind_run_and_conversion_runs_none() -> None:
    model, seen = llama(), []
    for name in ("mlp.down_proj", "mlp.act_fn", "post_attention_layernorm", "mlp"):
        module = model.model.layers[0].get_submodule(name)
        module.register_forward_pre_hook(lambda *args, name=name: seen.append((name, "before")))
        module.register_forward_hook(lambda *args, name=name: seen.append((name, "after")), always_call=True)
        module.register_full_backward_pre_hook(lambda *args, name=name: seen.append((name, "backward before")))
        module.register_full_backward_hook(lambda *args, name=name: seen.append((name, "backward after")))
        module.register_state_dict_pre_hook(lambda *args, name=name: seen.append((name, "saved")))
        module.register_load_state_dict_post_hook(lambda *args, name=name: seen.append((name, "loaded")))
    before = everything(model)

    def run() -> set[tuple[str, str]]:
        seen.clear()
        loss_of(model, inputs("llama")).backward()
        model.load_state_dict(model.state_dict())
        return set(seen)

    wanted = run()
    assert len(wanted) == 24
    seen.clear()
    convert_to_int8_training(model)
    assert not seen
    assert run() == wanted
    restore_float(model)
    assert everything(model) == before
    assert run() == wanted


def test_a_hook_on_the_activation_of_a_converted_gated_mlp_runs() -> None:
    """Without hooks, one operator computes the activation and the product after it."""
    model, x, seen = convert_to_int8_training(llama()).eval(), inputs("llama"), []
    fused = logits_of(model, x)
    handle = model.model.layers[0].mlp.act_fn.register_forward_hook(lambda *args: seen.append(1))
    hooked = logits_of(model, x)
    assert seen == [1]
    assert 0 < distance(hooked, fused) < 0.01 * (2 * 12) ** 0.5 * 2
    handle.remove()
    assert torch.equal(logits_of(model, x), fused)


def test_a_forward_replaced_for_all_linears_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 2 * forward(self, x))
    with pytest.raises(UnsupportedError, match=r"got blocks\.\*\.attn\.qkv \(Linear\)"):
        convert_to_int8_training(vit(), blocks=["blocks.*"])


def test_attributes_stay_and_conflicting_names_keep_a_module_in_float() -> None:
    model, x = vit(), inputs("vit")
    tags = {module: object() for module in model.modules()}
    for module, tag in tags.items():
        module.tag = tag
    model.blocks[0].mlp.fc1.output = "mine"
    model.blocks[1].norm1.register_buffer("block_size", torch.zeros(1))
    close_in_int8_and_the_same_when_restored(model, x)
    assert all(module.tag is tag for module, tag in tags.items())
    assert model.blocks[0].mlp.fc1.output == "mine"
    assert reasons(model) == {
        "blocks.0.mlp.fc1": "its attribute 'output' has another meaning in Int8Linear",
        "blocks.1.norm1": "its attribute 'block_size' has another meaning in Int8LayerNorm",
    }


class Adapted(nn.Linear):
    """Computes the same as nn.Linear, and has other methods."""

    special = True

    def merged(self) -> str:
        return "merged"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}extra"] = torch.ones(1)


class Lora(nn.Linear):
    """Computes something else."""

    def __init__(self, columns: int, features: int) -> None:
        super().__init__(columns, features)
        self.down, self.up = nn.Linear(columns, 4), nn.Linear(4, features)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.up(self.down(x))


class Wrapped(nn.Module):
    """Contains the layer that it adapts, frozen."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.down, self.up = nn.Linear(base_layer.in_features, 4), nn.Linear(4, base_layer.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x)) * 2.0


def test_converted_modules_are_instances_of_their_own_class(tmp_path: Any) -> None:
    model = vit()
    model.blocks[0].mlp.fc1 = Adapted(32, 128)
    close_in_int8_and_the_same_when_restored(model, inputs("vit"))
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for layer in (module.blocks[0].mlp.fc1 for module in (model, copy.deepcopy(model), loaded)):
        assert isinstance(layer, Int8Linear)
        assert isinstance(layer, Adapted)
        assert type(layer) is type(model.blocks[0].mlp.fc1)
        assert layer.special
        assert layer.merged() == "merged"
        assert "extra" in layer.state_dict()
    assert type(restore_float(loaded).blocks[0].mlp.fc1) is Adapted


def test_the_error_names_a_linear_that_computes_something_else() -> None:
    model = vit()
    model.blocks[0].mlp.fc1 = Lora(32, 128)
    before = everything(model)
    with pytest.raises(UnsupportedError, match=r"got blocks\.0\.mlp\.fc1 \(Lora\): it wraps a linear"):
        convert_to_int8_training(model)
    assert everything(model) == before
    convert_to_int8_training(model, mode="per_token")
    assert "it wraps a linear layer" in reasons(model)["blocks.0.mlp.fc1"]
    convert_to_int8_training(restore_float(model), keep_float=["blocks.0.mlp.fc1"])
    loss_of(model, inputs("vit")).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class Wider(nn.LayerNorm):
    """Another formula in a subclass of a known class."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_the_current_class_of_a_module_counts() -> None:
    model = vit()
    model.blocks[0].norm1.__class__ = Wider
    with pytest.raises(UnsupportedError, match=r"blocks\.0\.norm1 \(Wider\)"):
        convert_to_int8_training(model)
    model.blocks[0].norm1.__class__ = nn.LayerNorm
    model.blocks[0].mlp.fc1.__class__ = Adapted
    close_in_int8_and_the_same_when_restored(model, inputs("vit"))


@each_mode
def test_adapters_around_layers(mode: Any) -> None:
    """The layers inside adapters are converted, and frozen ones stay frozen."""
    model = vit()
    for block in model.blocks:
        block.mlp.fc1, block.attn.qkv = Wrapped(block.mlp.fc1), Wrapped(block.attn.qkv)
        block.attn.proj = Wrapped(block.attn.proj)
    fallbacks.clear()
    close_in_int8_and_the_same_when_restored(model, inputs("vit"), mode)
    assert not fallbacks
    assert not model.blocks[0].mlp.fc1.base_layer.weight.requires_grad


@each_mode
def test_frozen_weights_cost_no_product(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.utils._python_dispatch as dispatch

    products = ("qframework::block_linear", "qframework::int8_linear", "aten::mm")

    class Products(dispatch.TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func.name().split(".")[0] in products
            return func(*args, **(kwargs or {}))

    def backward(model: nn.Module) -> int:
        loss = loss_of(model, inputs("vit"))
        with Products() as counted:
            loss.backward()
        return counted.count

    model = convert_to_int8_training(vit(), mode=mode)
    every = backward(model)
    model.blocks[1].mlp.requires_grad_(False)
    model.blocks[1].attn.qkv.weight.requires_grad_(False)
    model.zero_grad()
    assert backward(model) == every - 3
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in model.parameters())


# Weights that are computed

COMPUTED: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
    "pruned": functools.partial(prune.l1_unstructured, name="weight", amount=0.3),
    "parametrized weight_norm": parametrizations.weight_norm,
    "parametrized spectral_norm": parametrizations.spectral_norm,
    "parametrized orthogonal": parametrizations.orthogonal,
}


@each_mode
@pytest.mark.parametrize("computed", COMPUTED)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_linears_with_computed_weights(computed: str, mode: Any) -> None:
    model = vit()
    for layer in (model.blocks[0].mlp.fc1, model.blocks[0].attn.qkv, model.blocks[1].attn.proj):
        COMPUTED[computed](layer)
    close_in_int8_and_the_same_when_restored(model, inputs("vit"), mode)
    assert isinstance(model.blocks[0].mlp.fc1, nn.Linear)
    assert type(model.blocks[0].mlp.fc1).__name__ == type(model.blocks[0].mlp.fc2).__name__
    loss_of(model, inputs("vit")).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("computed", ["weight_norm", "parametrized weight_norm"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_conv1d_with_computed_weights(computed: str) -> None:
    model = gpt2()
    COMPUTED[computed](model.transformer.h[0].mlp.c_fc)
    close_in_int8_and_the_same_when_restored(model, inputs("gpt2"))


REMOVED: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": remove_weight_norm,
    "spectral_norm": remove_spectral_norm,
    "pruned": functools.partial(prune.remove, name="weight"),
    **dict.fromkeys(
        (name for name in COMPUTED if name.startswith("parametrized")),
        functools.partial(parametrize.remove_parametrizations, tensor_name="weight"),
    ),
}


@each_mode
@pytest.mark.parametrize("computed", COMPUTED)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_computed_weights_can_be_made_parameters_after_the_conversion(computed: str, mode: Any) -> None:
    model = vit().eval()
    layers = model.blocks[0].mlp.fc1, model.blocks[0].attn.qkv
    for layer in layers:
        COMPUTED[computed](layer)
    convert_to_int8_training(model, mode=mode)
    with torch.no_grad():
        before = model(inputs("vit"))
    for layer in layers:
        REMOVED[computed](layer)
        assert "weight" in layer._parameters
        assert type(layer).__mro__ == type(model.blocks[1].mlp.fc1).__mro__
    assert (model(inputs("vit")) - before).abs().max() <= 1e-2 * before.abs().max()
    close_in_int8_and_the_same_when_restored(restore_float(model), inputs("vit"), mode)
    restore_float(model)
    assert all(type(layer) is nn.Linear for layer in layers)


def test_one_of_two_parametrizations_is_removed_after_the_conversion() -> None:
    model = vit()
    layer = model.blocks[0].mlp.fc1
    for name in ("weight", "bias"):
        parametrize.register_parametrization(layer, name, nn.Identity())
    convert_to_int8_training(model)
    parametrize.remove_parametrizations(layer, "weight")
    loss_of(model, inputs("vit")).backward()
    assert layer.weight.grad is not None
    restore_float(model)
    assert type(layer).__name__ == "ParametrizedLinear"
    assert type(layer.weight) is nn.Parameter
    parametrize.remove_parametrizations(layer, "bias")
    assert type(layer) is nn.Linear
    loss_of(model, inputs("vit")).backward()


def test_a_parametrized_norm_is_named() -> None:
    model = vit()
    parametrizations.weight_norm(model.blocks[0].norm1)
    with pytest.raises(UnsupportedError, match=r"blocks\.0\.norm1 \(ParametrizedLayerNorm\)"):
        convert_to_int8_training(model)


def test_a_class_changed_after_conversion_is_not_overwritten() -> None:
    model = convert_to_int8_training(vit())
    parametrizations.weight_norm(model.blocks[0].mlp.fc1)
    before = everything(model)
    with pytest.raises(
        QFrameworkError, match=r"restore_float: blocks\.0\.mlp\.fc1 must have the class of its conversion, Int8Linear"
    ):
        restore_float(model)
    assert everything(model) == before
