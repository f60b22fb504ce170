"""Hopper's kernels for dense attention: pieces of keys, plans, compiled code, and results natively."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from attention_oracle import assert_kernel_close, exact_attention
from oracle import UNIT
from test_compile_targets import compile_for, serializes_wgmma, stack_bytes

from qframework.kernels.attention import hopper, hopper_dense
from qframework.kernels.attention.hopper_dense import (
    BLOCK_N,
    DensePlan,
    DenseScales,
    attention_dense,
    fits,
    plan,
    split,
)
from qframework.kernels.attention.hopper_pieces import PieceForm
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
    assert plan(2048, 577, 577, 64, True, 132) == DensePlan(True, 2, 128, 5)
    assert plan(128, 4096, 4096, 64, False, 132) == DensePlan(True, 2, 128, 32)
    assert not plan(32768, 49, 49, 32, True, 132).stream
    for keys in range(1, 3000, 13):
        how = plan(100, 300, keys, 64, False, 132)
        assert not how.stream or keys > BLOCK_N


def operand(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_declines_what_it_cannot_compute(monkeypatch) -> None:
    monkeypatch.setattr(hopper_dense, "HAS_GLUON", True)
    monkeypatch.setattr(hopper_dense, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(hopper, "addressable", lambda x: x.shape[3] * x.element_size() % 16 == 0)
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
    monkeypatch.setattr(hopper_dense, "capability_of", lambda device: (10, 0))
    assert not fits(q, q, q, torch.float16)


KINDS = {"i8": torch.int8, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.skipif(not HAS_GLUON, reason="needs Gluon, which the interpreter does not have")
@pytest.mark.parametrize(("kind", "out"), [("i8", "i8"), ("i8", "fp16"), ("fp16", "fp16"), ("bf16", "bf16")])
@pytest.mark.parametrize("keys", [49, 197, 577])
@pytest.mark.parametrize("width", [32, 64])
def test_compiles_for_sm_90(kind: str, out: str, keys: int, width: int, tmp_path) -> None:
    """A few registers may be spilled outside of loops, for a fourth program on a multiprocessor."""
    int8 = kind == "i8"
    how, pieces = plan(6144, keys, keys, width, int8, 132), split(keys)

    def described(kind: str, rows: int) -> str:
        return f"tensordesc<{kind}[1, 1, {rows}, {width}],{hopper.layout(rows, width, KINDS[kind])!r}>"

    sizes = {"first": pieces.first, "second": pieces.second or pieces.first, "": BLOCK_N}
    kernel = hopper_dense.streaming if how.stream else hopper_dense.resident
    types = {name: "*fp32" if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
    for role in ("k", "v"):
        types |= {f"{role}{'_' * bool(name)}{name}_desc": described(kind, rows) for name, rows in sizes.items()}
    rows = 64 * how.warpgroups
    types |= {"q_desc": described(kind, rows), "out_desc": described(out, rows)}
    types |= {"v_ptr": "*i8" if int8 else f"*{kind}", "logit_scale": "fp32"}
    form = PieceForm(
        width, width, how.warpgroups, pieces.first, pieces.second, int8, pieces.masked, int8, True, out == kind
    )
    layout = hopper.layout(pieces.first, width, torch.float16 if int8 else KINDS[kind])
    constants = {"V_LAYOUT": layout, "PER_HEAD": (False, True, False, True), "FORM": form}
    if not how.stream:
        constants["BLOCKS"] = pieces.blocks
    if not int8:
        constants |= {f"{name}_scale_ptr": None for name in ("q", "k", "v", "out")}
    elif out != "i8":
        constants["out_scale_ptr"] = None
    options = {"num_warps": 4 * how.warpgroups, "maxnreg": how.registers}
    compiled = compile_for("sm_90", kernel, types, constants, **options)
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert ("s32.s8.s8" in compiled.asm["ptx"]) == int8
    assert stack_bytes(compiled, tmp_path) <= 64
    assert not serializes_wgmma(compiled, tmp_path)


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
]


@pytest.mark.gpu
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name or "default")
def test_agrees_with_float64(problem: Problem) -> None:
    """Both kernels, whatever the plan is, and every number of programs of a head."""
    q, k, v = problem.operands()
    if not ON_HOPPER:
        assert not fits(q, k, v, problem.out)
        return
    assert fits(q, k, v, problem.out)
    int8 = problem.dtype == torch.int8
    *given, _ = problem.scales() if int8 else [None] * 4
    real = [
        x.double() * (1.0 if s is None else s.double().view(1, -1, 1, 1)) for x, s in zip((q, k, v), given, strict=True)
    ]
    if not int8:
        q[0, 1, problem.queries // 2, 0] = torch.nan
    exact = exact_attention(*real)
    scale = problem.head_dim**-0.5 * 1.4426950408889634
    plans = [plan(problem.batch * problem.heads, problem.queries, problem.keys, 64, int8, 132)]
    if problem.keys > BLOCK_N:
        plans.append(DensePlan(True, 2, 168, -(-problem.queries // 128)))
    if problem.keys < 300:
        plans += [DensePlan(False, 1, 168, parts) for parts in (1, 2, 3) if parts <= -(-problem.queries // 64)]
    for how in plans:
        out = attention_dense(q, k, v, DenseScales(*given), scale, problem.out, how)
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
    out = attention_dense(q, k, v, DenseScales(*given, out_scale), scale, torch.int8)
    real = dequantized((q, k, v), given)
    expected = exact_attention(*real).out / out_scale.double().view(1, -1, 1, 1)
    apart = (out.double() - expected.clamp(-127, 127)).abs()
    assert apart.max() <= 0.5 + 127 * 2.0**-8
    assert (apart > 0.502 + 127 * 2.0**-10).float().mean() < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("problem", [Problem(heads=64, key_heads=64), Problem(queries=577, keys=577), Problem(**HALF)])
def test_repeats_beside_another_stream(problem: Problem) -> None:
    q, k, v = problem.operands()
    if not ON_HOPPER:
        assert not fits(q, k, v, problem.out)
        return
    scales = DenseScales(*problem.scales()[:3]) if problem.dtype == torch.int8 else DenseScales()
    first = attention_dense(q, k, v, scales, 0.2, torch.float16)
    other, x = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda", dtype=torch.float16)
    for _ in range(200):
        with torch.cuda.stream(other):
            x = (x @ x).clamp(-1, 1)
        again = attention_dense(q, k, v, scales, 0.2, torch.float16)
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
