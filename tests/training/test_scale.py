"""LayerScale and stochastic depth on INT8 blocks, against FP64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from qframework.errors import UnsupportedError
from qframework.kernels.blocks.format import CanonicalSize, block_shape
from qframework.training import BlockTensor, quantize_blocks
from qframework.training.scale import Int8DropPath, Int8LayerScale

SHAPES = [(2, 5, 40), (64, 32), (3, 1, 129)]


def steps(x: BlockTensor) -> Tensor:
    """The scale of each value."""
    height, width = block_shape(x.block_size)
    scale = x.scale.repeat_interleave(height, 0).repeat_interleave(width, 1)
    rows = x.numel() // x.shape[-1]
    return scale[:rows, : x.shape[-1]].reshape(x.shape).double()


def real(x: BlockTensor) -> Tensor:
    return x.detach().q.double() * steps(x)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block_size", [32, 128, (1, 128)])
def test_layer_scale(shape: tuple[int, ...], block_size: CanonicalSize) -> None:
    """Output and gradient are within half of their own steps; the parameter's gradient is exact up to FP32 sums."""
    module = Int8LayerScale(nn.Parameter(torch.randn(shape[-1])), block_size)
    x = quantize_blocks(torch.randn(shape), block_size).detach().requires_grad_()
    y, grad = module(x), quantize_blocks(torch.randn(shape), block_size)
    gamma = module.gamma.detach().double()
    assert isinstance(y, BlockTensor)
    assert ((real(y) - real(x) * gamma).abs() <= 0.501 * steps(y)).all()
    y.backward(grad)
    assert isinstance(x.grad, BlockTensor)
    assert ((real(x.grad) - real(grad) * gamma).abs() <= 0.501 * steps(x.grad)).all()
    wanted = (real(grad) * real(x)).reshape(-1, shape[-1])
    rounding = 2.0**-22 * wanted.abs().sum(0)
    assert ((module.gamma.grad.double() - wanted.sum(0)).abs() <= rounding).all()


@pytest.mark.parametrize("shape", [(6, 5, 40), (8, 33)])
@pytest.mark.parametrize(("scale_by_keep", "block_size"), [(True, 32), (False, 32), (True, (1, 128))])
def test_drop_path_drops_whole_samples_and_rounds_nothing(
    shape: tuple[int, ...], scale_by_keep: bool, block_size: CanonicalSize
) -> None:
    module = Int8DropPath(0.5, scale_by_keep, block_size)
    x = quantize_blocks(torch.randn(shape), block_size).detach().requires_grad_()
    y = module(x)
    factor = 2 if scale_by_keep else 1
    kept = real(y).flatten(1).abs().sum(1) > 0
    assert 0 < kept.sum() < len(kept)
    mask = kept.double().view(-1, *(1,) * (len(shape) - 1))
    assert torch.equal(real(y), real(x) * mask * factor)
    grad = quantize_blocks(torch.randn(shape), block_size)
    y.backward(grad)
    assert torch.equal(real(x.grad), real(grad) * mask * factor)


def test_drop_path_keeps_the_mean() -> None:
    """A sample is kept with probability 3/4: 2000 of them within five standard deviations."""
    module, x = Int8DropPath(0.25), torch.ones(2000, 32)
    kept = (module(x).dequantize()[:, 0] > 0).double().mean()
    assert abs(kept - 0.75) < 5 * (0.75 * 0.25 / 2000) ** 0.5


def test_drop_path_does_nothing_in_eval_mode_and_without_probability() -> None:
    x = torch.randn(4, 32)
    wanted = quantize_blocks(x)
    for module in (Int8DropPath(0.9).eval(), Int8DropPath(0.0)):
        assert torch.equal(real(module(x)), real(wanted))


def test_the_same_seed_drops_the_same() -> None:
    module, x = Int8DropPath(0.5), torch.randn(16, 32)
    torch.manual_seed(3)
    first = module(x)
    torch.manual_seed(3)
    assert torch.equal(real(module(x)), real(first))


def test_floats_are_quantized_and_their_gradients_float() -> None:
    x = torch.randn(4, 32, requires_grad=True)
    Int8LayerScale(nn.Parameter(torch.ones(32)))(x).dequantize().sum().backward()
    assert type(x.grad) is Tensor
    assert torch.allclose(x.grad, torch.ones(4, 32), rtol=1e-6)


def test_other_block_sizes_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="block_size must be one of 32, 64, 128"):
        Int8DropPath(0.5, block_size=16)
    with pytest.raises(UnsupportedError, match="block_size must be one of 32, 64, 128"):
        Int8LayerScale(nn.Parameter(torch.ones(4)), 16)
