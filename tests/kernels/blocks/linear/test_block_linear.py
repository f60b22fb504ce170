"""block_linear on every implementation, against an FP64 oracle that shares no code with it."""

from __future__ import annotations

import pytest
import torch
from block_linear_oracle import BLOCK_SIZES, assert_blocks_close, blocks_of, exact_product, make_case
from oracle import assert_float_close
from torch.library import opcheck

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.blocks.linear.block_linear import BLOCK_LINEAR, block_linear

SHAPES = [
    ((70, 200), 50),  # incomplete blocks in every dimension
    ((1, 1), 1),
    ((2, 3, 17), 129),  # one past a block; leading dimensions
    ((128, 256), 64),  # whole blocks
    ((33, 300), 1),
]


@pytest.fixture
def run(implementation):
    return {"cpu": torch.ops.qframework.block_linear, "triton": BLOCK_LINEAR.cuda}[implementation]


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize(("shape", "n"), SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_float32(run, place, shape, n, block_size, bias):
    *operands, added = make_case(place, shape, n, block_size)
    added = added if bias else None
    got, scale = run(*operands, added, block_size, torch.float32)
    assert got.is_contiguous()
    assert scale.shape == (0, 0)
    assert_float_close(got, *exact_product(*operands, added, block_size))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16])
def test_16_bit(run, place, block_size, dtype, bias_dtype):
    *operands, bias = make_case(place, (70, 200), 50, block_size, spread=0.5)
    got, _ = run(*operands, bias.to(bias_dtype), block_size, dtype)
    assert got.dtype == dtype
    assert_float_close(got, *exact_product(*operands, bias.to(bias_dtype), block_size))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize(("shape", "n"), SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_int8_blocks(run, place, shape, n, block_size, bias):
    """Each block of the result has its own scale, and its values are within half a step of the product."""
    *operands, added = make_case(place, shape, n, block_size)
    added = added if bias else None
    got, scale = run(*operands, added, block_size, torch.int8)
    exact, error = exact_product(*operands, added, block_size)
    assert_blocks_close(got, scale, exact, error, block_size)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_three_products_of_training(run, place, block_size):
    """Y, dX and dW, with operands from the transposing operators. Those of dW are both in blocks of a transpose."""
    generator = torch.Generator().manual_seed(5)
    of_b = blocks_of(block_size)[1]
    size = of_b[0] if of_b[0] == of_b[1] else of_b
    over_tokens = {(1, 128): (32, 256), (1, 256): (32, 256)}.get(block_size, size)
    ops = torch.ops.qframework
    x, dy, w = (torch.randn(shape, generator=generator) for shape in ((150, 144), (150, 40), (40, 144)))
    x[0] *= 300  # a massive first token
    x = ops.block_quantize(x, block_size)
    *dy, dy_t, dy_t_scale = ops.block_quantize_both(dy, block_size)
    *w, w_t, w_t_scale = ops.block_quantize_both(w, size)
    products = {
        "y": (*x, *w, block_size),
        "dx": (*dy, w_t, w_t_scale, block_size),
        "dw": (dy_t, dy_t_scale, *ops.block_transpose(*x, block_size), over_tokens),
    }
    for a, a_scale, b, b_scale, blocks in products.values():
        operands = tuple(t.to(place) for t in (a, a_scale, b, b_scale))
        exact, error = exact_product(*operands, None, blocks)
        got, _ = run(*operands, None, blocks, torch.float32)
        assert_float_close(got, exact, error)
        if blocks in BLOCK_SIZES:  # not a size of operands alone
            got, scale = run(*operands, None, blocks, torch.int8)
            assert_blocks_close(got, scale, exact, error, blocks)


def test_a_block_is_summed_exactly(run, place):
    """Sums within a block are INT32: these, with scales of one, do not fit into 16-bit floats."""
    a = torch.full((2, 128), 127, dtype=torch.int8, device=place)
    b = torch.tensor([[127] * 128, [127] * 127 + [126]], dtype=torch.int8, device=place)
    one = torch.ones(1, 1, device=place)
    got, _ = run(a, one, b, one, None, 128, torch.float32)
    assert got.tolist() == [[127 * 127 * 128, 127 * 127 * 128 - 127]] * 2


def test_padding_does_not_affect_scales(run, place):
    """Rows past the last one count as zeros, although a tile adds the bias to them."""
    a = torch.zeros(3, 32, dtype=torch.int8, device=place)
    b = torch.ones(40, 32, dtype=torch.int8, device=place)
    bias = torch.full((40,), 5.0, device=place)
    bias[32:] = 1e-3
    ones = torch.ones(1, 1, device=place), torch.ones(2, 1, device=place)
    q, scale = run(a, ones[0], b, ones[1], bias, 32, torch.int8)
    torch.testing.assert_close(scale.cpu(), torch.tensor([[5 / 127, 1e-3 / 127]]))
    assert (q == 127).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("height", [1, 32])
def test_nan_and_infinity_stay_in_the_rows_that_share_the_scale(run, place, height, bad):
    """With blocks of 128 columns; the scales of an int8 result in other rows of the tile stay finite too."""
    a, a_scale, b, b_scale, bias = make_case(place, (96, 160), 40, (height, 128))
    a_scale[64 // height, 1] = bad
    hit = torch.zeros(96, dtype=torch.bool)
    hit[64 : 64 + height] = True
    got, _ = run(a, a_scale, b, b_scale, bias, (height, 128), torch.float32)
    assert not got.cpu()[hit].isfinite().any()
    assert got.cpu()[~hit].isfinite().all()
    _, scale = run(a, a_scale, b, b_scale, bias, (height, 128), torch.int8)
    assert torch.equal(scale.isfinite().all(1).cpu(), ~hit[::height])


def test_a_nan_scale_of_b_reaches_its_32_columns_only(run, place):
    """A scale of b belongs to 32 rows, whatever the blocks of a."""
    a, a_scale, b, b_scale, bias = make_case(place, (9, 160), 100, (1, 128))
    b_scale[1, 0] = float("nan")
    got, _ = run(a, a_scale, b, b_scale, bias, (1, 128), torch.float32)
    assert got[:, 32:64].isnan().all()
    assert got[:, :32].isfinite().all()
    assert got[:, 64:].isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_reach_the_rows_of_their_block_only(run, place, bad):
    a, a_scale, b, b_scale, bias = make_case(place, (96, 64), 64, 32)
    a_scale[1, 0] = bad
    got, _ = run(a, a_scale, b, b_scale, bias, 32, torch.float32)
    assert not got[32:64].isfinite().any()
    assert got[:32].isfinite().all()
    assert got[64:].isfinite().all()
    _, scale = run(a, a_scale, b, b_scale, bias, 32, torch.int8)
    assert not scale[1].isfinite().any()
    assert scale[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize(("rows", "n", "k"), [(0, 4, 8), (4, 0, 8), (4, 5, 0)])
def test_empty(run, place, rows, n, k, dtype):
    a, b = (torch.zeros(size, k, dtype=torch.int8, device=place) for size in (rows, n))
    scales = [torch.ones(-(-size // 32), -(-k // 32), device=place) for size in (rows, n)]
    bias = torch.ones(n, device=place)
    got, scale = run(a, scales[0], b, scales[1], bias, 32, dtype)
    assert got.shape == (rows, n)
    real = got.float() * (scale[:1, :1] if dtype == torch.int8 and got.numel() else 1)
    torch.testing.assert_close(real, torch.ones(rows, n, device=place))


def test_operands_that_are_not_contiguous(run, place):
    a, a_scale, b, b_scale, bias = make_case(place, (64, 96), 32, 32)
    expected, _ = run(a, a_scale, b, b_scale, bias, 32, torch.float32)
    got, _ = run(a.t().contiguous().t(), a_scale.t().contiguous().t(), b, b_scale, bias, 32, torch.float32)
    assert torch.equal(got, expected)


def test_results_repeat_bit_for_bit(run, place):
    operands = make_case(place, (130, 300), 70, 64)
    first, second = (run(*operands, 64, torch.float32)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("block_size", [32, (1, 128)])
def test_opcheck(block_size, out_dtype):
    operands = make_case(torch.device("cpu"), (2, 20, 40), 33, block_size)
    # No autograd test: the operator has no gradient.
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    opcheck(torch.ops.qframework.block_linear.default, (*operands, block_size, out_dtype), test_utils=tests)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("block_size", [32, (1, 128)])
def test_compiles_without_graph_breaks(fresh_dynamo, block_size, out_dtype):
    operands = make_case(torch.device("cpu"), (20, 40), 33, block_size)

    def fn(*operands):
        return block_linear(*operands, block_size, out_dtype)

    for got, expected in zip(torch.compile(fn, fullgraph=True)(*operands), fn(*operands), strict=True):
        assert torch.equal(got, expected)


def test_a_bias_that_requires_a_gradient_is_refused():
    a, a_scale, b, b_scale, bias = make_case(torch.device("cpu"), (4, 8), 5, 32)
    expected, _ = block_linear(a, a_scale, b, b_scale, bias, block_size=32)
    bias.requires_grad_()
    with pytest.raises(QFrameworkError, match=r"bias must not require a gradient.*Int8Linear"):
        block_linear(a, a_scale, b, b_scale, bias, block_size=32)
    with torch.no_grad():
        assert torch.equal(block_linear(a, a_scale, b, b_scale, bias, block_size=32)[0], expected)


ERRORS = [
    (
        UnsupportedError,
        {"block_size": 48},
        r"block_size must be one of 32, 64, 128, \(32, 128\), \(1, 128\), \(1, 256\), got 48",
    ),
    (UnsupportedError, {"a": torch.zeros(4, 8, dtype=torch.int32)}, "a must have dtype int8, got torch.int32"),
    (
        UnsupportedError,
        {"b_scale": torch.ones(1, 1, dtype=torch.float16)},
        "b's scale must have dtype float32, got torch.float16",
    ),
    (QFrameworkError, {"a_scale": torch.ones(1)}, r"a's scale must have shape \(1, 1\) for .*, got \(1,\)"),
    (
        QFrameworkError,
        {"b": torch.zeros(5, 9, dtype=torch.int8)},
        r"a and b must have shapes \(..., K\) and \(N, K\), got \(4, 8\) and \(5, 9\)",
    ),
    (QFrameworkError, {"bias": torch.zeros(4)}, r"bias must have shape \(5,\), got \(4,\)"),
    (UnsupportedError, {"bias": torch.zeros(5, dtype=torch.int8)}, "bias must have dtype .*, got torch.int8"),
    (
        UnsupportedError,
        {"block_size": (32, 256), "out_dtype": torch.int8},
        r"block_size must be one of .*, got \(32, 256\)",
    ),
    (UnsupportedError, {"out_dtype": torch.float64}, "out_dtype must be float32, .* or int8, got torch.float64"),
    (
        QFrameworkError,
        {"b": torch.zeros(5, 8, dtype=torch.int8, device="meta"), "b_scale": torch.ones(1, 1, device="meta")},
        "b must be on .*, got meta",
    ),
]


@pytest.mark.parametrize(("kind", "wrong", "message"), ERRORS)
def test_errors(kind, wrong, message):
    names = ("a", "a_scale", "b", "b_scale", "bias")
    arguments = dict(zip(names, make_case(torch.device("cpu"), (4, 8), 5, 32), strict=True))
    with pytest.raises(kind, match=message):
        block_linear(**({"block_size": 32} | arguments | wrong))


MISFITS = [
    ("a", (2, 2), (1, 128), r"a's scale must have shape \(40, 2\) .* in blocks of \(1, 128\), got \(2, 2\)"),
    ("a", (40, 2), (32, 128), r"a's scale must have shape \(2, 2\) .* in blocks of \(32, 128\), got \(40, 2\)"),
    ("b", (70, 2), (1, 128), r"b's scale must have shape \(3, 2\) .* in blocks of \(32, 128\), got \(70, 2\)"),
    ("b", (1, 2), (32, 128), r"b's scale must have shape \(3, 2\) .* in blocks of \(32, 128\), got \(1, 2\)"),
    ("b", (3, 2), 128, r"b's scale must have shape \(1, 2\) for b \(70, 200\) in blocks of 128, got \(3, 2\)"),
]


@pytest.mark.parametrize(("operand", "shape", "block_size", "message"), MISFITS)
def test_scale_errors_name_the_blocks_of_their_operand(operand, shape, block_size, message):
    """The blocks of b differ from those of a."""
    names = ("a", "a_scale", "b", "b_scale", "bias")
    arguments = dict(zip(names, make_case(torch.device("cpu"), (40, 200), 70, block_size), strict=True))
    block_linear(**arguments, block_size=block_size)
    with pytest.raises(QFrameworkError, match=message):
        block_linear(**(arguments | {f"{operand}_scale": torch.ones(shape)}), block_size=block_size)
