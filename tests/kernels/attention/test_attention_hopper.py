"""Attention's kernel for Hopper agrees with the reference in float64, and declines what it cannot compute."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from attention_oracle import assert_kernel_close, exact_attention
from oracle import UNIT

from qframework.kernels.attention import auto
from qframework.kernels.attention import quantized_attention as module
from qframework.kernels.attention.auto import choose_variant
from qframework.kernels.attention.hopper import dense as hopper_dense
from qframework.kernels.attention.hopper import packed as hopper_packed
from qframework.kernels.attention.hopper import specialized
from qframework.kernels.attention.hopper.prepare import prepare_triton
from qframework.kernels.attention.hopper.specialized import NOTHING, Added
from qframework.kernels.attention.operands import Bias, QuantizedQK, Values
from qframework.kernels.attention.quantize_qk import attention_quantize
from qframework.kernels.attention.quantized_attention import quantized_attention_triton
from qframework.kernels.attention.reference import quantized_attention_ref
from qframework.kernels.attention.variants import PAIRED, resolve

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
    columns: int = 0
    softcap: float | None = None

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
        """A mask that broadcasts to (batch, heads, queries, keys); some queries attend to nothing."""
        if not self.mask:
            return None
        if self.mask.startswith("float"):
            return self.added(self.mask.removeprefix("float ")).to(device)
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

    def added(self, kind: str) -> torch.Tensor:
        """A float mask."""
        shapes = {
            "per head": (1, self.heads, self.queries, self.keys),
            "per batch": (self.batch, 1, self.queries, self.keys),
            "full": (self.batch, self.heads, self.queries, self.keys),
            "full float32": (self.batch, self.heads, self.queries, self.keys),
            "low rows": (self.batch, 1, self.queries, self.keys),
            "row": (self.batch, 1, 1, self.keys),
            "expanded row": (self.batch, 1, 1, self.keys),
        }
        mask = torch.randn(shapes[kind])
        if kind.endswith("row"):
            lengths = torch.linspace(self.keys // 2, self.keys, self.batch).long().view(-1, 1, 1, 1)
            mask = mask.masked_fill(torch.arange(self.keys) >= lengths, -torch.inf)
        else:
            mask[:, :, 9] = -torch.inf
            mask[:, :, 13, : self.keys // 2] = -torch.inf  # block after block without a key
            mask[:, :, 17, self.keys // 3 :] = -torch.inf
        mask = mask if kind.endswith("float32") else mask.to(self.dtype)
        if kind == "low rows":
            lowest = torch.finfo(self.dtype).min
            mask[:, :, 3] = lowest
            mask[:, :, 21, ::2] = lowest
        return mask.expand(-1, self.heads, self.queries, -1) if kind == "expanded row" else mask

    def factors(self, device: str) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Relative positions in an image with rows of ``columns``."""
        if not self.columns:
            return None, None
        lines = self.keys // self.columns
        height, width = (
            torch.randn(self.batch, self.heads, self.queries, n, device=device, dtype=self.dtype)
            for n in (lines, self.columns)
        )
        return height, width


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
    Problem(variant="8-per_thread-fp16-fp32", queries=333, keys=777),
    Problem(variant="8-per_thread-fp16-fp32", causal=True, queries=900, keys=900, head_dim=128, value_dim=128),
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
PLAIN = Problem(variant="unquantized", heads=40, key_heads=40)
WIDE = PLAIN._replace(head_dim=256, value_dim=256)
PROBLEMS += [
    WIDE,
    WIDE._replace(queries=1000, keys=1000, causal=True, dtype=torch.bfloat16, key_heads=20),
    WIDE._replace(queries=900, keys=70, causal=True),
    WIDE._replace(queries=700, keys=1000, causal=True),
    WIDE._replace(keys=64),
    WIDE._replace(mask="band", queries=1000, keys=1000),
    WIDE._replace(mask="heads", keys=450),
    WIDE._replace(mask="float per head", keys=333),
    WIDE._replace(head_dim=200, value_dim=40, mask="padding", keys=900),
    PLAIN._replace(head_dim=192, value_dim=192, keys=577, key_heads=10),
    PLAIN._replace(head_dim=160, value_dim=160, keys=2049, dtype=torch.bfloat16),
    PLAIN._replace(head_dim=144, value_dim=136, causal=True, queries=600, keys=600),
    PLAIN._replace(head_dim=96, value_dim=96, causal=True, queries=600, keys=600),
    PLAIN._replace(mask="float per head"),
    PLAIN._replace(mask="float per head", keys=203),
    PLAIN._replace(mask="float per batch", head_dim=80, value_dim=80, dtype=torch.bfloat16),
    PLAIN._replace(mask="float full", head_dim=128, value_dim=128, key_heads=20),
    PLAIN._replace(mask="float full float32", keys=500),
    PLAIN._replace(mask="float per batch", causal=True, queries=500, keys=500),
    PLAIN._replace(mask="float low rows", keys=700),
    PLAIN._replace(mask="float low rows", keys=700, dtype=torch.bfloat16, head_dim=96, value_dim=96),
    PLAIN._replace(mask="float row", keys=700),
    PLAIN._replace(mask="float row", keys=333, head_dim=128, value_dim=128, dtype=torch.bfloat16),
    PLAIN._replace(mask="float expanded row", keys=700, causal=True),
    PLAIN._replace(columns=64, queries=512, keys=512, head_dim=80, value_dim=80),
    PLAIN._replace(columns=16, queries=336, keys=336, dtype=torch.bfloat16),
    PLAIN._replace(columns=128, queries=384, keys=384, head_dim=128, value_dim=128),
    PLAIN._replace(columns=28, queries=784, keys=784, head_dim=96, value_dim=96),
    PLAIN._replace(columns=50, queries=300, keys=350, dtype=torch.bfloat16, key_heads=8),
    PLAIN._replace(columns=9, queries=200, keys=72, head_dim=40, value_dim=56),
    PLAIN._replace(columns=100, queries=300, keys=300, head_dim=32, value_dim=32, dtype=torch.bfloat16),
    PLAIN._replace(columns=33, queries=130, keys=165, head_dim=160, value_dim=160),
    PLAIN._replace(softcap=5.0),
    PLAIN._replace(softcap=0.5, head_dim=72, value_dim=72, dtype=torch.bfloat16, queries=729, keys=729),
    PLAIN._replace(softcap=5.0, head_dim=128, value_dim=128, causal=True, queries=700, keys=700, key_heads=20),
    WIDE._replace(softcap=50.0, queries=1000, keys=1000, causal=True, dtype=torch.bfloat16, key_heads=20),
    WIDE._replace(softcap=5.0, mask="band", queries=1000, keys=1000),
    WIDE._replace(softcap=5.0, mask="causal_padding", queries=900, keys=900, dtype=torch.bfloat16),
    WIDE._replace(softcap=2.0, keys=333),
    PLAIN._replace(softcap=5.0, mask="heads", keys=450, head_dim=192, value_dim=40),
    PLAIN._replace(softcap=5.0, mask="float per head", keys=203),
    PLAIN._replace(softcap=5.0, mask="float low rows", keys=700, dtype=torch.bfloat16, head_dim=96, value_dim=96),
    PLAIN._replace(softcap=5.0, mask="float row", keys=333, head_dim=128, value_dim=128),
    PLAIN._replace(softcap=5.0, columns=64, queries=512, keys=512, head_dim=80, value_dim=80),
    PLAIN._replace(softcap=5.0, columns=20, queries=400, keys=400, head_dim=80, value_dim=80),
]


@pytest.mark.parametrize(
    ("channels", "expected"),
    [
        *[
            (24, (32, 0)),
            (40, (32, 16)),
            (56, (64, 0)),
            (64, (64, 0)),
            (72, (64, 16)),
            (96, (64, 32)),
            (104, (128, 0)),
            (128, (128, 0)),
        ],
        *[(136, (128, 16)), (160, (128, 32)), (192, (128, 64)), (200, (256, 0)), (256, (256, 0))],
    ],
)
def test_slices_of_channels(channels, expected) -> None:
    assert specialized.slices(channels) == expected


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name or "default")
@pytest.mark.gpu
def test_agrees_with_the_reference(problem: Problem, monkeypatch) -> None:
    monkeypatch.setattr(specialized, "LEAST_TOKENS", 1)
    monkeypatch.setattr(hopper_dense, "fits", lambda *call, **options: False)  # the kernels of hopper/dense.py
    calls = []
    launch = specialized.attention_hopper
    monkeypatch.setattr(specialized, "attention_hopper", lambda *given: calls.append(given) or launch(*given))
    q, k, v = problem.operands("cuda")
    q[0, 1, 5, 0] = torch.nan
    scale = problem.head_dim**-0.5 * 1.4426950408889634
    mask = problem.masked("cuda")
    relative = problem.factors("cuda")
    variant, bias = resolve(problem.variant), Bias(mask, *relative, problem.causal, softcap=problem.softcap)
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
    clean = q.nan_to_num(0)
    added = {"rel_h": relative[0], "rel_w": relative[1], "softcap": problem.softcap}
    exact = exact_attention(clean, k, v, mask, problem.causal, **added)
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
    monkeypatch.setattr(specialized, "LEAST_TOKENS", 1)
    q, k, v = problem.operands("cuda")
    q *= times
    q[0, 1, 5, 0] = torch.nan
    k[1, 0, 70, 1] = torch.nan  # and with it the scale of keys 64 to 127
    mask = problem.masked("cuda")
    variant, bias = resolve("integer_exp"), Bias(mask, causal=problem.causal)
    qk, values = prepare_triton(q, k, v, variant, problem.head_dim**-0.5, True)
    assert bool(qk.k_norm.isinf()[1, 0])
    out, _ = quantized_attention_triton(qk, values, bias, variant, 1.0, problem.dtype)
    expected, _ = quantized_attention_ref(qk, values, bias, variant, dtype=torch.float64)
    assert torch.equal(out.isnan(), expected.isnan())
    exact = exact_attention(q.nan_to_num(0), k.nan_to_num(0), v, attn_mask=mask, is_causal=problem.causal)
    # Beside the result's own rounding: eight weights are summed in BF16. A weight's place on the scale of 128 steps to
    # an octave is off by up to half a step of the integer factor, so that it may be rounded to the other side.
    assert_kernel_close(out.nan_to_num(0), expected.nan_to_num(0), exact, UNIT[problem.dtype] * 3 + 2.0**-9, 2.0**-6)


def in_order(v: torch.Tensor) -> torch.Tensor:
    """Values ``(B, H, Dv, P)`` whose keys are PAIRED, in the order of the keys."""
    out = torch.empty_like(v)
    out[..., torch.arange(v.shape[3], device=v.device).view(-1, 16)[:, list(PAIRED)].flatten()] = v
    return out


@pytest.mark.parametrize(
    "problem",
    [
        Problem(variant="sage2_int8", keys=1000),
        Problem(variant="sage2_int8", queries=1000, keys=1000, causal=True, head_dim=128, value_dim=128, key_heads=16),
        Problem(variant="sage2_int8", queries=700, keys=1500, head_dim=80, value_dim=72, dtype=torch.bfloat16),
        Problem(variant="8-per_block-fp8-fp32", mask="band", queries=1000, keys=1000),
        Problem(variant="sage2_int8", mask="causal_padding", queries=900, keys=900, head_dim=128, value_dim=128),
        Problem(variant="sage2_int8", mask="heads", queries=500, keys=500),
        Problem(variant="sage2pp_int8", queries=700, keys=900),
    ],
    ids=lambda problem: problem.name,
)
@pytest.mark.gpu
def test_fp8_values_agree_with_the_reference(problem: Problem, monkeypatch) -> None:
    """P is rounded to 4 bits next to other running maxima than in the reference."""
    monkeypatch.setattr(specialized, "LEAST_TOKENS", 1)
    calls = []
    launch = specialized.attention_hopper
    monkeypatch.setattr(specialized, "attention_hopper", lambda *given: calls.append(given) or launch(*given))
    q, k, v = problem.operands("cuda")
    q[0, 1, 5, 0] = torch.nan
    mask = problem.masked("cuda")
    variant, bias = resolve(problem.variant), Bias(mask, causal=problem.causal)
    qk, values = prepare_triton(q, k, v, variant, problem.head_dim**-0.5, True)
    out, _ = quantized_attention_triton(qk, values, bias, variant, 1.0, problem.dtype)
    assert len(calls) == ON_HOPPER, "the wrong kernel"
    ordered = values._replace(v=in_order(values.v.float()).to(values.v.dtype), paired=False)
    expected, _ = quantized_attention_ref(qk, ordered, bias, variant, dtype=torch.float64)
    assert torch.equal(out.isnan(), expected.isnan())
    exact = exact_attention(q.nan_to_num(0), k, v, attn_mask=mask, is_causal=problem.causal)
    assert_kernel_close(out.nan_to_num(0), expected.nan_to_num(0), exact, 2.0**-4, 0.0)


@pytest.mark.parametrize("variant", ["unquantized", SPEC, "integer_exp"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.gpu
def test_packed_sequences_agree_with_dense_calls(variant: str, causal: bool, monkeypatch) -> None:
    """Also beside NaN of other sequences, without queries, without keys, and with tokens that belong to none."""
    monkeypatch.setattr(specialized, "LEAST_TOKENS", 1)
    monkeypatch.setattr(hopper_dense, "fits", lambda *call, **options: False)
    calls = []
    launch = hopper_packed.attention_packed
    monkeypatch.setattr(hopper_packed, "attention_packed", lambda *given: calls.append(given) or launch(*given))
    lengths = [(700, 900), (0, 40), (1300, 1100), (129, 300), (333, 333), (1024, 0), (5, 2000)]
    queries, keys = (torch.tensor(x) for x in zip(*lengths, strict=True))
    starts = [torch.cat([x.new_zeros(1), x.cumsum(0)]).int().cuda() for x in (queries, keys)]
    q = torch.randn(int(queries.sum()) + 50, 24, 64, dtype=torch.float16).cuda()
    k, v = (torch.randn(int(keys.sum()) + 9, 12, 64, dtype=torch.float16).cuda() for _ in range(2))
    v[900:940] = torch.nan
    k[940:980] = torch.inf
    out = torch.ops.qframework.sage_attention_varlen(q, k, v, *starts, 1300, 2000, causal, variant=variant)
    assert len(calls) == (ON_HOPPER and variant != SPEC), "the wrong kernel"
    assert not out[int(queries.sum()) :].any()
    for i, (rows, of_keys) in enumerate(lengths):
        if i == 2:  # its first keys are not finite
            continue
        first, key = int(starts[0][i]), int(starts[1][i])
        got = out[first : first + rows]
        assert got.isfinite().all()
        if not rows or not of_keys:
            assert not got.any()
            continue
        dense = [x.transpose(0, 1)[None] for x in (q[first : first + rows], *(x[key : key + of_keys] for x in (k, v)))]
        exact = torch.nn.functional.scaled_dot_product_attention(
            *(x.double() for x in dense), is_causal=causal, enable_gqa=True
        )
        error = (got.transpose(0, 1)[None] - exact).abs().sum() / exact.abs().sum()
        assert error < {"unquantized": 0.001, "integer_exp": 0.03}.get(variant, 0.02)


@pytest.mark.parametrize("scale", [-0.2, 0.0])
def test_leaves_scales_that_turn_maxima_around(scale: float, monkeypatch) -> None:
    """Without a GPU: the general kernel is launched."""
    monkeypatch.setattr(specialized, "fits", lambda *call: True)
    monkeypatch.setattr(specialized, "attention_hopper", lambda *call: pytest.fail("Hopper's kernel"))
    launched = []
    monkeypatch.setattr(module, "launch", lambda kernel, grid: lambda *given, **named: launched.append(kernel))
    q = torch.zeros(1, 40, 600, 64, dtype=torch.float16)
    qk = QuantizedQK(q, None, q, None, 64, marked=False)
    quantized_attention_triton(qk, Values(q), Bias(), resolve("unquantized"), scale, torch.float16)
    assert launched


def test_reads_biases_where_tma_can(monkeypatch) -> None:
    """Without a GPU: which biases are read, in which order tiles share them, and which are copied."""
    monkeypatch.setattr(specialized, "HAS_GLUON", True)
    mask = torch.zeros(2, 40, 300, 304, dtype=torch.float16)

    def read(mask: torch.Tensor) -> tuple:
        added = specialized.added_by(Bias(mask), mask.shape[3])
        given = specialized._readable_bias(Bias(mask), added)
        held = given.tiled if given.tiled is not None else given.loaded
        return added.kind, given.sizes, given.in_flight(2, 40, 1, 20), held.data_ptr() == mask.data_ptr()

    assert read(mask) == ("tile", (2, 40), (1, 1), True)
    assert read(mask[:1]) == ("tile", (1, 40), (2, 2), True)
    assert read(mask[:1].expand(2, -1, -1, -1)) == ("tile", (1, 40), (2, 2), True)
    assert read(mask[:, :1]) == ("tile", (2, 1), (8, 1), True)
    assert read(mask[:, :, :1].expand(-1, -1, 300, -1)) == ("row", (2, 40), (1, 1), True)
    assert read(mask[..., :303]) == ("tile", (2, 40), (1, 1), True)
    assert read(mask[..., 1:]) == ("tile", (2, 40), (1, 1), False)
    assert read(mask.mT.contiguous().mT) == ("tile", (2, 40), (1, 1), False)
    assert specialized.added_by(Bias(mask[..., :1]), 304) is None
    assert specialized.added_by(Bias(mask > 0), 304) == NOTHING == specialized.added_by(Bias(causal=True), 304)
    height, width = torch.zeros(2, 40, 300, 14), torch.zeros(2, 40, 300, 14)
    assert specialized.added_by(Bias(None, height, width), 196) == Added("factors", 4, 14)
    assert specialized.added_by(Bias(None, height, width, causal=True), 196) is None  # by places in memory
    assert specialized.added_by(Bias(None, height, torch.zeros(2, 40, 300, 129)), 14 * 129) is None
    width = torch.zeros(2, 40, 300, 64)
    for causal in (False, True):
        assert specialized.added_by(Bias(None, height, width, causal), 14 * 64) == Added("factors", 4, 64)
    assert specialized.added_by(Bias(None, height.half(), width), 14 * 64) is None


@pytest.mark.gpu
@pytest.mark.parametrize(
    "problem",
    [
        PLAIN._replace(causal=True, queries=1000, keys=1000, head_dim=256, value_dim=256),
        PLAIN._replace(head_dim=96, value_dim=96, queries=1000, keys=1000),
        PLAIN._replace(mask="float per head", queries=1000, keys=1000),
        PLAIN._replace(mask="float row", queries=1000, keys=1000),
        PLAIN._replace(columns=64, queries=1024, keys=1024),
        PLAIN._replace(columns=28, queries=784, keys=784, head_dim=96, value_dim=96),
    ],
    ids=lambda problem: problem.name,
)
def test_wide_heads_and_biases_repeat(problem) -> None:
    """As :func:`test_repeats_beside_another_stream`."""
    q, k, v = problem.operands("cuda")
    height, width = problem.factors("cuda")
    given = {"attn_mask": problem.masked("cuda"), "rel_h": height, "rel_w": width, "is_causal": problem.causal}
    first = torch.ops.qframework.sage_attention(q, k, v, variant="unquantized", **given)[0]
    other, x = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda", dtype=torch.float16)
    for _ in range(50):
        with torch.cuda.stream(other):
            x = (x @ x).clamp(-1, 1)
        again = torch.ops.qframework.sage_attention(q, k, v, variant="unquantized", **given)[0]
        assert torch.equal(first.nan_to_num(7), again.nan_to_num(7))


@pytest.mark.gpu
@pytest.mark.parametrize("variant", [SPEC, "unquantized", "integer_exp", "sage2_int8"])
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
    monkeypatch.setattr(specialized, "chip_of", lambda device: ((9, 0), 132))
    monkeypatch.setattr(specialized, "HAS_GLUON", True)

    def chosen(tokens: int, head_dim: int, heads: int = 4, dtype=torch.float16, plain: bool = True) -> str:
        q = torch.empty(1, heads, tokens, head_dim, dtype=dtype)
        return choose_variant(q, q, q, tokens, plain)

    integer, as_is = (resolve(name).spec for name in ("integer_exp", "unquantized"))
    assert chosen(8192, 48) == chosen(8192, 64) == chosen(8192, 128, dtype=torch.bfloat16) == integer
    assert chosen(8192, 256, heads=8) == integer
    assert {chosen(8192, 72), chosen(8192, 32), chosen(4096, 256), chosen(8192, 128, plain=False)} == {as_is}
    assert {chosen(8192, 160), chosen(8192, 192)} == {as_is}
    assert {chosen(197, 64), chosen(1024, 64, heads=64), chosen(4096, 64, heads=1)} == {as_is}
    assert chosen(197, 64, dtype=torch.float32) == SPEC
    monkeypatch.setattr(hopper_dense, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(hopper_dense, "HAS_GLUON", True)
    assert chosen(8192, 64) == as_is  # few blocks of queries: small programs are faster
    assert chosen(8192, 64, heads=16) == chosen(8192, 128) == integer
    monkeypatch.setattr(auto, "capability_of", lambda device: (10, 0))
    assert chosen(8192, 64) not in (integer, as_is)


@pytest.mark.parametrize(
    ("shape", "masking", "left"),
    [
        *[((8, 16, 1024, 160), "none", False), ((8, 16, 1023, 160), "none", True)],
        *[((8, 16, 1024, 160), "causal", True), ((4, 16, 4096, 160), "causal", False)],
        *[((8, 16, 1024, 192), "none", True), ((2, 16, 8192, 256), "none", False)],
        *[((8, 16, 1024, 64), "float", False), ((8, 16, 1023, 64), "float", True)],
        *[((16, 16, 512, 64), "none", False), ((8, 12, 1024, 64), "none", False)],
        *[((8, 12, 512, 64), "none", True), ((32, 12, 384, 64), "none", True)],
        *[((4, 16, 4096, 40), "none", True), ((4, 16, 4096, 32), "none", False), ((64, 16, 577, 40), "none", False)],
        *[((8, 16, 1024, 256), "float", False), ((1, 4, 1024, 64), "float", True)],
    ],
)
def test_what_is_left_to_pytorch(shape, masking, left, monkeypatch) -> None:
    """Without a GPU: sizes from which the kernel was measured to be ahead of cuDNN."""
    monkeypatch.setattr(specialized, "HAS_GLUON", True)
    query = torch.empty(shape, dtype=torch.float16, device="meta")
    assert auto.pytorch_is_faster(query, shape[2], shape[3], masking, auto.Hopper(132, cudnn=True)) == left


def test_declines_what_it_cannot_compute() -> None:
    """The general kernel computes these; the sizes alone would be accepted."""
    q, k, v = (torch.empty(1, 200, 600, 64, dtype=torch.float16, device="meta") for _ in range(3))
    variant, chip = resolve(SPEC), (9, 0)
    assert not specialized.fits(q, k, v, variant, torch.float16, None)
    assert not specialized.fits(q, k, v, variant, torch.float16, (8, 0))
    assert not specialized.fits(q, k, v, variant, torch.bfloat16, chip)
    assert not specialized.fits(q, k, v.float(), variant, torch.float32, chip)
    for other in ("sage_b", "sage_t", "sage2pp_int4", "sage2_int4", "sage_vb", "qattn"):
        assert not specialized.fits(q, k, v, resolve(other), torch.float16, chip)


@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_declines_what_tma_cannot_address(operand: str, monkeypatch) -> None:
    """Slices of a larger tensor, whose rows do not start at multiples of 16 bytes."""
    monkeypatch.setattr(specialized, "chip_of", lambda device: ((9, 0), 132))
    monkeypatch.setattr(specialized, "HAS_GLUON", True)
    dtypes = {"q": torch.int8, "k": torch.int8, "v": torch.float16}
    operands = {name: torch.zeros(1, 40, 600, 64, dtype=dtype) for name, dtype in dtypes.items()}
    chip = (resolve(SPEC), torch.float16, (9, 0))
    assert specialized.fits(*operands.values(), *chip)
    operands[operand] = torch.zeros(1, 40, 600, 65, dtype=dtypes[operand])[..., :64]
    assert not specialized.fits(*operands.values(), *chip)
    operands[operand] = torch.zeros(1, 1, 600, 64, dtype=dtypes[operand]).expand(1, 40, 600, 64)
    assert not specialized.fits(*operands.values(), *chip)
