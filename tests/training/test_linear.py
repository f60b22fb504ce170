"""linear.py and linear_baselines.py: against FP64 products of the quantized operands, and against float layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from qframework import numerics
from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.blocks.format import (
    BLOCK_SIZES,
    dequantize_blocks_ref,
    is_square,
    operand_size,
    quantize_blocks_ref,
    spread_scale,
    transposed_size,
)
from qframework.training import BlockTensor, quantize_blocks
from qframework.training.linear import Conv1D, Int8Conv1D, Int8Linear
from qframework.training.linear_baselines import PerTensorConv1D, PerTensorLinear, PerTokenConv1D, PerTokenLinear

UNIT = 2.0**-24
SHAPES = [((2, 37, 70), 50), ((64, 128), 96), ((1, 5), 3)]
BASELINES = {
    "per_tensor": PerTensorLinear,
    "per_tensor conv1d": PerTensorConv1D,
    "per_token": PerTokenLinear,
    "per_token conv1d": PerTokenConv1D,
}


def float_layer(conv1d, columns, n, bias=True, device="cpu"):
    if not conv1d:
        return nn.Linear(columns, n, bias, device)
    layer = Conv1D(n, columns, device)
    nn.init.normal_(layer.bias)
    return layer


def operands(shape, n, device="cpu"):
    """Activations with an outlier channel and a row of zeros, and a gradient with an outlier row."""
    x, grad = torch.randn(shape, device=device), torch.randn((*shape[:-1], n), device=device)
    x[..., 1] *= 50
    x.view(-1, shape[-1])[-1] = 0
    grad.view(-1, n)[0] *= 50
    return x.requires_grad_(), grad


def blocks_of(x, block_size):
    """``(q, scale)`` of a float tensor, or of one in blocks."""
    if isinstance(x, BlockTensor):
        return x.q, x.scale
    return torch.ops.qframework.block_quantize(x.detach(), block_size)


def transposed_blocks_of(x, block_size):
    """Like ``blocks_of`` for the transpose, in blocks of ``transposed_size``; blocks are quantized again."""
    if isinstance(x, BlockTensor):
        return torch.ops.qframework.block_transpose(x.q, x.scale, block_size)
    return torch.ops.qframework.block_quantize_both(x.detach(), block_size)[2:]


def in_blocks(x, block_size):
    """``x`` after quantization, in FP64."""
    return dequantize_blocks_ref(*blocks_of(x, block_size), block_size).double()


def transposed_in_blocks(x, block_size):
    """The transpose of ``x``, as rows, after quantization, in FP64."""
    return dequantize_blocks_ref(*transposed_blocks_of(x, block_size), transposed_size(block_size)).double()


def rows(x):
    return x.reshape(-1, x.shape[-1])


def product(a, b):
    """``a @ b.T`` in FP64, and the largest error of float32 sums in any order."""
    return a @ b.t(), (a.shape[1] + 4) * UNIT * (a.abs() @ b.abs().t())


def assert_within(got, exact, error, unit=UNIT):
    """``got`` is ``exact`` within ``error`` and one rounding."""
    off = (rows(got).double() - exact).abs()
    allowed = 1.01 * (error + unit * exact.abs()) + 1e-30
    assert (off <= allowed).all(), f"{float((off / allowed).max()):.3g} times what rounding explains"


def three_products(x, weight, grad):
    """Y, dX and dW of FP64 operands as ``(exact, error)``; ``weight`` is (N, K)."""
    x, grad = rows(x), rows(grad)
    return product(x, weight), product(grad, weight.t()), product(grad.t(), x.t())


def three_products_of_blocks(x, weight, grad, block_size, conv1d):
    """The same of operands as the layer quantizes them: X and dY as they come, W from the master weight."""
    size, x = operand_size(block_size), x.detach()
    upright, transposed = in_blocks(weight, size), transposed_in_blocks(weight, size)
    for_y, for_x = (transposed, upright) if conv1d else (upright, transposed)
    return (
        product(rows(in_blocks(x, block_size)), for_y),
        product(rows(in_blocks(grad, block_size)), for_x),
        product(transposed_in_blocks(grad, block_size), transposed_in_blocks(x, block_size)),
    )


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize(("shape", "n"), SHAPES)
@pytest.mark.parametrize(("conv1d", "bias"), [(False, False), (False, True), (True, True)])
def test_from_floats_to_floats(device, block_size, shape, n, conv1d, bias):
    given = float_layer(conv1d, shape[-1], n, bias, device)
    layer = (Int8Conv1D if conv1d else Int8Linear).from_float(given, block_size, "float")
    x, grad = operands(shape, n, device)
    y = layer(x)
    y.backward(grad)
    (exact, error), (exact_x, error_x), (exact_w, error_w) = three_products_of_blocks(
        x, given.weight, grad, block_size, conv1d
    )
    added = given.bias.detach().double() if bias else 0.0
    assert_within(y.detach(), exact + added, error + UNIT * (exact.abs() + abs(added)))
    assert_within(x.grad, exact_x, error_x)
    assert_within(given.weight.grad.t() if conv1d else given.weight.grad, exact_w, error_w)
    if bias:
        torch.testing.assert_close(given.bias.grad, rows(grad).sum(0))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("conv1d", [False, True])
def test_from_blocks_to_blocks(device, block_size, conv1d):
    """Results and gradients are within half a step of their own blocks of the FP64 products."""
    shape, n = (2, 37, 70), 50
    given = float_layer(conv1d, shape[-1], n, device=device)
    layer = (Int8Conv1D if conv1d else Int8Linear).from_float(given, block_size)
    values, grad_values = operands(shape, n, device)
    x = quantize_blocks(values.detach(), block_size).requires_grad_()
    grad = quantize_blocks(grad_values, block_size)
    y = layer(x)
    y.backward(grad)
    (exact, error), (exact_x, error_x), (exact_w, error_w) = three_products_of_blocks(
        x, given.weight, grad, block_size, conv1d
    )
    exact = exact + given.bias.detach().double()
    assert_half_a_step(y, exact, error + UNIT * exact.abs())
    assert_half_a_step(x.grad, exact_x, error_x)
    assert_within(given.weight.grad.t() if conv1d else given.weight.grad, exact_w, error_w)
    summed = in_blocks(grad, block_size)
    assert_within(given.bias.grad, rows(summed).sum(0), len(rows(summed)) * UNIT * rows(summed).abs().sum(0))


def assert_half_a_step(got, exact, error):
    assert isinstance(got, BlockTensor)
    step = rows(spread_scale(got.scale, got.shape, got.block_size)).double()
    value = rows(dequantize_blocks_ref(got.q, got.scale, got.block_size)).double()
    assert ((value - exact).abs() <= (0.5 + 127 * 8 * UNIT) * step + 1.01 * error).all()
    # One rounding, of the product: a scale of anything but its own largest value would show.
    assert float((rows(got.q).abs() == 127).double().mean()) > 0
    assert got.q.abs().amax() == 127


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_the_error_against_the_float_layer(block_size):
    """Half a step of either operand, times the other: what the format costs, and no more."""
    given = nn.Linear(70, 50)
    x, _ = operands((2, 37, 70), 50)
    y = Int8Linear.from_float(given, block_size, "float")(x)
    w = given.weight.detach()
    step_x = spread_scale(quantize_blocks_ref(x.detach(), block_size)[1], x.shape, block_size)
    step_w = spread_scale(quantize_blocks_ref(w, operand_size(block_size))[1], w.shape, operand_size(block_size))
    allowed = 0.5 * step_x @ w.abs().t() + 0.5 * (x.detach().abs() + 0.5 * step_x) @ step_w.t()
    off = (y - given(x)).detach().abs()
    assert (off <= 1.001 * allowed + 1e-4).all()
    assert off.max() > 1e-4, "nothing was quantized"


def rounding(blocks, shape, block_size):
    """For all values rounded to these blocks: the largest error and the mean squared error."""
    step = spread_scale(blocks[1], shape, block_size).double()
    return step / 2, step.square() / 12


def rounding_of_transpose(t, block_size):
    """The same for the transpose of ``t (R, C)``, which is rounded twice if blocks are not square."""
    last = rounding(transposed_blocks_of(t, block_size), (t.shape[1], t.shape[0]), transposed_size(block_size))
    if not isinstance(t, BlockTensor):
        return last
    most, square = (each.t() for each in rounding(blocks_of(t, block_size), t.shape, block_size))
    return (most, square) if is_square(block_size) else (most + last[0], square + last[1])


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_the_error_of_gradients_against_the_float_layer(block_size, in_blocks):
    """At most what the errors of both operands explain, and on average as much, since roundings are independent."""
    m, k, n = 150, 140, 130
    layer = Int8Linear.from_float(nn.Linear(k, n), block_size, "block" if in_blocks else "float")
    x, grad, weight = torch.randn(m, k, requires_grad=True), torch.randn(m, n), layer.weight.detach()
    given = quantize_blocks(grad, block_size) if in_blocks else grad
    layer(x).backward(given)
    of_grad = rounding(blocks_of(given, block_size), grad.shape, block_size)
    of_weight = rounding_of_transpose(weight, operand_size(block_size))
    of_grad_t, of_x_t = rounding_of_transpose(given, block_size), rounding_of_transpose(x, block_size)
    for got, a, (most_a, square_a), b, (most_b, square_b) in (
        (x.grad, grad, of_grad, weight.t(), of_weight),
        (layer.weight.grad, grad.t(), of_grad_t, x.detach().t(), of_x_t),
    ):
        a, b = a.double(), b.double()
        off = got.double() - a @ b.t()
        assert (off.abs() <= 1.001 * (most_a @ b.abs().t() + (a.abs() + most_a) @ most_b.t()) + 1e-4).all()
        expected = square_a @ b.square().t() + a.square() @ square_b.t()
        assert 0.9 < float(off.square().mean() / expected.mean()) ** 0.5 < 1.1


@pytest.mark.parametrize("name", BASELINES)
def test_baselines(device, name):
    """Three products with one scale per tensor, or two with one per row of both operands and a float dW."""
    per_token, conv1d = name.startswith("per_token"), name.endswith("conv1d")
    given = float_layer(conv1d, 70, 50, device=device)
    x, grad = operands((2, 37, 70), 50, device)
    y = BASELINES[name].from_float(given)(x)
    y.backward(grad)

    def quantized(t, granularity):
        scale = numerics.dynamic_scale(t.detach(), granularity)
        return numerics.quantize(t.detach(), scale).double() * scale.double()

    granularity = "per_token" if per_token else "per_tensor"
    weight = given.weight.t() if conv1d else given.weight  # (outputs, inputs)
    by_output, by_input = quantized(weight, granularity), quantized(weight.t(), granularity).t()
    inputs, gradient = quantized(x, granularity), quantized(grad, granularity)
    (exact, error), _, (exact_w, error_w) = three_products(inputs, by_output, gradient)
    _, (exact_x, error_x), _ = three_products(inputs, by_input, gradient)
    if per_token:
        exact_w, error_w = product(rows(grad).double().t(), rows(x.detach()).double().t())
    bias = given.bias.detach().double()
    assert_within(y.detach(), exact + bias, error + UNIT * (exact.abs() + bias.abs()))
    assert_within(x.grad, exact_x, error_x)
    assert_within(given.weight.grad.t() if conv1d else given.weight.grad, exact_w, error_w)
    torch.testing.assert_close(given.bias.grad, rows(grad).sum(0))


LAYERS = {
    "block": lambda given: Int8Linear.from_float(given, 32, "block"),
    "float": lambda given: Int8Linear.from_float(given, 32, "float"),
    "block of one row": lambda given: Int8Linear.from_float(given, (1, 128), "block"),
    "per_tensor": PerTensorLinear.from_float,
    "per_token": PerTokenLinear.from_float,
}


def run(layer, x):
    """Result, gradient of the input and gradients of the parameters, as floats."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y = y.dequantize() if isinstance(y, BlockTensor) else y
    (y * torch.arange(1.0, 1 + y.shape[-1], device=y.device)).sum().backward()
    return y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())


@pytest.mark.parametrize("name", LAYERS)
def test_compiles_without_graph_breaks(fresh_dynamo, device, name):
    layer = LAYERS[name](nn.Linear(40, 33, device=device))
    x = torch.randn(3, 20, 40, device=device)
    for got, expected in zip(run(torch.compile(layer, fullgraph=True), x), run(layer, x), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("kind", ["per_tensor", "per_token"])
@pytest.mark.parametrize("conv1d", [False, True])
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(140_000, 2, 3), (2, 140_000, 3), (2, 3, 140_000)])
def test_baselines_sum_up_more_products_than_fit_int32(kind, conv1d, tokens, inputs, outputs):
    """Of ones, so that every sum is as large as it can be: a batch's tokens, wide inputs, a vocabulary."""
    given = Conv1D(outputs, inputs) if conv1d else nn.Linear(inputs, outputs)
    for parameter in given.parameters():
        nn.init.ones_(parameter)
    layer = BASELINES[kind + " conv1d" * conv1d].from_float(given)
    x = torch.ones(tokens, inputs, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    torch.testing.assert_close(y, torch.full_like(y, inputs + 1))
    torch.testing.assert_close(x.grad, torch.full_like(x, outputs))
    torch.testing.assert_close(layer.weight.grad, torch.full_like(layer.weight, tokens))


@pytest.mark.parametrize("name", LAYERS)
def test_checkpointed(name):
    layer = LAYERS[name](nn.Linear(40, 33))

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return checkpoint(self.layer, x, use_reentrant=False)

    x = torch.randn(3, 20, 40)
    for got, expected in zip(run(Checkpointed(), x), run(layer, x), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("name", LAYERS)
def test_autocast_decides_the_dtype(name):
    layer = LAYERS[name](nn.Linear(40, 33))
    x = torch.randn(4, 40, requires_grad=True)
    assert layer(x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype == layer.weight.grad.dtype == layer.bias.grad.dtype == torch.float32
    assert layer.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16


def saved(layer, x):
    """The tensors that the forward pass saves for the backward pass."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    return kept


def floats(kept):
    """Of what is saved, tensors in floats that are not scales."""
    return [t for t in kept if t.is_floating_point() and not isinstance(t, BlockTensor) and t.numel() > 100]


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("name", ["block", "float", "block of one row", "per_tensor"])
def test_saves_int8(name, in_blocks):
    """And the master weight where it is quantized again: in the baselines, with keep_weight=False, and in parts."""
    layer = LAYERS[name](nn.Linear(40, 33))
    x = torch.randn(64, 40)
    if in_blocks and name != "per_tensor":
        x = quantize_blocks(x, layer.block_size)
    kept = saved(layer, x.requires_grad_())
    assert [t.data_ptr() for t in floats(kept)] == ([layer.weight.data_ptr()] if name == "per_tensor" else [])
    assert any(isinstance(t, BlockTensor) or t.dtype == torch.int8 for t in kept)
    if name != "per_tensor":
        layer.keep_weight = False
        assert [t.data_ptr() for t in floats(saved(layer, x))] == [layer.weight.data_ptr()]
        layer.keep_weight, layer.weight_is_spread = None, True
        assert [t.data_ptr() for t in floats(saved(layer, x))] == [layer.weight.data_ptr()]
        layer.keep_weight = True
        assert floats(saved(layer, x)) == []


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("conv1d", [False, True])
def test_a_kept_weight_changes_no_result(block_size, conv1d):
    layer = (Int8Conv1D if conv1d else Int8Linear).from_float(float_layer(conv1d, 70, 50), block_size)
    values, grad_values = operands((2, 37, 70), 50)
    grad, found = quantize_blocks(grad_values, block_size), []
    for keep in (True, False):
        layer.keep_weight, layer.weight.grad = keep, None
        x = quantize_blocks(values.detach(), block_size).requires_grad_()
        y = layer(x)
        y.backward(grad)
        found.append([t.dequantize().detach() for t in (y, x.grad)] + [layer.weight.grad])
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


def test_saves_only_what_a_gradient_needs():
    layer = Int8Linear(40, 33, output="float")
    assert sum(t.dtype == torch.int8 for t in saved(layer, torch.randn(64, 40))) == 1
    layer.weight.requires_grad_(False)
    (of_weight,) = (t for t in saved(layer, torch.randn(64, 40, requires_grad=True)) if t.dtype == torch.int8)
    assert of_weight.shape == (40, 33)
    x = torch.randn(4, 40, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert x.grad is not None
    with torch.no_grad():
        assert saved(layer, x) == []


def test_weights_are_quantized_again_before_each_product():
    layer = Int8Linear(8, 4, bias=False, output="float")
    x = torch.randn(4, 8)
    before = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)  # as an optimizer's step: an exact factor, so that the integers are the same
    assert torch.equal(layer(x), 2 * before)


@pytest.mark.parametrize("name", LAYERS)
def test_parameters_and_state_dict_are_the_float_layer_s(name):
    given = nn.Linear(40, 33).eval()
    layer = LAYERS[name](given)
    assert layer.weight is given.weight
    assert layer.bias is given.bias
    assert not layer.training
    layer.load_state_dict(given.state_dict())
    assert layer.state_dict().keys() == given.state_dict().keys()


def test_conv1d_takes_the_state_dict_of_transformers():
    conv = pytest.importorskip("transformers.pytorch_utils").Conv1D(33, 40)
    layer = Int8Conv1D(33, 40, output="float")
    layer.load_state_dict(conv.state_dict())
    x = torch.randn(4, 40)
    assert (layer(x) - conv(x)).norm() < 0.02 * conv(x).norm()


@pytest.mark.parametrize("kind", [Int8Linear, Int8Conv1D])
def test_a_float_result_can_be_changed_in_place(kind):
    """An activation with inplace=True after a layer; the gradient is that of the values before."""
    torch.manual_seed(0)
    layer, x = kind(32, 64, output="float"), torch.randn(2, 5, 64 if kind is Int8Conv1D else 32)
    (2 * layer(x)).sum().backward()
    wanted = layer.weight.grad.clone()
    layer.zero_grad()
    y = layer(x)
    y *= 2
    y.sum().backward()
    assert torch.equal(layer.weight.grad, wanted)


def test_errors():
    sizes = r"32, 64, 128, \(32, 128\), \(1, 128\), \(1, 256\)"
    with pytest.raises(UnsupportedError, match=f"Int8Linear: block_size must be one of {sizes}, got 48"):
        Int8Linear(4, 4, block_size=48)
    with pytest.raises(UnsupportedError, match=rf"Int8Linear: block_size must be one of {sizes}, got \(128, 1\)"):
        Int8Linear(4, 4, block_size=(128, 1))
    with pytest.raises(UnsupportedError, match="Int8Conv1D: output must be 'block' or 'float', got 'int8'"):
        Int8Conv1D(4, 4, output="int8")
    with pytest.raises(QFrameworkError, match=r"must be in blocks of \(1, 128\), got blocks of 64"):
        Int8Linear(4, 4)(quantize_blocks(torch.randn(2, 4), 64))
    with pytest.raises(QFrameworkError, match=r"must be in blocks of \(1, 128\), got blocks of \(32, 128\)"):
        Int8Linear(4, 4, block_size=[1, 128])(quantize_blocks(torch.randn(2, 4), (32, 128)))
    with pytest.raises(
        QFrameworkError, match=r"a and b must have shapes \(..., K\) and \(N, K\), got \(2, 5\) and \(4, 4\)"
    ):
        Int8Linear(4, 4)(torch.randn(2, 5))


def test_repr():
    assert "block_size=64, output='float'" in repr(Int8Linear(4, 5, block_size=64, output="float"))
    assert "block_size=(1, 128)" in repr(Int8Linear(4, 5, block_size=[1, 128]))
    assert "nf=5, nx=4, block_size=32" in repr(Int8Conv1D(5, 4, block_size=(32, 32)))
