"""What a conversion decides about shared modules, and that a conversion that fails changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_state import everything
from torch import Tensor, nn
from training_models import MODELS, gpt2, inputs, llama, logits_of, loss_of, vit

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.training import (
    conversion_report,
    convert_to_int8_training,
    fallbacks,
    plan,
    quantize_blocks,
    restore_float,
)
from qframework.training import convert as conversion
from qframework.training.linear import Int8Linear

each_model = pytest.mark.parametrize("name", MODELS)


def works_and_is_restored(model: nn.Module, x: Tensor, mode: Any = "per_block") -> nn.Module:
    """Check that a converted model is close to the float model, and that it can be restored and converted again."""
    wanted, before, parameters = logits_of(model.eval(), x).detach(), everything(model), list(model.parameters())
    fallbacks.clear()
    convert_to_int8_training(model, mode=mode)
    got = logits_of(model, x)
    assert 1e-5 < float((got.detach() - wanted).norm() / wanted.norm()) < 0.01 * (2 * 12) ** 0.5 * 2
    loss_of(model, x).backward()
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(parameter.grad is not None for parameter in parameters)
    assert fallbacks == {}
    restore_float(model)
    assert everything(model) == before
    assert torch.equal(logits_of(model, x), wanted)
    return convert_to_int8_training(model, mode=mode)


# Failures

STEPS = {
    "deciding": (plan, "role_of"),
    "choosing": (plan, "replacement"),
    "changing": (conversion, "become"),
    "entering": (conversion, "EnterBlocks"),
    "leaving": (conversion, "LeaveBlocks"),
    "keeping": (conversion, "FloatInputs"),
    "hooking before": (nn.Module, "register_forward_pre_hook"),
    "hooking": (nn.Module, "register_forward_hook"),
    "checking": (conversion, "watch"),
    "compiling": (conversion, "register_fallbacks"),
}


class Failing:
    """Calls a function until a chosen call fails, before or after its work."""

    def __init__(self, function: Callable[..., Any], at: int | None, late: bool = False) -> None:
        self.function, self.at, self.late, self.calls = function, at, late, 0

    def __get__(self, instance: Any, owner: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: self(instance, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.at != self.calls:
            return self.function(*args, **kwargs)
        if self.late:
            self.function(*args, **kwargs)
        raise (KeyboardInterrupt if self.calls % 2 else ZeroDivisionError)("in the middle")


@each_model
@pytest.mark.parametrize("step", STEPS)
def test_a_failure_anywhere_changes_nothing(name: str, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of each step fails once, before and after its work."""
    first = {"vit": "blocks.0", "gpt2": "transformer.h.0", "llama": "model.layers.0"}[name]
    kept = {"vit": "norm1", "gpt2": "ln_1", "llama": "input_layernorm"}[name]
    options: dict[str, Any] = {"keep_float": [f"{first}.{kept}"], "check_finite": True, "stochastic_gradients": True}
    where, function = STEPS[step]
    original = getattr(where, function)
    model = MODELS[name]()
    before, generator = everything(model), torch.get_rng_state()
    monkeypatch.setattr(where, function, counted := Failing(original, None))
    convert_to_int8_training(model, **options)
    monkeypatch.setattr(where, function, original)
    restore_float(model)
    assert everything(model) == before
    assert counted.calls >= 1
    for at in range(1, counted.calls + 1):
        for late in (False, True):
            monkeypatch.setattr(where, function, Failing(original, at, late))
            with torch._dynamo.config.patch(optimize_ddp=True):
                with pytest.raises((KeyboardInterrupt, ZeroDivisionError), match="in the middle"):
                    convert_to_int8_training(model, **options)
                assert torch._dynamo.config.optimize_ddp is True
            monkeypatch.setattr(where, function, original)
            assert everything(model) == before
    assert torch.equal(torch.get_rng_state(), generator)
    convert_to_int8_training(model, **options)
    restore_float(model)


class FinalGELU(nn.GELU):
    """A class without subclasses, as the class of a converted module would be."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise TypeError("is final")


def test_the_error_names_a_class_that_cannot_change() -> None:
    model = vit()
    model.blocks[1].mlp.act = FinalGELU()
    before = everything(model)
    with pytest.raises(
        UnsupportedError, match=r"blocks\.1\.mlp\.act \(FinalGELU\) must have a class that can change: is final"
    ):
        convert_to_int8_training(model)
    assert everything(model) == before
    convert_to_int8_training(model, keep_float=["blocks.1.mlp.act"])


def linear(**options: Any) -> nn.Linear:
    return nn.Linear(32, 128, **options)


def with_weight(weight: Tensor) -> nn.Linear:
    layer = linear()
    layer.weight = nn.Parameter(weight, requires_grad=weight.is_floating_point() or weight.is_complex())
    return layer


@pytest.mark.parametrize("mode", ["per_block", "per_token"])
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.LazyLinear(128), "weight is not initialized: run the float model once first"),
        (lambda: nn.Linear(0, 128), "weight has shape (128, 0), which is empty"),
        (lambda: nn.Linear(32, 0), "weight has shape (0, 32), which is empty"),
        (lambda: linear(dtype=torch.float64), "weight has dtype torch.float64, not float32, float16 or bfloat16"),
        (lambda: linear(dtype=torch.complex64), "weight has dtype torch.complex64"),
        (lambda: with_weight(torch.ones(128, 32, dtype=torch.int8)), "weight has dtype torch.int8"),
        (lambda: with_weight(torch.ones(128, 32).to(torch.float8_e4m3fn)), "weight has dtype torch.float8_e4m3fn"),
        (lambda: with_weight(quantize_blocks(torch.ones(128, 32))), "weight is a BlockTensor, not an ordinary tensor"),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors", "ignore:Lazy modules", "ignore:Complex modules")
def test_the_error_names_unsupported_weights(make: Callable[[], nn.Module], reason: str, mode: Any) -> None:
    model = vit()
    model.blocks[1].mlp.fc1 = make()
    before = everything(model)
    with pytest.raises(UnsupportedError, match=rf"blocks\.1\.mlp\.fc1 \(\w+\): {re.escape(reason)}"):
        convert_to_int8_training(model, mode=mode)
    assert everything(model) == before
    convert_to_int8_training(model, mode=mode, keep_float=["blocks.1.mlp.fc1"])


def test_a_lazy_linear_is_converted_once_it_has_run() -> None:
    model = vit()
    model.blocks[1].mlp.fc1 = nn.LazyLinear(128)
    model(inputs("vit"))
    works_and_is_restored(model, inputs("vit"))


def test_a_lazy_linear_kept_in_float_is_initialized_in_training() -> None:
    model = vit()
    model.blocks[1].mlp.fc1 = nn.LazyLinear(128)
    convert_to_int8_training(model, keep_float=["blocks.1.mlp.fc1"])
    loss_of(model, inputs("vit")).backward()
    assert model.blocks[1].mlp.fc1.weight.grad.shape == (128, 32)


def test_nothing_is_converted_twice() -> None:
    model = convert_to_int8_training(vit())
    before = everything(model)
    for other in (model, nn.Sequential(model), model.blocks, model.blocks[1]):
        with pytest.raises(QFrameworkError, match="converted already"):
            convert_to_int8_training(other)
        if other is not model:
            with pytest.raises(QFrameworkError, match="model must be converted"):
                restore_float(other)
        assert everything(model) == before


@pytest.mark.parametrize("name", ["vit", "llama"])
@pytest.mark.parametrize(
    "around",
    [torch.no_grad, torch.inference_mode, lambda: torch.device("meta"), lambda: torch.autocast("cpu", torch.bfloat16)],
)
def test_conversion_does_not_depend_on_global_settings(around: Callable[[], Any], name: str) -> None:
    model = MODELS[name]()
    wanted = conversion_report(convert_to_int8_training(MODELS[name]()))
    torch.set_default_dtype(torch.bfloat16)
    try:
        with around():
            convert_to_int8_training(model)
    finally:
        torch.set_default_dtype(torch.float32)
    assert conversion_report(model) == wanted
    loss_of(model, inputs(name)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_conversion_does_not_change_random_numbers() -> None:
    model = llama()
    torch.manual_seed(3)
    convert_to_int8_training(model)
    drawn = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(4))


# Sharing


def same_mlp(model: Any) -> None:
    model.blocks[1].mlp = model.blocks[0].mlp


def same_linear(model: Any) -> None:
    model.blocks[1].mlp.fc1 = model.blocks[0].mlp.fc1


def same_linear_in_every_role(model: Any) -> None:
    model.blocks[0].mlp.fc1 = model.blocks[0].mlp.fc2 = model.blocks[1].attn.proj = nn.Linear(32, 32)


def same_norms(model: Any) -> None:
    model.blocks[1].norm1 = model.blocks[1].norm2 = model.blocks[0].norm1


def same_weights(model: Any) -> None:
    model.blocks[1].norm1.weight = model.blocks[0].norm2.weight
    model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight


def one_block(model: Any) -> None:
    model.blocks = nn.Sequential(model.blocks[0], model.blocks[0])


def first_block_last(model: Any) -> None:
    model.blocks = nn.Sequential(model.blocks[0], model.blocks[1], model.blocks[0])


def odd_widths(model: Any) -> None:
    model.blocks[0].mlp.fc1, model.blocks[0].mlp.fc2 = nn.Linear(32, 33), nn.Linear(33, 32)


def transposed_weights(model: Any) -> None:
    for block in model.blocks:
        block.mlp.fc1.weight = nn.Parameter(block.mlp.fc1.weight.detach().t().contiguous().t())


@pytest.mark.parametrize("mode", ["per_block", "per_token", "per_tensor"])
@pytest.mark.parametrize(
    "change",
    [
        same_mlp,
        same_linear,
        same_linear_in_every_role,
        same_norms,
        same_weights,
        one_block,
        first_block_last,
        odd_widths,
        transposed_weights,
    ],
)
def test_shared_modules_stay_shared(change: Callable[[Any], None], mode: Any) -> None:
    """``works_and_is_restored`` compares each place's object."""
    model = vit()
    change(model)
    places = {name: id(module) for name, module in model.named_modules(remove_duplicate=False)}
    works_and_is_restored(model, inputs("vit"), mode)
    assert {name: id(module) for name, module in model.named_modules(remove_duplicate=False)} == places
    assert not [row for row in conversion_report(model).kept if "attention, which" not in row.reason]


def test_a_linear_used_inside_and_outside_attention_returns_floats() -> None:
    model = vit()
    model.blocks[1].attn.qkv = model.blocks[0].mlp.fc1 = nn.Linear(32, 96)
    model.blocks[0].mlp.fc2 = nn.Linear(96, 32)
    works_and_is_restored(model, inputs("vit"))
    assert isinstance(model.blocks[1].attn.qkv, Int8Linear)
    assert model.blocks[1].attn.qkv.output == "float"


@pytest.mark.parametrize("mode", ["per_block", "per_token"])
def test_modules_also_used_outside_blocks_stay_in_float(mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = vit()
    model.blocks[0].attn.proj = model.fc_norm = nn.Linear(32, 32)
    model.norm = model.blocks[1].norm1
    works_and_is_restored(model, inputs("vit"), mode)
    told = {row.name: row.reason for row in conversion_report(model).kept if "attention, which" not in row.reason}
    outside = ["blocks.0.attn.proj", "blocks.1.norm1"] if mode == "per_block" else ["blocks.0.attn.proj"]
    assert told == dict.fromkeys(outside, "also used outside the converted blocks")
    logged = "2 modules stay in float, also used outside the converted blocks: blocks.0.attn.proj (Linear)"
    assert logged in caplog.text or mode != "per_block"


def test_modules_also_used_in_a_float_block_stay_in_float() -> None:
    model = vit(depth=3)
    model.blocks[2].mlp = model.blocks[1].mlp
    convert_to_int8_training(model, keep_float=["blocks.1"])
    assert type(model.blocks[2].mlp.fc1) is nn.Linear
    assert isinstance(model.blocks[2].attn.qkv, Int8Linear)
    loss_of(model, inputs("vit")).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_keep_float_matches_any_name_of_a_module() -> None:
    model = vit()
    model.blocks[1].mlp.fc1 = model.blocks[0].mlp.fc1
    convert_to_int8_training(model, keep_float=["blocks.1.mlp.fc1"])
    assert type(model.blocks[0].mlp.fc1) is nn.Linear


def test_blocks_before_one_that_is_not_listed_give_floats() -> None:
    model = vit(depth=3)
    fallbacks.clear()
    convert_to_int8_training(model, blocks=["blocks.0", "blocks.2"])
    loss_of(model, inputs("vit")).backward()
    assert fallbacks == {}


def test_a_model_may_be_a_block() -> None:
    model = vit().blocks[0]
    convert_to_int8_training(model, blocks=[""])
    assert type(model(torch.randn(2, 17, 32))) is Tensor


def test_albert_applies_one_layer_many_times() -> None:
    from transformers import AlbertConfig, AlbertModel

    shape = {"vocab_size": 64, "embedding_size": 16, "hidden_size": 32, "intermediate_size": 64}
    model = AlbertModel(AlbertConfig(**shape, num_hidden_layers=3, num_attention_heads=2)).eval()
    x, before = inputs("gpt2"), everything(model)
    wanted = model(x).last_hidden_state.detach()
    convert_to_int8_training(model)
    got = model(x).last_hidden_state
    assert float((got - wanted).norm() / wanted.norm()) < 0.01 * (3 * 12) ** 0.5 * 2
    got.sum().backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "pooler" not in name)
    restore_float(model)
    assert everything(model) == before


def test_tied_weights_stay_tied() -> None:
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    convert_to_int8_training(model)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert [id(each) for each in optimizer.param_groups[0]["params"]] == [id(each) for each in model.parameters()]


def test_existing_references_see_the_converted_modules() -> None:
    model = vit()
    held = [module.mlp.fc1 for module in model.blocks]
    convert_to_int8_training(model)
    assert all(isinstance(layer, Int8Linear) for layer in held)
    assert held[0] is model.blocks[0].mlp.fc1


def test_compiled_models_follow_conversion_and_restoration(fresh_dynamo: None) -> None:
    model, x = vit(depth=1).eval(), inputs("vit")
    wanted = model(x)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    assert torch.allclose(model(x), wanted, atol=1e-5)
    convert_to_int8_training(model)
    assert not torch.allclose(model(x), wanted, atol=1e-5)
    restore_float(model)
    assert torch.allclose(model(x), wanted, atol=1e-5)
