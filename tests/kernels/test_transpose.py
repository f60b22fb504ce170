"""transpose_rows on every implementation."""

from __future__ import annotations

import pytest
import torch

from qframework.errors import UnsupportedError
from qframework.kernels.transpose import TRANSPOSE_ROWS

SHAPES = [((2, 9, 64), 64), ((196, 70), 256), ((3, 2, 65, 130), 65), ((1, 64, 64), 64), ((2, 0, 5), 16), ((0, 4, 8), 4)]


@pytest.fixture
def transposed(implementation):
    return {"cpu": torch.ops.qframework.transpose_rows, "triton": TRANSPOSE_ROWS.cuda}[implementation]


@pytest.mark.parametrize(("shape", "width"), SHAPES)
@pytest.mark.parametrize("strided", [False, True])
def test_rows_are_columns_and_zeros(transposed, place, shape, width, strided):
    x = torch.randint(-127, 128, (*shape[:-1], shape[-1] * 2), dtype=torch.int8).to(place)
    x = x[..., ::2] if strided else x[..., : shape[-1]].contiguous()
    y = transposed(x, width)
    assert y.shape == (*shape[:-2], shape[-1], width)
    assert y.is_contiguous()
    assert torch.equal(y[..., : shape[-2]], x.transpose(-1, -2))
    assert not y[..., shape[-2] :].any()


@pytest.mark.parametrize(
    ("x", "width", "message"),
    [
        (torch.zeros(2, 3), 4, "x must have dtype int8, got torch.float32"),
        (torch.zeros(3, dtype=torch.int8), 4, r"\(\.\.\., T, C\) and width must be at least T, got \(3,\) and 4"),
        (torch.zeros(5, 3, dtype=torch.int8), 4, r"width must be at least T, got \(5, 3\) and 4"),
    ],
    ids=["dtype", "shape", "width"],
)
def test_what_is_refused(x, width, message):
    with pytest.raises(UnsupportedError, match=message):
        torch.ops.qframework.transpose_rows(x, width)
