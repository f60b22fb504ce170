"""block_linear compiles for every supported chip without a GPU, uses INT8 tensor cores and keeps its registers."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from test_compile_targets import CHIPS, compile_for, stack_bytes

from qframework.kernels.blocks.format import BLOCK_SIZES, block_shape
from qframework.kernels.blocks.linear import hopper as specialized
from qframework.kernels.blocks.linear import tiles as block_linear_tiles
from qframework.kernels.blocks.linear.launch import (
    specialized_constants,
    specialized_options,
    sum_constants,
    tile_constants,
)
from qframework.kernels.blocks.linear.tiles import COOPERATIVE, SINGLE, STEP, choose_tile, parts_of
from qframework.kernels.blocks.linear.triton import _block_linear_kernel
from qframework.kernels.linear.hopper import layout
from qframework.kernels.runtime.triton import HAS_TRITON, INTERPRET

pytestmark = pytest.mark.skipif(INTERPRET or not HAS_TRITON, reason="interpreted kernels cannot be compiled")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "i8": torch.int8}
MAX_STACK = 32  # bytes a thread may spill: eight registers, once, after the loop over K
AVAILABLE = {"sm_80": 163, "sm_90": 227, "sm_100": 227}  # KB of shared memory; 99 elsewhere
POINTERS = {"a_scale_ptr": "*fp32", "b_scale_ptr": "*fp32", "bias_ptr": "*fp32", "out_scale_ptr": "*fp32"}


def compile_anywhere(chip, tile, block_size, out, k):
    types = POINTERS | {"a_ptr": "*i8", "b_ptr": "*i8", "out_ptr": f"*{out}"}
    types |= dict.fromkeys(("M", "N", "K", "DEPTH"), "i32")
    if tile.tma:
        columns = min(block_shape(block_size)[1], STEP)
        types["a_ptr"] = f"tensordesc<i8[{tile.block_m}, {columns}]>"
        types["b_ptr"] = f"tensordesc<i8[{tile.block_n}, {columns}]>"
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return compile_for(chip, _block_linear_kernel, types, tile_constants(tile, k, block_size, True), **options)


@pytest.mark.sample(1 / 3)
@pytest.mark.parametrize("m", [8192, 200], ids=["large", "small"])
@pytest.mark.parametrize("out", ["bf16", "i8"])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("chip", CHIPS)
def test_block_linear(monkeypatch, chip, block_size, out, m, tmp_path):
    _, capability, instruction = CHIPS[chip]
    monkeypatch.setattr(block_linear_tiles, "HAS_GLUON", False)
    tile = choose_tile(m, 4096, 1024, block_size, capability, 108, True, out == "i8")
    compiled = compile_anywhere(chip, tile, block_size, out, 1024)
    assembly = compiled.asm["ptx"]
    assert re.search(instruction, assembly), f"no INT8 tensor-core instruction for {tile}"
    assert bool(re.search(r"cp\.async\.bulk\.tensor", assembly)) == tile.tma
    assert stack_bytes(compiled, tmp_path) <= MAX_STACK, tile
    assert compiled.metadata.shared <= AVAILABLE.get(chip, 99) * 1024, tile


@pytest.mark.parametrize("out", ["bf16", "i8"])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_hopper_without_descriptors(block_size, out, tmp_path):
    """An inner size that is no multiple of 16."""
    tile = choose_tile(8192, 4096, 1000, block_size, (9, 0), 132, False, out == "i8")
    assert not tile.tma
    assert not tile.consumers
    assert stack_bytes(compile_anywhere("sm_90", tile, block_size, out, 1000), tmp_path) <= MAX_STACK


def compile_specialized(tile, block_size, out, bias=True, **known):
    by_tma = out != "fp32"
    types = POINTERS | {"out_ptr": f"*{out}"} | dict.fromkeys(("M", "N", "K", "STEPS", "PARTS"), "i32")
    columns = min(block_shape(block_size)[1], STEP)
    types["a_desc"] = described("i8", tile.block_m, columns)
    types["b_desc"] = described("i8", tile.block_n, columns)
    types["out_desc"] = described(out, specialized.ROWS, specialized.COLUMNS) if by_tma else types["b_desc"]
    constants = specialized_constants(tile, block_size, bias, by_tma) | known
    multiples = {"N", "K"} - known.keys()
    return compile_for("sm_90", specialized.kernel, types, constants, multiples, **specialized_options(tile))


def described(kind, rows, columns):
    return f"tensordesc<{kind}[{rows}, {columns}],{layout(rows, columns, DTYPES[kind])!r}>"


SPECIALIZED = [
    (tiles[columns], size)
    for tiles in (COOPERATIVE, SINGLE)
    for size in BLOCK_SIZES
    for columns in [block_shape(size)[1]]
    if columns in tiles
]


@pytest.mark.sample(1 / 3)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("out", DTYPES)
@pytest.mark.parametrize(("tile", "block_size"), SPECIALIZED)
def test_specialized(tile, block_size, out, bias, tmp_path):
    """Two halves a warpgroup, each product of 32 columns begun without a wait in between; registers are kept."""
    columns = block_shape(block_size)[1]
    compiled = compile_specialized(tile, block_size, out, bias)
    ptx = compiled.asm["ptx"]
    assert len(re.findall(r"wgmma\.mma_async\S*s32\.s8\.s8", ptx)) == tile.consumers * 2 * columns // 32
    assert ptx.count("wgmma.wait_group.sync.aligned 0") == tile.consumers * 2
    assert "setmaxnreg" in ptx
    assert stack_bytes(compiled, tmp_path) <= MAX_STACK
    # A multiprocessor has 228 KB, of which each program takes 1 KB for the system.
    assert (compiled.metadata.shared + 1024) * tile.programs <= 228 * 1024


@pytest.mark.sample(1 / 3)
@pytest.mark.parametrize("pairs", [2, 3])
@pytest.mark.parametrize("out", ["bf16", "i8"])
@pytest.mark.parametrize(
    ("tile", "block_size"), [(tile, size) for tile, size in SPECIALIZED if block_shape(size)[1] >= 128]
)
def test_sums_of_products(tile, block_size, out, pairs, tmp_path):
    """One loop over K for all pairs: a loop for each would spill sums in the loop."""
    columns = min(block_shape(block_size)[1], STEP)
    types = {"out_ptr": f"*{out}", "out_scale_ptr": "*fp32"}
    types |= dict.fromkeys(("M", "N", "K", "K2", "K3", "STEPS"), "i32")
    types["out_desc"] = described(out, specialized.ROWS, specialized.COLUMNS)
    for i in ("", "2", "3"):
        types |= {f"a{i}_scale_ptr": "*fp32", f"b{i}_scale_ptr": "*fp32"}
        types[f"a{i}_desc"] = described("i8", tile.block_m, columns)
        types[f"b{i}_desc"] = described("i8", tile.block_n, columns)
    constants = sum_constants(pairs, tile, block_size, True)
    multiples = ("N", "K", "K2", "K3")
    compiled = compile_for("sm_90", specialized.sum_kernel, types, constants, multiples, **specialized_options(tile))
    ptx = compiled.asm["ptx"]
    products = tile.consumers * 2 * block_shape(block_size)[1] // 32
    assert len(re.findall(r"wgmma\.mma_async\S*s32\.s8\.s8", ptx)) == products
    few_rows = block_size == (32, 128)  # their scales are what spills
    assert stack_bytes(compiled, tmp_path) <= (4 * MAX_STACK if few_rows else MAX_STACK)
    assert (compiled.metadata.shared + 1024) * tile.programs <= 228 * 1024


@pytest.mark.parametrize("out", ["fp32", "bf16"])
@pytest.mark.parametrize("block_size", [128, (1, 128), (1, 256)])
def test_one_column(block_size, out, tmp_path):
    """Triton compiles an argument that is 1 in."""
    compiled = compile_specialized(COOPERATIVE[block_shape(block_size)[1]], block_size, out, N=1)
    assert stack_bytes(compiled, tmp_path) <= MAX_STACK


@pytest.mark.parametrize("tiles", [COOPERATIVE, SINGLE], ids=["cooperative", "single"])
def test_two_instructions_an_element(tiles, tmp_path):
    """What a block costs the CUDA cores: a conversion and a multiply-add, the scales' product once a thread."""
    tile = tiles[32]
    ptx = compile_specialized(tile, 32, "fp32").asm["ptx"]
    elements = 2 * 64 * 128 // 128 * tile.consumers  # both halves, of a thread
    assert ptx.count("cvt.rn.f32.s32") == elements
    assert ptx.count("fma.rn.f32") == elements


@pytest.mark.parametrize(("block_size", "products"), [(128, 1), ((32, 128), 8), ((1, 128), 16)])
def test_scales_are_multiplied_once_for_many_elements(block_size, products):
    """A thread of a warpgroup has 4 rows and 4 groups of columns, of 128 x 128 elements: not a product for each."""
    ptx = compile_specialized(SINGLE[128], block_size, "fp32").asm["ptx"]
    assert len(re.findall(r"\bmul\.(rn\.)?f32", ptx)) == products


def test_rows_are_quantized_within_a_warp():
    """The largest magnitude of 4 rows of a thread, from 4 threads each: two shuffles a row, no shared memory."""
    int8, float32 = (compile_specialized(SINGLE[128], (1, 128), out).asm["ptx"] for out in ("i8", "fp32"))
    assert len(re.findall(r"\bshfl\.sync\.bfly", int8)) == 2 * 4
    assert int8.count("ld.shared") == float32.count("ld.shared")


@pytest.mark.skipif(not specialized.HAS_GLUON, reason="no Gluon")
def test_what_is_chosen_for_few_rows_in_a_block():
    """The columns of a block decide as they do for squares; int8 results need tiles of whole blocks alone."""
    for block_size in ((32, 128), (1, 128)):
        for case in [(8192, 1024, 1024), (8192, 4096, 16384), (1024, 1024, 16384), (197, 3072, 768)]:
            assert choose_tile(*case, block_size, (9, 0), 132, True, False) == choose_tile(
                *case, 128, (9, 0), 132, True, False
            )
        assert choose_tile(8192, 4096, 1024, block_size, (9, 0), 132, True, True) == COOPERATIVE[128]
        assert choose_tile(2048, 1024, 1024, block_size, (9, 0), 132, True, True) == SINGLE[128]
        few = choose_tile(197, 768, 768, block_size, (9, 0), 132, True, True)
        assert (few.consumers, few.block_m, few.block_n) == (0, 64, 128)
    assert choose_tile(197, 768, 768, 128, (9, 0), 132, True, True).block_m == 128


@pytest.mark.skipif(not specialized.HAS_GLUON, reason="no Gluon")
def test_what_is_chosen_on_hopper():
    """Blocks of 128 take the tile that reads least, unless processors stay idle; shorter ones two small programs."""

    def chosen(m, n, k, block_size=128, whole=False):
        return choose_tile(m, n, k, block_size, (9, 0), 132, True, whole)

    for m, n, k in [(8192, 1024, 1024), (8192, 4096, 16384), (50432, 3072, 768), (1024, 1024, 16384)]:
        assert chosen(m, n, k) == COOPERATIVE[128]
        assert chosen(m, n, k, 64) == SINGLE[64]
        assert chosen(m, n, k, 32) == SINGLE[32]
    assert chosen(2048, 1024, 1024, whole=True) == SINGLE[128]  # 128 tiles, where the large ones are 64
    assert chosen(2304, 1024, 1024, whole=True) == COOPERATIVE[128]  # 144 tiles: some processors had two programs
    assert chosen(40, 768, 768).consumers == 0
    assert chosen(512, 768, 768).consumers == 0
    assert choose_tile(8192, 4096, 4096, 128, (8, 0), 108, True, False).consumers == 0


def test_few_tiles_are_cut_along_their_inner_size():
    """A weight's gradient: parts that fill the chip, each of 1024 columns or more; a result in blocks stays whole."""
    tile = COOPERATIVE[128]
    assert parts_of(tile, 1024, 1024, 16384, 132, False) == 4
    assert parts_of(tile, 1024, 1024, 2048, 132, False) == 2
    assert parts_of(tile, 1024, 1024, 16384, 132, True) == 1
    assert parts_of(tile, 8192, 4096, 4096, 132, False) == 1


@pytest.mark.parametrize("out", ["bf16", "i8"])
def test_early_dequantizes_half_of_a_step_before_the_next_turn(out, tmp_path):
    """Its conversions lie between the wait for its product and that for the next turn, where the other group works."""
    compiled = compile_specialized(COOPERATIVE[128]._replace(early=True), (1, 128), out)
    steps = r"wgmma\.wait_group|mbarrier\.try_wait|cvt\.rn\.f32\.s32|wgmma\.mma_async"
    found = [name for name, _ in itertools.groupby(re.findall(steps, compiled.asm["ptx"]))]
    product = ["mbarrier.try_wait", "wgmma.mma_async", "wgmma.wait_group", "cvt.rn.f32.s32"]
    assert ",".join(found).count(",".join(2 * product)) == 2  # of a step: two halves, in each of two warpgroups
    assert stack_bytes(compiled, tmp_path) <= MAX_STACK
