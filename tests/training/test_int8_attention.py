"""convert_to_int8_training with attention whose gradient is computed in 8 bit."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from training_models import MODELS, gpt2, inputs, llama, loss_of, vit

import qframework.attention
from qframework.errors import UnsupportedError
from qframework.training import conversion_report, convert_to_int8_training, fallbacks, restore_float
from qframework.training.attention import Int8Attention

NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
OPTIONS = {"vit": {}, "gpt2": NO_DROPOUT, "llama": {}}


class Calls(TorchDispatchMode):
    """Counts backward passes of attention in 8 bit, and their form."""

    def __init__(self) -> None:
        super().__init__()
        self.forms: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.qframework.int8_gradient_attention_backward.default:
            self.forms.append(args[10])  # the argument gradient
        return func(*args, **(kwargs or {}))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss_of(model, x).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("attention", ["int8", "mixed"])
@pytest.mark.parametrize("name", MODELS)
def test_attention_in_every_block(name: str, attention: str) -> None:
    """As many backward passes as blocks, and gradients as close to those with attention in float as blocks allow."""
    model, x = MODELS[name](**OPTIONS[name]), inputs(name)
    usual = convert_to_int8_training(copy.deepcopy(model), (1, 128))
    expected = gradients(usual, x)
    convert_to_int8_training(model, (1, 128), attention=attention)
    with Calls() as calls:
        found = gradients(model, x)
    assert calls.forms == [attention] * 2
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape
    flat = [torch.cat([g.flatten() for g in each]) for each in (found, expected)]
    assert (flat[0] - flat[1]).norm() <= 0.05 * flat[1].norm()
    rows = [row for row in conversion_report(model).converted if row.after == "Int8Attention"]
    assert len(rows) == 2


def test_attention_in_float_is_the_default() -> None:
    model = convert_to_int8_training(vit())
    with Calls() as calls:
        gradients(model, inputs("vit"))
    assert calls.forms == []
    assert not any(isinstance(module, Int8Attention) for module in model.modules())


@pytest.mark.parametrize("mode", ["per_tensor", "per_token"])
def test_baselines_take_it_too(mode: str) -> None:
    model = convert_to_int8_training(llama(), mode=mode, attention="mixed")
    with Calls() as calls:
        gradients(model, inputs("llama"))
    assert calls.forms == ["mixed"] * 2


def test_evaluation_does_not_change() -> None:
    x = inputs("vit")
    usual, model = vit(), vit()
    model.load_state_dict(usual.state_dict())
    convert_to_int8_training(usual)
    convert_to_int8_training(model, attention="int8")
    with torch.no_grad():
        assert torch.equal(usual.eval()(x), model.eval()(x))


def test_restored_copied_and_pickled() -> None:
    model, x = vit(), inputs("vit")
    kinds = [type(module) for module in model.modules()]
    expected = gradients(model, x)
    convert_to_int8_training(model, attention="int8")
    again = gradients(model, x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(torch.equal(a, b) for a, b in zip(gradients(twin, x), again, strict=True))
    restore_float(model)
    assert [type(module) for module in model.modules()] == kinds
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), expected, strict=True))


def test_kept_attention_stays() -> None:
    model = convert_to_int8_training(vit(), keep_float=["blocks.0.attn"], attention="int8")
    with Calls() as calls:
        gradients(model, inputs("vit"))
    assert calls.forms == ["int8"]


def test_dropout_in_attention() -> None:
    """GPT-2's default: drawn from torch's generator, and again by checkpointing."""
    model = convert_to_int8_training(gpt2(**NO_DROPOUT | {"attn_pdrop": 0.3}), attention="int8").train()
    x, found = inputs("gpt2"), []
    for seed, checkpointing in ((0, False), (1, False), (0, True)):
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(seed)
        with Calls() as calls:
            found.append(gradients(model, x))
        assert calls.forms == ["int8"] * 2
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))


def test_attention_written_out_is_counted() -> None:
    model = convert_to_int8_training(gpt2(**NO_DROPOUT, attn_implementation="eager"), attention="int8")
    fallbacks.clear()
    gradients(model, inputs("gpt2"))
    assert fallbacks == {"attention of GPT2Attention without F.scaled_dot_product_attention": 2}


def test_an_unknown_attention_is_refused() -> None:
    model = vit()
    with pytest.raises(UnsupportedError, match="attention must be float, int8 or mixed, got 'fp8'"):
        convert_to_int8_training(model, attention="fp8")
    assert not any("_float_origin" in module.__dict__ for module in model.modules())


@pytest.mark.slow
def test_int8_attention_compiles_whole() -> None:
    model, x = convert_to_int8_training(vit(), (1, 128), attention="int8"), inputs("vit")
    expected = gradients(model, x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.zero_grad()
    loss = loss_of(compiled, x)
    with Calls() as calls:
        loss.backward()
    assert calls.forms == ["int8"] * 2
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_checkpointing_runs_attention_in_8_bit_again() -> None:
    model = convert_to_int8_training(vit(), attention="int8")
    x = inputs("vit")
    expected = gradients(model, x)
    model.set_grad_checkpointing()
    with Calls() as calls:
        found = gradients(model, x)
    assert calls.forms == ["int8"] * 2
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_losses_are_those_of_attention_in_float() -> None:
    """Ten steps of Adam from the same weights, to a third of the first loss."""
    start, x = llama(), inputs("llama")
    last = {}
    for attention in ("float", "int8", "mixed"):
        model = convert_to_int8_training(copy.deepcopy(start), (1, 128), attention=attention)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for _ in range(10):
            loss = loss_of(model, x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        last[attention] = float(loss.detach())
    assert last["float"] < 1.8
    for attention in ("int8", "mixed"):
        assert abs(last[attention] - last["float"]) < 0.02 * last["float"]


def test_other_calls_inside_the_scope_are_float_attention() -> None:
    """A mask that the model passes itself leads to PyTorch's attention, with its gradient."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attn, self.mlp = nn.LayerNorm(32), MaskedAttention(), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(self.attn(self.norm(x)))

    class MaskedAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            return self.proj(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))

    model = convert_to_int8_training(nn.Sequential(Masked()), attention="int8")
    reason = "attn_mask with backward='int8'"
    before = qframework.attention.fallbacks[reason]
    with Calls() as calls:
        model(torch.randn(2, 40, 32)).sum().backward()
    assert calls.forms == []
    assert qframework.attention.fallbacks[reason] - before == 1
