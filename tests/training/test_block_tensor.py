"""block_tensor.py and block_dispatch.py: autograd, ATen operators, checkpointing, serialization and DDP."""

from __future__ import annotations

import copy
import io
import logging
import pickle

import pytest
import torch
import torch.distributed as dist
from block_models import Residual, loss_and_gradients
from torch.nn import functional as F

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.blocks.format import BlockSize, dequantize_blocks_ref, spread_scale
from qframework.training import BlockTensor, fallbacks, new_seed, quantize_blocks
from qframework.training.block_tensor import as_blocks

# Half a step, and the roundings of values that are up to 127 steps large.
HALF_STEP = 0.5 + 127 * 2.0**-22


@pytest.fixture(autouse=True)
def counted_anew():
    fallbacks.clear()
    yield
    fallbacks.clear()


def blocks(
    *shape: int, block_size: BlockSize = 32, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> BlockTensor:
    return quantize_blocks((torch.randn(shape) * scale).to(dtype), block_size)


def float_values(x: BlockTensor) -> torch.Tensor:
    """The float32 values of a BlockTensor, computed without the package."""
    return dequantize_blocks_ref(x.q, x.scale, x.block_size)


def assert_rounded(got: torch.Tensor, exact: torch.Tensor) -> None:
    """Check that ``got`` is a BlockTensor within half of its own step of ``exact``."""
    assert isinstance(got, BlockTensor)
    assert got.shape == exact.shape
    allowed = HALF_STEP * spread_scale(got.scale, got.shape, got.block_size)
    assert ((float_values(got) - exact).abs() <= allowed).all()
    used = got.q.abs().amax()
    assert used == 127 or not exact.any(), "the scale is too large"


def assert_all_equal(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_it_has_the_shape_and_dtype_of_a_float_tensor(dtype):
    x = torch.randn(3, 50, 70).to(dtype)
    blocks = quantize_blocks(x, 64)
    assert (blocks.shape, blocks.dtype, blocks.device, blocks.stride()) == (x.shape, dtype, x.device, x.stride())
    assert blocks.is_floating_point()
    assert blocks.q.dtype == torch.int8
    assert blocks.scale.shape == (3, 2)
    assert blocks.dequantize().dtype == dtype
    assert_rounded(blocks, x.float())
    assert quantize_blocks(blocks, 64) is blocks
    assert repr(blocks) == f"BlockTensor(shape=(3, 50, 70), block_size=64, dtype={dtype}, device=cpu)"


@pytest.mark.parametrize(
    ("given", "kept"), [((32, 32), 32), ([64, 64], 64), ([1, 128], (1, 128)), ((32, 128), (32, 128))]
)
def test_block_sizes_are_canonical(given, kept):
    """Block sizes have one form, so that tensors of equal blocks match."""
    x = torch.randn(5, 130)
    made = quantize_blocks(x, given)
    parts = made.q, made.scale, given, torch.float32
    for y in (
        made,
        BlockTensor(*parts),
        made + made,
        made.view(5, 1, 130),
        torch.zeros_like(made),
        as_blocks(x, given),
    ):
        assert type(y.block_size) is type(kept)
        assert y.block_size == kept
    assert as_blocks(made, given) is as_blocks(made, kept) is made
    assert f"block_size={kept}," in repr(made)
    context = made.__tensor_flatten__()[1]
    assert context == quantize_blocks(x, kept).__tensor_flatten__()[1]
    assert hash(context) == hash((kept, torch.float32, False))


def test_gradients_pass_straight_through():
    x = torch.randn(4, 40, requires_grad=True)
    weight = torch.randn(4, 40)
    quantize_blocks(x).dequantize().mul(weight).sum().backward()
    assert type(x.grad) is torch.Tensor
    expected = quantize_blocks(weight)
    assert torch.equal(x.grad, float_values(expected)), "the gradient is quantized where blocks were dequantized"


@pytest.mark.parametrize("block_size", [32, (1, 128)])
@pytest.mark.parametrize("size", [(10, 40), (2, 5, 1, 40), (-1, 40), (5, 2, -1), (10, -1)])
def test_views_of_leading_dimensions_keep_the_blocks(size, block_size):
    x = blocks(2, 5, 40, block_size=block_size)
    x = x + x  # with statistics
    for view in (x.view(size), x.reshape(size)):
        assert view.shape == torch.empty(2, 5, 40).view(size).shape
        assert view.q.data_ptr() == x.q.data_ptr()
        assert view.statistics is not None
        assert torch.equal(view.dequantize(), x.dequantize().view(size))
    assert not fallbacks


def test_other_views_of_leading_dimensions():
    x = blocks(1, 5, 40)
    for view in (x.flatten(0, 1), x.unsqueeze(1), x.squeeze(0), x.unsqueeze(0).squeeze(1)):
        assert isinstance(view, BlockTensor)
        assert view.shape == view.q.shape
    assert not fallbacks
    for view in (x.unsqueeze(-1), x.view(5, 4, 10), x.view(-1)):
        assert torch.equal(view, x.dequantize().view(view.shape))
    assert fallbacks == {"aten::view": 2, "aten::unsqueeze": 1}


def test_copies_and_conversions():
    x = blocks(4, 40)
    for same in (x.detach(), x.clone(), x.to("cpu"), x.contiguous(), torch.ops.aten.alias(x)):
        assert torch.equal(same.q, x.q)
        assert torch.equal(same.scale, x.scale)
    assert x.clone().q.data_ptr() != x.q.data_ptr()
    half = x.to(torch.bfloat16)
    assert half.q.data_ptr() != x.q.data_ptr()
    assert isinstance(half, BlockTensor)
    assert half.dtype == half.dequantize().dtype == torch.bfloat16
    assert torch.equal(half.q, x.q)
    meta = x.to("meta")
    assert isinstance(meta, BlockTensor)
    assert meta.q.device.type == meta.scale.device.type == "meta"
    assert not torch.zeros_like(x).q.any()
    assert isinstance(torch.empty_like(x), BlockTensor)
    assert not fallbacks
    assert torch.equal(x.to(torch.float64), x.dequantize().double())
    assert fallbacks == {"aten::_to_copy": 1}


@pytest.mark.parametrize("block_size", [32, (32, 128), (1, 128)])
def test_sums_and_products_stay_in_blocks(block_size):
    x, y = blocks(3, 40, 70, block_size=block_size), blocks(3, 40, 70, block_size=block_size, scale=0.1)
    assert_rounded(x + y, float_values(x) + float_values(y))
    assert_rounded(x * y, float_values(x) * float_values(y))
    assert not fallbacks


def test_sums_carry_row_statistics_if_gradients_are_enabled():
    x, y = blocks(3, 40, 70), blocks(3, 40, 70)
    total = x + y
    assert total.statistics is not None
    torch.testing.assert_close(total.statistics[:, 0], float_values(total).view(120, 70).mean(1))
    with torch.no_grad():
        assert (x + y).statistics is None


@pytest.mark.parametrize("number", [2.0, 0.3, 7])
def test_a_positive_number_scales_the_scales(number):
    x = blocks(4, 40)
    for product in (x * number, number * x, x / (1 / number)):
        assert torch.equal(product.q, x.q)
        assert product.q.data_ptr() != x.q.data_ptr(), "it may be written to"
        torch.testing.assert_close(product.scale, x.scale * number)
    assert not fallbacks
    for other in (x * 0, x * -number, x * float("nan")):
        assert not isinstance(other, BlockTensor)
    assert fallbacks == {"aten::mul.Tensor": 3}


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_and_their_gradients_stay_in_blocks(kind):
    function = ACTIVATIONS[kind]
    x = blocks(3, 40, 70).requires_grad_()
    exact = float_values(x.detach()).double().requires_grad_()
    y, exact_y = function(x), function(exact)
    assert_rounded(y.detach(), exact_y.detach().float())
    grad = blocks(3, 40, 70)
    y.backward(grad)
    exact_y.backward(float_values(grad).double())
    assert_rounded(x.grad, exact.grad.float())
    assert not fallbacks


def test_a_float_gradient_enters_the_blocks():
    x = blocks(4, 40).requires_grad_()
    F.gelu(x).sum().backward()  # the sum is float, and so is its gradient
    assert isinstance(x.grad, BlockTensor)
    assert fallbacks == {"aten::sum": 1}


def test_gradients_that_meet_are_added_in_blocks():
    x = blocks(4, 40).requires_grad_()
    grad = blocks(4, 40)
    (x + x + x.view(2, 2, 40).view(4, 40)).backward(grad)
    assert isinstance(x.grad, BlockTensor)
    # Three roundings at most: of 2 grad, of 3 grad, and of grad itself none.
    steps = spread_scale(x.grad.scale, x.shape, 32)
    assert ((float_values(x.grad) - 3 * float_values(grad)).abs() <= 2 * HALF_STEP * steps).all()
    assert not fallbacks


def test_everything_else_computes_in_float_and_is_counted(caplog):
    x = blocks(2, 5, 40)
    with caplog.at_level(logging.WARNING, logger="qframework"):
        for _ in range(2):
            assert torch.equal(x.sum(), x.dequantize().sum())
        assert torch.equal(F.layer_norm(x, (40,)), F.layer_norm(x.dequantize(), (40,)))
        assert torch.equal(torch.cat([x, x]), torch.cat([x.dequantize()] * 2)), "tensors in a list"
        assert torch.equal(x + torch.ones(40), x.dequantize() + 1)
    assert fallbacks == {"aten::sum": 2, "aten::native_layer_norm": 1, "aten::cat": 1, "aten::add.Tensor": 1}
    assert fallbacks.most_common(1) == [("aten::sum", 2)]
    assert [record.getMessage().count("aten::sum has no INT8 implementation") for record in caplog.records].count(
        1
    ) == 1


def test_unsupported_sums_fall_back_to_float():
    x, y = blocks(64, 64), blocks(64, 64)
    for other in (blocks(64, 64, block_size=64), blocks(64, 64, block_size=(1, 128)), blocks(1, 64)):
        assert torch.equal(x + other, x.dequantize() + other.dequantize())
    assert torch.equal(x.sub(y), x.dequantize() - y.dequantize())
    assert torch.equal(x.add(y, alpha=2), x.dequantize() + 2 * y.dequantize())
    assert fallbacks == {"aten::add.Tensor": 4, "aten::sub.Tensor": 1}


def test_dtypes_promote_as_for_floats():
    """Under autocast the residual stream stands for FP32, its branches for BF16."""
    x, y = blocks(4, 40).requires_grad_(), blocks(4, 40, dtype=torch.bfloat16).requires_grad_()
    for z, exact in ((y + x, float_values(x) + float_values(y)), (y * x, float_values(x) * float_values(y))):
        assert z.dtype == torch.float32
        assert_rounded(z.detach(), exact.detach())
    grad = blocks(4, 40)
    (x + y).backward(grad)
    assert (x.grad.dtype, y.grad.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(y.grad.q, grad.q)
    assert y.grad.q.data_ptr() == grad.q.data_ptr(), "a gradient of another dtype is no copy"
    assert not fallbacks


def test_writing_in_place():
    x, y = blocks(4, 40), blocks(4, 40)
    exact, alias = float_values(x) + float_values(y), x.detach()
    before = x
    x += y
    assert x is before
    assert_rounded(x, exact)
    assert torch.equal(alias.q, x.q), "what shares memory sees it"
    assert not fallbacks
    x.clamp_(min=0)
    assert_rounded(x, float_values(alias).clamp(min=0))
    x.copy_(y)
    assert torch.equal(x.q, y.q)
    assert torch.equal(alias.dequantize(), y.dequantize())
    assert "aten::copy_" not in fallbacks
    x.copy_(torch.ones(4, 40))
    assert_rounded(x, torch.ones(4, 40))
    assert torch.add(torch.ones(4, 40), 1, out=x) is x
    assert_rounded(x, torch.full((4, 40), 2.0))
    plain = torch.zeros(4, 40)
    plain.copy_(y)
    assert torch.equal(plain, y.dequantize())
    x = x + y
    x += y
    rows = float_values(x).mean(1)
    torch.testing.assert_close(x.statistics[:, 0], rows)
    assert x.mul_(2).statistics is None, "those of what it was"
    with pytest.raises(UnsupportedError, match="must not write to a list of BlockTensors"):
        torch._foreach_add_([x], 1.0)
    with pytest.raises(UnsupportedError, match="a BlockTensor must keep its shape"):
        x.unsqueeze_(0)


def test_what_is_saved_for_the_backward_pass_is_int8():
    saved = []

    def pack(x):
        inside = (x.q, x.scale, x.statistics) if isinstance(x, BlockTensor) else (x,)
        saved.append(sum(each.nbytes for each in inside if each is not None))
        return x

    model = Residual(width=64, depth=3)
    x = torch.randn(2, 64, 64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = model(x)
    weights = sum(p.nbytes for p in model.parameters())
    values = 3 * 2 * 64 * (64 + 70 + 70)  # for each block: the input of up, of GELU, and of down
    # Scales, and statistics of the sums, two of four bytes for a row.
    assert values <= sum(saved) - weights <= 1.25 * values
    y.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_nothing(reentrant, device):
    model, x = Residual().to(device), torch.randn(2, 5, 40, device=device)
    expected = loss_and_gradients(model, model, x)
    assert_all_equal(loss_and_gradients(lambda x: model(x, reentrant), model, x), expected)
    assert not fallbacks


def test_checkpointing_repeats_the_seed(device):
    x = torch.randn(64, 64, device=device, requires_grad=True)
    seeds = []

    def rounded(x):
        seeds.append(new_seed(x.device))
        return quantize_blocks(x, 32, seeds[-1]).dequantize().square()

    torch.utils.checkpoint.checkpoint(rounded, x, use_reentrant=False).sum().backward()
    assert len(seeds) == 2
    assert torch.equal(*seeds)
    assert not torch.equal(seeds[0], new_seed(x.device))


def test_gradients_of_parameters_accumulate_as_floats():
    model, x = Residual(), torch.randn(4, 5, 40)
    single = [loss_and_gradients(model, model, part)[1:-1] for part in (x[:2], x[2:])]
    model.zero_grad()
    for part in (x[:2], x[2:]):
        model(part).square().mean().backward()
    for parameter, one, other in zip(model.parameters(), *single, strict=True):
        assert type(parameter.grad) is torch.Tensor
        assert torch.equal(parameter.grad, one + other)


def test_ddp():
    model, x = Residual(), torch.randn(2, 5, 40)
    expected = loss_and_gradients(model, model, x)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        assert_all_equal(loss_and_gradients(wrapped, model, x), expected)
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
def test_moves_between_devices():
    x = blocks(4, 40)
    there = x.cuda()
    assert isinstance(there, BlockTensor)
    assert there.device == there.q.device == there.scale.device
    assert torch.equal(there.dequantize().cpu(), x.dequantize())
    assert torch.equal(there.to("cpu").q, x.q)
    x.copy_(there + there)
    assert_rounded(x, 2 * float_values(there.cpu()))


def test_autocast():
    x = blocks(4, 40)
    weight = torch.randn(3, 40)
    with torch.autocast("cpu", torch.bfloat16):
        assert F.linear(x, weight).dtype == torch.bfloat16
        assert isinstance(F.gelu(x), BlockTensor)


@pytest.mark.parametrize("block_size", [32, (1, 128)])
def test_copied_pickled_and_saved(block_size):
    x = blocks(4, 40, block_size=block_size)
    x = x + x
    buffer = io.BytesIO()
    torch.save({"x": x}, buffer)
    buffer.seek(0)
    with torch.serialization.safe_globals([BlockTensor]):
        loaded = torch.load(buffer, weights_only=True)["x"]
    for y in (copy.deepcopy(x), pickle.loads(pickle.dumps(x)), loaded):
        assert isinstance(y, BlockTensor)
        assert torch.equal(y.q, x.q)
        assert torch.equal(y.scale, x.scale)
        assert torch.equal(y.statistics, x.statistics)
        assert (y.block_size, y.dtype) == (x.block_size, x.dtype)
        assert y.q.data_ptr() != x.q.data_ptr()


def test_bad_input():
    x = blocks(4, 40)
    with pytest.raises(UnsupportedError, match=r"block_size must be one of 32, 64, 128, .*, got 33"):
        quantize_blocks(torch.randn(4, 40), 33)
    for size in ((128, 1), (1, 64), [32], (1, 2, 3), "32", None):
        with pytest.raises(UnsupportedError, match=r"block_size must be one of 32, .*, \(1, 256\), got"):
            BlockTensor(x.q, x.scale, size, torch.float32)
    with pytest.raises(UnsupportedError, match=r"quantize_blocks: x must have dtype float32.*, got torch.int32"):
        quantize_blocks(torch.ones(4, 40, dtype=torch.int32))
    with pytest.raises(QFrameworkError, match="must be in blocks of 64, got blocks of 32"):
        as_blocks(x, 64)
    with pytest.raises(QFrameworkError, match=r"must be in blocks of \(1, 128\), got blocks of 32"):
        as_blocks(x, [1, 128])
    with pytest.raises(
        QFrameworkError, match=r"q's scale must have shape \(1, 1\) for q \(4, 40\) in blocks of 64, got \(1, 2\)"
    ):
        BlockTensor(x.q, x.scale, 64, torch.float32)
    with pytest.raises(UnsupportedError, match=r"the tensor must have dtype float32.*, got torch.float64"):
        BlockTensor(x.q, x.scale, 32, torch.float64)
