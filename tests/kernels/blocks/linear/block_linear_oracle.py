"""The FP64 oracle of block_linear, which shares no code with the package, and operands for its tests."""

from __future__ import annotations

import numpy as np
import torch
from oracle import UNIT, numpy64

BLOCK_SIZES = (32, 64, 128, (32, 128), (1, 128), (1, 256))


def blocks_of(block_size):
    """Rows and columns of the blocks of a and the result, then of b; independent of the package."""
    if isinstance(block_size, int):
        return (block_size, block_size), (block_size, block_size)
    return tuple(block_size), (32, block_size[1])


def make_case(place, shape, n, block_size, spread=4.0):
    """Full-range operands, a row of zeros, and scales that differ by up to a factor of ``e^(2 spread)``."""
    of_a, of_b = blocks_of(block_size)
    generator = torch.Generator().manual_seed(n + sum(of_a))
    rows, k = int(np.prod(shape[:-1])), shape[-1]
    a = torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)
    b = torch.randint(-127, 128, (n, k), dtype=torch.int8, generator=generator)
    a.view(rows, k)[0] = 127
    b[0] = 127
    b[-1] = -127
    if rows > 1:
        a.view(rows, k)[-1] = 0

    def scales(size, block):
        blocks = (-(-size // block[0]), -(-k // block[1]))
        return torch.exp(spread * (2 * torch.rand(blocks, generator=generator) - 1)) / 127

    bias = torch.randn(n, generator=generator)
    return tuple(t.to(place) for t in (a, scales(rows, of_a), b, scales(n, of_b), bias))


def spread(scale: torch.Tensor, shape: tuple[int, int], block: tuple[int, int]) -> np.ndarray:
    return np.kron(numpy64(scale), np.ones(block))[: shape[0], : shape[1]]


def exact_product(a, a_scale, b, b_scale, bias, block_size) -> tuple[np.ndarray, np.ndarray]:
    """The FP64 product, and the largest error of float32 sums over blocks in any order.

    Scaling a block's sum by a product of scales takes three roundings, the sum over n blocks n more, and the bias one.
    A CPU sums column by column, and rounds each factor once.
    """
    of_a, of_b = blocks_of(block_size)
    rows, k = a.numel() // a.shape[-1], a.shape[-1]
    left = numpy64(a).reshape(rows, k) * spread(a_scale, (rows, k), of_a)
    right = numpy64(b) * spread(b_scale, (b.shape[0], k), of_b)
    y, terms = left @ right.T, np.abs(left) @ np.abs(right).T
    if bias is not None:
        y, terms = y + numpy64(bias), terms + np.abs(numpy64(bias))
    error = (k + 4) * UNIT[torch.float32] * terms
    return y.reshape(*a.shape[:-1], -1), error.reshape(*a.shape[:-1], -1)


def assert_blocks_close(got, scale, exact, error, block_size):
    """Each block is scaled by its own magnitude, and values are within half a step of ``exact``, up to ``error``."""
    assert got.shape == exact.shape
    assert got.dtype == torch.int8
    n = exact.shape[-1]
    exact, error = exact.reshape(-1, n), error.reshape(-1, n)
    (height, width), _ = blocks_of(block_size)
    assert scale.shape == (-(-len(exact) // height), -(-n // width))
    scale, got = numpy64(scale), numpy64(got.reshape(-1, n))
    for i, j in np.ndindex(*scale.shape):
        rows, columns = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
        step = float(scale[i, j])
        off = 1.01 * error[rows, columns].max()
        amax = np.abs(exact[rows, columns]).max()
        assert abs(step - max(amax / 127, 2.0**-60)) <= (off + 2 * UNIT[torch.float32] * amax) / 127
        values = got[rows, columns]
        assert np.abs(values * step - exact[rows, columns]).max() <= (0.5 + 127 * 4 * UNIT[torch.float32]) * step + off
        assert np.abs(values).max() == (127 if amax > 0 else 0)
