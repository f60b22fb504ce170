"""The attention kernels, as they would be launched, compile for every supported chip and use its tensor cores.

The launchers run on CPU tensors with recorders in the kernels' place and the chip's own choices; what was recorded is
compiled. So types, constants, tiles and alignment are those of a real call.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch
from test_compile_targets import CHIPS, OVERLAPPING, check_waits_first, stack_bytes, stored_floats

from qframework.kernels.attention import (
    pipeline,
    quantize_qk,
    quantize_v,
    quantized_attention,
    row_bias,
    token_statistics,
)
from qframework.kernels.attention.hopper import packed_items as packed
from qframework.kernels.attention.hopper import prepare, prepare_packed, specialized
from qframework.kernels.attention.mixed import MIXED_ATTENTION
from qframework.kernels.attention.operands import Lengths
from qframework.kernels.attention.pipeline import SAGE_ATTENTION, SAGE_ATTENTION_VARLEN
from qframework.kernels.attention.tiles import choose_attention_tile
from qframework.kernels.attention.variants import VARIANTS, resolve
from qframework.kernels.runtime.launch import OPTIONS as LAUNCH_OPTIONS
from qframework.kernels.runtime.triton import HAS_TRITON, INTERPRET

pytestmark = pytest.mark.skipif(INTERPRET or not HAS_TRITON, reason="interpreted kernels cannot be compiled")

if HAS_TRITON and not INTERPRET:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

KERNELS = {
    "_quantized_attention_kernel": quantized_attention,
    "_attention_quantize_kernel": quantize_qk,
    "_packed_items_kernel": packed,
    "_packed_statistics_kernel": prepare_packed,
    "_prepare_kernel": prepare,
    "_prepare_packed_kernel": prepare_packed,
    "_statistics_kernel": prepare,
    "_value_quantize_kernel": quantize_v,
    "_block_statistics_kernel": token_statistics,
    "_row_bias_kernel": row_bias,
}
POINTERS = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int8: "*i8", torch.uint8: "*u8",
    torch.int32: "*i32", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages")
# FP8 multiplies as FP8 from sm_89 on; sm_80 multiplies its numbers in FP16.
HAS_FP8 = {"sm_89", "sm_90", "sm_100", "sm_120"}
FP8_PRODUCT = {
    "sm_89": r"mma\.sync\S*e4m3\.e4m3",
    "sm_90": r"wgmma\.mma_async\S*e4m3\.e4m3",
    "sm_100": r"tcgen05\.mma\S*kind::f8f6f4|mma\.sync\S*e4m3\.e4m3",
    "sm_120": r"mma\.sync\S*e4m3\.e4m3",
}
FP16_PRODUCT = {
    "sm_90": r"wgmma\.mma_async\S*\.f16\.f16",
    "sm_100": r"tcgen05\.mma\S*kind::f16|mma\.sync\S*\.f16\.f16",
}
# Bytes that a thread may spill once, behind the loop over keys. Blackwell's tiles and wide heads are not tuned yet.
MAX_STACK, WIDE_STACK = {"sm_100": 512, "sm_120": 128}, 384
SHARED_KIB = {"sm_80": 163, "sm_90": 227, "sm_100": 227}


class Launch(NamedTuple):
    """One recorded launch."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]


class Recorder:
    """Stands for a kernel and remembers how it was launched."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: Any):
        def record(*arguments: Any, **named: Any) -> None:
            options = {name: named.pop(name) for name in OPTIONS if name in named}
            values = dict(zip(self.kernel.arg_names, arguments, strict=False)) | named
            self.launches.append(Launch(self.kernel, values, options))

        return record


@pytest.fixture
def launches(monkeypatch):
    """``launches(chip, fn)``: what ``fn`` would launch there, by the kernel's name."""

    def run(chip: str, fn) -> dict[str, list[Launch]]:
        recorded: list[Launch] = []
        for name, module in KERNELS.items():
            monkeypatch.setattr(module, name, Recorder(getattr(module, name), recorded))
        capability = CHIPS[chip][1]
        monkeypatch.setattr(
            quantized_attention,
            "attention_tile",
            lambda device, *problem: choose_attention_tile(*problem, capability),
        )
        monkeypatch.setattr(quantize_v, "has_fp8", lambda device: chip in HAS_FP8)
        if hasattr(quantized_attention, "has_fp8"):
            monkeypatch.setattr(quantized_attention, "has_fp8", lambda device: chip in HAS_FP8)
        monkeypatch.setattr(pipeline, "capability_of", lambda device: capability)
        # the general kernel, which other calls take
        monkeypatch.setattr(specialized, "fits", lambda *call, **options: False)
        fn()
        monkeypatch.undo()
        by_name: dict[str, list[Launch]] = {}
        for launch in recorded:
            by_name.setdefault(launch.kernel.__name__, []).append(launch)
        return by_name

    return run


def compile_launch(chip: str, launch: Launch):
    """Compile as Triton would specialize the launch: integers of 1 constant, those that 16 divides aligned."""
    kernel, constants, signature, aligned = launch.kernel, {}, {}, []
    arguments = launch.arguments | {"OVERLAP": chip in OVERLAPPING}

    def specialize(path: tuple[int, ...], value: Any, constant: bool = False) -> Any:
        """The type of the argument at ``path``; of a tuple, the types of what it holds."""
        if constant or value is None or (isinstance(value, int) and value == 1):
            constants[path] = value
            return "constexpr"
        if isinstance(value, tuple):
            assert len(path) == 1, "Triton 3.6 loses constants of a group in a group"
            types = [specialize((*path, i), x) for i, x in enumerate(value)]
            return type(value)(*types) if hasattr(value, "_fields") else tuple(types)
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            aligned.append(path)
        if isinstance(value, torch.Tensor):
            return POINTERS[value.dtype]
        return "fp32" if isinstance(value, float) else "i32"

    for position, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        signature[name] = specialize((position,), arguments[name], parameter.is_constexpr)
    attributes = {path: [["tt.divisibility", 16]] for path in aligned}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget(*CHIPS[chip][0]), options=launch.options | LAUNCH_OPTIONS)
    check_waits_first(chip, compiled)
    assert not stored_floats(compiled.asm.get("ptx", ""))
    if sums_blocks_apart(launch):
        check_sums_start_at_zero(compiled)
    return compiled


def sums_blocks_apart(launch: Launch) -> bool:
    """Whether the sum over a block of keys must not start from the sum over those before: it has too few bits."""
    if "PRODUCT" not in launch.arguments:
        return False
    product, v = launch.arguments["PRODUCT"], launch.arguments["v"].data
    return product.accumulate_fp16 or (product.mode == "fp8" and v.dtype == torch.float8_e4m3fn)


def starts_of_products(ttgir: str) -> list[str]:
    """What each product of floats is added to: a constant's value, or "sum" where it is not constant."""
    constants = dict(re.findall(r"(%\w+) = arith\.constant (?:dense<)?([^\s>]+)", ttgir))
    added = r"(?:tt\.dot|warp_group_dot) %\S+, %\S+, (%\w+)|tc_gen5_mma %\S+, %\S+, %\S+, (%\w+)"  # the second: whether
    found = [re.search(added, line) for line in ttgir.splitlines() if "xi8" not in line]
    return [constants.get(match[1] or match[2], "sum") for match in found if match]


def starts_of_fp8_sums(ptx: str) -> set[str]:
    """What ``mma.sync`` adds FP8 products to: "zero", "products" (the sum of others) or "other"."""
    values: dict[str, str] = {}
    found = set()
    for line in ptx.splitlines():
        if match := re.search(r"mma\.sync\S*e4m3\.e4m3\S* \{(.*?)\}, \{.*?\}, \{.*?\}, \{(.*?)\}", line):
            results, added = (re.findall(r"%\w+", part) for part in match.groups())
            found |= {values.get(register, "other") for register in added}
            values |= dict.fromkeys(results, "products")
        elif match := re.search(r"\bmov\.\w+\s+(%\w+), ([^;]+);", line):
            values[match[1]] = "zero" if match[2] in ("0", "0f00000000") else values.get(match[2], "other")
        elif match := re.search(r"\s(%\w+), ", line):
            values[match[1]] = "other"
    return found


def check_sums_start_at_zero(compiled) -> None:
    starts = starts_of_products(compiled.asm["ttgir"])
    assert starts, "no product of floats"
    assert set(starts) <= {"0.000000e+00", "false"}, starts
    assert starts_of_fp8_sums(compiled.asm.get("ptx", "")) <= {"zero", "products"}


def assembly(compiled) -> str:
    return compiled.asm["ptx"]


def operands(head_dim: int = 64, tokens: int = 1024, dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    return [torch.zeros(1, 2, tokens, head_dim, dtype=dtype) for _ in range(3)]


def float_call(variant: str, head_dim: int = 64, dtype: torch.dtype = torch.float16, **options):
    return lambda: SAGE_ATTENTION.cuda(*operands(head_dim, dtype=dtype), variant=variant, **options)


def int8_call():
    """QAttn static, int8 in and out."""
    scale = torch.ones(1)
    return MIXED_ATTENTION.cuda(*operands(dtype=torch.int8), scale, scale, scale, out_scale=scale)


def varlen_call():
    packed = [x[0].transpose(0, 1) for x in operands()]
    starts = torch.tensor([0, 512, 1024], dtype=torch.int32)
    return SAGE_ATTENTION_VARLEN.cuda(*packed, starts, starts, 512, 512, variant="sage2_int8")


def assert_fits(chip: str, compiled, tmp_path, stack: int) -> None:
    assert compiled.metadata.shared <= SHARED_KIB.get(chip, 99) * 1024
    assert stack_bytes(compiled, tmp_path) <= stack


def uses_fp16(chip: str, text: str) -> bool:
    return re.search(FP16_PRODUCT.get(chip, r"mma\.sync\S*\.f16\.f16"), text) is not None


@pytest.mark.sample(1 / 2)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chip", CHIPS)
def test_attention(launches, chip, variant, tmp_path):
    """INT8 products of Q and K everywhere, INT4's too, unless they stay in 16 bit; P and V as the variant says."""
    (launch,) = launches(chip, float_call(variant))["_quantized_attention_kernel"]
    compiled = compile_launch(chip, launch)
    text = assembly(compiled)
    int8 = re.search(CHIPS[chip][2], text) is not None
    assert int8 == resolve(variant).quantizes_qk, "INT8 tensor-core instructions for Q K"
    fp8 = resolve(variant).pv == "fp8" and chip in HAS_FP8
    assert not fp8 or re.search(FP8_PRODUCT[chip], text), "no FP8 tensor-core instruction for P V"
    assert uses_fp16(chip, text) == (resolve(variant).pv != "int8" and not fp8)
    assert_fits(chip, compiled, tmp_path, MAX_STACK.get(chip, 64))


@pytest.mark.parametrize(
    ("chip", "accumulator"),
    [("sm_89", "f16"), ("sm_90", "f16"), ("sm_120", "f16"), ("sm_89", "f32"), ("sm_90", "f32"), ("sm_120", "f32")],
)
def test_fp8_accumulates_in_what_the_variant_says(launches, chip, accumulator):
    variant = {"f16": "sage2pp_int8", "f32": "sage2_int8"}[accumulator]
    (launch,) = launches(chip, float_call(variant))["_quantized_attention_kernel"]
    text = assembly(compile_launch(chip, launch))
    found = set(re.findall(r"mma\S*?\.(f16|f32)\.e4m3\.e4m3", text))
    assert found == {accumulator}


@pytest.mark.sample(1 / 5)
@pytest.mark.parametrize("head_dim", [3, 8, 72])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("chip", CHIPS)
def test_queries_of_unaligned_heads(launches, chip, dtype, head_dim):
    """Their integers pass through shared memory byte by byte, where ptxas must not see floats."""
    recorded = launches(chip, float_call("sage_b", head_dim=head_dim, dtype=dtype))
    for (launch,) in recorded.values():
        compile_launch(chip, launch)


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "rounds"), [("integer_exp", False), ("integer_exp", True), ("sage2_int8", False)], ids=str
)
def test_preparing_for_hopper(launches, dtype, head_dim, name, rounds, tmp_path):
    """On other chips, and for other heads, attention quantizes within its own kernel."""
    q, k, v = operands(head_dim, dtype=dtype)
    rounded = prepare.Rounded(q, k, torch.zeros(*k.shape[:2], 1, head_dim)) if rounds else None
    given = (q, k, v, resolve(name), 0.1, True, None, rounded)
    recorded = launches("sm_90", lambda: prepare.prepare_triton(*given))
    assert set(recorded) == {"_statistics_kernel", "_prepare_kernel"}
    for (launch,) in recorded.values():
        assert_fits("sm_90", compile_launch("sm_90", launch), tmp_path, 64)


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_preparing_packed_sequences_for_hopper(launches, dtype, head_dim, tmp_path):
    x = torch.zeros(1000, 2, head_dim, dtype=dtype)
    starts = torch.tensor([0, 300, 1000], dtype=torch.int32)
    given = (resolve("integer_exp"), 0.1, True, Lengths(starts, starts, 700, 700))
    recorded = launches("sm_90", lambda: prepare_packed.prepare_packed_triton(x, x, x, *given))
    assert set(recorded) == {"_packed_statistics_kernel", "_prepare_packed_kernel"}
    for (launch,) in recorded.values():
        assert_fits("sm_90", compile_launch("sm_90", launch), tmp_path, 64)


@pytest.mark.parametrize("causal", [False, True])
def test_items_of_packed_sequences(launches, causal, tmp_path):
    starts = torch.tensor([0, 300, 1000], dtype=torch.int32)
    lengths, out = Lengths(starts, starts, 700, 700), torch.zeros(1000, 2, 64, dtype=torch.float16)
    recorded = launches("sm_90", lambda: packed.packed_items_triton(lengths, out, 1000, causal))
    (launch,) = recorded["_packed_items_kernel"]
    assert_fits("sm_90", compile_launch("sm_90", launch), tmp_path, 0)


@pytest.mark.parametrize(("variant", "head_dim"), [("sage_b", 128), ("sage2_int4", 256)])
@pytest.mark.parametrize("chip", CHIPS)
def test_wide_heads_fit(launches, chip, variant, head_dim, tmp_path):
    (launch,) = launches(chip, float_call(variant, head_dim))["_quantized_attention_kernel"]
    assert_fits(chip, compile_launch(chip, launch), tmp_path, WIDE_STACK)


@pytest.mark.parametrize(("chip", "sums"), [("sm_80", "f32"), ("sm_89", "f16"), ("sm_90", "f32"), ("sm_120", "f16")])
def test_bfloat16_values_of_an_fp16_accumulator(launches, chip, sums, tmp_path):
    """Cast to float16 where FP16 accumulators are fast, else bfloat16 with FP32 accumulators."""
    (launch,) = launches(chip, float_call("sage_b", dtype=torch.bfloat16))["_quantized_attention_kernel"]
    compiled = compile_launch(chip, launch)
    values = {"f16": "f16", "f32": "bf16"}[sums]
    assert set(re.findall(r"mma\S*?\.(f16|f32)\.(b?f16)\.b?f16", assembly(compiled))) == {(sums, values)}
    assert_fits(chip, compiled, tmp_path, MAX_STACK.get(chip, 64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chip", CHIPS)
def test_logits_of_means_of_queries_are_float32(launches, chip, dtype, tmp_path):
    (launch,) = launches(chip, float_call("sage2_int4", 72, dtype))["_row_bias_kernel"]
    compiled = compile_launch(chip, launch)
    assert not re.search(r"mma\S*(tf32|bf16)|mfma\S*xf32", assembly(compiled))
    assert_fits(chip, compiled, tmp_path, 0)


FEATURES = {
    "causal": float_call("sage2_int8", is_causal=True, return_lse=True),
    "bool": float_call("sage2_int8", attn_mask=torch.ones(1024, 1024, dtype=torch.bool)),
    "float": float_call("sage_vb", attn_mask=torch.zeros(1024, 1024, dtype=torch.float16)),
    "relative": float_call(
        "sage2_int8", 80, rel_h=torch.zeros(1, 2, 1024, 32).half(), rel_w=torch.zeros(1, 2, 1024, 32).half()
    ),
    "rows": float_call(
        "sage_b", 80, rel_h=torch.zeros(1, 2, 1024, 16).half(), rel_w=torch.zeros(1, 2, 1024, 64).half()
    ),
    "row": float_call("sage_b", rel_h=torch.zeros(1, 2, 1024, 1), rel_w=torch.zeros(1, 2, 1024, 1024)),
    "bfloat16": float_call("sage_b", dtype=torch.bfloat16),
    "float32": float_call("sage_b", dtype=torch.float32),
    "softcap": float_call("sage_b", softcap=50.0, attn_mask=torch.zeros(1024, 1024, dtype=torch.float16)),
    "int8": int8_call,
    "varlen": varlen_call,
}


@pytest.mark.sample(1 / 2)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("chip", ["sm_80", "sm_90"])
def test_features_compile_and_fit(launches, chip, feature, tmp_path):
    """With everything that launches before the attention itself: sums, and the quantization of Q, K and V."""
    recorded = launches(chip, FEATURES[feature])
    assert "_quantized_attention_kernel" in recorded
    for name, calls in recorded.items():
        for launch in calls:
            stack = WIDE_STACK if name == "_quantized_attention_kernel" else 0
            assert_fits(chip, compile_launch(chip, launch), tmp_path, stack)


@pytest.mark.parametrize("variant", ["unquantized", "sage_b"])
def test_wide_heads_with_a_bias_keep_their_registers(launches, variant, tmp_path):
    """On Hopper: with half as many warps they spilled, and ptxas serialized wgmma, which took up to 4 times as long."""
    bias = torch.zeros(1, 2, 1024, 1024, dtype=torch.float16)
    (launch,) = launches("sm_90", float_call(variant, 80, attn_mask=bias))["_quantized_attention_kernel"]
    assert_fits("sm_90", compile_launch("sm_90", launch), tmp_path, 0)


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("variant", ["unquantized", "8-per_block-fp16-fp32"])
@pytest.mark.parametrize("chip", ["sm_80", "sm_90"])
def test_a_soft_cap_takes_few_registers(launches, chip, variant, head_dim, tmp_path):
    """The heads of Gemma 2. An exponential and a reciprocal, each one instruction."""
    calls = [
        launches(chip, float_call(variant, head_dim, torch.bfloat16, is_causal=True, softcap=softcap))
        for softcap in (None, 50.0)
    ]
    plain, capped = (compile_launch(chip, call["_quantized_attention_kernel"][0]) for call in calls)
    more = {
        name: assembly(capped).count(name) - assembly(plain).count(name)
        for name in ("ex2.approx", "rcp.approx", "div.full")
    }
    assert more["ex2.approx"] == more["rcp.approx"] > 0
    assert more["div.full"] == 1, "by the cap alone, before the loop"
    stacks = [stack_bytes(compiled, tmp_path) for compiled in (plain, capped)]
    assert stacks[1] <= stacks[0] + 32, "more than eight registers are spilled, once"
    assert_fits(chip, capped, tmp_path, WIDE_STACK)


def test_a_kernel_sees_what_the_chip_stores(launches):
    """The recorder's premise: FP8 values where the chip multiplies them, their numbers in float16 where it does not."""
    for chip, dtype in (("sm_90", torch.float8_e4m3fn), ("sm_80", torch.float16)):
        recorded = launches(chip, float_call("sage2_int8"))
        assert recorded["_quantized_attention_kernel"][0].arguments["v"].data.dtype == dtype


@pytest.mark.parametrize("mask", [torch.float16, torch.bool], ids=str)
@pytest.mark.parametrize(("keys", "ahead"), [(512, True), (500, False)])
def test_masks_of_whole_blocks_are_copied_ahead_on_hopper(launches, keys, ahead, mask, tmp_path):
    """In pieces of up to 16 bytes to shared memory; else each thread loads one value after the other and waits."""
    q, k, v = operands(64, 512)
    given = {"attn_mask": torch.zeros(1, 2, 512, keys, dtype=mask), "variant": "unquantized"}
    recorded = launches("sm_90", lambda: SAGE_ATTENTION.cuda(q, k[:, :, :keys], v[:, :, :keys], **given))
    compiled = compile_launch("sm_90", recorded["_quantized_attention_kernel"][0])
    single = re.findall(r"ld\.global\.(?:b8|b16|u8|u16)\b", compiled.asm["ptx"])
    assert len(single) == (0 if ahead else 32)
    assert_fits("sm_90", compiled, tmp_path, 0)
