"""block_linear on every implementation, against an FP64 oracle that shares no code with it."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from oracle import UNIT, assert_float_close, numpy64
from torch.library import opcheck

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.blocks.linear import launch as block_linear_launch
from qframework.kernels.blocks.linear.arguments import BlockLinearArguments
from qframework.kernels.blocks.linear.block_linear import BLOCK_LINEAR, block_linear
from qframework.kernels.blocks.linear.hopper import HAS_GLUON
from qframework.kernels.blocks.linear.launch import block_linear_triton
from qframework.kernels.blocks.linear.tiles import COOPERATIVE, SINGLE, BlockTile, Choice
from qframework.kernels.runtime.replay import replayed

BLOCK_SIZES = (32, 64, 128, (32, 128), (1, 128))
SHAPES = [
    ((70, 200), 50),  # tails everywhere
    ((1, 1), 1),
    ((2, 3, 17), 129),  # one past a block; leading dimensions
    ((128, 256), 64),  # whole blocks
    ((33, 300), 1),
]


@pytest.fixture
def run(implementation):
    return {"cpu": torch.ops.qframework.block_linear, "triton": BLOCK_LINEAR.cuda}[implementation]


def blocks_of(block_size):
    """Rows and columns of a's and the result's blocks, then of b's: written out, not asked of the package."""
    if isinstance(block_size, int):
        return (block_size, block_size), (block_size, block_size)
    return tuple(block_size), (32, 128)


def make_case(place, shape, n, block_size, spread=4.0):
    """Full-range operands, a row of zeros, and scales that differ by up to ``e^(2 spread)`` from block to block."""
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

    A block's sum is scaled by a product of scales: three roundings. The sum over n blocks has n more, the bias one; a
    CPU sums up columns one by one, each of whose factors was rounded once.
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
    """Scales of the result's own blocks, and values within half a step of the product."""
    *operands, added = make_case(place, shape, n, block_size)
    added = added if bias else None
    got, scale = run(*operands, added, block_size, torch.int8)
    exact, error = exact_product(*operands, added, block_size)
    assert_blocks_close(got, scale, exact, error, block_size)


def assert_blocks_close(got, scale, exact, error, block_size):
    """Scales of the blocks' own magnitudes, and values within half a step of ``exact``, each within ``error``."""
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


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_three_products_of_training(run, place, block_size):
    """Y, dX and dW, the transposes by the operators that make them; of dW a and the result are in b's blocks too."""
    generator = torch.Generator().manual_seed(5)
    of_b = blocks_of(block_size)[1]
    size = of_b[0] if of_b[0] == of_b[1] else of_b
    ops = torch.ops.qframework
    x, dy, w = (torch.randn(shape, generator=generator) for shape in ((150, 144), (150, 40), (40, 144)))
    x[0] *= 300  # a massive first token
    x = ops.block_quantize(x, block_size)
    *dy, dy_t, dy_t_scale = ops.block_quantize_both(dy, block_size)
    *w, w_t, w_t_scale = ops.block_quantize_both(w, size)
    products = {
        "y": (*x, *w, block_size),
        "dx": (*dy, w_t, w_t_scale, block_size),
        "dw": (dy_t, dy_t_scale, *ops.block_transpose(*x, block_size), size),
    }
    for a, a_scale, b, b_scale, blocks in products.values():
        operands = tuple(t.to(place) for t in (a, a_scale, b, b_scale))
        exact, error = exact_product(*operands, None, blocks)
        got, _ = run(*operands, None, blocks, torch.float32)
        assert_float_close(got, exact, error)
        got, scale = run(*operands, None, blocks, torch.int8)
        assert_blocks_close(got, scale, exact, error, blocks)


def test_a_block_is_summed_exactly(run, place):
    """INT32 within a block: sums that 16-bit floats could not hold, with scales of one."""
    a = torch.full((2, 128), 127, dtype=torch.int8, device=place)
    b = torch.tensor([[127] * 128, [127] * 127 + [126]], dtype=torch.int8, device=place)
    one = torch.ones(1, 1, device=place)
    got, _ = run(a, one, b, one, None, 128, torch.float32)
    assert got.tolist() == [[127 * 127 * 128, 127 * 127 * 128 - 127]] * 2


def test_padding_is_no_part_of_a_scale(run, place):
    """Beyond the last row lies nothing: not the bias either, though a tile computes it there."""
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
def test_what_is_not_finite_stays_in_its_rows(run, place, height, bad):
    """Blocks of 128 columns: the rows that share the scale, neither others nor, in int8, others of their tile."""
    a, a_scale, b, b_scale, bias = make_case(place, (96, 160), 40, (height, 128))
    a_scale[64 // height, 1] = bad
    hit = torch.zeros(96, dtype=torch.bool)
    hit[64 : 64 + height] = True
    got, _ = run(a, a_scale, b, b_scale, bias, (height, 128), torch.float32)
    assert not got.cpu()[hit].isfinite().any()
    assert got.cpu()[~hit].isfinite().all()
    _, scale = run(a, a_scale, b, b_scale, bias, (height, 128), torch.int8)
    assert torch.equal(scale.isfinite().all(1).cpu(), ~hit[::height])


def test_a_scale_of_b_that_is_not_finite_reaches_its_columns(run, place):
    """Of b a scale belongs to 32 rows, whatever the rows of a's blocks."""
    a, a_scale, b, b_scale, bias = make_case(place, (9, 160), 100, (1, 128))
    b_scale[1, 0] = float("nan")
    got, _ = run(a, a_scale, b, b_scale, bias, (1, 128), torch.float32)
    assert got[:, 32:64].isnan().all()
    assert got[:, :32].isfinite().all()
    assert got[:, 64:].isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(run, place, bad):
    """It reaches the rows of its block, and no other."""
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


TILES = {
    "descriptors": BlockTile(32, 64, 4, 1, tma=True, group_m=1),
    "rows shorter than a block": BlockTile(32, 128, 4, 1),
}


@pytest.mark.interpreter
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("block_size", [64, 128, (32, 128), (1, 128)])
@pytest.mark.parametrize("parts", [1, 2])
def test_every_tile(tile, block_size, parts):
    """Tiles smaller and larger than blocks; K in parts, the last of them shorter."""
    check_tile(TILES[tile], parts, block_size, (150, 5 * 64 + 16), 130, torch.float32)


@pytest.mark.interpreter
@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("block_size", [(32, 128), (1, 128)])
@pytest.mark.parametrize("rows", [3, 197])
def test_whole_blocks_in_tiles_of_fewer_rows(rows, block_size, tma):
    """Int8 results of blocks with fewer than 128 rows, in the tile for few rows."""
    tile = BlockTile(64, 128, 4, 1, tma=tma, group_m=1)
    check_tile(tile, 1, block_size, (rows, 272), 144, torch.int8)


SPECIALIZED = {"cooperative": COOPERATIVE, "single": SINGLE}


SPECIALIZED_CASES = [
    (rows, n, k, parts, out_dtype)
    for rows, n, k, parts in [(130, 144, 32, 1), (1, 16, 48, 1), (600, 400, 1552, 1), (1300, 528, 4096, 1)]
    for out_dtype in (torch.float32, torch.bfloat16, torch.int8)
] + [
    (150, 130, 2048, 1, torch.bfloat16),
    (150, 130, 2048, 3, torch.float32),
    (600, 1, 1552, 1, torch.float32),
    (197, 144, 768, 1, torch.float16),
    (150, 130, 640, 4, torch.float32),  # of blocks of 128 columns, the last part has none
]


@pytest.mark.gpu
@pytest.mark.parametrize("tile", SPECIALIZED)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize(("rows", "n", "k", "parts", "out_dtype"), SPECIALIZED_CASES)
def test_specialized_tiles(monkeypatch, tile, block_size, rows, n, k, parts, out_dtype):
    """Many rounds of stages, partial tiles everywhere, more tiles than the two programs or four that run."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("compiled for Hopper only")
    monkeypatch.setattr(block_linear_launch, "chip_of", lambda _: ((9, 0), 2))
    check_tile(SPECIALIZED[tile][blocks_of(block_size)[0][1]], parts, block_size, (rows, k), n, out_dtype)


def check_tile(tile, parts, block_size, shape, n, out_dtype):
    """``tile`` for whatever comes, with K in so many parts; twice, for the second launch goes past Triton."""
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    *operands, bias = make_case(place, shape, n, block_size, spread=0.5)
    for _ in range(2):
        arguments = BlockLinearArguments(*operands, bias, block_size, out_dtype)
        got, scale = block_linear_triton(arguments, Choice(tile, parts))
        if out_dtype == torch.int8:
            assert_blocks_close(got, scale, *exact_product(*operands, bias, block_size), block_size)
        else:
            assert_float_close(got, *exact_product(*operands, bias, block_size))


def test_operands_that_are_not_contiguous(run, place):
    a, a_scale, b, b_scale, bias = make_case(place, (64, 96), 32, 32)
    expected, _ = run(a, a_scale, b, b_scale, bias, 32, torch.float32)
    got, _ = run(a.t().contiguous().t(), a_scale.t().contiguous().t(), b, b_scale, bias, 32, torch.float32)
    assert torch.equal(got, expected)


class OfOnes:
    """A kernel that writes ones wherever its result is to be; ``launches`` says with what, tensors as weak references.

    ``result``: the result's place among the arguments.
    """

    def __init__(self, result):
        self.result = result
        self.launches = []

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            arguments[self.result].fill_(1)
            self.launches.append((grid, constants, [seen(x) for x in arguments]))

        return run


def seen(argument):
    if isinstance(argument, torch.Tensor):
        return weakref.ref(argument)
    if hasattr(argument, "base"):  # a tensor descriptor
        return weakref.ref(argument.base), list(argument.shape), list(argument.block_shape)
    return argument


POINTERS = BlockTile(128, 128, 8, 3)
DESCRIPTORS = BlockTile(32, 64, 4, 1, tma=True, group_m=1)


@pytest.fixture
def kernel(monkeypatch):
    """The kernel for every chip, as far as its launches go; the tile is ``POINTERS``, whatever the problem."""
    kernel = OfOnes(result=5)
    monkeypatch.setattr(block_linear_launch, "check_device", lambda _: None)
    monkeypatch.setattr(block_linear_launch, "choice_for", lambda *_: Choice(POINTERS, 1))
    monkeypatch.setattr(block_linear_launch, "_block_linear_kernel", kernel)
    return kernel


@pytest.fixture
def asked(kernel, monkeypatch):
    """What tiles were chosen for: device, sizes, block size, whether by descriptors, whether results are in blocks."""
    asked = []
    monkeypatch.setattr(block_linear_launch, "choice_for", lambda *given: asked.append(given) or Choice(POINTERS, 1))
    return asked


def cases(count, shape=(130, 256), n=96, block_size=128):
    return [make_case(torch.device("cpu"), shape, n, block_size) for _ in range(count)]


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("tile", [POINTERS, DESCRIPTORS], ids=["pointers", "descriptors"])
def test_a_replayed_call_launches_the_same_without_checks_and_choices(kernel, monkeypatch, tile, parts):
    monkeypatch.setattr(block_linear_launch, "choice_for", lambda *_: Choice(tile, parts))
    run = replayed(BLOCK_LINEAR.cuda)
    *others, third = cases(3)
    for operands in others:
        run(*operands, 128, torch.bfloat16)
    for owner, name in ((BlockLinearArguments, "check"), (block_linear_launch, "choice_for")):
        monkeypatch.setattr(owner, name, None)
    out, scale = run(*third, 128, torch.bfloat16)
    (_, *_, written), (_, *_, replayed_launch) = kernel.launches[0], kernel.launches[2]
    assert kernel.launches[0][:2] == kernel.launches[2][:2]
    assert [x for x in replayed_launch if type(x) is int] == [x for x in written if type(x) is int]
    a_scale, b_scale, a, b, bias, result, _, *sizes = replayed_launch
    if tile.tma:
        (a, *of_a), (b, *of_b) = a, b
        assert (of_a, of_b) == ([[130, 256], [32, 128]], [[96, 256], [64, 128]])
    for passed, expected in zip((a, a_scale, b, b_scale, bias), third, strict=True):
        assert passed() is expected
    assert sizes == [130, 96, 256, 2 // parts]
    assert (out.shape, out.dtype, scale.shape) == ((130, 96), torch.bfloat16, (0, 0))
    if parts == 1:
        assert result() is out
        assert (out == 1).all()
    else:  # ones of both parts, and the bias, which no part may add by itself
        assert not kernel.launches[2][1]["HAS_BIAS"]
        assert torch.equal(out, (2 + third[4]).bfloat16().expand(130, 96))


@pytest.mark.skipif(not HAS_GLUON, reason="no Gluon")
@pytest.mark.parametrize(
    ("tile", "parts", "out_dtype", "programs"),
    [
        (COOPERATIVE[128], 1, torch.bfloat16, 2),
        (COOPERATIVE[128], 1, torch.float32, 2),
        (COOPERATIVE[128], 2, torch.bfloat16, 3),
        (SINGLE[128], 1, torch.int8, 4),
        (SINGLE[128], 2, torch.bfloat16, 6),
    ],
)
def test_launches_of_the_kernel_for_hopper(kernel, monkeypatch, tile, parts, out_dtype, programs):
    """As many programs as run at a time, here on 3 processors; float32 is stored without a descriptor."""
    monkeypatch.setattr(block_linear_launch.specialized, "kernel", hopper := OfOnes(result=6))
    monkeypatch.setattr(block_linear_launch, "chip_of", lambda _: ((9, 0), 3))
    ((a, a_scale, b, b_scale, bias),) = cases(1, (200, 256), 144)
    arguments = BlockLinearArguments(a, a_scale, b, b_scale, bias, 128, out_dtype)
    out, _ = block_linear_triton(arguments, Choice(tile, parts))
    ((grid, constants, launched),) = hopper.launches
    assert grid == (programs, 1, 1)
    by_tma = parts == 1 and out_dtype != torch.float32
    assert (constants["TMA_STORE"], constants["HAS_BIAS"]) == (by_tma, parts == 1)
    assert launched[2][1:] == ([200, 256], [tile.block_m, 128])
    assert launched[3][1:] == ([144, 256], [128, 128])
    assert launched[5] == ((launched[6], [200, 144], [64, 128]) if by_tma else launched[3])
    assert launched[8:] == [200, 144, 256, 2 // parts, parts]
    if parts == 1:
        assert (out == 1).all()
    else:
        assert torch.equal(out, (2 + bias).to(out_dtype).expand(200, 144))
    assert not kernel.launches


def test_calls_that_differ_are_recorded_apart(kernel):
    a, a_scale, b, b_scale, bias = make_case(torch.device("cpu"), (4, 64), 32, 32)
    calls = [
        (a, a_scale, b, b_scale, bias, 32, torch.float16),
        (a, a_scale, b, b_scale, bias, 32, torch.int8),
        (a, a_scale, b, b_scale, None, 32, torch.float16),
        (a, a_scale, b, b_scale, bias.half(), 32, torch.float16),
        (a, a_scale[:, :1].contiguous(), b, b_scale[:, :1].contiguous(), bias, (32, 128), torch.float16),
        (a, a_scale[:, :1].contiguous(), b, b_scale[:, :1].contiguous(), bias, 64, torch.float16),
        (a.view(2, 2, 64), a_scale, b, b_scale, bias, 32, torch.float16),
    ]
    run = replayed(BLOCK_LINEAR.cuda)
    for count, call in enumerate(calls, 1):
        written, *_, again = (run(*call) for _ in range(3))
        assert [(x.shape, x.dtype) for x in again] == [(x.shape, x.dtype) for x in written]
        assert kernel.launches[-1][:2] == kernel.launches[-3][:2]
        assert len(run.replays) == count
    assert all(map(callable, run.replays.values()))


@pytest.mark.parametrize(("one", "same"), [(128, [128, 128]), ((1, 128), [1, 128]), ((32, 128), [32, 128])])
def test_ways_to_write_a_block_size_are_one(kernel, asked, one, same):
    """The dispatcher turns sizes into lists."""
    (operands,) = cases(1, block_size=one)
    for block_size in (one, same):
        BLOCK_LINEAR.cuda(*operands, block_size, torch.bfloat16)
    assert [block_size for _, _, _, _, block_size, *_ in asked] == [one, one]
    for _, constants, _ in kernel.launches:
        assert (constants["BLOCK"], constants["BLOCK_B"]) == blocks_of(one)


def test_operands_that_begin_elsewhere_are_recorded_apart(asked):
    """Triton compiles in whether a pointer is a multiple of 16; descriptors need it."""
    a, a_scale, b, b_scale, bias = make_case(torch.device("cpu"), (4, 64), 32, 32)
    shifted = torch.empty(33)[1:].copy_(bias)
    elsewhere = torch.empty(257, dtype=torch.int8)[1:].view(4, 64).copy_(a)
    run = replayed(BLOCK_LINEAR.cuda)
    for left, added in ((a, bias), (a, shifted), (elsewhere, bias)):
        for _ in range(3):
            run(left, a_scale, b, b_scale, added, 32, torch.float32)
    assert [by_descriptors for *_, by_descriptors, _ in asked] == [True, True, True, True, False, False]
    assert len(run.replays) == 3


@pytest.mark.parametrize(
    ("k", "n", "out_dtype", "by_descriptors"),
    [
        (64, 33, torch.float32, True),
        (72, 32, torch.float32, False),  # rows of the operands begin anywhere
        (64, 33, torch.int8, False),  # rows of the result do
        (64, 48, torch.int8, True),
    ],
)
def test_descriptors_need_rows_that_begin_at_multiples_of_16(asked, k, n, out_dtype, by_descriptors):
    ((*operands,),) = cases(1, (4, k), n, 32)
    BLOCK_LINEAR.cuda(*operands, 32, out_dtype)
    assert asked == [(torch.device("cpu"), 4, n, k, 32, by_descriptors, out_dtype == torch.int8)]


@pytest.mark.parametrize("tile", [POINTERS, DESCRIPTORS], ids=["pointers", "descriptors"])
def test_no_operand_and_no_result_is_kept_alive(kernel, monkeypatch, tile):
    monkeypatch.setattr(block_linear_launch, "choice_for", lambda *_: Choice(tile, 2))
    run = replayed(BLOCK_LINEAR.cuda)
    for operands in cases(3):
        alive = [weakref.ref(x) for x in (*operands, *run(*operands, 128, torch.float32))]
    assert callable(*run.replays.values())
    del operands
    gc.collect()
    assert [x() for x in alive] == [None] * 7


def test_one_bit_apart_nowhere(run, place):
    """The same call gives the same bits."""
    operands = make_case(place, (130, 300), 70, 64)
    first, second = (run(*operands, 64, torch.float32)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("block_size", [32, (1, 128)])
def test_opcheck(block_size, out_dtype):
    operands = make_case(torch.device("cpu"), (2, 20, 40), 33, block_size)
    # No autograd test: it has no gradient, and says so.
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    opcheck(torch.ops.qframework.block_linear.default, (*operands, block_size, out_dtype), test_utils=tests)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("block_size", [32, (1, 128)])
def test_compiles_whole(fresh_dynamo, block_size, out_dtype):
    operands = make_case(torch.device("cpu"), (20, 40), 33, block_size)

    def fn(*operands):
        return block_linear(*operands, block_size, out_dtype)

    for got, expected in zip(torch.compile(fn, fullgraph=True)(*operands), fn(*operands), strict=True):
        assert torch.equal(got, expected)


def test_has_no_gradient_of_its_own():
    a, a_scale, b, b_scale, bias = make_case(torch.device("cpu"), (4, 8), 5, 32)
    expected, _ = block_linear(a, a_scale, b, b_scale, bias)
    bias.requires_grad_()
    with pytest.raises(QFrameworkError, match=r"bias must not require a gradient.*Int8Linear"):
        block_linear(a, a_scale, b, b_scale, bias)
    with torch.no_grad():
        assert torch.equal(block_linear(a, a_scale, b, b_scale, bias)[0], expected)


ERRORS = {
    r"size=48 is unsupported; accepted: 32, 64, 128, \(32, 128\), \(1, 128\)": (UnsupportedError, {"block_size": 48}),
    "a must have dtype int8, got torch.int32": (UnsupportedError, {"a": torch.zeros(4, 8, dtype=torch.int32)}),
    "b's scale must have dtype float32": (UnsupportedError, {"b_scale": torch.ones(1, 1, dtype=torch.float16)}),
    r"a's scale has shape \(1,\)": (QFrameworkError, {"a_scale": torch.ones(1)}),
    r"a \(4, 8\) and b \(5, 9\) do not fit": (QFrameworkError, {"b": torch.zeros(5, 9, dtype=torch.int8)}),
    r"bias has shape \(4,\); accepted: \(5,\)": (QFrameworkError, {"bias": torch.zeros(4)}),
    "bias must have dtype .*, got torch.int8": (UnsupportedError, {"bias": torch.zeros(5, dtype=torch.int8)}),
    "out_dtype=torch.float64; accepted": (UnsupportedError, {"out_dtype": torch.float64}),
    "b must be on .*, got meta": (QFrameworkError, {"b": torch.zeros(5, 8, dtype=torch.int8, device="meta"),
                                       "b_scale": torch.ones(1, 1, device="meta")}),
}  # fmt: skip


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message):
    names = ("a", "a_scale", "b", "b_scale", "bias")
    arguments = dict(zip(names, make_case(torch.device("cpu"), (4, 8), 5, 32), strict=True))
    kind, wrong = ERRORS[message]
    with pytest.raises(kind, match=message):
        block_linear(**(arguments | wrong))


MISFITS = [
    ("a", (2, 2), (1, 128), r"a's scale has shape \(2, 2\); a \(40, 200\) in blocks of \(1, 128\) needs \(40, 2\)"),
    ("a", (40, 2), (32, 128), r"a's scale has shape \(40, 2\); a \(40, 200\) in blocks of \(32, 128\) needs \(2, 2\)"),
    ("b", (70, 2), (1, 128), r"b's scale has shape \(70, 2\); b \(70, 200\) in blocks of \(32, 128\) needs \(3, 2\)"),
    ("b", (1, 2), (32, 128), r"b's scale has shape \(1, 2\); b \(70, 200\) in blocks of \(32, 128\) needs \(3, 2\)"),
    ("b", (3, 2), 128, r"b's scale has shape \(3, 2\); b \(70, 200\) in blocks of 128 needs \(1, 2\)"),
]


@pytest.mark.parametrize(("operand", "shape", "block_size", "message"), MISFITS)
def test_scales_of_other_blocks(operand, shape, block_size, message):
    """The message names the blocks of the operand: those of b are not those of a."""
    names = ("a", "a_scale", "b", "b_scale", "bias")
    arguments = dict(zip(names, make_case(torch.device("cpu"), (40, 200), 70, block_size), strict=True))
    block_linear(**arguments, block_size=block_size)
    with pytest.raises(QFrameworkError, match=message):
        block_linear(**(arguments | {f"{operand}_scale": torch.ones(shape)}), block_size=block_size)
