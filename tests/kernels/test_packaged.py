"""Overloads with names of dtypes: the same results as the operators, and graphs that call them."""

from __future__ import annotations

import pytest
import torch
from operator_calls import ints, scale
from torch import Tensor, nn

from qframework.errors import UnsupportedError
from qframework.kernels.packaged import name_dtypes

DTYPES = ["float32", "float16", "bfloat16", None]


def linear_operands() -> tuple[Tensor, ...]:
    return ints(5, 64), scale() / 50, ints(32, 64), scale(32) / 50


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_linear(dtype: str | None) -> None:
    operands = linear_operands()
    wanted = None if dtype is None else getattr(torch, dtype)
    expected = torch.ops.qframework.int8_linear(*operands, out_dtype=wanted)
    torch.testing.assert_close(
        torch.ops.qframework.int8_linear.packaged(*operands, out_dtype=dtype), expected, rtol=0, atol=0
    )
    positional = (*operands, None, "none", None, None, dtype)
    torch.library.opcheck(torch.ops.qframework.int8_linear.packaged, positional)
    torch.testing.assert_close(torch.ops.qframework.int8_linear.packaged(*positional), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mixed_attention(dtype: str | None) -> None:
    operands = (*(ints(1, 2, 9, 16) for _ in range(3)), *(scale() / 50 for _ in range(3)))
    wanted = None if dtype is None else getattr(torch, dtype)
    expected = torch.ops.qframework.mixed_attention(*operands, out_dtype=wanted)
    out = torch.ops.qframework.mixed_attention.packaged(*operands, out_dtype=dtype)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


class Call(nn.Module):
    def forward(self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
        return torch.ops.qframework.int8_linear(a, a_scale, b, b_scale, out_dtype=torch.bfloat16)


class Dequantize(nn.Module):
    def forward(self, q: Tensor, q_scale: Tensor) -> Tensor:
        return torch.ops.qframework.dequantize(q, q_scale, torch.float16)


def test_a_graph_names_its_dtypes() -> None:
    operands = linear_operands()
    gm = torch.export.export(Call(), operands).module()
    name_dtypes(gm)
    (call,) = [node for node in gm.graph.nodes if "int8_linear" in str(node.target)]
    assert call.target is torch.ops.qframework.int8_linear.packaged
    assert "bfloat16" in (*call.args, *call.kwargs.values())
    torch.testing.assert_close(gm(*operands), Call()(*operands), rtol=0, atol=0)


def test_an_operator_without_such_an_overload() -> None:
    gm = torch.export.export(Dequantize(), (ints(4, 8), scale())).module()
    with pytest.raises(UnsupportedError, match=r"to_package: qframework\.dequantize\.default takes a dtype"):
        name_dtypes(gm)
