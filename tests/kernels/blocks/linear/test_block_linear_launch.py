"""Launches of block_linear: its tiles, and what a launch and a replayed call pass to the kernel."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from block_linear_oracle import BLOCK_SIZES, assert_blocks_close, blocks_of, exact_product, make_case
from oracle import assert_float_close

from qframework.kernels.blocks.format import block_shape
from qframework.kernels.blocks.linear import launch as block_linear_launch
from qframework.kernels.blocks.linear.arguments import BlockLinearArguments
from qframework.kernels.blocks.linear.block_linear import BLOCK_LINEAR
from qframework.kernels.blocks.linear.hopper import HAS_GLUON
from qframework.kernels.blocks.linear.launch import block_linear_triton
from qframework.kernels.blocks.linear.tiles import COOPERATIVE, SINGLE, BlockTile, Choice
from qframework.kernels.runtime.replay import replayed

TILES = {
    "descriptors": BlockTile(32, 64, 4, 1, tma=True, group_m=1),
    "rows shorter than a block": BlockTile(32, 128, 4, 1),
}


@pytest.mark.interpreter
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("block_size", [64, 128, (32, 128), (1, 128)])
@pytest.mark.parametrize("parts", [1, 2])
def test_tiles_smaller_and_larger_than_blocks(tile, block_size, parts):
    """Also with K in parts, the last of them shorter."""
    check_tile(TILES[tile], parts, block_size, (150, 5 * 64 + 16), 130, torch.float32)


@pytest.mark.interpreter
@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("block_size", [(32, 128), (1, 128)])
@pytest.mark.parametrize("rows", [3, 197])
def test_whole_blocks_in_tiles_of_fewer_rows(rows, block_size, tma):
    """Int8 results in blocks with fewer than 128 rows, with the tile for few rows."""
    tile = BlockTile(64, 128, 4, 1, tma=tma, group_m=1)
    check_tile(tile, 1, block_size, (rows, 272), 144, torch.int8)


SPECIALIZED = {
    (name, size): tiles[columns]
    for name, tiles in {"cooperative": COOPERATIVE, "single": SINGLE}.items()
    for size in [*BLOCK_SIZES, (32, 256)]
    for columns in [block_shape(size)[1]]
    if columns in tiles
}

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
@pytest.mark.parametrize(("tile", "block_size"), SPECIALIZED)
@pytest.mark.parametrize(("rows", "n", "k", "parts", "out_dtype"), SPECIALIZED_CASES)
def test_specialized_tiles(monkeypatch, tile, block_size, rows, n, k, parts, out_dtype):
    """Many rounds of stages, incomplete tiles, and more tiles than the two or four programs that run."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("compiled for Hopper only")
    monkeypatch.setattr(block_linear_launch, "chip_of", lambda _: ((9, 0), 2))
    if block_size == (32, 256) and out_dtype == torch.int8:
        out_dtype = torch.float16  # a size of operands alone
    check_tile(SPECIALIZED[tile, block_size], parts, block_size, (rows, k), n, out_dtype)


def check_tile(tile, parts, block_size, shape, n, out_dtype):
    """Compare two calls with ``tile`` and K in ``parts`` parts: the second launch skips Triton's argument binding."""
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    *operands, bias = make_case(place, shape, n, block_size, spread=0.5)
    for _ in range(2):
        arguments = BlockLinearArguments(*operands, bias, block_size, out_dtype)
        got, scale = block_linear_triton(arguments, Choice(tile, parts))
        if out_dtype == torch.int8:
            assert_blocks_close(got, scale, *exact_product(*operands, bias, block_size), block_size)
        else:
            assert_float_close(got, *exact_product(*operands, bias, block_size))


class OfOnes:
    """A kernel that fills its result with ones and records its launches, with tensors as weak references.

    ``result``: the index of the result among the arguments.
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
    """A fake of triton.py's kernel. The tile is always ``POINTERS``."""
    kernel = OfOnes(result=5)
    monkeypatch.setattr(block_linear_launch, "check_device", lambda _: None)
    monkeypatch.setattr(block_linear_launch, "choice_for", lambda *_: Choice(POINTERS, 1))
    monkeypatch.setattr(block_linear_launch, "_block_linear_kernel", kernel)
    return kernel


@pytest.fixture
def asked(kernel, monkeypatch):
    """Arguments of each choice of a tile: device, sizes, block size, descriptors or not, result in blocks or not."""
    asked = []
    monkeypatch.setattr(block_linear_launch, "choice_for", lambda *given: asked.append(given) or Choice(POINTERS, 1))
    return asked


def cases(count, shape=(130, 256), n=96, block_size=128):
    return [make_case(torch.device("cpu"), shape, n, block_size) for _ in range(count)]


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("tile", [POINTERS, DESCRIPTORS], ids=["pointers", "descriptors"])
def test_a_replayed_call_launches_the_same_kernel_without_checks_and_tile_choice(kernel, monkeypatch, tile, parts):
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
    else:  # the ones of both parts, and the bias, which neither part adds
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
    """Launches as many programs as run at a time, here on 3 processors; float32 is stored without a descriptor."""
    monkeypatch.setattr(block_linear_launch.specialized, "kernel", hopper := OfOnes(result=6))
    monkeypatch.setattr(block_linear_launch, "chip_of", lambda _: ((9, 0), 3))
    ((a, a_scale, b, b_scale, bias),) = cases(1, (200, 256), 144)
    arguments = BlockLinearArguments(a, a_scale, b, b_scale, bias, 128, out_dtype)
    out, _ = block_linear_triton(arguments, Choice(tile, parts))
    ((grid, constants, launched),) = hopper.launches
    assert grid == (programs, 1, 1)
    by_tma = parts == 1 and out_dtype != torch.float32
    form = constants["FORM"]
    assert (form.tma_store, form.has_bias) == (by_tma, parts == 1)
    assert launched[2][1:] == ([200, 256], [tile.block_m, 128])
    assert launched[3][1:] == ([144, 256], [128, 128])
    assert launched[5] == ((launched[6], [200, 144], [64, 128]) if by_tma else launched[3])
    assert launched[8:] == [200, 144, 256, 2 // parts, parts]
    if parts == 1:
        assert (out == 1).all()
    else:
        assert torch.equal(out, (2 + bias).to(out_dtype).expand(200, 144))
    assert not kernel.launches


def test_different_calls_are_recorded_separately(kernel):
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
def test_a_block_size_given_as_a_list_is_the_same(kernel, asked, one, same):
    """The dispatcher turns block sizes into lists."""
    (operands,) = cases(1, block_size=one)
    for block_size in (one, same):
        BLOCK_LINEAR.cuda(*operands, block_size, torch.bfloat16)
    assert [block_size for _, _, _, _, block_size, *_ in asked] == [one, one]
    for _, constants, _ in kernel.launches:
        assert (constants["BLOCK"], constants["BLOCK_B"]) == blocks_of(one)


def test_operands_of_other_alignment_are_recorded_separately(asked):
    """Triton specializes kernels on pointers being multiples of 16, which descriptors require."""
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
def test_replays_keep_no_operand_or_result_alive(kernel, monkeypatch, tile):
    monkeypatch.setattr(block_linear_launch, "choice_for", lambda *_: Choice(tile, 2))
    run = replayed(BLOCK_LINEAR.cuda)
    for operands in cases(3):
        alive = [weakref.ref(x) for x in (*operands, *run(*operands, 128, torch.float32))]
    assert callable(*run.replays.values())
    del operands
    gc.collect()
    assert [x() for x in alive] == [None] * 7
