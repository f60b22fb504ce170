"""Hopper's kernels for windows with a mask, bias or relative positions: what is read, compiled code, results."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from attention_oracle import assert_kernel_close, exact_attention
from oracle import UNIT
from test_compile_targets import compile_for, serializes_wgmma, stack_bytes

from qframework.kernels.attention.hopper import dense as hopper_dense
from qframework.kernels.attention.hopper import specialized
from qframework.kernels.attention.hopper.bias import NO_BIAS, DenseBias, dense_bias
from qframework.kernels.attention.hopper.dense import DenseScales, attention_dense, fits, takes, takes_bias
from qframework.kernels.attention.hopper.dense_plan import plan, plan_of, plan_windows, slices_of, split
from qframework.kernels.attention.hopper.piece_form import BLOCK_N, ROWS, PieceForm
from qframework.kernels.attention.operands import LOG2_E, Bias
from qframework.kernels.runtime.gluon import HAS_GLUON

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
MOST_SPILLED = 64  # bytes
KINDS = {"i8": torch.int8, "fp16": torch.float16, "bf16": torch.bfloat16}


def test_reads_masks_by_strides() -> None:
    x = torch.zeros(4, 3, 64, 64, dtype=torch.float16)
    whole = dense_bias(Bias(x))
    assert whole is not None
    assert (whole.step, whole.sizes, whole.itemsize) == (2, (4, 3), 2)
    assert whole.arguments[1:] == (6144, 2048, 32, 0)  # in pairs
    odd = dense_bias(Bias(torch.zeros(1, 3, 49, 49)))
    assert odd is not None
    assert (odd.step, odd.arguments[1:]) == (1, (0, 2401, 49, 1))
    column, turned = dense_bias(Bias(x[..., :1])), dense_bias(Bias(x.mT))
    assert column is not None
    assert turned is not None
    assert (column.step, turned.step) == (0, 0)
    assert column.arguments[4] == 0
    expanded = dense_bias(Bias(torch.zeros(1, 1, 64, 64).expand(8, 3, 64, 64)))
    assert expanded is not None
    assert expanded.sizes == (1, 1)
    kept = dense_bias(Bias(torch.ones(2, 1, 1, 77, dtype=torch.bool)))
    assert kept is not None
    assert (kept.added, kept.arguments[0].dtype, kept.itemsize) == ("bool", torch.uint8, 2)
    assert dense_bias(Bias()) == NO_BIAS
    assert dense_bias(Bias(causal=True)) == NO_BIAS
    assert dense_bias(Bias(x, causal=True)) is None
    assert dense_bias(Bias(x.double())) is None


def test_reads_relative_positions() -> None:
    heights, widths = torch.zeros(5, 2, 60, 6), torch.zeros(5, 2, 60, 10)
    found = dense_bias(Bias(rel_h=heights, rel_w=widths))
    assert found is not None
    assert (found.columns, found.sizes, found.width_arguments[4]) == (32, (5, 2), 10)
    assert dense_bias(Bias(torch.zeros(1, 1, 60, 60), heights, widths)) is None
    assert dense_bias(Bias(rel_h=heights, rel_w=widths.half())) is None


def test_plans_of_windows() -> None:
    """Where biases repeat, every program meets one of them only."""
    few = plan_windows(100, 49, 49, 32, 132, 2, 100)
    assert (few.windows, few.parts) == (True, 100)
    assert plan_windows(16384, 49, 49, 32, 132, 2, 256).parts == 512
    assert plan_windows(16384, 49, 49, 32, 132, 2, 1).parts == 528
    assert plan_windows(16384, 49, 49, 32, 132, 2, 16384).parts == 528
    for keys in range(1, 65, 7):
        for channels in (16, 32, 48, 64):
            for itemsize in (0, 2, 4):
                how = plan_windows(10**6, keys, keys, channels, 1, itemsize, 1)
                assert how.parts * how.warpgroups <= 4
                assert how.parts * how.warpgroups * 128 * how.registers <= 65536


def test_lengths_with_a_bias() -> None:
    assert takes_bias(196, 196, 64, False, 4)
    assert takes_bias(128, 128, 64, False, 4)
    assert takes_bias(300, 49, 64, True, 2)
    assert takes_bias(196, 196, 64, False, 0, 32)
    assert not takes_bias(4096, 4096, 64, False, 2)
    assert not takes_bias(4096, 4096, 64, False, 0, 128)
    assert takes(49, 49, 24, 24, 2) == HAS_GLUON
    assert not takes(49, 49, 20, 20, 2)
    assert takes(196, 196, 80, 80, 0, 32) == HAS_GLUON
    assert not takes(49, 49, 104, 104, 2)


class Compiled(NamedTuple):
    kind: str
    out: str
    queries: int
    keys: int
    width: int
    added: str
    dtype: str
    step: int = 1
    spilled: int = MOST_SPILLED


CASES = [
    Compiled("fp16", "fp16", 49, 49, 32, "float", "fp16"),
    Compiled("bf16", "bf16", 64, 64, 32, "float", "fp32", 2),
    Compiled("fp16", "fp16", 64, 64, 64, "float", "fp16", 2),
    Compiled("fp16", "fp16", 49, 49, 32, "bool", "u8", 0),
    Compiled("fp16", "fp16", 81, 81, 32, "float", "fp16"),
    Compiled("bf16", "bf16", 128, 128, 64, "float", "fp32", 2),
    Compiled("fp16", "fp16", 20, 120, 64, "float", "fp16"),
    Compiled("fp16", "fp16", 144, 144, 32, "float", "fp16", 2),
    Compiled("fp16", "fp16", 196, 196, 64, "float", "fp16", 2),
    Compiled("bf16", "bf16", 256, 256, 32, "float", "fp32", 1),
    Compiled("i8", "i8", 49, 49, 32, "float", "fp16"),
    Compiled("i8", "fp16", 196, 196, 64, "float", "fp16", 2),
    Compiled("fp16", "fp16", 196, 196, 64, "factors", "fp16"),
    Compiled("bf16", "bf16", 49, 49, 32, "factors", "bf16"),
    Compiled("fp16", "fp16", 196, 196, 80, "factors", "fp16"),
    Compiled("bf16", "bf16", 196, 196, 80, "float", "bf16", 2),
    Compiled("fp16", "fp16", 60, 60, 96, "bool", "u8"),
    Compiled("fp16", "fp16", 784, 196, 96, "factors", "fp16", spilled=112),
]


@pytest.mark.skipif(not HAS_GLUON, reason="needs Gluon, which the interpreter does not have")
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_compiles_for_sm_90(case: Compiled, tmp_path) -> None:
    """A few registers may be spilled outside of loops over keys."""
    int8, factors, pieces = case.kind == "i8", case.added == "factors", split(case.keys)
    itemsize, columns = (0, 32) if factors else ({"fp32": 4}.get(case.dtype, 2), 0)
    width, rest = slices_of(case.width)
    if not int8 and not factors and max(case.queries, case.keys) <= ROWS and not rest:
        how = plan_windows(6144, case.queries, case.keys, case.width, 132, itemsize, 1)
    else:
        how = plan(6144, case.queries, case.keys, case.width, int8, 132, False, itemsize, columns)
    assert not how.stream
    rows = ROWS * how.warpgroups
    kernel = hopper_dense.windowed if how.windows else hopper_dense.resident

    def described(kind: str, tokens: int, channels: int = width) -> str:
        layout = specialized.layout(tokens, channels, KINDS[kind])
        return f"tensordesc<{kind}[1, 1, {tokens}, {channels}],{layout!r}>"

    types = {name: "*fp32" if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
    sizes = {"first": pieces.first, "second": pieces.second or pieces.first, "": BLOCK_N}
    for role in ("k", "v"):
        for name, n in sizes.items():
            types[f"{role}{'_' * bool(name)}{name}_desc"] = described(case.kind, n)
            types[f"{role}{'_' * bool(name)}{name}_rest_desc"] = described(case.kind, n, rest or width)
    types |= {"q_desc": described(case.kind, rows), "out_desc": described(case.out, rows)}
    types |= {"logit_scale": "fp32", "ONE": "fp32"}
    types |= {"q_rest_desc": described(case.kind, rows, rest or width)}
    types |= {"out_rest_desc": described(case.out, rows, rest or width)}
    types |= {"v_ptr": "*i8" if int8 else f"*{case.kind}", "bias_ptr": f"*{case.dtype}", "width_ptr": f"*{case.dtype}"}
    form = PieceForm(
        width,
        width,
        how.warpgroups,
        pieces.first,
        pieces.second,
        halves=int8,
        masked=pieces.masked,
        int8_values=int8,
        whole_values=True,
        reuses_query=case.out == case.kind,
        added="none" if factors else case.added,
        step=case.step,
        columns=columns,
        rest_d=rest,
        rest_dv=rest,
        queries=how.queries,
    )
    constants = {"FORM": form}
    if not how.windows:
        layout = specialized.layout(pieces.first, width, torch.float16 if int8 else KINDS[case.kind])
        constants |= {"V_LAYOUT": layout, "PER_HEAD": (False, True, False, True), "BLOCKS": pieces.blocks}
        constants["lse_ptr"] = None  # calls with a bias go to another kernel for it
        constants |= {} if factors else {"width_ptr": None}
        if not int8:
            constants |= {f"{name}_scale_ptr": None for name in ("q", "k", "v", "out")}
        elif case.out != "i8":
            constants["out_scale_ptr"] = None
    types = {name: kind for name, kind in types.items() if name in kernel.arg_names}
    options = {"num_warps": 4 * how.warpgroups, "maxnreg": how.registers}
    compiled = compile_for("sm_90", kernel, types, constants, **options)
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert stack_bytes(compiled, tmp_path) <= case.spilled
    assert not serializes_wgmma(compiled, tmp_path)
    at_once = 65536 // (how.registers * 128 * how.warpgroups)
    assert compiled.metadata.shared * min(at_once, how.parts // 132 or 1) <= 227 * 1024


class Problem(NamedTuple):
    kind: str
    batch: int = 8
    heads: int = 4
    key_heads: int = 4
    queries: int = 49
    keys: int = 49
    head_dim: int = 32
    windows: int = 4
    dtype: torch.dtype = torch.float16

    @property
    def name(self) -> str:
        return "-".join(f"{key}_{value}" for key, value in self._asdict().items())

    def operands(self) -> list[torch.Tensor]:
        """Views of tensors with tokens before heads, as a qkv linear writes them."""
        shapes = [(self.queries, self.heads), (self.keys, self.key_heads), (self.keys, self.key_heads)]
        x = [torch.randn(self.batch, *shape, self.head_dim, device="cuda") for shape in shapes]
        if self.dtype == torch.int8:
            x = [(t * 30).round().clamp(-127, 127) for t in x]
        return [t.to(self.dtype).transpose(1, 2) for t in x]

    def bias(self) -> Bias:
        """A float or bool mask, or relative positions."""
        shape = (self.windows, self.heads, self.queries, self.keys)
        dtype = torch.float16 if self.dtype == torch.int8 else self.dtype
        x = torch.randn(shape, device="cuda").to(torch.float32 if self.kind.endswith("32") else dtype)
        match self.kind.removesuffix("32"):
            case "own":
                return Bias(torch.randn(self.batch, *shape[1:], device="cuda").to(x.dtype))
            case "head":
                return Bias(x[:1])
            case "window":
                return Bias(x[:, :1])
            case "turned":
                return Bias(x.mT.contiguous().mT)
            case "row":
                return Bias(x[:, :, :1])
            case "column":
                return Bias(x[..., :1])
            case "bool":
                keep = x > -0.5
                keep[0, 1, self.queries // 2] = False
                return Bias(keep)
            case "padding":
                return Bias(
                    torch.arange(self.keys, device="cuda") < torch.arange(1, self.batch + 1).cuda().view(-1, 1, 1, 1)
                )
            case "factors":
                width = next(n for n in (14, 12, 7, 1) if self.keys % n == 0)
                sizes = (self.keys // width, width)
                rel = [torch.randn(self.batch, *shape[1:3], n, device="cuda").to(dtype) for n in sizes]
                return Bias(None, *rel)
        lowest = torch.finfo(x.dtype).min
        x[..., self.keys // 2 :] = lowest  # rows of some keys, of the lowest float, of both, and of none
        x[:, :, self.queries // 3] = lowest
        x[:, :, self.queries // 2] = -torch.inf
        x[:, :, self.queries // 4, 1:] = -torch.inf
        x[:, :, 0] = -torch.inf
        x[:, :, 0, self.keys // 4 :] = lowest
        return Bias(x)


BFLOAT, INT8 = {"dtype": torch.bfloat16}, {"dtype": torch.int8}
LONG = {"queries": 196, "keys": 196, "head_dim": 64}
PROBLEMS = [
    *(
        Problem(kind)
        for kind in ("own", "head", "window", "turned", "row", "column", "bool", "padding", "low", "own32")
    ),
    Problem("low", **BFLOAT),
    Problem("low32", **BFLOAT, key_heads=2),
    Problem("factors", key_heads=1),
    Problem("head", batch=700, heads=3, key_heads=3, queries=36, keys=36, head_dim=24, windows=7),
    Problem("low", queries=64, keys=64, head_dim=64),
    Problem("low", queries=5, keys=3, windows=1),
    Problem("own", queries=64, keys=17, head_dim=40),
    Problem("low", queries=81, keys=81, head_dim=48, key_heads=2),
    Problem("low32", queries=100, keys=100),
    Problem("low", queries=20, keys=120, head_dim=64),
    Problem("bool", queries=128, keys=128, head_dim=64),
    Problem("low", queries=144, keys=144),
    Problem("own", queries=256, keys=256, head_dim=32, **BFLOAT),
    Problem("padding", queries=300, keys=200, head_dim=48),
    *(Problem(kind, **LONG) for kind in ("low", "low32", "bool", "factors", "turned")),
    Problem("factors", **LONG, **BFLOAT),
    Problem("factors", queries=144, keys=144, head_dim=40),
    *(Problem(kind, queries=196, keys=196, head_dim=80) for kind in ("low", "own", "factors")),
    Problem("factors", queries=784, keys=196, head_dim=96),
    Problem("factors", queries=49, keys=196, head_dim=88, dtype=torch.bfloat16),
    Problem("low", queries=60, keys=60, head_dim=96, key_heads=2),
    Problem("window", queries=100, keys=100, head_dim=72, **BFLOAT),
    *(Problem(kind, **INT8) for kind in ("low", "head32", "bool")),
    Problem("own", **LONG, **INT8),
]


@pytest.mark.gpu
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_agrees_with_float64(problem: Problem) -> None:
    """Whatever is masked: rows of -inf are zero, rows of the lowest float are means of all values they may see."""
    q, k, v = problem.operands()
    added = dense_bias(bias := problem.bias())
    int8 = problem.dtype == torch.int8
    out_dtype = torch.float16 if int8 else problem.dtype
    if not ON_HOPPER:
        assert not fits(q, k, v, out_dtype, bias=added)
        return
    assert added is not None
    assert fits(q, k, v, out_dtype, bias=added)
    scales = DenseScales(*(torch.full((1,), 1 / 30, device="cuda") for _ in range(3))) if int8 else DenseScales()
    factor = 1 / 30 if int8 else 1.0
    mask = bias.masks_of(problem.batch)
    if mask is not None and mask.dtype != torch.bool:
        # Float32 logits of the lowest float are all equal, as softmax in float32 has them.
        mask = torch.where(mask < -1e30, torch.where(mask.isneginf(), mask.double(), -1e300), mask.double())
    exact = exact_attention(*(x.double() * factor for x in (q, k, v)), mask, rel_h=bias.rel_h, rel_w=bias.rel_w)
    scale = problem.head_dim**-0.5 * LOG2_E
    plans = [plan_of(q, k, v, added)]
    heads, sizes = problem.batch * problem.heads, (problem.queries, problem.keys, problem.head_dim)
    if not int8 and added.mask is not None and max(problem.queries, problem.keys) <= ROWS and problem.head_dim <= 64:
        windows = plan_windows(heads, *sizes, 132, 4, problem.heads * added.masks)
        plans += [windows, windows._replace(parts=3), plan(heads, *sizes, False, 132, False, 2)]
    for how in plans:
        out = attention_dense(q, k, v, scales, scale, out_dtype, how, bias=added)
        assert (out[exact.p.sum(-1) == 0] == 0).all()
        # The result is rounded once; every weight is rounded to the 16 bits of P.
        assert_kernel_close(out, exact.out, exact, UNIT[out_dtype] * 3 + UNIT[out_dtype] * 2, 0.0)


@pytest.mark.gpu
def test_nan_in_a_query_stays_in_its_row() -> None:
    problem = Problem("head")
    q, k, v = problem.operands()
    added = dense_bias(problem.bias())
    if not ON_HOPPER:
        assert not fits(q, k, v, q.dtype, bias=added)
        return
    assert added is not None
    q[3, 2, 7, 0] = torch.nan
    out = attention_dense(q, k, v, DenseScales(), 0.2, q.dtype, bias=added)
    assert out[3, 2, 7].isnan().all()
    assert out.isnan().sum() == problem.head_dim


@pytest.mark.gpu
@pytest.mark.parametrize("problem", [Problem("low", batch=512), Problem("factors", batch=64, **LONG)], ids=str)
def test_repeats_beside_another_stream(problem: Problem) -> None:
    q, k, v = problem.operands()
    added = dense_bias(problem.bias())
    if not ON_HOPPER:
        assert not fits(q, k, v, q.dtype, bias=added)
        return
    assert added is not None
    first = attention_dense(q, k, v, DenseScales(), 0.2, q.dtype, bias=added)
    other, x = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda", dtype=torch.float16)
    for _ in range(200):
        with torch.cuda.stream(other):
            x = (x @ x).clamp(-1, 1)
        assert torch.equal(first, attention_dense(q, k, v, DenseScales(), 0.2, q.dtype, bias=added))


@pytest.mark.gpu
def test_replays_in_a_cuda_graph_with_other_values() -> None:
    problem = Problem("own")
    q, k, v = problem.operands()
    mask = problem.bias().mask
    assert mask is not None
    call = lambda: torch.ops.qframework.sage_attention(q, k, v, mask, variant="unquantized")[0]  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for x in (q, k, v, mask):
        x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(out, call())


def test_none_is_the_default() -> None:
    assert DenseBias().is_empty
    assert NO_BIAS.arguments == (None, 0, 0, 0, 0)
    assert NO_BIAS.width_arguments == (None, 0, 0, 0, 1)
