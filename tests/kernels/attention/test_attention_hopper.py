"""Attention's kernel for Hopper: it compiles without spilling, and agrees with the reference in float64."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from attention_oracle import assert_kernel_close, exact_attention
from oracle import UNIT
from test_compile_targets import compile_for, serializes_wgmma, stack_bytes

from qframework.kernels.attention import auto, hopper
from qframework.kernels.attention import quantized_attention as module
from qframework.kernels.attention.auto import choose_variant
from qframework.kernels.attention.operands import Bias, QuantizedQK, Values
from qframework.kernels.attention.prepare import prepare_triton
from qframework.kernels.attention.quantize_qk import attention_quantize
from qframework.kernels.attention.quantized_attention import quantized_attention_triton
from qframework.kernels.attention.reference import quantized_attention_ref
from qframework.kernels.attention.variants import resolve
from qframework.kernels.runtime.gluon import HAS_GLUON

SPEC = "8-per_block-fp16-fp32"
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


class Problem(NamedTuple):
    batch: int = 2
    heads: int = 64
    key_heads: int = 64
    queries: int = 300
    keys: int = 300
    head_dim: int = 64
    value_dim: int = 64
    causal: bool = False
    dtype: torch.dtype = torch.float16
    variant: str = SPEC
    mask: str = ""

    @property
    def name(self) -> str:
        return "-".join(f"{key}_{value}" for key, value in self._asdict().items() if value != self._field_defaults[key])

    def operands(self, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random Q and K, with an outlying query, and V as a strided view of tokens before heads."""
        q = torch.randn(self.batch, self.heads, self.queries, self.head_dim, device=device, dtype=self.dtype)
        k = torch.randn(self.batch, self.key_heads, self.keys, self.head_dim, device=device, dtype=self.dtype)
        v = torch.randn(self.batch, self.keys, self.key_heads, self.value_dim, device=device, dtype=self.dtype)
        q[:, :, 7] *= 10
        return q, k, v.transpose(1, 2)

    def masked(self, device: str) -> torch.Tensor | None:
        """A bool mask that broadcasts to (batch, heads, queries, keys); some queries attend to nothing."""
        if not self.mask:
            return None
        row, key = torch.arange(self.queries)[:, None], torch.arange(self.keys)[None, :]
        lengths = torch.tensor([self.keys - 37, *[self.keys // 3] * (self.batch - 1)]).view(-1, 1, 1, 1)
        masks = {
            "padding": key < lengths,
            "expanded": (key < lengths).expand(-1, self.heads, self.queries, -1),
            "band": ((row - key).abs() < 150)[None, None],
            "causal_padding": (key <= row) & (key < lengths),
            "heads": (torch.rand(1, self.heads, self.queries, self.keys) > 0.4) & (row != 9),
            "far": ((key > row + 700) | (key < 3) & (row > 200))[None, None],
        }
        return masks[self.mask].to(device)


PROBLEMS = [
    Problem(),
    Problem(queries=256, keys=4096),
    Problem(queries=4000, keys=257, heads=6, key_heads=6),
    Problem(head_dim=128, value_dim=128, keys=1000),
    Problem(head_dim=128, value_dim=128, queries=1000, keys=1000, causal=True, key_heads=16),
    Problem(queries=1024, keys=1024, causal=True, dtype=torch.bfloat16, heads=9, key_heads=3),
    Problem(queries=500, keys=900, causal=True),
    Problem(queries=900, keys=500, causal=True),
    Problem(head_dim=80, value_dim=80, dtype=torch.bfloat16, queries=577, keys=577),
    Problem(head_dim=48, value_dim=48, key_heads=32),
    Problem(head_dim=96, value_dim=112),
    Problem(head_dim=112, value_dim=40),
    Problem(variant="8-per_warp-fp16-fp32", queries=333),
    Problem(variant="8-per_head-fp16-fp32", keys=2049),
    Problem(variant="sage_b", dtype=torch.bfloat16),
    Problem(batch=3, heads=11, key_heads=11, queries=2000, keys=2000),
    Problem(variant="unquantized"),
    Problem(variant="unquantized", queries=65, keys=64, heads=80, key_heads=40),
    Problem(variant="unquantized", head_dim=72, value_dim=72, dtype=torch.bfloat16, queries=729, keys=729),
    Problem(variant="unquantized", head_dim=128, value_dim=128, queries=1000, keys=1000, causal=True, key_heads=16),
    Problem(variant="unquantized", head_dim=40, value_dim=104, keys=2049),
    Problem(variant="unquantized", dtype=torch.bfloat16, queries=4000, keys=3000, heads=3, key_heads=3, causal=True),
    Problem(mask="padding", keys=900),
    Problem(mask="causal_padding", queries=900, keys=900, key_heads=16, head_dim=128, value_dim=128),
    Problem(mask="padding", queries=900, keys=900, causal=True),
    Problem(variant="unquantized", mask="expanded", keys=900, dtype=torch.bfloat16),
    Problem(variant="unquantized", mask="band", queries=1000, keys=1000, head_dim=80, value_dim=80),
    Problem(variant="unquantized", mask="heads", keys=500, key_heads=32),
    Problem(variant="unquantized", mask="far", queries=1000, keys=1500, heads=20, key_heads=20),
]


@pytest.mark.skipif(not HAS_GLUON, reason="needs Gluon, which the interpreter does not have")
@pytest.mark.parametrize(("width", "kind"), [(64, "fp16"), (64, "bf16"), (128, "fp16"), (128, "bf16")])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("variant", [SPEC, "unquantized", "integer_exp"])
def test_compiles_for_sm_90_without_spilling(width, kind, causal, variant, tmp_path) -> None:
    """A spill in the loop costs more than the two warpgroups gain."""
    _compiles_without_spilling(width, kind, causal, variant, False, tmp_path)


@pytest.mark.skipif(not HAS_GLUON, reason="needs Gluon, which the interpreter does not have")
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("variant", [SPEC, "unquantized", "integer_exp"])
def test_compiles_with_a_mask(width, variant, tmp_path) -> None:
    _compiles_without_spilling(width, "fp16", False, variant, True, tmp_path)


def _compiles_without_spilling(width, kind, causal, variant, masked, tmp_path) -> None:
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[kind]

    def described(kind, dtype, rows):
        return f"tensordesc<{kind}[1, 1, {rows}, {width}],{hopper.layout(rows, width, dtype)!r}>"

    types = {name: "*fp32" if name.endswith("_ptr") else "i32" for name in hopper.kernel.arg_names}
    stored = ("i8", torch.int8) if resolve(variant).quantizes_qk else (kind, dtype)
    types |= {"q_desc": described(*stored, hopper.ROWS), "k_desc": described(*stored, hopper.BLOCK_N)}
    values = ("bf16", torch.bfloat16) if resolve(variant).exponential == "integer" else (kind, dtype)
    types |= {"v_desc": described(*values, hopper.BLOCK_N), "out_desc": described(kind, dtype, hopper.ROWS)}
    types |= {"logit_scale": "fp32", "bits_ptr": "*i32", "order_ptr": "*i32", "counts_ptr": "*i32"}
    constants = {"CAUSAL": causal, "FORM": hopper.form_of(resolve(variant), width, width, masked)}
    compiled = compile_for("sm_90", hopper.kernel, types, constants, num_warps=4)
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert stack_bytes(compiled, tmp_path) == 0
    assert not serializes_wgmma(compiled, tmp_path)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name or "default")
@pytest.mark.gpu
def test_agrees_with_the_reference(problem: Problem, monkeypatch) -> None:
    monkeypatch.setattr(hopper, "LEAST_TOKENS", 1)
    calls = []
    launch = hopper.attention_hopper
    monkeypatch.setattr(hopper, "attention_hopper", lambda *given: calls.append(given) or launch(*given))
    q, k, v = problem.operands("cuda")
    q[0, 1, 5, 0] = torch.nan
    scale = problem.head_dim**-0.5 * 1.4426950408889634
    mask = problem.masked("cuda")
    variant, bias = resolve(problem.variant), Bias(mask, causal=problem.causal)
    qk, factor = QuantizedQK(q, None, k, None, problem.head_dim, marked=False), scale
    if variant.quantizes_qk:
        q8, q_scale = attention_quantize(q, None, scale, variant.granularity, "query")
        qk = QuantizedQK(q8, q_scale, *attention_quantize(k, None, 1.0, variant.granularity, "key"), problem.head_dim)
        factor = 1.0
    out, _ = quantized_attention_triton(qk, Values(v), bias, variant, factor, problem.dtype)
    assert len(calls) == ON_HOPPER, "the wrong kernel"
    expected, _ = quantized_attention_ref(qk, Values(v), bias, variant, factor, dtype=torch.float64)
    assert out[0, 1, 5].isnan().all()
    assert out.isnan().sum() == problem.value_dim
    exact = exact_attention(q.nan_to_num(0), k, v, attn_mask=mask, is_causal=problem.causal)
    # The result is rounded once; P is rounded next to other running maxima than in the reference.
    rounding = UNIT[problem.dtype] * 3 + 2.0**-18
    assert_kernel_close(out.nan_to_num(0), expected.nan_to_num(0), exact, rounding, 0.0)


INTEGER_PROBLEMS = [
    Problem(keys=1000),
    Problem(queries=4000, keys=2000, heads=6, key_heads=3, dtype=torch.bfloat16),
    Problem(queries=1000, keys=1000, causal=True, head_dim=128, value_dim=128, key_heads=16),
    Problem(queries=700, keys=1500, causal=True, head_dim=80, value_dim=72, dtype=torch.bfloat16),
    Problem(mask="padding", keys=1000),
    Problem(mask="padding", queries=1000, keys=1000, head_dim=128, value_dim=128, causal=True, key_heads=16),
    Problem(mask="causal_padding", queries=1000, keys=1000, key_heads=32, dtype=torch.bfloat16),
    Problem(mask="band", queries=1000, keys=1300),
    Problem(mask="heads", queries=500, keys=500),
    Problem(mask="far", queries=1000, keys=1500, heads=20, key_heads=20),
]


@pytest.mark.parametrize("times", [1.0, 12.0], ids=["bounded", "unbounded"])
@pytest.mark.parametrize("problem", INTEGER_PROBLEMS, ids=lambda problem: problem.name)
@pytest.mark.gpu
def test_integer_exponential_agrees_with_the_reference(problem: Problem, times: float, monkeypatch) -> None:
    """Some tiles of large logits need running maxima; a query with NaN and a key with NaN spoil what they must."""
    monkeypatch.setattr(hopper, "LEAST_TOKENS", 1)
    q, k, v = problem.operands("cuda")
    q *= times
    q[0, 1, 5, 0] = torch.nan
    k[1, 0, 70, 1] = torch.nan  # and with it the scale of keys 64 to 127
    mask = problem.masked("cuda")
    variant, bias = resolve("integer_exp"), Bias(mask, causal=problem.causal)
    qk, v16 = prepare_triton(q, k, v, variant, problem.head_dim**-0.5, True)
    assert bool(qk.k_norm.isinf()[1, 0])
    out, _ = quantized_attention_triton(qk, Values(v16), bias, variant, 1.0, problem.dtype)
    expected, _ = quantized_attention_ref(qk, Values(v16), bias, variant, dtype=torch.float64)
    assert torch.equal(out.isnan(), expected.isnan())
    exact = exact_attention(q.nan_to_num(0), k.nan_to_num(0), v, attn_mask=mask, is_causal=problem.causal)
    # Beside the result's own rounding: eight weights are summed in BF16. A weight's place on the scale of 128 steps to
    # an octave is off by up to half a step of the integer factor, so that it may be rounded to the other side.
    assert_kernel_close(out.nan_to_num(0), expected.nan_to_num(0), exact, UNIT[problem.dtype] * 3 + 2.0**-9, 2.0**-6)


@pytest.mark.parametrize("scale", [-0.2, 0.0])
def test_leaves_scales_that_turn_maxima_around(scale: float, monkeypatch) -> None:
    """Without a GPU: the general kernel is launched."""
    monkeypatch.setattr(hopper, "fits", lambda *call: True)
    monkeypatch.setattr(hopper, "attention_hopper", lambda *call: pytest.fail("Hopper's kernel"))
    launched = []
    monkeypatch.setattr(module, "launch", lambda kernel, grid: lambda *given, **named: launched.append(kernel))
    q = torch.zeros(1, 40, 600, 64, dtype=torch.float16)
    qk = QuantizedQK(q, None, q, None, 64, marked=False)
    quantized_attention_triton(qk, Values(q), Bias(), resolve("unquantized"), scale, torch.float16)
    assert launched


@pytest.mark.gpu
@pytest.mark.parametrize("variant", [SPEC, "unquantized", "integer_exp"])
def test_repeats_beside_another_stream(variant: str) -> None:
    """The barriers hold when another kernel takes multiprocessors away and gives them back."""
    q, k, v = Problem(queries=1000, keys=1000, causal=True, head_dim=128, value_dim=128).operands("cuda")
    first = torch.ops.qframework.sage_attention(q, k, v, is_causal=True, variant=variant)[0]
    other, x = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda", dtype=torch.float16)
    for _ in range(200):
        with torch.cuda.stream(other):
            x = (x @ x).clamp(-1, 1)
        again = torch.ops.qframework.sage_attention(q, k, v, is_causal=True, variant=variant)[0]
        assert torch.equal(first, again)


def test_auto_on_hopper(monkeypatch) -> None:
    """Without a GPU: the integer exponential for long plain calls, else nothing is quantized; FP32 is."""
    monkeypatch.setattr(auto, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(hopper, "chip_of", lambda device: ((9, 0), 132))
    monkeypatch.setattr(hopper, "HAS_GLUON", True)

    def chosen(tokens: int, head_dim: int, heads: int = 4, dtype=torch.float16, plain: bool = True) -> str:
        q = torch.empty(1, heads, tokens, head_dim, dtype=dtype)
        return choose_variant(q, q, q, tokens, plain)

    integer, as_is = (resolve(name).spec for name in ("integer_exp", "unquantized"))
    assert chosen(8192, 48) == chosen(8192, 64) == chosen(8192, 128, dtype=torch.bfloat16) == integer
    assert {chosen(8192, 72), chosen(8192, 32), chosen(8192, 256), chosen(8192, 128, plain=False)} == {as_is}
    assert {chosen(197, 64), chosen(1024, 64, heads=64), chosen(4096, 64, heads=1)} == {as_is}
    assert chosen(197, 64, dtype=torch.float32) == SPEC
    monkeypatch.setattr(auto, "capability_of", lambda device: (10, 0))
    assert chosen(8192, 64) not in (integer, as_is)


def test_declines_what_it_cannot_compute() -> None:
    """The general kernel computes these; the sizes alone would be accepted."""
    q, k, v = (torch.empty(1, 200, 600, 64, dtype=torch.float16, device="meta") for _ in range(3))
    variant, chip = resolve(SPEC), (9, 0)
    assert not hopper.fits(q, k, v, variant, torch.float16, None)
    assert not hopper.fits(q, k, v, variant, torch.float16, (8, 0))
    assert not hopper.fits(q, k, v, variant, torch.bfloat16, chip)
    assert not hopper.fits(q, k, v.float(), variant, torch.float32, chip)
    for other in ("sage_b", "sage_t", "sage2_int8", "sage2_int4", "sage_vb", "qattn"):
        assert not hopper.fits(q, k, v, resolve(other), torch.float16, chip)


@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_declines_what_tma_cannot_address(operand: str, monkeypatch) -> None:
    """Slices of a larger tensor, whose rows do not start at multiples of 16 bytes."""
    monkeypatch.setattr(hopper, "chip_of", lambda device: ((9, 0), 132))
    monkeypatch.setattr(hopper, "HAS_GLUON", True)
    dtypes = {"q": torch.int8, "k": torch.int8, "v": torch.float16}
    operands = {name: torch.zeros(1, 40, 600, 64, dtype=dtype) for name, dtype in dtypes.items()}
    chip = (resolve(SPEC), torch.float16, (9, 0))
    assert hopper.fits(*operands.values(), *chip)
    operands[operand] = torch.zeros(1, 40, 600, 65, dtype=dtypes[operand])[..., :64]
    assert not hopper.fits(*operands.values(), *chip)
    operands[operand] = torch.zeros(1, 1, 600, 64, dtype=dtypes[operand]).expand(1, 40, 600, 64)
    assert not hopper.fits(*operands.values(), *chip)
