"""One token is selected before the operations that compute each token by itself, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qframework
from benchmarks.models import quantize_qframework
from qframework import explain
from qframework.graph.nodes import fake_value, linear_call
from qframework.graph.rewrites.select_early import select_early
from qframework.quantizer.config import ActivationConfig, LinearConfig

TOKENS, WIDTH = 7, 32


class Block(nn.Module):
    """Linears between two norms, behind and before a product across tokens, as in a transformer's last block."""

    def __init__(self, choose: Callable[[Tensor], Any], norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.choose = choose
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm, self.last, self.head = norm(WIDTH), norm(WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Any:
        mixed = (x @ x.transpose(1, 2)).softmax(-1) @ x
        x = x + self.first(mixed)
        x = x + F.dropout(self.third(F.gelu(self.second(self.norm(x)))), 0.1, self.training)
        chosen = self.choose(self.last(x))
        return self.head(chosen) if isinstance(chosen, Tensor) else chosen


CHOICES: dict[str, Callable[[Tensor], Any]] = {
    "first": lambda x: x[:, 0],
    "with all channels": lambda x: x[:, 2, :],
    "last": lambda x: x[:, -1],
    "kept as one": lambda x: x[:, -1:],
    "inside": lambda x: x[:, 3:4, :],
    "select": lambda x: torch.ops.aten.select.int(x, 1, 4),
    "slice": lambda x: torch.ops.aten.slice.Tensor(x, 1, -2, -1),
}


def tokens(gm: torch.fx.GraphModule) -> list[Any]:
    """How many tokens each linear computes."""
    values = [fake_value(node) for node in gm.graph.nodes if linear_call(node) is not None]
    return [value.shape[1] if value.ndim == 3 else 1 for value in values if value is not None]


def moved(module: Callable[..., Any], x: Tensor, **options: Any) -> tuple[Any, list[Any]]:
    """The result of the graph behind the pass, and the tokens of its linears."""
    found: list[Any] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        select_early(gm)
        gm.graph.lint()
        gm.recompile()
        found.extend(tokens(gm))
        return gm.forward

    torch._dynamo.reset()
    return torch.compile(module, backend=backend, **options)(x), found


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("choice", CHOICES)
def test_linears_compute_one_token(choice: str, norm: type[nn.Module]) -> None:
    block, x = Block(CHOICES[choice], norm).eval(), torch.randn(3, TOKENS, WIDTH)
    result, found = moved(block, x)
    torch.testing.assert_close(result, block(x))
    assert found == [1, 1, 1, 1]


def test_a_prompt_of_transformers() -> None:
    """The last layer of a Llama behind its attention, and the norm and head behind it, for the last token."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(num_hidden_layers=2, vocab_size=50, **sizes)
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.arange(3 * TOKENS).reshape(3, TOKENS)

    def last(ids: Tensor) -> Tensor:
        logits: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
        return logits

    with torch.no_grad():
        result, found = moved(last, ids, fullgraph=True)
        torch.testing.assert_close(result, last(ids))
    assert found == [TOKENS] * 10 + [1] * 5


STAYS: dict[str, Callable[[Tensor], Any]] = {
    "several tokens": lambda x: x[:, 2:5],
    "every second token": lambda x: x[:, ::2],
    "another reader": lambda x: (x[:, 0], x.mean(1)),
    "a sequence": lambda x: x[0],
    "a channel": lambda x: (x[:, :, 0],),
    "a changed token": lambda x: (x.add_(1), x[:, 0]),
}


@pytest.mark.parametrize("choice", STAYS)
def test_everything_else_stays(choice: str) -> None:
    block, x = Block(STAYS[choice]).eval(), torch.randn(3, TOKENS, WIDTH)
    result, found = moved(block, x)
    torch.testing.assert_close(result, block(x))
    assert found[:3] == [TOKENS] * 3


ACROSS: dict[str, Callable[[Tensor], Tensor]] = {
    "a norm of all tokens": lambda x: F.layer_norm(x, x.shape[1:]),
    "softmax": lambda x: x.softmax(1),
    "a running sum": lambda x: x.cumsum(1),
    "the token before": lambda x: x + x.roll(1, 1),
}


@pytest.mark.parametrize("step", ACROSS)
def test_what_computes_across_tokens_gets_all_of_them(step: str) -> None:
    block, x = Block(CHOICES["inside"]).eval(), torch.randn(3, TOKENS, WIDTH)
    block.second.register_forward_hook(lambda module, args, out: ACROSS[step](out))
    result, found = moved(block, x)
    torch.testing.assert_close(result, block(x))
    assert found == [TOKENS, TOKENS, 1, 1]


def test_a_factor_of_each_token() -> None:
    block, x, factor = Block(CHOICES["inside"]).eval(), torch.randn(3, TOKENS, WIDTH), torch.randn(TOKENS, 1)
    block.second.register_forward_hook(lambda module, args, out: out * factor)
    result, found = moved(block, x)
    torch.testing.assert_close(result, block(x))
    assert found[2:] == [1, 1]


def test_an_active_dropout_stays() -> None:
    _, found = moved(Block(CHOICES["first"]).train(), torch.randn(3, TOKENS, WIDTH))
    assert found == [TOKENS, TOKENS, TOKENS, 1]


@pytest.mark.parametrize("choice", ["first", "last"])
def test_sizes_may_be_symbols(choice: str) -> None:
    block = Block(CHOICES[choice]).eval()
    for shape in ((3, TOKENS, WIDTH), (5, 9, WIDTH)):
        x = torch.randn(shape)
        result, found = moved(block, x, dynamic=True)
        torch.testing.assert_close(result, block(x))
        assert all(type(each) is int for each in found), found


def test_gradients_are_the_same() -> None:
    block = Block(CHOICES["first"]).eval()
    x = torch.randn(3, TOKENS, WIDTH, requires_grad=True)
    wanted = torch.autograd.grad(block(x).square().sum(), (x, block.first.weight, block.norm.weight))
    result, _ = moved(block, x)
    torch.testing.assert_close(
        torch.autograd.grad(result.square().sum(), (x, block.first.weight, block.norm.weight)), wanted
    )


@pytest.mark.parametrize(("preset", "choice"), [("static_int8", "first"), ("dynamic_int8", "last")])
def test_quantized_layers_are_the_same(preset: str, choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, with the same operators: each token is quantized with the same scale."""
    block, x = Block(CHOICES[choice]).eval(), torch.randn(3, TOKENS, WIDTH)
    with torch.no_grad():
        quantized = quantize_qframework(block, x, preset=preset)
        torch._dynamo.reset()
        early, layers = torch.compile(quantized, backend="qframework")(x), explain(quantized, x)
        _, found = moved(quantized, x)
        monkeypatch.setattr("qframework.graph.rewrites.select_early._movable", lambda *_: [])
        torch._dynamo.reset()
        assert torch.equal(early, torch.compile(quantized, backend="qframework")(x))
        assert str(explain(quantized, x)) == str(layers)
    assert found == [1, 1, 1, 1]


def test_a_scale_of_all_tokens_stays_that() -> None:
    """A dynamic scale of the whole tensor: with fewer tokens it would be another."""
    block, x = Block(CHOICES["last"]).eval(), torch.randn(3, TOKENS, WIDTH)
    config = LinearConfig(activation=ActivationConfig("per_tensor", dynamic=True))
    with torch.no_grad():
        quantized = qframework.quantize(block, (x,), config)
        expected = quantized(x)
        result, found = moved(quantized, x)
    assert torch.equal(result, expected)
    assert found == [TOKENS, TOKENS, TOKENS, 1]
