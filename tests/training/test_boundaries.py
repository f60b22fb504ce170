"""Writes of a module that stays in float to its arguments reach the BlockTensors that they stand for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qframework.training import convert_to_int8_training, restore_float


def write_and_copy(x: Tensor) -> Tensor:
    x.mul_(2.0)
    return x * 3.0


def zero_channels(x: Tensor) -> Tensor:
    x[..., :5] = 0.0
    return x + 1.0


def flat(x: Tensor) -> Tensor:
    x.view(-1).mul_(2.0)
    return x + 1.0


# A gradient behind a bound is right up to the values that quantization moved across it: allowed, of the gradient.
WRITES: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "nothing": (lambda x: x, 0.05),
    "mul": (lambda x: x.mul_(2.0), 0.05),
    "relu": (lambda x: torch.relu_(x), 0.15),
    "clamp": (lambda x: x.clamp_(-0.3, 0.3), 0.2),
    "detached": (lambda x: x.detach().mul_(2.0), 0.05),
    "write and copy": (write_and_copy, 0.05),
    "slice": (zero_channels, 0.05),
    "view": (flat, 0.05),
}


class Writes(nn.Module):
    """A module kept in float by its name."""

    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        return self.write(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        return self.proj(F.scaled_dot_product_attention(query, key, value))


class Block(nn.Module):
    """Reads its argument of a module after the call, and changes the module's result."""

    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attn = nn.LayerNorm(32), nn.LayerNorm(32), Attention()
        self.fc1, self.writes, self.fc2 = nn.Linear(32, 64), Writes(write), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        h = self.fc1(self.norm2(x))
        returned = self.writes(h) * 1.0
        return x + self.fc2(h + returned)


class Model(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def distance(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).detach().norm() / wanted.detach().norm())


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("stochastic", [False, True])
def test_results_and_gradients_are_those_of_the_float_model(name: str, stochastic: bool) -> None:
    write, allowed = WRITES[name]
    model, x = Model(Block(write)), torch.randn(2, 65, 32)
    reference = copy.deepcopy(model)
    convert_to_int8_training(model, keep_float=["*.writes"], stochastic_gradients=stochastic)
    results = [each(x) for each in (model, reference)]
    assert distance(*results) < 0.04
    for result in results:
        result.square().mean().backward()
    for got, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        assert got.grad is not None
        assert wanted.grad is not None
        assert wanted.grad.norm() < 1e-4 or distance(got.grad, wanted.grad) < allowed
    with torch.inference_mode():
        assert distance(model(x), reference(x)) < 0.04
    restore_float(model)
    assert torch.equal(model(x), reference(x))
    assert not any(each._forward_hooks or each._forward_hooks_always_called for each in model.modules())


@pytest.mark.parametrize("name", ["mul", "slice"])
def test_compiled(name: str, fresh_dynamo: None) -> None:
    model, x = convert_to_int8_training(Model(Block(WRITES[name][0])), keep_float=["*.writes"]), torch.randn(2, 65, 32)
    wanted = model(x)
    got = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(got, wanted)
    got.square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_module_that_returns_its_input_still_does() -> None:
    """Later writes to the result change both."""
    block = Block(lambda x: x)

    def forward(x: Tensor) -> Tensor:
        h = block.fc1(block.norm2(x + block.attn(block.norm1(x))))
        block.writes(h).mul_(0.0)
        return block.fc2(h)

    block.__dict__["forward"] = forward
    model = convert_to_int8_training(Model(block), blocks=["blocks.0"], keep_float=["*.writes"])
    result = model(torch.randn(2, 65, 32))
    assert torch.allclose(result, block.fc2.bias.expand_as(result), atol=float(block.fc2.bias.abs().max()) / 127)


@torch.no_grad()
def test_the_caller_sees_writes_of_a_block_to_its_input() -> None:
    """For example in models that collect hidden states before each block."""

    class Residual(Block):
        def forward(self, x: Tensor) -> Tensor:
            x += self.attn(self.norm1(x))
            x.add_(self.fc2(self.fc1(self.norm2(x))))
            return x

    model, x = Model(Residual(lambda x: x)), torch.randn(2, 65, 32)
    wanted = x.clone()
    copy.deepcopy(model)(wanted)
    convert_to_int8_training(model, keep_float=["*.writes"])
    got = x.clone()
    model(got)
    assert distance(x, wanted) > 0.1
    assert distance(got, wanted) < 0.04


def test_a_failed_call_keeps_nothing_alive() -> None:
    def fail(x: Tensor) -> Any:
        raise KeyError

    model = convert_to_int8_training(Model(Block(fail)), keep_float=["*.writes"])
    with pytest.raises(KeyError):
        model(torch.randn(2, 65, 32))
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    assert [len(hook.lent.pairs) for hook in hooks] == [0, 0]
