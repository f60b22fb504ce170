"""hadamard and hadamard_quantize on every implementation, against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle import assert_int8_close, numpy64

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.hadamard import HADAMARD_QUANTIZE, hadamard, hadamard_matrix, turn_blocks
from qframework.kernels.runtime.triton import INTERPRET

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [((37, 192), 64), ((2, 9, 96), 32), ((48,), 16), ((3, 5, 2, 640), 64)]


def sylvester(size: int) -> np.ndarray:
    """The Hadamard matrix ``(size, size)`` by Kronecker products, float64."""
    return np.ones((1, 1)) if size == 1 else np.kron([[1.0, 1.0], [1.0, -1.0]], sylvester(size // 2))


@pytest.fixture
def quantized(implementation):
    return {"cpu": torch.ops.qframework.hadamard_quantize, "triton": HADAMARD_QUANTIZE.cuda}[implementation]


def operands(place, shape, dtype):
    """Values with an outlier row, an outlier channel and a row of zeros; factors from 0.5 to 2; offsets."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    rows = x.view(-1, shape[-1])
    rows[0] *= 100
    rows[:, 3] *= 30
    rows[-1] = 0 if rows.shape[0] > 1 else rows[-1]
    factor = torch.exp2(2 * torch.rand(shape[-1], generator=generator) - 1)
    offset = torch.randn(shape[-1], generator=generator)
    return tuple(each.to(dtype).to(place) for each in (x, factor, offset))


def exact(x, factor, offset, size, truncates=False):
    """float64, apart from the rounding of ``x * factor`` to the dtype of x, to bfloat16 by truncation if asked."""
    product = x.float() * factor.float()
    if truncates and x.dtype == torch.bfloat16:
        product = (product.view(torch.int32) >> 16 << 16).view(torch.float32)
    scaled = numpy64(product.to(x.dtype))
    turned = scaled.reshape(*scaled.shape[:-1], -1, size) @ sylvester(size) / np.sqrt(size)
    return turned.reshape(scaled.shape) - numpy64(offset)


@pytest.mark.parametrize("size", [16, 32, 64])
def test_the_matrix_is_sylvesters(size):
    assert torch.equal(hadamard_matrix(size), torch.from_numpy(sylvester(size)).float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "size"), SHAPES)
def test_quantized(quantized, implementation, place, shape, size, dtype):
    x, factor, offset = operands(place, shape, dtype)
    q, scale = quantized(x, factor, offset, size)
    expected = exact(x, factor, offset, size, truncates=INTERPRET and implementation == "triton")
    amax = np.abs(expected).max(-1, keepdims=True)
    np.testing.assert_allclose(numpy64(scale), amax / 127, rtol=1e-5)
    assert_int8_close(q, expected, np.abs(expected) * 0 + 2e-6 * amax, numpy64(scale))
    assert (q.shape, q.dtype, q.is_contiguous()) == (x.shape, torch.int8, True)
    assert scale.shape == (*shape[:-1], 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_alone(dtype):
    x, factor, offset = operands("cpu", (5, 96), dtype)
    y, expected = hadamard(x, factor, offset, 32), exact(x, factor, offset, 32)
    assert y.dtype == dtype
    np.testing.assert_allclose(numpy64(y), expected, rtol=torch.finfo(dtype).eps, atol=1e-6 * np.abs(expected).max())


def test_turning_twice_is_the_identity():
    x = torch.randn(3, 128, dtype=torch.float64)
    torch.testing.assert_close(turn_blocks(turn_blocks(x, 64), 64), x)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_reach_the_scale(quantized, place, bad):
    x, factor, offset = operands(place, (20, 128), torch.float32)
    x[2, 100] = bad
    _, scale = quantized(x, factor, offset, 64)
    finite = scale.isfinite().flatten()
    assert not finite[2]
    assert finite.sum() == 19


def test_strided_and_empty(quantized, place):
    x, factor, offset = operands(place, (20, 256), torch.float16)
    for view, own in ((x[::2, :128], slice(128)), (x[:, ::2], slice(0, None, 2)), (x[:0, :128], slice(128))):
        whole = quantized(view.contiguous(), factor[own].contiguous(), offset[own].contiguous(), 64)
        for a, b in zip(quantized(view, factor[own].contiguous(), offset[own].contiguous(), 64), whole, strict=True):
            assert torch.equal(a, b)


def test_gradient():
    x = torch.randn(3, 32, dtype=torch.float32, requires_grad=True)
    factor, offset, seen = torch.rand(32) + 0.5, torch.randn(32), torch.randn(3, 32)
    (hadamard(x, factor, offset, 16) * seen).sum().backward()
    matrix = torch.block_diag(hadamard_matrix(16), hadamard_matrix(16)) / 4
    torch.testing.assert_close(x.grad, seen @ matrix.T * factor)


def test_opcheck():
    x, factor, offset = operands("cpu", (3, 64), torch.float32)
    torch.library.opcheck(torch.ops.qframework.hadamard.default, (x.requires_grad_(), factor, offset, 32))
    torch.library.opcheck(torch.ops.qframework.hadamard_quantize.default, (x.detach(), factor, offset, 32))


def test_bad_input():
    x, factor, offset = torch.randn(3, 96), torch.ones(96), torch.zeros(96)
    for size in (64, 8, 3):
        with pytest.raises(UnsupportedError, match=f"block_size must be one of .*, got {size} for 96 channels"):
            hadamard(x, factor, offset, size)
    with pytest.raises(QFrameworkError, match=r"factor must have shape \(96,\), got \(32,\)"):
        hadamard(x, factor[:32], offset, 32)
    with pytest.raises(UnsupportedError, match="x must have dtype"):
        hadamard(x.int(), factor, offset, 32)
