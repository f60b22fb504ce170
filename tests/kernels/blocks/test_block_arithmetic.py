"""Quotients of scales computed without a division are those of a division."""

from __future__ import annotations

import pytest
import torch

from qframework.kernels.blocks.arithmetic import inverse, over_127
from qframework.kernels.runtime.launch import launch
from qframework.kernels.runtime.triton import tl, triton

SIZE = 1024


@triton.jit
def _quotients_kernel(x_ptr, over_ptr, inverse_ptr, SIZE: tl.constexpr):
    where = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(x_ptr + where)
    tl.store(over_ptr + where, over_127(x))
    tl.store(inverse_ptr + where, inverse(x))


@pytest.mark.interpreter
@pytest.mark.parametrize("exponent", [-53, 0, 120])
def test_quotients_are_those_of_a_division(exponent):
    """By 127 bit for bit; a reciprocal one unit of the last place off at most, and hardly ever.

    Every mantissa on a GPU, every 512th in the interpreter.
    """
    place, step = ("cuda", 1) if torch.cuda.is_available() else ("cpu", 512)
    first = 127 + exponent << 23
    x = torch.arange(first, first + 2**23, step, dtype=torch.int32, device=place).view(torch.float32)
    over, inverses = torch.empty_like(x), torch.empty_like(x)
    launch(_quotients_kernel, (x.numel() // SIZE,))(x, over, inverses, SIZE=SIZE)
    x, over, inverses = x.cpu(), over.cpu(), inverses.cpu()
    assert torch.equal(over, x / 127)
    off = (inverses.view(torch.int32) - (1 / x).view(torch.int32)).abs()
    assert off.max() <= 1
    assert off.double().mean() <= 1e-4
