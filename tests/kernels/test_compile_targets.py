"""Every kernel compiles for every supported chip without a GPU, uses INT8 tensor cores, and keeps its registers.

Spills are read from the compiled binary, the stack frame by cuobjdump.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch

from qframework.kernels import int8_linear as _public  # noqa: F401  (registers the operators)
from qframework.kernels.linear import hopper as specialized
from qframework.kernels.linear import hopper_gated
from qframework.kernels.linear import tiles as int8_linear_tiles
from qframework.kernels.linear.epilogue import EpilogueForm
from qframework.kernels.linear.launch import epilogue_of, tile_constants
from qframework.kernels.linear.quantize_weights import _TILE, _quantize_weights_kernel
from qframework.kernels.linear.tile import (
    COOPERATIVE,
    FLAT_160,
    FLAT_192,
    PINGPONG,
    THIRDS,
    WIDE,
    WIDE_160,
    WIDE_192,
    Tile,
)
from qframework.kernels.linear.tile_candidates import candidates
from qframework.kernels.linear.tiles import GATED, choose_tile
from qframework.kernels.linear.triton import _int8_linear_kernel
from qframework.kernels.quantize import _dynamic_quantize_kernel, _quantize_kernel
from qframework.kernels.runtime.launch import OPTIONS, tile_of_rows
from qframework.kernels.runtime.triton import HAS_TRITON, INTERPRET
from qframework.kernels.transpose import _transpose_rows_kernel

pytestmark = pytest.mark.skipif(INTERPRET or not HAS_TRITON, reason="interpreted kernels cannot be compiled")

if HAS_TRITON and not INTERPRET:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

CHIPS = {
    "sm_80": (("cuda", 80, 32), (8, 0), r"mma\.sync\S*s32\.s8\.s8"),
    "sm_89": (("cuda", 89, 32), (8, 9), r"mma\.sync\S*s32\.s8\.s8"),
    "sm_90": (("cuda", 90, 32), (9, 0), r"wgmma\.mma_async\S*s32\.s8\.s8"),
    # Triton 3.6 knows no tcgen05 for INT8 and takes the older instruction, which the chip still has.
    "sm_100": (("cuda", 100, 32), (10, 0), r"tcgen05\.mma\S*kind::i8|mma\.sync\S*s32\.s8\.s8"),
    "sm_120": (("cuda", 120, 32), (12, 0), r"mma\.sync\S*s32\.s8\.s8"),
}
MAX_STACK = 32  # bytes a thread may spill: eight registers, once, after the loop over K
MULTIPROCESSORS = 108
FP16 = EpilogueForm("row", b_per_channel=True, activation="none", has_bias=True)
EPILOGUES = {
    "fp16": FP16,
    "residual": FP16._replace(has_residual=True),
    "gelu_int8": FP16._replace(activation="gelu", out_scale="tensor"),
    "gelu_fp16": FP16._replace(activation="gelu"),
    "qkv_int8": FP16._replace(out_scale="channel"),
    "silu": FP16._replace(activation="silu"),
    "gelu_tanh": FP16._replace(activation="gelu_tanh", has_residual=True),
    "gelu_zero_point": FP16._replace(activation="gelu", out_scale="tensor", zero_point=True),
    "zero_points": FP16._replace(out_scale="channel", zero_point=True),
}
LARGE, SMALL = (50432, 3072, 768), (197, 768, 768)


OVERLAPPING = ("sm_90", "sm_100", "sm_120")  # chips on which a kernel begins while the one before it still runs
MEMORY = r"\b(?:ld|st|red|atom|prefetch)(?:\.\w+)*\.global|cp\.async"


def compile_for(chip, kernel, types, constants, multiples=("K", "C"), strides=True, **options):
    """Compile a kernel with pointers, strides and those sizes multiples of 16 that nearly always are."""
    constants = constants | {"OVERLAP": chip in OVERLAPPING}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = [n for n in names if n.endswith("_ptr") or n in multiples or (strides and n.startswith("stride"))]
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        kernel,
        signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned if name in types},
    )
    compiled = triton.compile(source, target=GPUTarget(*CHIPS[chip][0]), options=options | OPTIONS)
    check_waits_first(chip, compiled)
    assert not stored_floats(compiled.asm.get("ptx", ""))
    assert not overwritten_barriers(compiled.asm.get("ptx", ""))
    return compiled


_LAST_WRONG_PTX = (9, 0)  # the version of PTX that ptxas 13.0 takes; with Triton 3.9 a newer one compiles for sm_100


def stored_floats(ptx: str) -> set[str]:
    """Registers whose lowest byte is stored to shared memory, and which a float operation writes, maybe via moves.

    ptxas 12.8 to 13.0 stores the float converted to an integer instead (F2IP.U8.F32), against PTX's specification;
    that of 13.4 does not.
    """
    version = re.search(r"^\.version (\d+)\.(\d+)", ptx, re.MULTILINE)
    if version is not None and tuple(map(int, version.groups())) > _LAST_WRONG_PTX:
        return set()
    written = {register for _, register in re.findall(r"(\w+)(?:\.\w+)*\.f32 \t?(%\w+),", ptx)}
    moves = re.findall(r"mov\.b32 \t?(%\w+), (%\w+);", ptx)
    for register, source in moves:
        written |= {register} if source in written else set()
    return written & set(re.findall(r"st\.shared(?:::cta)?\.[bsu]8\s+\[[^\]]*\], \{?\s*(%\w+)", ptx))


def test_stored_floats_are_found():
    store = "st.shared.b8 \t[%r21+16384], %r3;"
    assert stored_floats("add.f32 \t%r3, %r2, 0f4B400000;\n" + store) == {"%r3"}
    assert stored_floats("add.rn.f32 \t%f3, %f2, %f1;\nmov.b32 \t%r3, %f3;\n" + store) == {"%r3"}
    assert not stored_floats("add.f32 \t%r2, %r1, 0f4B400080;\nxor.b32 \t%r3, %r2, 128;\n" + store)
    assert not stored_floats("add.f32 \t%r3, %r2, 0f4B400000;\nst.shared.b32 \t[%r21], %r3;")
    for version, found in (("8.7", {"%r3"}), ("9.0", {"%r3"}), ("9.1", set())):
        assert stored_floats(f".version {version}\n.target sm_100a\nadd.f32 \t%r3, %r2, 0f4B400000;\n" + store) == found


def check_waits_first(chip, compiled):
    """Where it may begin before the kernel before it is done, nothing touches memory until that is done."""
    ptx = compiled.asm.get("ptx", "").replace("cp.async.bulk.prefetch.L2", "")  # reads nothing: L2 sees all writes
    assert ("griddepcontrol.wait" in ptx) == (chip in OVERLAPPING)
    if chip in OVERLAPPING:
        assert ptx.index("griddepcontrol.wait") < re.search(MEMORY, ptx).start()


def overwritten_barriers(ptx: str) -> set[int]:
    """Where other things are stored on top of barriers that were begun and not given up; bytes of shared memory.

    PTX forbids it. Triton's allocator does it where a barrier is begun and then not used.
    """
    added = {name: int(offset) for name, offset in re.findall(r"add\.[su]\d+ \t?(%\w+), %\w+, (\d+);", ptx)}

    def places(instruction: str) -> set[int]:
        found = re.findall(instruction + r"[^\[;]*\[\s*(%?\w+)\s*(?:\+\s*(\d+))?\s*\]", ptx)
        return {added.get(base, 0) + int(offset or 0) for base, offset in found}

    barriers = places(r"mbarrier\.init") - places(r"mbarrier\.inval")
    stores = places(r"st\.shared") | places("stmatrix")
    return {place for place in stores if any(barrier <= place < barrier + 8 for barrier in barriers)}


def test_stores_on_barriers_are_found():
    begun = "add.s32 \t%r2, %r1, 64;\n@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;\n"
    for store in ("st.shared.b32 \t[%r9+68], %r3;", "@%p2 st.shared.b32 [ %r2 + 4 ], %r3;"):
        assert overwritten_barriers(begun + store) == {68}
        assert not overwritten_barriers(f"{begun}mbarrier.inval.shared::cta.b64 [%r2];\n{store}")
    assert not overwritten_barriers(begun + "st.shared.b32 \t[%r9+72], %r3;\nld.shared.b32 \t%r3, [%r9+64];")


def stack_bytes(compiled, tmp_path: Path) -> int:
    """Bytes of registers spilled to memory by one thread."""
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"STACK:(\d+)", usage)
    assert found, usage
    return max(int(n) for n in found)


def serializes_wgmma(compiled, tmp_path: Path) -> bool:
    """Whether ptxas makes asynchronous products wait for each other, as where their registers are written meanwhile."""
    ptx = tmp_path / "kernel.ptx"
    ptx.write_text(compiled.asm["ptx"])
    command = [get_ptxas(90).path, "-arch=sm_90a", "-v", ptx, "-o", tmp_path / "again.cubin"]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "registers" in said.stderr, said.stderr
    return "serialized" in said.stderr


def epilogue_kind(epilogue: EpilogueForm) -> str:
    return epilogue_of(epilogue.activation, epilogue.has_residual, epilogue.out_scale != "none")


def compile_int8_linear(
    chip, tile: Tile, epilogue: EpilogueForm, per_row: bool, dtype: str = "fp16", single: bool = False
):
    """The kernel as its launcher has it compiled for floats of ``dtype`` around INT8."""
    out = dtype if epilogue.out_scale == "none" else "i8"
    pointers = {
        "a": "*i8",
        "a_scale": "*fp32",
        "b": "*i8",
        "b_scale": "*fp32",
        "bias": "*fp16",
        "residual": f"*{dtype}",
    }
    walk = "persistent" if tile.programs and not single else "grid"
    constants = {
        "EPILOGUE": epilogue._replace(a_scale="row" if per_row else "tensor"),
        **tile_constants(tile, tile.block_k, walk),
    }
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    sizes = dict.fromkeys(("M", "N", "K", "PA", "PO", "stride_am", "stride_bn", "stride_rm", "stride_om"), "i32")
    pointers |= {"out_scale": "*fp32", "zero_point": "*i32", "out": f"*{out}"}
    types = {f"{name}_ptr": kind for name, kind in pointers.items()}
    if tile.tma:
        types["a_ptr"] = f"tensordesc<i8[{tile.block_m}, {tile.block_k}]>"
        types["b_ptr"] = f"tensordesc<i8[{tile.block_n}, {tile.block_k}]>"
    if tile.tma_store:
        types["out_ptr"] = f"tensordesc<{out}[{tile.block_m}, {tile.block_n // tile.subtiles}]>"
    if tile.specialized:
        rows = specialized.rows_of_a(tile.block_m)
        width = specialized.width_of_block(tile.block_n)
        blocks = {"a": ("i8", rows, tile.block_k), "b": ("i8", width, tile.block_k)}
        types |= {f"{name}_desc": described(*block) for name, block in blocks.items()}
        block = (specialized.ROWS, width)
        types |= dict.fromkeys(("residual_desc", "out_desc"), described(out, *block))
        return compile_for(chip, specialized.kernel, types | sizes, constants, **options)
    return compile_for(chip, _int8_linear_kernel, types | sizes, constants, **options)


def described(kind: str, rows: int, columns: int) -> str:
    """The type of a Gluon descriptor of blocks."""
    dtype = {"i8": torch.int8, "fp16": torch.float16}[kind]
    return f"tensordesc<{kind}[{rows}, {columns}],{specialized.layout(rows, columns, dtype)!r}>"


@pytest.mark.sample(1 / 3)
@pytest.mark.parametrize("per_row", [False, True], ids=["per_tensor", "per_row"])
@pytest.mark.parametrize("shape", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("chip", CHIPS)
def test_int8_linear(chip, epilogue, shape, per_row, tmp_path):
    _, capability, instruction = CHIPS[chip]
    flags = EPILOGUES[epilogue]
    tile = choose_tile(*shape, capability, MULTIPROCESSORS, epilogue_kind(flags))
    compiled = compile_int8_linear(chip, tile, flags, per_row)
    assembly = compiled.asm["ptx"]
    assert re.search(instruction, assembly), f"no INT8 tensor-core instruction for {tile}"
    assert bool(re.search(r"cp\.async\.bulk\.tensor", assembly)) == tile.tma
    assert stack_bytes(compiled, tmp_path) <= MAX_STACK, tile
    available = {"sm_80": 163, "sm_90": 227, "sm_100": 227}.get(chip, 99) * 1024
    assert compiled.metadata.shared <= available // max(tile.programs, 1)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("shape", [LARGE, SMALL, (32768, 1280, 5120)])
def test_hopper_in_float32(epilogue, shape):
    """Twice the shared memory for the result, and for the residual: fewer programs at a time, but they run."""
    flags = EPILOGUES[epilogue]
    tile = choose_tile(*shape, (9, 0), MULTIPROCESSORS, epilogue_kind(flags), wide=True)
    assert compile_int8_linear("sm_90", tile, flags, True, "fp32").metadata.shared <= 227 * 1024


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_hopper_without_descriptors(epilogue, tmp_path):
    """Operands that begin or step at other than multiples of 16 bytes."""
    flags = EPILOGUES[epilogue]
    tile = choose_tile(*LARGE, (9, 0), MULTIPROCESSORS, epilogue_kind(flags), tma=False)
    assert not tile.tma
    assert stack_bytes(compile_int8_linear("sm_90", tile, flags, True), tmp_path) <= MAX_STACK


SPECIALIZED = {
    "pingpong": PINGPONG,
    "cooperative": COOPERATIVE,
    "thirds": THIRDS,
    "wide": WIDE,
    "wide 160": WIDE_160,
    "wide 192": WIDE_192,
    "flat 160": FLAT_160,
    "flat 192": FLAT_192,
}


@pytest.mark.sample(1 / 4)
@pytest.mark.parametrize("single", [False, True], ids=["any number of tiles", "one tile"])
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("tile", SPECIALIZED.values(), ids=SPECIALIZED)
def test_specialized(tile, epilogue, single, tmp_path):
    """It multiplies asynchronously, never waits for the product it just began, and keeps its registers.

    Of one tile, the second warpgroup of a ping-pong has none.
    """
    if EPILOGUES[epilogue].has_residual and tile == COOPERATIVE:
        tile = tile._replace(num_stages=3)  # it needs room for the residual
    compiled = compile_int8_linear("sm_90", tile, EPILOGUES[epilogue], True, single=single)
    ptx = compiled.asm["ptx"]
    working = {64: 1, 192: 3}.get(tile.block_m, 1 if single and tile.specialized == "pingpong" else 2)
    accumulators = 1 if tile == THIRDS else 2
    steps = 2  # the first one, which adds to no registers, has its own products
    assert ptx.count("wgmma.mma_async") == steps * working * accumulators * 4, "for each accumulator, four products"
    left = 0 if tile == WIDE else accumulators  # the other warpgroup multiplies while this one waits for its rows
    assert ptx.count(f"wgmma.wait_group.sync.aligned {left}") == steps * working
    assert "setmaxnreg" in ptx
    assert compiled.metadata.shared <= 227 * 1024
    assert stack_bytes(compiled, tmp_path) <= MAX_STACK


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_halves_share_the_code_of_a_long_epilogue(activation):
    """The code of both warpgroups together must fit the cache of instructions; columns are read once, not by value."""
    epilogue = FP16._replace(activation=activation, out_scale="tensor")
    ptx = compile_int8_linear("sm_90", PINGPONG, epilogue, False).asm["ptx"]
    values = 64 * PINGPONG.block_n // 128  # of a half in each thread
    assert ptx.count("tanh.approx") == 2 * values
    assert len(re.findall(r"ld\.global", ptx)) <= 2 * 4, "scales and biases of columns, and scales of tensors"


@pytest.mark.parametrize("epilogue", ["residual", "gelu_tanh", "fp16"])
@pytest.mark.parametrize("shape", [(50432, 768, 3072), (32768, 1280, 5120), (50432, 640, 64)])
def test_hopper_where_its_tiles_are_largest(epilogue, shape, tmp_path):
    """A residual, also one behind an activation, has its room in shared memory; a short K loads past its end."""
    flags = EPILOGUES[epilogue]
    tile = choose_tile(*shape, (9, 0), 132, epilogue_kind(flags))
    assert tile.specialized
    compiled = compile_int8_linear("sm_90", tile, flags, True)
    assert compiled.metadata.shared <= 227 * 1024
    assert tile.block_k == 128, "the only one whose layout was run"


def measured_tiles() -> dict[str, tuple[Tile, str]]:
    rows = json.loads((Path(int8_linear_tiles.__file__).parent / "tiles_sm_90.json").read_text())["tiles"]
    flags = {"float": "fp16", "residual": "residual", "int8": "qkv_int8", "activation": "gelu_int8"}
    flags["activation_float"] = "gelu_fp16"
    found = {(Tile(**row["tile"]), flags[row["epilogue"]]) for row in rows}
    return {f"{'-'.join(str(value) for value in tile)} {epilogue}": (tile, epilogue) for tile, epilogue in found}


@pytest.mark.parametrize("name", sorted(measured_tiles()))
def test_measured_tiles(name):
    """Every tile of the table can run as often on a multiprocessor as it says."""
    tile, epilogue = measured_tiles()[name]
    compiled = compile_int8_linear("sm_90", tile, EPILOGUES[epilogue], epilogue == "fp16")
    assert "wgmma" in compiled.asm["ptx"] or tile.block_m < 64
    assert compiled.metadata.shared <= 227 * 1024 // max(tile.programs, 1)


ROOM = {"sm_80": 163, "sm_89": 99, "sm_100": 227, "sm_120": 99}  # KB of shared memory for a program


@pytest.mark.sample(1 / 4)
@pytest.mark.parametrize("place", range(12))
@pytest.mark.parametrize("chip", ROOM)
def test_candidates_fit_their_chips(chip, place, tmp_path):
    """What tune-kernels measures there compiles, fits and does not spill."""
    capability = CHIPS[chip][1]
    tiles = dict.fromkeys([*candidates(capability, 197), *candidates(capability, 50432)])
    for tile in list(tiles)[place::12]:
        compiled = compile_int8_linear(chip, tile, EPILOGUES["residual" if place % 2 else "gelu_int8"], False)
        assert compiled.metadata.shared <= ROOM[chip] * 1024
        assert stack_bytes(compiled, tmp_path) <= MAX_STACK


@pytest.mark.parametrize("m", [197, 50432])
def test_the_table_is_looked_up(m):
    tile = choose_tile(m, 768, 768, (9, 0), 132, "float")
    assert tile in [found for found, _ in measured_tiles().values()]
    assert choose_tile(m + 1, 768, 768, (9, 0), 132, "float") == tile, "rows are looked up by their power of two"
    assert not choose_tile(m, 768, 768, (9, 0), 132, "float", tma=False).tma


@pytest.mark.parametrize("columns", [64, 768, 8192, 10_000])
@pytest.mark.parametrize("chip", CHIPS)
def test_quantize(chip, columns, tmp_path):
    sizes = dict.fromkeys(("M", "C", "P", "stride_xm"), "i32")
    types = sizes | {"x_ptr": "*fp16", "scale_ptr": "*fp32", "zero_point_ptr": "*i32", "q_ptr": "*i8"}

    def compiled_for(kernel, most, **constants):
        block_m, block_c, warps = tile_of_rows(min(columns, most))
        blocks = {"BLOCK_M": block_m, "BLOCK_C": block_c}
        return compile_for(chip, kernel, types, constants | blocks, num_warps=warps)

    static = [compiled_for(_quantize_kernel, 2048, ZERO_POINT=given) for given in (False, True)]
    dynamic = compiled_for(_dynamic_quantize_kernel, 8192, MIN_SCALE=2.0**-60, WHOLE=columns <= 8192)
    for compiled in (*static, dynamic):
        assert stack_bytes(compiled, tmp_path) == 0


@pytest.mark.parametrize("chip", CHIPS)
def test_transpose_rows(chip, tmp_path):
    types = {"x_ptr": "*i8", "y_ptr": "*i8", "T": "i32", "C": "i32", "WIDTH": "i32"}
    compiled = compile_for(chip, _transpose_rows_kernel, types, {"BLOCK": 64}, num_warps=4)
    assert stack_bytes(compiled, tmp_path) == 0


@pytest.mark.parametrize("chip", CHIPS)
def test_quantize_weights(chip, tmp_path):
    names = [n for n in _quantize_weights_kernel.arg_names if not n.isupper()]
    types = {name: "*fp16" if name[0] == "w" else "i32" for name in names} | {
        "values_ptr": "*i8",
        "scales_ptr": "*fp32",
    }
    sizes = {name: _TILE[name] for name in ("BLOCK_N", "BLOCK_K")}
    constants = {"MIN_SCALE": 2.0**-60, "ALIGNMENT": 128, "EVEN_K": True, **sizes}
    compiled = compile_for(chip, _quantize_weights_kernel, types, constants, num_warps=_TILE["num_warps"])
    assert stack_bytes(compiled, tmp_path) == 0
    assert re.search(r"ld\.global\S*\.v4\.b32", compiled.asm["ptx"]), "rows are read 16 bytes at a time"


def test_a_spill_is_detected(tmp_path):
    """The measuring stick itself: a tile too large for its warps must show a stack frame."""
    tile = Tile(128, 256, 64, 4, 2)
    assert stack_bytes(compile_int8_linear("sm_80", tile, EPILOGUES["residual"], True), tmp_path) > 0


@pytest.mark.parametrize("m", [1, 197, 1576, 50432])
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_tiles_fill_the_chip(m, capability):
    tile = choose_tile(m, 768, 768, capability, MULTIPROCESSORS, "float")
    assert tile.block_k <= 768
    if m == 50432:
        assert tile.block_m == 128


@pytest.mark.sample(1 / 3)
@pytest.mark.parametrize("single", [False, True], ids=["any number of tiles", "one tile"])
@pytest.mark.parametrize("out", ["fp16", "i8"])
@pytest.mark.parametrize("activation", ["gelu", "silu"])
@pytest.mark.parametrize("tile", [*GATED, COOPERATIVE], ids=lambda tile: f"{tile.specialized} {tile.block_n}")
def test_gated(tile, activation, out, single, tmp_path):
    """Both halves of a product stay in registers, and the products of both warpgroups run beside their epilogues."""
    columns = tile.block_n // 2
    constants = {
        "EPILOGUE": FP16._replace(
            activation=activation, out_scale="tensor" if out == "i8" else "none", zero_point=out == "i8"
        ),
        **tile_constants(tile, tile.block_k, "grid" if single else "persistent", weights=2),
    }
    floats = ("a_scale", "gate_scale", "up_scale", "out_scale")
    types = {f"{name}_ptr": "*fp32" for name in floats} | dict.fromkeys(("gate_bias_ptr", "up_bias_ptr"), "*fp16")
    types |= {"zero_point_ptr": "*i32"} | dict.fromkeys(("M", "N", "K", "PA"), "i32")
    types |= {"a_desc": described("i8", tile.block_m, tile.block_k)}
    types |= dict.fromkeys(("gate_desc", "up_desc"), described("i8", columns, tile.block_k))
    types |= {"out_desc": described(out, specialized.ROWS, columns)}
    compiled = compile_for("sm_90", hopper_gated.kernel, types, constants, num_warps=4, num_stages=tile.num_stages)
    assert stack_bytes(compiled, tmp_path) <= MAX_STACK
    assert not serializes_wgmma(compiled, tmp_path)
    working = 1 if single and tile.specialized == "pingpong" else 2
    products = 2 * working * 2 * 4  # four for each accumulator, in the first step and in the others
    assert compiled.asm["ptx"].count("wgmma.mma_async") == products
    spread = working * 4 * columns // 16  # scales and biases, four at a time
    assert compiled.asm["ptx"].count("ld.shared") <= 1 + spread, "halves change no threads"
    assert compiled.metadata.shared <= 227 * 1024
