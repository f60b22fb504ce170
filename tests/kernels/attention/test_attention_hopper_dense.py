"""Hopper's kernels for dense attention: pieces of keys, plans, compiled code, and results natively."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from attention_oracle import assert_kernel_close, exact_attention
from oracle import UNIT
from test_compile_targets import compile_for, serializes_wgmma, stack_bytes

from qframework.kernels.attention import quantized_attention
from qframework.kernels.attention.hopper import dense as hopper_dense
from qframework.kernels.attention.hopper import specialized
from qframework.kernels.attention.hopper.dense import DenseScales, attention_dense, fits, streaming_form
from qframework.kernels.attention.hopper.dense_plan import DensePlan, plan, split
from qframework.kernels.attention.hopper.piece_form import BLOCK_N, PieceForm
from qframework.kernels.attention.operands import Bias, QuantizedQK, Values
from qframework.kernels.attention.quantized_attention import quantized_attention_triton
from qframework.kernels.attention.variants import resolve
from qframework.kernels.runtime.gluon import HAS_GLUON

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.parametrize(
    "keys", [1, 16, 17, 33, 49, 64, 65, 97, 112, 128, 129, 144, 196, 197, 257, 577, 785, 1024, 4097]
)
def test_pieces_hold_all_keys(keys: int) -> None:
    """At most 15 keys more, or 31 where three pieces would be needed; only the last piece holds them."""
    first, second, blocks, masked = split(keys)
    held = first + second + blocks * BLOCK_N
    assert {first, second} <= {0, 16, 32, 64}
    assert first > 0
    assert 0 <= held - keys < 32
    assert masked == (held != keys)
    assert keys > blocks * BLOCK_N + (first if second else 0)


def test_plans() -> None:
    """Few keys stay in shared memory, INT8 longer than 16 bit; few heads are split among more programs."""
    assert plan(6144, 197, 197, 64, True, 132) == DensePlan(False, 1, 128, 1)
    assert plan(6144, 197, 197, 64, False, 132) == DensePlan(False, 1, 168, 1)
    assert plan(12, 197, 197, 64, True, 132).parts == 4
    assert plan(2048, 577, 577, 64, True, 132) == DensePlan(True, 2, 128, 264)
    assert plan(2048, 577, 577, 64, False, 132) == DensePlan(True, 2, 128, 264)
    assert plan(1024, 785, 785, 64, False, 132) == DensePlan(True, 2, 128, 1024 * 7)
    assert plan(256, 785, 785, 64, False, 132) == DensePlan(True, 2, 128, 264)
    assert plan(256, 640, 640, 64, False, 132) == DensePlan(True, 2, 128, 264)
    assert plan(96, 1024, 1024, 64, False, 132) == DensePlan(True, 2, 128, 264)
    assert plan(48, 1024, 1024, 64, False, 132) == DensePlan(True, 2, 128, 384)  # two programs too few, or too many
    assert plan(128, 1536, 1536, 64, False, 132) == DensePlan(True, 2, 128, 1536)
    assert plan(128, 4096, 4096, 64, False, 132) == DensePlan(True, 2, 128, 128 * 32)
    assert not plan(32768, 49, 49, 32, True, 132).stream
    for keys in range(1, 3000, 13):
        how = plan(100, 300, keys, 64, False, 132)
        assert not how.stream or keys > BLOCK_N


def test_plans_under_causality() -> None:
    """Short tiles share a program; all keys stream, however few."""
    assert plan(1024, 256, 256, 64, False, 132, True) == DensePlan(True, 2, 128, 264)
    assert plan(512, 512, 512, 64, False, 132, True) == DensePlan(True, 2, 128, 264)
    assert plan(96, 512, 512, 64, False, 132, True) == DensePlan(True, 2, 128, 192)
    assert plan(256, 1024, 1024, 64, False, 132, True) == DensePlan(True, 2, 128, 1024)
    assert plan(128, 2048, 2048, 64, False, 132, True) == DensePlan(True, 2, 128, 2048)
    assert plan(12, 1024, 1024, 64, False, 132, True) == DensePlan(True, 2, 128, 96)
    assert plan(1, 1, 1, 64, True, 132, True) == DensePlan(True, 2, 128, 1)
    assert plan(512, 512, 512, 128, False, 132, True) == DensePlan(True, 2, 128, 2048)


def operand(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_declines_what_it_cannot_compute(monkeypatch) -> None:
    monkeypatch.setattr(hopper_dense, "HAS_GLUON", True)
    monkeypatch.setattr(hopper_dense, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(specialized, "addressable", lambda x: x.shape[3] * x.element_size() % 16 == 0)
    q = operand(1, 4, 300, 64)
    q8 = operand(1, 4, 300, 64, dtype=torch.int8)
    assert fits(q, q, q, torch.float16)
    assert fits(q8, q8, q8, torch.int8)
    assert fits(q8, q8, q8, torch.bfloat16)
    assert not fits(q, q, q, torch.bfloat16)
    assert not fits(q, q, operand(1, 4, 300, 64, dtype=torch.bfloat16), torch.float16)
    assert not fits(q8, q8, q8, torch.float32)
    assert not fits(q.float(), q.float(), q.float(), torch.float32)
    wide, odd = operand(1, 4, 300, 80), operand(1, 4, 300, 40, dtype=torch.int8)
    assert not fits(wide, wide, wide, torch.float16)
    assert not fits(odd, odd, odd, torch.float16)
    wider = operand(1, 4, 300, 128)
    assert fits(wider, wider, wider, torch.float16, causal=True)
    assert not fits(wider, wider, wider, torch.float16)
    assert not fits(wider, wider, operand(1, 4, 300, 120), torch.float16, causal=True)
    assert not fits(wide, wide, wide, torch.float16, causal=True)
    longer = operand(1, 4, 8193, 128)
    assert not fits(longer, longer, longer, torch.float16, causal=True)
    assert not fits(wider.to(torch.int8), wider.to(torch.int8), wider.to(torch.int8), torch.float16, causal=True)
    monkeypatch.setattr(hopper_dense, "capability_of", lambda device: (10, 0))
    assert not fits(q, q, q, torch.float16)


def test_log_sum_exp_of_plain_and_masked_calls(monkeypatch) -> None:
    """Without a GPU: the kernels are given where to store it, but with a bias, which they do not take then."""
    calls = []

    def attend(q, *given, causal=False, bias=hopper_dense.NO_BIAS, blocks=None, lse=None):
        calls.append((bias.is_empty, blocks is not None))
        lse.fill_(len(calls))
        return torch.zeros_like(q)

    monkeypatch.setattr(hopper_dense, "attention_dense", attend)
    monkeypatch.setattr(hopper_dense, "fits", lambda *call: True)
    monkeypatch.setattr(hopper_dense, "fits_mask", lambda *call: True)
    launched = []
    monkeypatch.setattr(quantized_attention, "launch", lambda kernel, grid: lambda *x, **named: launched.append(kernel))
    monkeypatch.setattr(quantized_attention, "mask_blocks_triton", lambda *call: call)
    q = torch.zeros(1, 2, 300, 64, dtype=torch.float16)
    qk, variant = QuantizedQK(q, None, q, None, 64, marked=False), resolve("unquantized")
    mask = torch.ones(1, 1, 300, 300, dtype=torch.bool)
    for bias in (Bias(), Bias(causal=True), Bias(mask)):
        _, lse = quantized_attention_triton(qk, Values(q), bias, variant, 0.1, q.dtype, lse=True)
        assert lse is not None
        assert lse.shape == (1, 2, 300)
        assert (lse == len(calls)).all()
    assert calls == [(True, False), (True, False), (True, True)]
    quantized_attention_triton(qk, Values(q), Bias(mask.half()), variant, 0.1, q.dtype, lse=True)
    assert (len(calls), len(launched)) == (3, 1)


KINDS = {"i8": torch.int8, "fp16": torch.float16, "bf16": torch.bfloat16}


def described(kind: str, rows: int, width: int) -> str:
    """The type of a descriptor of heads of ``width`` channels, ``rows`` tokens a block."""
    return f"tensordesc<{kind}[1, 1, {rows}, {width}],{specialized.layout(rows, width, KINDS[kind])!r}>"


def common(kernel, kind: str, out: str, lse: bool = False) -> tuple[dict, dict]:
    """Types and constants that both kernels have."""
    types = {name: "*fp32" if name.endswith("_ptr") else "i32" for name in kernel.arg_names} | {"logit_scale": "fp32"}
    constants = {"PER_HEAD": (False, True, False, True)}
    if not lse:
        constants["lse_ptr"] = None
    if kind != "i8":
        constants |= {f"{name}_scale_ptr": None for name in ("q", "k", "v", "out")}
    elif out != "i8":
        constants["out_scale_ptr"] = None
    return types, constants


def compile_resident(kind: str, out: str, keys: int, width: int, registers: int, lse: bool = False):
    int8, pieces = kind == "i8", split(keys)
    sizes = {"first": pieces.first, "second": pieces.second or pieces.first, "": BLOCK_N}
    types, constants = common(hopper_dense.resident, kind, out, lse)
    for rest in ("", "_rest"):
        for role in ("k", "v"):
            types |= {f"{role}{'_' * bool(n)}{n}{rest}_desc": described(kind, rows, width) for n, rows in sizes.items()}
        types |= {f"q{rest}_desc": described(kind, 64, width), f"out{rest}_desc": described(out, 64, width)}
    types |= {"v_ptr": "*i8" if int8 else f"*{kind}", "ONE": "fp32"}
    form = PieceForm(width, width, 1, pieces.first, pieces.second, int8, pieces.masked, int8, True, out == kind)
    layout = specialized.layout(pieces.first, width, torch.float16 if int8 else KINDS[kind])
    constants |= {"V_LAYOUT": layout, "FORM": form, "BLOCKS": pieces.blocks, "bias_ptr": None, "width_ptr": None}
    return compile_for("sm_90", hopper_dense.resident, types, constants, num_warps=4, maxnreg=registers)


MASK = ("bits_ptr", "order_ptr", "counts_ptr", "MASKS", "MASK_HEADS", "MASK_TILES")


def compile_streaming(
    kind: str,
    out: str,
    keys: int,
    width: int,
    causal: bool,
    several: bool,
    queries: int = 1,
    masked: bool = False,
    lse: bool = False,
):
    int8 = kind == "i8"
    form = streaming_form(width, width, queries, keys, int8, out == kind, causal, several, masked)
    types, constants = common(hopper_dense.streaming, kind, out, lse)
    types |= dict.fromkeys(MASK[:3], "*i32")
    if not masked:
        constants |= dict.fromkeys(MASK)
        types = {name: types[name] for name in types if name not in MASK}
    types |= {f"{role}_desc": described(kind, form.block_n, width) for role in ("k", "v")}
    types |= {"q_desc": described(kind, 64, width), "out_desc": described(out, 64, width)}
    layout = specialized.layout(form.block_n, width, torch.float16 if int8 else KINDS[kind])
    constants |= {"V_LAYOUT": layout, "FORM": form}
    return compile_for("sm_90", hopper_dense.streaming, types, constants, num_warps=4, maxnreg=128)


def check_compiled(compiled, int8: bool, spilled: int, tmp_path) -> None:
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert ("s32.s8.s8" in compiled.asm["ptx"]) == int8
    assert stack_bytes(compiled, tmp_path) <= spilled
    assert not serializes_wgmma(compiled, tmp_path)


WIDTHS_AND_KINDS = [("i8", "i8"), ("i8", "fp16"), ("fp16", "fp16"), ("bf16", "bf16")]


@pytest.mark.skipif(not HAS_GLUON, reason="needs Gluon, which the interpreter does not have")
@pytest.mark.parametrize(("kind", "out"), WIDTHS_AND_KINDS)
@pytest.mark.parametrize("keys", [49, 197])
@pytest.mark.parametrize("width", [32, 64])
def test_resident_kernel_compiles_for_sm_90(kind: str, out: str, keys: int, width: int, tmp_path) -> None:
    """A few registers may be spilled outside of loops, for a fourth program on a multiprocessor."""
    how = plan(6144, keys, keys, width, kind == "i8", 132)
    assert not how.stream
    check_compiled(compile_resident(kind, out, keys, width, how.registers), kind == "i8", 64, tmp_path)


@pytest.mark.skipif(not HAS_GLUON, reason="needs Gluon, which the interpreter does not have")
@pytest.mark.parametrize(("kind", "out"), WIDTHS_AND_KINDS)
@pytest.mark.parametrize(
    ("causal", "several", "width"),
    [(False, False, 64), (False, True, 64), (True, False, 64), (True, True, 64), (True, True, 32)],
)
def test_streaming_kernel_compiles_for_sm_90(
    kind: str, out: str, causal: bool, several: bool, width: int, tmp_path
) -> None:
    """Two programs fit a multiprocessor: 128 registers for each of 256 threads, and half of its shared memory."""
    compiled = compile_streaming(kind, out, 577, width, causal, several)
    check_compiled(compiled, kind == "i8", 16, tmp_path)
    assert compiled.metadata.shared <= 233472 // 2 - 1024


@pytest.mark.skipif(not HAS_GLUON, reason="needs Gluon, which the interpreter does not have")
def test_streaming_kernel_compiles_for_more_queries_than_keys(tmp_path) -> None:
    """Then both warpgroups mask both pieces of the last keys."""
    check_compiled(compile_streaming("fp16", "fp16", 577, 64, True, True, queries=1000), False, 16, tmp_path)


@pytest.mark.skipif(not HAS_GLUON, reason="needs Gluon, which the interpreter does not have")
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_streaming_kernel_compiles_for_128_channels(kind: str, tmp_path) -> None:
    compiled = compile_streaming(kind, kind, 577, 128, causal=True, several=False)
    check_compiled(compiled, False, 16, tmp_path)
    assert compiled.metadata.shared <= 233472 // 2 - 1024


@pytest.mark.skipif(not HAS_GLUON, reason="needs Gluon, which the interpreter does not have")
@pytest.mark.parametrize(
    ("causal", "several", "width", "masked"),
    [(False, False, 64, False), (False, True, 32, False), (True, True, 64, False), (True, False, 128, False),
     (False, False, 64, True)],
)  # fmt: skip
def test_log_sum_exp_compiles_for_sm_90(causal: bool, several: bool, width: int, masked: bool, tmp_path) -> None:
    """It is stored behind the loop, and spills no more than the kernel without."""
    compiled = compile_streaming("fp16", "fp16", 577, width, causal, several, masked=masked, lse=True)
    check_compiled(compiled, False, 16, tmp_path)
    assert compiled.metadata.shared <= 233472 // 2 - 1024


@pytest.mark.skipif(not HAS_GLUON, reason="needs Gluon, which the interpreter does not have")
@pytest.mark.parametrize("kind", ["bf16", "i8"])
@pytest.mark.parametrize("keys", [49, 197])
def test_log_sum_exp_of_few_keys_compiles_for_sm_90(keys: int, kind: str, tmp_path) -> None:
    how = plan(6144, keys, keys, 64, kind == "i8", 132)
    check_compiled(compile_resident(kind, "bf16", keys, 64, how.registers, lse=True), kind == "i8", 64, tmp_path)


class Problem(NamedTuple):
    batch: int = 2
    heads: int = 6
    key_heads: int = 6
    queries: int = 197
    keys: int = 197
    head_dim: int = 64
    value_dim: int = 64
    dtype: torch.dtype = torch.int8
    out: torch.dtype = torch.float16
    per_head: bool = False
    causal: bool = False

    @property
    def name(self) -> str:
        return "-".join(f"{key}_{value}" for key, value in self._asdict().items() if value != self._field_defaults[key])

    def operands(self) -> list[torch.Tensor]:
        """Views of tensors with tokens before heads, as a qkv linear writes them."""
        shapes = [(self.queries, self.heads, self.head_dim), (self.keys, self.key_heads, self.head_dim)]
        shapes.append((self.keys, self.key_heads, self.value_dim))
        x = [torch.randn(self.batch, *shape, device="cuda") for shape in shapes]
        x[0][:, 7 % self.queries] *= 4
        if self.dtype == torch.int8:
            x = [(t * 30).round().clamp(-127, 127) for t in x]
        return [t.to(self.dtype).transpose(1, 2) for t in x]

    def scales(self) -> list[torch.Tensor]:
        sizes = [self.heads, self.key_heads, self.key_heads, self.heads] if self.per_head else [1] * 4
        return [(torch.rand(size, device="cuda") + 0.5) / 30 for size in sizes]


def dequantized(operands, scales) -> list[torch.Tensor]:
    return [
        x.double() * (1.0 if scale is None else scale.double().view(1, -1, 1, 1))
        for x, scale in zip(operands, scales, strict=True)
    ]


HALF, BFLOAT = (
    {"dtype": torch.float16, "out": torch.float16},
    {"dtype": torch.bfloat16, "out": torch.bfloat16},
)
PROBLEMS = [
    Problem(),
    Problem(per_head=True, heads=8, key_heads=2, out=torch.bfloat16),
    Problem(queries=1, keys=1),
    Problem(queries=5, keys=16, head_dim=32, value_dim=32),
    Problem(queries=300, keys=49, head_dim=32, value_dim=64),
    Problem(queries=64, keys=577, heads=64, key_heads=64),
    Problem(queries=577, keys=785, head_dim=48, value_dim=48),
    Problem(queries=900, keys=128),
    Problem(queries=100, keys=1024, head_dim=64, value_dim=32),
    Problem(queries=333, keys=4001, per_head=True),
    Problem(**HALF),
    Problem(**BFLOAT, heads=8, key_heads=4, queries=700, keys=257),
    Problem(**HALF, queries=49, keys=49, head_dim=32, value_dim=32, batch=40),
    Problem(**HALF, queries=577, keys=577, head_dim=40, value_dim=56),
    Problem(**HALF, queries=1000, keys=1300),
    Problem(**BFLOAT, queries=65, keys=129),
    Problem(**HALF, causal=True, heads=8, key_heads=2, queries=300, keys=300),
    Problem(**HALF, causal=True, queries=1, keys=1),
    Problem(**HALF, causal=True, queries=333, keys=1000),
    Problem(**BFLOAT, causal=True, queries=1000, keys=333),
    Problem(**HALF, causal=True, queries=129, keys=129, head_dim=40, value_dim=40),
    Problem(**BFLOAT, causal=True, queries=2000, keys=2000, head_dim=32, value_dim=64),
    Problem(**HALF, causal=True, queries=400, keys=700, head_dim=128, value_dim=128),
    Problem(**BFLOAT, causal=True, queries=1024, keys=333, head_dim=120, value_dim=120),
    Problem(causal=True, queries=401, keys=402, per_head=True),
    Problem(causal=True, queries=900, keys=130, head_dim=32, value_dim=32, out=torch.bfloat16),
]


@pytest.mark.gpu
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name or "default")
def test_agrees_with_float64(problem: Problem) -> None:
    """Both kernels, whatever the plan is, and every number of programs of a head."""
    q, k, v = problem.operands()
    if not ON_HOPPER:
        assert not fits(q, k, v, problem.out)
        return
    assert fits(q, k, v, problem.out, problem.causal) or problem.head_dim > 64
    int8 = problem.dtype == torch.int8
    *given, _ = problem.scales() if int8 else [None] * 4
    real = [
        x.double() * (1.0 if s is None else s.double().view(1, -1, 1, 1)) for x, s in zip((q, k, v), given, strict=True)
    ]
    if not int8:
        q[0, 1, problem.queries // 2, 0] = torch.nan
    exact = exact_attention(*real, is_causal=problem.causal)
    scale = problem.head_dim**-0.5 * 1.4426950408889634
    heads, tiles = problem.batch * problem.heads, -(-problem.queries // 128)
    plans = [plan(heads, problem.queries, problem.keys, problem.head_dim, int8, 132, problem.causal)]
    plans += [DensePlan(True, 2, 128, n) for n in {heads * tiles, -(-heads * tiles // 2), 3} if n <= heads * tiles]
    if problem.keys < 300 and not problem.causal:
        plans += [DensePlan(False, 1, 168, parts) for parts in (1, 2, 3) if parts <= -(-problem.queries // 64)]
    for how in plans:
        call = (q, k, v, DenseScales(*given), scale, problem.out, how)
        out = attention_dense(*call, causal=problem.causal)
        lse = q.new_full(q.shape[:3], 7.0, dtype=torch.float32)
        again = attention_dense(*call, causal=problem.causal, lse=lse)
        assert torch.equal(out.nan_to_num(nan=9.0), again.nan_to_num(nan=9.0))
        if not int8:
            assert lse[0, 1, problem.queries // 2].isnan()
            lse[0, 1, problem.queries // 2] = exact.lse[0, 1, problem.queries // 2]
        # Weights and their sums of two, four and eight are rounded to P's 16 bits: the sum is off by (1 - u)^4 at most.
        # FP16 rounds weights below 2^-14 by up to 2^-25 instead, and the sum is at least the largest weight, 1.
        p_dtype = torch.float16 if int8 else q.dtype
        rounding = -4 * math.log1p(-UNIT[p_dtype]) + (problem.keys * 2.0**-25 if p_dtype == torch.float16 else 0.0)
        torch.testing.assert_close(lse.double(), exact.lse, rtol=2e-6, atol=rounding)
        if not int8:
            assert out[0, 1, problem.queries // 2].isnan().all()
            assert out.isnan().sum() == problem.value_dim
            out[0, 1, problem.queries // 2] = exact.out[0, 1, problem.queries // 2].to(out.dtype)
        # The result is rounded once; every weight is rounded to the 16 bits of P.
        weights = UNIT[torch.float16 if int8 else problem.dtype]
        assert_kernel_close(out, exact.out, exact, UNIT[problem.out] * 3 + weights * 2, 0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("problem", [p for p in PROBLEMS if p.dtype == torch.int8], ids=lambda p: p.name or "default")
def test_quantizes_the_result(problem: Problem) -> None:
    q, k, v = problem.operands()
    if not ON_HOPPER:
        assert not fits(q, k, v, problem.out)
        return
    *given, out_scale = problem.scales()
    out_scale = out_scale / 20  # so that some results saturate
    scale = problem.head_dim**-0.5 * 1.4426950408889634
    out = attention_dense(q, k, v, DenseScales(*given, out_scale), scale, torch.int8, causal=problem.causal)
    real = dequantized((q, k, v), given)
    expected = exact_attention(*real, is_causal=problem.causal).out / out_scale.double().view(1, -1, 1, 1)
    apart = (out.double() - expected.clamp(-127, 127)).abs()
    assert apart.max() <= 0.5 + 127 * 2.0**-8
    assert (apart > 0.502 + 127 * 2.0**-10).float().mean() < 0.02


REPEATED = [
    Problem(heads=64, key_heads=64),
    Problem(queries=577, keys=577),
    Problem(**HALF),
    Problem(**HALF, batch=16, queries=200, keys=200, causal=True),
    Problem(**HALF, batch=16, queries=1500, keys=1500, causal=True),
]


@pytest.mark.gpu
@pytest.mark.parametrize("problem", REPEATED, ids=lambda problem: problem.name or "default")
def test_repeats_beside_another_stream(problem: Problem) -> None:
    q, k, v = problem.operands()
    if not ON_HOPPER:
        assert not fits(q, k, v, problem.out)
        return
    scales = DenseScales(*problem.scales()[:3]) if problem.dtype == torch.int8 else DenseScales()
    first = attention_dense(q, k, v, scales, 0.2, torch.float16, causal=problem.causal)
    other, x = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda", dtype=torch.float16)
    for _ in range(200):
        with torch.cuda.stream(other):
            x = (x @ x).clamp(-1, 1)
        again = attention_dense(q, k, v, scales, 0.2, torch.float16, causal=problem.causal)
        assert torch.equal(first, again)


@pytest.mark.gpu
def test_replays_in_a_cuda_graph_with_other_values() -> None:
    operands = Problem(queries=300, keys=300).operands()
    scale = torch.tensor([0.02], device="cuda")
    call = lambda: torch.ops.qframework.mixed_attention(*operands, scale, scale, scale)  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for x in operands:
        x.copy_(torch.randint_like(x, -100, 100))
    scale.fill_(0.01)
    graph.replay()
    assert torch.equal(out, call())
