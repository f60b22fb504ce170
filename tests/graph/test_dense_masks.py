"""Masks of PyTorch's attention become what its kernels read, once for all calls, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qframework.graph.attention.dense_masks import make_masks_dense
from qframework.graph.nodes import argument, fake_value, operation

Mask = Callable[[Tensor], Tensor]
STRIDED: dict[str, Mask] = {
    "heads innermost": lambda bias: bias.permute(2, 0, 1)[None],
    "and expanded": lambda bias: bias.permute(2, 0, 1)[None].expand(2, -1, -1, -1),
    "expanded keys": lambda bias: bias[None, None, :, :1, 0].expand(1, 4, -1, 9),
    "bool": lambda bias: (bias.permute(2, 0, 1) > 0)[None],
    "transposed": lambda bias: bias.permute(2, 1, 0)[None].contiguous().transpose(-1, -2),
}
SHARED: dict[str, Mask] = {
    "all heads": lambda bias: (bias[..., 0] > 0)[None, None],
    "expanded heads": lambda bias: (bias[..., 0] > 0).expand(2, 4, 9, 9),
    "expanded queries": lambda bias: (bias[:1, :, 0] > 0).expand(2, 1, 9, 9),
    "a query without keys": lambda bias: ((bias[..., 0] > 0) & (torch.arange(9)[:, None] > 0))[None, None],
}
OTHERS: dict[str, Mask | None] = {
    "dense": lambda bias: bias.permute(2, 0, 1)[None].contiguous(),
    "expanded heads": lambda bias: bias[:, :, 0].contiguous().expand(2, 4, -1, -1),
    "one for all keys": lambda bias: bias[:, :1, 0].expand(-1, 1),
    "none": None,
}


def run(
    mask: Mask | None, between: Callable[[Tensor], Any] | None = None, dynamic: bool = False
) -> tuple[list[Any], Tensor, Tensor]:
    """The masks and copies of two calls of attention behind the pass, its result, and that without it."""
    torch.manual_seed(0)
    x, bias = torch.randn(2, 4, 9, 16), torch.randn(9, 9, 4)

    def attention(x: Tensor, bias: Tensor) -> Tensor:
        added = None if mask is None else mask(bias)
        first = F.scaled_dot_product_attention(x, x, x, added)
        if between is not None and added is not None:
            between(added)
        return F.scaled_dot_product_attention(first, x, x, attn_mask=added)

    found: list[Any] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        make_masks_dense(gm)
        gm.graph.lint()
        gm.recompile()
        for node in gm.graph.nodes:
            if operation(node) == "scaled_dot_product_attention":
                found.append(argument(node, 3, "attn_mask"))
        found.append([node for node in gm.graph.nodes if operation(node) in ("clone", "masked_fill")])
        return gm.forward

    torch._dynamo.reset()
    result = torch.compile(attention, backend=backend, fullgraph=True, dynamic=dynamic)(x, bias.clone())
    return found, result, attention(x, bias.clone())


@pytest.mark.parametrize("name", STRIDED)
def test_a_strided_mask_is_copied_once(name: str) -> None:
    (first, second, copies), result, expected = run(STRIDED[name])
    assert first is second
    assert len(copies) == 1
    value, part = fake_value(first), fake_value(copies[0])
    assert value is not None
    assert part is not None
    assert value.stride(-1) == 1
    assert part.shape[0] == 1, "the expanded dimension stays expanded"
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("name", SHARED)
def test_a_bool_mask_of_several_calls_is_converted_once(name: str) -> None:
    (first, second, copies), result, expected = run(SHARED[name])
    assert first is second
    assert len(copies) == 1
    value, part = fake_value(first), fake_value(copies[0])
    assert value is not None
    assert part is not None
    assert value.dtype == torch.float32
    assert part.numel() == 81, "of what is expanded, the queries alone are not any more"
    assert torch.equal(result, expected)


def test_a_bool_mask_of_one_call_stays() -> None:
    def attention(x: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, mask)

    masks = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        make_masks_dense(gm)
        masks.extend(
            argument(node, 3, "attn_mask")
            for node in gm.graph.nodes
            if operation(node) == "scaled_dot_product_attention"
        )
        return gm.forward

    torch._dynamo.reset()
    torch.compile(attention, backend=backend, fullgraph=True)(torch.randn(2, 4, 9, 16), torch.ones(9, 9).bool())
    assert [mask.op for mask in masks] == ["placeholder"]


def test_sizes_may_be_symbols() -> None:
    (_, _, copies), result, expected = run(STRIDED["and expanded"], dynamic=True)
    assert len(copies) == 1
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name: str) -> None:
    (_, _, copies), result, expected = run(OTHERS[name])
    assert not copies
    torch.testing.assert_close(result, expected)


def test_a_written_mask_is_copied_again() -> None:
    (first, second, copies), result, expected = run(STRIDED["heads innermost"], lambda mask: mask.mul_(2))
    assert first is not second
    assert len(copies) == 2
    torch.testing.assert_close(result, expected)
