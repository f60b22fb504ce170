"""block_linear_sum on every implementation, against an FP64 oracle that shares no code with it, and its launches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from block_linear_oracle import BLOCK_SIZES, assert_blocks_close, exact_product, make_case, spread
from oracle import assert_float_close, numpy64
from test_block_linear_launch import OfOnes
from torch.library import opcheck

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.blocks.format import block_shape
from qframework.kernels.blocks.linear import launch as block_linear_launch
from qframework.kernels.blocks.linear.arguments import BlockLinearSumArguments
from qframework.kernels.blocks.linear.block_linear import BLOCK_LINEAR_SUM, block_linear_sum
from qframework.kernels.blocks.linear.hopper import HAS_GLUON
from qframework.kernels.blocks.linear.launch import block_linear_sum_triton
from qframework.kernels.blocks.linear.tiles import COOPERATIVE, SINGLE, BlockTile
from qframework.kernels.runtime.replay import replayed

SHAPES = [
    ((70,), 50, (200, 40)),  # leading dimensions of a, columns of the result, inner sizes
    ((2, 3), 129, (17, 300, 256)),
    ((128,), 64, (256, 256, 256)),
    ((33,), 1, (1, 130)),
    ((5,), 48, (64,)),
]


@pytest.fixture
def run(implementation):
    return {"cpu": torch.ops.qframework.block_linear_sum, "triton": BLOCK_LINEAR_SUM.cuda}[implementation]


def make_pairs(place, rows, n, inner, block_size, spread=4.0):
    """Operands of each product, all different: four tensors for every inner size."""
    cases = [make_case(place, (*rows, k), n, block_size, spread)[:4] for k in inner]
    return [x.roll(i, 0) if x.ndim > 1 else x for i, case in enumerate(cases) for x in case]


def exact_sum(operands, block_size):
    """The FP64 sum, and the largest error of float32 sums over the blocks of all products in any order."""
    pairs = [operands[i : i + 4] for i in range(0, len(operands), 4)]
    results = [exact_product(*pair, None, block_size) for pair in pairs]
    inner = [pair[0].shape[-1] for pair in pairs]
    longer = (sum(inner) + 4 + len(inner)) * np.array([1 / (k + 4) for k in inner])
    return sum(y for y, _ in results), sum(factor * error for factor, (_, error) in zip(longer, results, strict=True))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize(("rows", "n", "inner"), SHAPES)
def test_sums(run, place, rows, n, inner, block_size):
    operands = make_pairs(place, rows, n, inner, block_size)
    exact, error = exact_sum(operands, block_size)
    got, scale = run(operands, block_size, torch.float32)
    assert scale.shape == (0, 0)
    assert_float_close(got, exact, error)
    assert_blocks_close(*run(operands, block_size, torch.int8), exact, error, block_size)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit(run, place, dtype):
    operands = make_pairs(place, (70,), 50, (200, 130), (1, 128), spread=0.5)
    got, _ = run(operands, (1, 128), dtype)
    assert got.dtype == dtype
    assert_float_close(got, *exact_sum(operands, (1, 128)))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_rounding_once_is_more_accurate_than_adding_rounded_products(run, place, block_size):
    """The gradient of q, k and v's input: three products that are rounded, added and rounded twice more."""
    generator = torch.Generator().manual_seed(3)
    ops = torch.ops.qframework
    size = block_size if isinstance(block_size, int) else (32, block_size[1])
    operands = []
    for k in (256, 256, 512):
        a, b = torch.randn(160, k, generator=generator), torch.randn(256, k, generator=generator)
        operands += [*ops.block_quantize(a, block_size), *ops.block_quantize(b, size)]
    exact, _ = exact_sum(operands, block_size)
    added = ops.block_linear(*operands[:4], None, block_size, torch.int8)
    for i in (4, 8):
        product = ops.block_linear(*operands[i : i + 4], None, block_size, torch.int8)
        *added, _ = ops.block_add(*added, *product, block_size)
    joined = run([x.to(place) for x in operands], block_size, torch.int8)

    def error(q, scale):
        return np.linalg.norm(numpy64(q) * spread(scale, q.shape, block_shape(block_size)) - exact)

    assert error(*joined) < 0.7 * error(*added)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("pair", [0, 1, 2])
def test_nan_and_infinity_of_any_pair_stay_in_their_rows(run, place, pair, bad):
    operands = make_pairs(place, (96,), 40, (160, 128, 32), (32, 128))
    operands[4 * pair + 1][1, 0] = bad
    got, _ = run(operands, (32, 128), torch.float32)
    assert not got[32:64].isfinite().any()
    assert got[:32].isfinite().all()
    assert got[64:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize(("rows", "n", "inner"), [(0, 4, (8, 8)), (4, 0, (8, 8)), (4, 5, (0, 0)), (4, 5, (0, 8))])
def test_empty(run, place, rows, n, inner, dtype):
    operands = []
    for k in inner:
        a, b = (torch.ones(size, k, dtype=torch.int8, device=place) for size in (rows, n))
        scales = [torch.ones(-(-size // 32), -(-k // 32), device=place) for size in (rows, n)]
        operands += [a, scales[0], b, scales[1]]
    got, scale = run(operands, 32, dtype)
    real = got.float() * (scale[:1, :1] if dtype == torch.int8 and got.numel() else 1)
    torch.testing.assert_close(real, torch.full((rows, n), float(sum(inner)), device=place))


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.int8])
def test_opcheck(out_dtype):
    operands = make_pairs(torch.device("cpu"), (2, 20), 33, (40, 17), (1, 128))
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    opcheck(torch.ops.qframework.block_linear_sum.default, (operands, (1, 128), out_dtype), test_utils=tests)


def test_compiles_without_graph_breaks(fresh_dynamo):
    operands = make_pairs(torch.device("cpu"), (20,), 33, (40, 17), 32)

    def fn(*operands):
        return block_linear_sum(operands[:4], operands[4:], block_size=32, out_dtype=torch.int8)

    for got, expected in zip(torch.compile(fn, fullgraph=True)(*operands), fn(*operands), strict=True):
        assert torch.equal(got, expected)


def test_errors():
    a, a_scale, b, b_scale, *others = make_pairs(torch.device("cpu"), (4,), 5, (8, 16), 32)
    pair = a, a_scale, b, b_scale
    with pytest.raises(QFrameworkError, match=r"of 1 to 3 pairs, got 0 tensors"):
        BLOCK_LINEAR_SUM.cpu([], 32, torch.int8)
    with pytest.raises(QFrameworkError, match=r"of 1 to 3 pairs, got 16 tensors"):
        block_linear_sum(*[pair] * 4, block_size=32)
    with pytest.raises(QFrameworkError, match=r"of 1 to 3 pairs, got 7 tensors"):
        block_linear_sum(pair, others[:3], block_size=32)
    with pytest.raises(QFrameworkError, match=r"block_linear_sum: a and b must have shapes"):
        block_linear_sum(pair, (a, a_scale, others[2], others[3]), block_size=32)
    with pytest.raises(QFrameworkError, match=r"shape of the first, \(4, 5\), got a \(4, 8\) and b \(4, 8\)"):
        block_linear_sum(pair, (a, a_scale, b[:4], b_scale), block_size=32)
    with pytest.raises(UnsupportedError, match=r"block_linear_sum: block_size must be one of .*, got \(32, 256\)"):
        block_linear_sum(pair, pair, block_size=(32, 256))


@pytest.mark.interpreter
@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.int8])
def test_tiles_of_fewer_rows(out_dtype, tma):
    check_tile(BlockTile(64, 128, 4, 1, tma=tma, group_m=1), (1, 128), (197,), 144, (272, 64, 128), out_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tile", "block_size"),
    [(tiles[size[1]], size) for tiles in (COOPERATIVE, SINGLE) for size in [(1, 128), (32, 128)]]
    + [(COOPERATIVE[256], (1, 256)), (COOPERATIVE[128], 128), (SINGLE[64], 64), (SINGLE[32], 32)],
)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(
    ("rows", "n", "inner"), [(1300, 528, (4096, 1024, 1024)), (600, 400, (1552, 1552)), (1, 16, (48, 16, 32))]
)
def test_specialized_tiles(monkeypatch, tile, block_size, rows, n, inner, out_dtype):
    """Many rounds of stages, incomplete tiles, and more tiles than the two or four programs that run."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("compiled for Hopper only")
    monkeypatch.setattr(block_linear_launch, "chip_of", lambda _: ((9, 0), 2))
    check_tile(tile, block_size, (rows,), n, inner, out_dtype)


def check_tile(tile, block_size, rows, n, inner, out_dtype):
    """Compare two calls with ``tile``: the second launch skips Triton's argument binding."""
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    operands = make_pairs(place, rows, n, inner, block_size, spread=0.5)
    exact, error = exact_sum(operands, block_size)
    for _ in range(2):
        got, scale = block_linear_sum_triton(BlockLinearSumArguments(operands, block_size, out_dtype), tile)
        if out_dtype == torch.int8:
            assert_blocks_close(got, scale, exact, error, block_size)
        else:
            assert_float_close(got, exact, error)


@pytest.mark.skipif(not HAS_GLUON, reason="no Gluon")
@pytest.mark.parametrize(("count", "inner"), [(2, [256, 128, 256]), (3, [256, 128, 64])])
def test_launches_and_replays_of_the_kernel_for_hopper(monkeypatch, count, inner):
    """Where there is no third pair, the first takes its place in the launch; the kernel does not read it."""
    monkeypatch.setattr(block_linear_launch, "check_device", lambda _: None)
    monkeypatch.setattr(block_linear_launch, "_tile_of_sum", lambda _: COOPERATIVE[128])
    monkeypatch.setattr(block_linear_launch.specialized, "sum_kernel", hopper := OfOnes(result=13))
    monkeypatch.setattr(block_linear_launch, "chip_of", lambda _: ((9, 0), 3))
    run = replayed(BLOCK_LINEAR_SUM.cuda)
    kept = [make_pairs(torch.device("cpu"), (200,), 144, inner[:count], (1, 128)) for _ in range(3)]
    results = [run(operands, (1, 128), torch.int8) for operands in kept]
    for operands, (out, out_scale), (grid, constants, launched) in zip(kept, results, hopper.launches, strict=True):
        assert grid == (2, 1, 1)
        form = constants["FORM"]
        assert (form.pairs, form.tma_store, form.early) == (count, True, True)
        operands = operands + operands[: 12 - len(operands)]
        for i in range(0, 12, 4):
            a, a_scale, b, b_scale = operands[i : i + 4]
            assert launched[i]() is a_scale
            assert launched[i + 1]() is b_scale
            (left, *of_a), (right, *of_b) = launched[i + 2 : i + 4]
            assert left() is a
            assert right() is b
            assert (of_a, of_b) == ([[200, a.shape[1]], [256, 128]], [[144, a.shape[1]], [128, 128]])
        assert launched[12][1:] == ([200, 144], [64, 128])
        assert launched[13]() is out
        assert launched[14]() is out_scale
        assert launched[15:] == [200, 144, *inner, 2]
    assert callable(*run.replays.values())
