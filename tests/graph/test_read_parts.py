"""A part of a concatenation is read from the operand that it comes from, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qframework.graph.nodes import operation
from qframework.graph.rewrites.read_parts import read_parts

READS: dict[str, Callable[[Tensor], Tensor]] = {
    "the first operand": lambda x: x[:, :1],
    "the second": lambda x: x[:, 1:],
    "the second, from the end": lambda x: x[:, -6:],
    "within the second": lambda x: x[:, 3:5],
    "one token": lambda x: x[:, 0],
    "one token, from the end": lambda x: x[:, -1],
    "slice": lambda x: torch.ops.aten.slice.Tensor(x, 1, 1, 7),
    "select": lambda x: torch.ops.aten.select.int(x, -2, 2),
    "narrow": lambda x: x.narrow(1, 1, 6),
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "of both operands": lambda x: x[:, :3],
    "with a step": lambda x: x[:, 1::2],
    "of another dimension": lambda x: x[..., :1],
    "of two dimensions": lambda x: x[:, 1:, :2],
    "of none": lambda x: x[:, 7:],
}


class Joined(nn.Module):
    """Reads a part of two joined tensors."""

    def __init__(
        self, read: Callable[[Tensor], Tensor], between: Callable[[Tensor, Tensor], Any] | None = None
    ) -> None:
        super().__init__()
        self.read, self.between = read, between

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        doubled = second * 2
        joined = torch.cat([first, doubled], dim=1)
        if self.between is not None:
            self.between(joined, doubled)
        return self.read(joined) + 1


def operands() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 1, 8), torch.randn(2, 6, 8)


def names(gm: torch.fx.GraphModule) -> list[str | None]:
    return [operation(node) for node in gm.graph.nodes]


def after_pass(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[torch.fx.GraphModule, Tensor]:
    """The graph behind the pass, and the result of the compiled module."""
    found: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        read_parts(gm)
        gm.graph.lint()
        gm.recompile()
        found.append(gm)
        return gm.forward

    torch._dynamo.reset()
    result = torch.compile(module, backend=backend, fullgraph=True)(*(x.clone() for x in inputs))
    return found[0], result


@pytest.mark.parametrize("read", READS)
def test_a_part_is_read_from_its_operand(read: str) -> None:
    module, inputs = Joined(READS[read]), operands()
    gm, result = after_pass(module, inputs)
    assert "cat" not in names(gm)
    torch.testing.assert_close(result, module(*inputs), rtol=0, atol=0)


@pytest.mark.parametrize("read", OTHERS)
def test_what_is_no_part_of_one_operand_stays(read: str) -> None:
    module, inputs = Joined(OTHERS[read]), operands()
    gm, result = after_pass(module, inputs)
    assert "cat" in names(gm)
    torch.testing.assert_close(result, module(*inputs), rtol=0, atol=0)


def test_the_concatenation_stays_for_its_other_readers() -> None:
    module, inputs = Joined(lambda x: x[:, 1:] * x.sum()), operands()
    gm, result = after_pass(module, inputs)
    assert "cat" in names(gm)
    assert "getitem" not in names(gm)
    torch.testing.assert_close(result, module(*inputs))


@pytest.mark.parametrize(
    "between",
    [lambda joined, doubled: joined.add_(1), lambda joined, doubled: doubled.add_(1)],
    ids=["the concatenation", "the operand"],
)
def test_a_later_write_keeps_the_copy(between: Callable[[Tensor, Tensor], Any]) -> None:
    module, inputs = Joined(lambda x: x[:, 1:], between), operands()
    _, result = after_pass(module, inputs)
    torch.testing.assert_close(result, module(*inputs), rtol=0, atol=0)


class Returned(nn.Module):
    """Returns a part, which is the caller's own."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x], dim=1)[:, :3]


def test_a_returned_part_does_not_alias_an_input() -> None:
    x = torch.randn(2, 3)
    gm, result = after_pass(Returned(), (x,))
    assert "cat" in names(gm)
    torch.testing.assert_close(result, x, rtol=0, atol=0)


class ClassAttention(nn.Module):
    """Blocks that join and part a class token and patches, as VOLO's last ones."""

    def __init__(self, blocks: int = 3, width: int = 32) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks))
        self.queries, self.keys = (nn.ModuleList(nn.Linear(width, width) for _ in range(blocks)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        for norm, query, key in zip(self.norms, self.queries, self.keys, strict=True):
            normed = norm(x)
            weights = (query(normed[:, :1]) @ key(normed).transpose(1, 2)).softmax(-1)
            x = torch.cat([x[:, :1] + weights @ normed, x[:, 1:]], dim=1)
        return self.norms[0](x[:, 0])


def test_parts_of_class_attention_are_read_directly() -> None:
    """Where the class token is a part of the block's result, it and the patches no longer pass through ``cat``."""
    model, x = ClassAttention().eval(), torch.randn(4, 9, 32)
    with torch.no_grad():
        gm, result = after_pass(model, (x,))
        torch.testing.assert_close(result, model(x))
    joined = [node for node in gm.graph.nodes if operation(node) == "cat"]
    parts = [user for node in joined for user in node.users if operation(user) == "getitem"]
    assert len(joined) == 3
    assert not parts
