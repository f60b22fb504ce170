"""The kernels between blocks compile for every supported chip without a GPU, within their registers."""

from __future__ import annotations

import importlib
import re
from types import SimpleNamespace

import pytest
import torch
from block_oracle import BLOCK_SIZES
from test_compile_targets import CHIPS, MAX_STACK, compile_for, stack_bytes

from qframework.kernels import block_quantize
from qframework.kernels.blocks import elementwise, statistics
from qframework.kernels.blocks import tiles as _block_operators
from qframework.kernels.blocks.dropout import values_in_a_thread
from qframework.kernels.blocks.format import block_shape
from qframework.kernels.blocks.gated_activation import backward_values
from qframework.kernels.blocks.statistics import in_fours, whole_rows
from qframework.kernels.blocks.tiles import FEW_VALUES, VALUES_PER_THREAD, rows_of_tile, tile_of
from qframework.kernels.runtime.triton import HAS_TRITON, INTERPRET

pytestmark = pytest.mark.skipif(INTERPRET or not HAS_TRITON, reason="interpreted kernels cannot be compiled")

COLUMNS = 8192
FLOATS = ("scale", "partial", "statistics", "weight", "bias", "mean", "rstd", "rows", "sums", "sum", "a", "b", "c")
NORM = {"HAS_WEIGHT": True}
GRADIENT = {"STRETCH": 256, "ADDS": False}
# Module, kernel and its flags.
KERNELS = {
    "gelu": ("activation", "_block_activation_kernel", {"KIND": "gelu"}),
    "gelu_tanh": ("activation", "_block_activation_kernel", {"KIND": "gelu_tanh"}),
    "silu": ("activation", "_block_activation_kernel", {"KIND": "silu"}),
    "gelu_backward": ("activation", "_block_activation_backward_kernel", {"KIND": "gelu"}),
    "silu_backward": ("activation", "_block_activation_backward_kernel", {"KIND": "silu"}),
    "swiglu": ("gated_activation", "_block_gated_activation_kernel", {"KIND": "silu"}),
    "swiglu_backward": ("gated_activation", "_block_gated_activation_backward_kernel", {"KIND": "silu"}),
    "geglu_backward": ("gated_activation", "_block_gated_activation_backward_kernel", {"KIND": "gelu"}),
    "add": ("elementwise", "_block_elementwise_kernel", {"PRODUCT": False, "STATISTICS": True, "FOURS": True}),
    "mul": ("elementwise", "_block_elementwise_kernel", {"PRODUCT": True, "STATISTICS": False, "FOURS": False}),
    "statistics": ("statistics", "_block_statistics_kernel", {"FOURS": True}),
    "merge": ("statistics", "_merge_statistics_kernel", {"ROWS": 32, "TILES": 32, "num_warps": 4}),
    "dropout": ("dropout", "_block_dropout_kernel", {}),
    "layer_norm": ("norm", "_block_norm_kernel", NORM | {"RMS": False, "HAS_BIAS": True}),
    "rms_norm": ("norm", "_block_norm_kernel", NORM | {"RMS": True, "HAS_BIAS": False}),
    "layer_norm_sums": ("norm_backward", "_norm_sums_kernel", NORM | {"RMS": False, "STRETCH": 256}),
    "rms_norm_sums": ("norm_backward", "_norm_sums_kernel", NORM | {"RMS": True, "STRETCH": 256}),
    "layer_norm_backward": ("norm_backward", "_norm_backward_kernel", NORM | GRADIENT | {"RMS": False}),
    "layer_norm_backward_and_add": (
        "norm_backward",
        "_norm_backward_kernel",
        NORM | GRADIENT | {"RMS": False, "ADDS": True},
    ),
    "rms_norm_backward_and_add": (
        "norm_backward",
        "_norm_backward_kernel",
        NORM | GRADIENT | {"RMS": True, "ADDS": True},
    ),
    "sum_rows": ("sum_rows", "_block_sum_rows_kernel", {"STRETCH": 256}),
    "add_up": ("sum_rows", "_add_up_kernel", {"SUMMED": 64, "num_warps": 4}),
}

SMALL = ("gelu", "gelu_tanh", "silu", "gelu_backward", "silu_backward", "swiglu", "add", "mul")  # of FEW_VALUES


def types_of(kernel, constants) -> dict[str, str]:
    """The Triton type of each argument that is not a constant, by its name."""
    types = {}
    for name in kernel.arg_names:
        if name.endswith("_ptr"):
            last = name.removesuffix("_ptr").split("_")[-1]
            kind = "*fp32" if last in (*FLOATS, "dweight", "dbias") else "*i8"
            types[name] = "*i64" if last == "seed" else kind
        elif name not in constants and name != "OVERLAP":
            types[name] = "fp32" if name in ("eps", "factor") else "i32"
    return types


def check(chip, name, block_size, tmp_path, columns=COLUMNS):
    module, attribute, flags = KERNELS[name]
    kernel = getattr(importlib.import_module(f"qframework.kernels.blocks.{module}"), attribute)
    walks = "stretch_origin" in kernel.src
    values = FEW_VALUES if name in SMALL else VALUES_PER_THREAD
    if "gated_activation_backward" in attribute:
        values = backward_values(block_size)
    if name == "dropout":
        values = values_in_a_thread(block_size)
    tile = rows_of_tile(columns, block_size) if walks else tile_of(COLUMNS, columns, block_size, values)
    if name == "statistics":
        tile = whole_rows(COLUMNS, columns, block_size)
    settings = tile | flags
    constants = {key: value for key, value in settings.items() if key in kernel.arg_names}
    options = {key: settings[key] for key in ("num_warps", "maxnreg") if key in settings}
    if chip.startswith("gfx"):
        options.pop("maxnreg", None)  # as in ``tile_of``
    compiled = compile_for(chip, kernel, types_of(kernel, constants), constants, **options)
    assert stack_bytes(compiled, tmp_path) <= (0 if chip == "sm_90" and not walks else MAX_STACK)
    assert compiled.metadata.shared <= 16 * 1024
    return compiled


@pytest.mark.sample(1 / 3)
@pytest.mark.parametrize("block_size", [32, (1, 128)])
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("chip", CHIPS)
def test_every_chip(chip, name, block_size, tmp_path):
    if block_size == 32 or name not in ("merge", "add_up"):  # which know nothing of blocks
        check(chip, name, block_size, tmp_path)


@pytest.mark.sample(1 / 3)
@pytest.mark.parametrize("block_size", [size for size in BLOCK_SIZES if size not in (32, (1, 128))])
@pytest.mark.parametrize("name", KERNELS)
def test_every_block_size(name, block_size, tmp_path):
    check("sm_90", name, block_size, tmp_path)


@pytest.mark.parametrize("block_size", [32, (1, 128)])
@pytest.mark.parametrize("columns", [COLUMNS, COLUMNS + 16])
@pytest.mark.parametrize("name", ["gelu", "swiglu_backward", "layer_norm", "layer_norm_sums"])
def test_values_are_read_sixteen_at_a_time(name, columns, block_size, tmp_path):
    """Loads are vectors of 16 bytes; a mask or layout that splits them would need several times the instructions."""
    ptx = check("sm_90", name, block_size, tmp_path, columns).asm["ptx"]
    assert "ld.global.v4.b32" in ptx
    assert "ld.global.b8" not in ptx
    assert "st.global.b8" not in ptx


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize(("name", "operands"), [("gelu", 1), ("gelu_backward", 2), ("add", 2), ("layer_norm", 1)])
def test_the_next_tile_is_prefetched_if_rows_share_a_scale(name, operands, block_size, tmp_path):
    """An instruction prefetches a sector of 32 bytes, so there is one per operand and 32 values of a thread."""
    ptx = check("sm_90", name, block_size, tmp_path).asm["ptx"]
    values = FEW_VALUES if name in SMALL else VALUES_PER_THREAD
    shared = block_shape(block_size)[0] > 1
    assert ptx.count("prefetch.global.L2") == (operands * values // 32 if shared else 0)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("name", ["gelu_backward", "layer_norm"])
def test_registers_are_limited_where_many_values_share_a_scale(name, block_size, tmp_path):
    """Elsewhere a limit is harmful: the compiler uses all registers up to it where 40 suffice."""
    ptx = check("sm_90", name, block_size, tmp_path).asm["ptx"]
    assert (".maxnreg 64" in ptx) == (name in SMALL and block_shape(block_size)[0] > 1)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_random_bits_are_computed_in_the_threads_that_use_them(block_size, tmp_path):
    """Shared memory holds only scales, at most 4 bytes per row and block: a tile of bits needs no layout conversion."""
    rows, columns = block_shape(block_size)
    compiled = check("sm_90", "dropout", block_size, tmp_path)
    assert compiled.metadata.shared <= 4 * max(rows, 32) * 256 // columns


@pytest.mark.parametrize(
    ("columns", "block_size", "tiles"), [(8192, 32, 17), (8192, 128, 5), (1024, 32, 132), (50, 32, 2112)]
)
def test_the_prefetched_tile_is_that_of_the_next_program(monkeypatch, columns, block_size, tiles):
    """132 multiprocessors run 32,768 values each, in rows of tiles; with 50 columns a tile is 64 wide."""
    monkeypatch.setattr(_block_operators, "chip_of", lambda _: ((9, 0), 132))
    like = SimpleNamespace(shape=(1 << 20, columns), device=torch.device("cuda", 0))
    tile = tile_of(*like.shape, block_size, FEW_VALUES)
    assert _block_operators.rows_ahead(like, tile) == tiles * tile["TILE_M"]


@pytest.mark.parametrize("name", ["gelu", "mul", "dropout", "layer_norm"])
def test_a_row_of_a_block_lies_in_eight_threads(name, tmp_path):
    """A thread holds 16 of its values: three shuffles reduce them, without shared memory."""
    compiled = check("sm_90", name, (1, 128), tmp_path)
    values = FEW_VALUES if name in SMALL else VALUES_PER_THREAD
    assert compiled.asm["ptx"].count("shfl.sync") == 3 * values // 16


@pytest.mark.parametrize("block_size", [32, (1, 128)])
@pytest.mark.parametrize("name", ["add", "mul", "dropout", "rms_norm", "layer_norm"])
def test_scales_need_no_division(name, block_size, tmp_path):
    """A division has a branch, which would keep all rows of a thread in registers until all are divided."""
    assert "div.rn" not in check("sm_90", name, block_size, tmp_path).asm["ptx"]


@pytest.mark.parametrize("name", ["gelu", "gelu_backward", "swiglu_backward", "dropout"])
def test_bytes_are_converted_without_conversion_instructions(name, tmp_path):
    assert not re.findall(r"cvt\.rn\.f32\.s(?:8|16|32)", check("sm_90", name, 32, tmp_path).asm["ptx"])


@pytest.mark.sample(1 / 3)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("columns", [16, 48, 272, COLUMNS])
@pytest.mark.parametrize("name", ["add", "statistics"])
def test_sums_of_four_are_of_neighbours(name, columns, block_size, tmp_path):
    """The instruction sums adjacent values of a thread, which must be adjacent in the tensor too."""
    ir = check("sm_90", name, block_size, tmp_path, columns).asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.blocked<.*)$", ir, re.MULTILINE))
    summed = re.findall(r"dp4a.*: tensor<\w+, (#\w+)> ->", ir)
    assert summed
    for layout in summed:
        assert "sizePerThread = [1, 16]" in layouts[layout]
        assert "order = [1, 0]" in layouts[layout]


@pytest.mark.parametrize("name", ["add", "statistics"])
def test_rows_that_begin_anywhere_are_summed_value_by_value(name, monkeypatch, tmp_path):
    module, kernel, flags = KERNELS[name]
    monkeypatch.setitem(KERNELS, name, (module, kernel, flags | {"FOURS": False}))
    assert "dp4a" not in check("sm_90", name, 32, tmp_path, 300).asm["ptx"]


@pytest.mark.parametrize(("columns", "fours"), [(300, False), (272, True)])
def test_launchers_check_whether_fours_are_neighbours(monkeypatch, columns, fours):
    said = []
    for module in (statistics, _block_operators):
        monkeypatch.setattr(module, "launch", lambda *_: lambda *_, **constants: said.append(constants.get("FOURS")))
    x, scale = block_quantize(torch.randn(40, columns), 32)
    statistics.row_statistics_triton(x, scale, 32)
    elementwise.BLOCK_ADD.cuda(x, scale, x, scale, 32, True)
    assert said == [fours, fours, None]  # the last merges


def test_fours_are_neighbours_if_rows_begin_at_multiples_of_16():
    x = torch.zeros(1 + 8 * 300, dtype=torch.int8)
    assert in_fours(x[:-1].view(-1, 48), x[: 4 * 16].view(4, 16))
    assert not in_fours(x[:-1].view(8, 300))
    assert not in_fours(x[: 4 * 16].view(4, 16), x[1 : 1 + 4 * 16].view(4, 16))


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu"])
def test_an_activation_is_one_tanh(name, tmp_path):
    """One instruction of the special function units per value; the only others are one reciprocal per block."""
    ptx = check("sm_90", name, 32, tmp_path).asm["ptx"]
    assert ptx.count("tanh.approx.f32") == FEW_VALUES
    assert "ex2.approx" not in ptx
