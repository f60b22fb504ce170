"""decode/hopper.py: Hopper's kernel for many rows that share a key head: plans, compiled code, and results natively."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from decode_oracle import assert_exact, make_cache
from test_compile_targets import compile_for, serializes_wgmma, stack_bytes
from torch import Tensor

from qframework.kernels.attention.decode import decode
from qframework.kernels.attention.decode import hopper as decode_hopper
from qframework.kernels.attention.decode.arguments import DecodeAttentionArguments
from qframework.kernels.attention.decode.hopper import block_widths, choose_rows_plan, program_bytes
from qframework.kernels.attention.decode.hopper_kernel import ROWS, RowsForm
from qframework.kernels.attention.hopper import specialized
from qframework.kernels.runtime.gluon import HAS_GLUON

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
MULTIPROCESSOR, LARGEST, SYSTEM = 228 * 1024, 227 * 1024, 1024  # bytes of shared memory; of a program; the system's


@pytest.mark.parametrize("rows", [20, 64, 128, 400])
@pytest.mark.parametrize("heads", [1, 8, 100, 700])
@pytest.mark.parametrize("keys", [1, 300, 5000, 65536])
@pytest.mark.parametrize("channels", [(32, 32), (64, 128), (72, 72), (128, 128), (256, 64), (256, 256)])
@pytest.mark.parametrize("row_mask", [False, True])
def test_plans(rows: int, heads: int, keys: int, channels: tuple[int, int], row_mask: bool) -> None:
    """As many programs fit a multiprocessor as the plan says, and splits leave few of the programs without work."""
    plan = choose_rows_plan(rows, heads, keys, channels, 132, row_mask)
    assert 1 <= plan.splits <= -(-keys // plan.block_n)
    size = program_bytes(block_widths(*channels), plan, row_mask)
    assert size <= LARGEST
    assert plan.programs * (size + SYSTEM) <= MULTIPROCESSOR
    assert plan.programs * plan.warpgroups * 128 * decode_hopper._REGISTERS <= 65536
    programs = heads * -(-rows // (ROWS * plan.warpgroups)) * plan.splits
    if keys == 65536 and heads > 1:
        rounds = -(-programs // (132 * plan.programs))
        assert programs > 0.6 * rounds * 132 * plan.programs


def test_few_keys_are_split_less() -> None:
    """One program a multiprocessor where beginning another takes longer than its blocks."""
    assert choose_rows_plan(64, 8, 4096, (128, 128), 132).splits == 16
    assert choose_rows_plan(64, 32, 16384, (128, 128), 132).splits == 8


def test_few_rows_are_worth_it_where_there_is_much_to_read() -> None:
    """(16, 16, 2, 3, 5000, 64) is not; (1, 32, 8, 8, 16384, 128) and (8, 32, 8, 5, 16384, 64) are."""
    assert not decode_hopper.worth(32, 32 * 5000, (64, 64), 132)
    assert decode_hopper.worth(32, 8 * 16384, (128, 128), 132)
    assert decode_hopper.worth(32, 64 * 16384, (64, 64), 132)
    assert not decode_hopper.worth(32, 64 * 16384, (256, 256), 132)
    assert not decode_hopper.worth(16, 64 * 16384, (128, 128), 132)
    assert decode_hopper.worth(33, 1, (128, 128), 132)


def arguments(rows: int = 16, **change: Any) -> DecodeAttentionArguments:
    """Of a call on "meta" with 4 query heads a key head."""

    def empty(*shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x = DecodeAttentionArguments(
        empty(2, 8, rows, 64, dtype=torch.float16),
        empty(2, 2, 300, 64),
        empty(2, 2, 300, 64),
        empty(2, 2, 300, 2, dtype=torch.bfloat16),
    )
    return x._replace(**change)


def test_declines_what_it_cannot_compute(monkeypatch) -> None:
    monkeypatch.setattr(decode_hopper, "HAS_GLUON", True)
    monkeypatch.setattr(decode_hopper, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(decode_hopper, "chip_of", lambda device: ((9, 0), 132))
    monkeypatch.setattr(specialized, "addressable", lambda x: x.stride(2) % 16 == 0)
    fits, x = decode_hopper.fits, arguments()
    assert fits(x)
    assert not fits(arguments(rows=1))
    assert not fits(x._replace(softcap=50.0))
    assert not fits(x._replace(sinks=torch.zeros(x.query.shape[1])))
    mask = torch.empty(2, 1, 1, 290, dtype=torch.bool, device="meta")
    assert fits(x._replace(attn_mask=mask))
    assert fits(x._replace(attn_mask=mask[0, 0, 0]))
    assert not fits(x._replace(attn_mask=mask.half()))
    assert fits(x._replace(attn_mask=mask.expand(2, 1, 16, 290).contiguous()))
    assert not fits(arguments(rows=17, attn_mask=mask.expand(2, 1, 17, 290).contiguous()))
    assert not fits(x._replace(attn_mask=mask.expand(2, 8, 1, 290).contiguous()))
    odd = torch.empty(2, 2, 300, 72, dtype=torch.int8, device="meta")
    assert not fits(x._replace(key=odd))
    assert fits(x._replace(key=torch.empty(2, 2, 300, 80, dtype=torch.int8, device="meta")[..., :72]))
    assert not fits(x._replace(scales=torch.empty(2, 2, 2, 300, dtype=torch.bfloat16, device="meta").mT))
    monkeypatch.setattr(decode_hopper, "capability_of", lambda device: (10, 0))
    assert not fits(x)


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": True},
    "padding": {"masked": "keys", "causal": True},
    "masks": {"masked": "rows"},
    "whole": {"split": False},
}


@pytest.mark.skipif(not HAS_GLUON, reason="needs Gluon, which the interpreter does not have")
@pytest.mark.sample(1 / 4)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    ("rows", "channels", "dtype"),
    [
        (64, (64, 64), "fp16"), (64, (128, 128), "bf16"), (128, (256, 256), "fp16"), (32, (256, 256), "fp32"),
        (64, (72, 32), "fp32"),
    ],
)  # fmt: skip
def test_compiles_for_sm_90(option: str, rows: int, channels: tuple[int, int], dtype: str, tmp_path) -> None:
    """Q K^T multiplies INT8, products run beside other work, and registers suffice but for a few outside of loops."""
    row_mask = OPTIONS[option].get("masked") == "rows"
    plan = choose_rows_plan(rows, 8, 16384, channels, 132, row_mask)
    flags = {"lengths": True, "causal": False, "window": False, "masked": "none", "split": True} | OPTIONS[option]
    widths = block_widths(*channels)
    form = RowsForm(*widths, *channels, plan.block_n, plan.stages, plan.warpgroups, 16, **flags)

    def described(width: int) -> str:
        layout = specialized.layout(plan.block_n, width, torch.int8)
        return f"tensordesc<i8[1, 1, {plan.block_n}, {width}],{layout!r}>"

    kernel = decode_hopper.kernel
    types = {name: "*fp32" if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
    types |= {"k_desc": described(widths[0]), "v_desc": described(widths[1]), "q_ptr": f"*{dtype}"}
    types |= {"scales_ptr": "*bf16", "lengths_ptr": "*i32", "mask_ptr": "*i8", "logit_scale": "fp32"}
    types |= {"out_ptr": "*fp16" if form.split else f"*{dtype}"}
    constants = {"V_LAYOUT": specialized.layout(plan.block_n, widths[1], torch.float16), "FORM": form}
    options = {"num_warps": 4 * plan.warpgroups, "maxnreg": decode_hopper._REGISTERS}
    compiled = compile_for("sm_90", kernel, types, constants, **options)
    assert "wgmma.mma_async.sync.aligned.m64n" in compiled.asm["ptx"]
    assert "s32.s8.s8" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= program_bytes(widths, plan, row_mask)
    assert stack_bytes(compiled, tmp_path) <= 240
    assert not serializes_wgmma(compiled, tmp_path)


class Problem(NamedTuple):
    """Random queries and a cache, with options of the call."""

    heads: int = 8
    kv: int = 2
    tokens: int = 16
    capacity: int = 700
    d: int = 128
    dv: int = 128
    lengths: tuple[int, ...] = (650, 9)
    dtype: torch.dtype = torch.float16
    causal: bool = False
    window: int | None = None
    mask: str = "none"  # or "padding", or "rows" that differ
    scale: float | None = None

    def call(self) -> tuple[DecodeAttentionArguments, Any]:
        """The arguments on the GPU, and the cache."""
        padded = make_cache(
            2, self.kv, self.capacity, -(-self.d // 16) * 16, -(-self.dv // 16) * 16, list(self.lengths), "cuda"
        )
        cache = padded._replace(key=padded.key[..., : self.d], value=padded.value[..., : self.dv])
        query = torch.randn(2, self.heads, self.tokens, self.d, device="cuda").to(self.dtype)
        mask = None
        if self.mask == "rows":
            mask = torch.rand(2, 1, self.tokens, self.capacity - 5, device="cuda") > 0.3
            mask[0, :, 1] = False  # a row that sees nothing
            mask[1, :, :, :256] = False  # whole blocks
            mask[:, :, :, 384:600] = True
        if self.mask == "padding":
            first = torch.tensor([[3], [self.lengths[-1] // 2]], device="cuda")
            mask = (torch.arange(self.capacity - 5, device="cuda") >= first)[:, None, None]
        return DecodeAttentionArguments(query, *cache, mask, self.causal, self.window, self.scale), cache


PROBLEMS = {
    "default": Problem(),
    "causal": Problem(causal=True),
    "empty": Problem(lengths=(0, 129), tokens=9),
    "window": Problem(window=200, causal=True, tokens=12),
    "window_alone": Problem(window=64, lengths=(700,)),
    "padding": Problem(mask="padding", causal=True, lengths=(650,)),
    "rows": Problem(mask="rows", lengths=(650, 410)),
    "rows_causal": Problem(mask="rows", causal=True, window=300, d=64, dv=64, kv=1, tokens=11),
    "64": Problem(d=64, dv=64, kv=1, causal=True),
    "72": Problem(d=72, dv=40, dtype=torch.bfloat16),
    "256": Problem(d=256, dv=256, kv=1, causal=True, capacity=1300, lengths=(1290,)),
    "256_few": Problem(d=256, dv=256, tokens=10),
    "narrow_values": Problem(d=128, dv=32),
    "many_rows": Problem(heads=24, kv=2, tokens=16),
    "float32": Problem(dtype=torch.float32, scale=-0.07),
    "no_scale": Problem(scale=0.0),
    "one_key": Problem(lengths=(1,), dtype=torch.float32),
}


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("name", PROBLEMS)
def test_agrees_with_float64(name: str, splits: int | None) -> None:
    """P and V's scale are rounded to fp16 once, and shares once more; a query is off by 2^-16 of its largest value."""
    x, cache = PROBLEMS[name].call()
    x.check()
    if not ON_HOPPER:
        assert not decode_hopper.fits(x)
        return
    assert decode_hopper.fits(x)
    plan = decode_hopper.plan_of(x)
    got = decode.decode_attention_triton(x, plan if splits is None else plan._replace(splits=splits))
    options = {"mask": x.attn_mask, "causal": x.is_causal, "window": x.window, "scale": x.scale}
    assert_exact(got, x.query, cache, **options, p_error=1.3 * 2.0**-10, q_error=2.0**-16)


@pytest.mark.gpu
def test_nan_stays_with_the_queries_that_see_it() -> None:
    """A token whose scales are NaN, which only the last three queries see; a query that is NaN."""
    x, cache = Problem(lengths=(650,), causal=True).call()
    if not ON_HOPPER:
        assert not decode_hopper.fits(x)
        return
    cache.scales[:, :, 647] = math.nan
    x.query[0, 3, 5, 7] = math.nan
    got = decode.decode_attention_triton(x)
    assert got[:, :, 13:].isnan().all()
    assert got[0, 3, 5].isnan().all()
    got[0, 3, 5] = 0.0
    assert got[:, :, :13].isfinite().all()


@pytest.mark.gpu
def test_scales_of_values_may_differ_by_many_octaves() -> None:
    x, cache = Problem(lengths=(650,)).call()
    if not ON_HOPPER:
        assert not decode_hopper.fits(x)
        return
    cache.scales[..., 1] *= 2.0 ** torch.randint(-20, 10, cache.scales.shape[:3], device="cuda")
    got = decode.decode_attention_triton(x)
    assert_exact(got, x.query, cache, p_error=1.3 * 2.0**-10, q_error=2.0**-16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["causal", "64", "256", "many_rows"])
def test_repeats_beside_another_stream(name: str) -> None:
    x, _ = PROBLEMS[name].call()
    if not ON_HOPPER:
        assert not decode_hopper.fits(x)
        return
    first = decode.decode_attention_triton(x)
    other, y = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda", dtype=torch.float16)
    for _ in range(200):
        with torch.cuda.stream(other):
            y = (y @ y).clamp(-1, 1)
        assert torch.equal(first, decode.decode_attention_triton(x))


@pytest.mark.gpu
def test_a_graph_follows_the_lengths() -> None:
    x, cache = Problem(causal=True).call()
    cache.scales.nan_to_num_(0.01)
    decode.decode_attention(*x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = decode.decode_attention(*x)
    for lengths in ([1, 16], [700, 64], [77, 641]):
        cache.lengths.copy_(torch.tensor(lengths))
        graph.replay()
        assert_exact(got, x.query, cache, causal=True)
