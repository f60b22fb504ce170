"""Views of a BlockTensor that are float copies: what is written to them is refused, not lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qframework.errors import UnsupportedError
from qframework.training import quantize_blocks


def set_tokens(x: Tensor) -> None:
    x[:, 1:] = 0


WRITES: dict[str, Callable[[Tensor], object]] = {
    "setitem": set_tokens,
    "mul": lambda x: x[:, :5].mul_(0.0),
    "transposed": lambda x: x.transpose(1, 2)[..., 7:10].zero_(),
    "select": lambda x: x.select(1, 0).fill_(3.0),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("read", [lambda x: x.dequantize(), lambda x: x + x, lambda x: x.sum()])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_to_a_copied_view_is_refused(name: str, read: Callable[[Tensor], Tensor], grad: bool) -> None:
    x = quantize_blocks(torch.randn(2, 33, 64, requires_grad=grad)) * 2.0

    def write_and_read() -> Tensor:
        WRITES[name](x)
        return read(x)

    with pytest.raises(UnsupportedError, match=r"was written to through a view of aten::\w+"):
        write_and_read()


@pytest.mark.parametrize("grad", [False, True])
def test_reading_views_and_writing_to_the_whole_go_on(grad: bool) -> None:
    x = quantize_blocks(torch.randn(2, 33, 64, requires_grad=grad)) * 2.0
    first = x[:, 0].clone()
    x.add_(x.clone())
    x.masked_fill_(torch.arange(33)[None, :, None] > 5, 0.0)
    step = float(x.detach().dequantize().abs().max()) / 127
    assert (x[:, 0] - 2 * first).abs().max() <= 2 * step
    assert not x.dequantize()[:, 6:].any()
