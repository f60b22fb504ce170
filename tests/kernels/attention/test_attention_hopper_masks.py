"""Bool masks in Hopper's streaming attention kernel: which calls, compiled code, and results natively."""

from __future__ import annotations

import pytest
import torch
from attention_oracle import assert_kernel_close, exact_attention
from oracle import UNIT
from test_attention_hopper_dense import check_compiled, compile_streaming
from test_compile_targets import compile_for, stack_bytes

from qframework.kernels.attention import auto, mask_blocks
from qframework.kernels.attention.auto import Hopper
from qframework.kernels.attention.hopper import dense as hopper_dense
from qframework.kernels.attention.hopper import dense_plan as hopper_dense_plan
from qframework.kernels.attention.hopper import specialized
from qframework.kernels.attention.hopper.dense import streaming_form, takes_mask
from qframework.kernels.attention.mask_blocks import mask_blocks_triton
from qframework.kernels.attention.pipeline import SAGE_ATTENTION
from qframework.kernels.runtime.gluon import HAS_GLUON
from qframework.kernels.runtime.triton import HAS_TRITON, INTERPRET

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
KINDS = ("padding", "causal", "causal and padding", "band", "heads", "blocks", "rows")


@pytest.mark.skipif(not HAS_GLUON, reason="needs Gluon, which the interpreter does not have")
@pytest.mark.parametrize(
    ("kind", "width", "several"),
    [
        *((kind, 64, several) for kind in ("fp16", "bf16") for several in (False, True)),
        *(("fp16", 32, several) for several in (False, True)),
        ("fp16", 128, False),
    ],
)
def test_compiles_without_spilling(kind: str, width: int, several: bool, tmp_path) -> None:
    """Two programs fit a multiprocessor, as without a mask. Those of several tiles spill what the next tile needs.

    Each tile of wide heads has a program.
    """
    compiled = compile_streaming(kind, kind, 577, width, causal=False, several=several, masked=True)
    check_compiled(compiled, False, 48 if several else 16, tmp_path)
    assert compiled.metadata.shared <= 233472 // 2 - 1024


def test_one_form_serves_all_lengths() -> None:
    forms = {streaming_form(64, 64, n, n, False, True, False, False, masked=True) for n in (300, 577, 1024)}
    assert len(forms) == 1


@pytest.mark.parametrize(
    ("sizes", "taken"),
    [
        ((4, 16, 512, 512, 64, 64), True),
        ((4, 16, 512, 512, 40, 56), True),
        ((4, 16, 512, 512, 72, 72), False),  # hopper/specialized_kernel.py
        ((4, 16, 1024, 1024, 128, 128), True),
        ((4, 16, 1024, 1024, 128, 64), False),
        ((4, 16, 1000, 1024, 128, 128), False),
        ((4, 16, 9000, 9000, 128, 128), False),
        ((4, 16, 512, 512, 60, 64), False),  # rows that TMA cannot address
        ((1, 2, 512, 512, 64, 64), False),  # few tiles
        ((40, 16, 512, 128, 64, 64), False),
        ((40, 16, 300, 300, 64, 64), True),
        ((40, 16, 300, 255, 64, 64), False),  # all keys of a head stay in shared memory
    ],
)
def test_sizes_that_it_takes(sizes, taken, monkeypatch) -> None:
    monkeypatch.setattr(hopper_dense, "HAS_GLUON", True)
    assert takes_mask(*sizes, 132) == taken


@pytest.mark.parametrize(("keys", "row", "taken"), [(200, True, True), (200, False, False), (192, True, False)])
def test_padding_takes_it_with_fewer_keys(keys: int, row: bool, taken: bool, monkeypatch) -> None:
    """From two blocks on it is faster than the kernel that keeps all keys of a head and skips none."""
    monkeypatch.setattr(hopper_dense, "HAS_GLUON", True)
    assert takes_mask(64, 16, keys, keys, 64, 64, 132, row) == taken
    query = torch.empty(64, 16, keys, 64, dtype=torch.float16, device="meta")
    expected = "mask" if taken else "nothing"
    assert auto.reads_blocks(query, query, query, "auto", Hopper(132, cudnn=True), row) == expected


@pytest.mark.parametrize(("channels", "left"), [(32, False), (64, False), (24, False), (48, False)])
def test_auto_takes_masks_of_narrow_heads(channels: int, left: bool, monkeypatch) -> None:
    """The kernel with a loading warp takes up to 32 channels from 1,024 tokens on only."""
    monkeypatch.setattr(specialized, "HAS_GLUON", True)
    monkeypatch.setattr(hopper_dense, "HAS_GLUON", True)
    query = torch.empty(8, 16, 960, channels, dtype=torch.float16, device="meta")
    chip = Hopper(132, cudnn=True)
    assert auto.pytorch_is_faster(query, 960, channels, "bool", chip) == left
    assert auto.reads_blocks(query, query, query, "auto", chip) == "mask"
    assert auto.reads_blocks(query.float(), query.float(), query.float(), "auto", chip) == "nothing"


def mask_of(kind: str, batch: int, heads: int, queries: int, keys: int) -> torch.Tensor:
    """Of which some queries attend to nothing, but with padding, causality and rows."""
    row, key = torch.arange(queries)[:, None], torch.arange(keys)[None, :]
    lengths = torch.tensor([keys - 37, *[keys // 3] * (batch - 1)]).view(-1, 1, 1, 1)
    if kind == "padding":
        mask = key < lengths
    elif kind == "causal":
        mask = (key <= row)[None, None]
    elif kind == "causal and padding":
        mask = (key <= row) & (key < lengths) & (row != 9)
    elif kind == "band":
        mask = ((row - key).abs() < 150)[None, None]
    elif kind == "heads":
        mask = (torch.rand(1, heads, queries, keys) > 0.4) & (row != 9)
    elif kind == "blocks":
        tiles = torch.rand(batch, 1, -(-queries // 128), -(-keys // 128)) < 0.4
        mask = tiles.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :queries, :keys]
    else:
        mask = (row % 3 != 1)[None, None]  # (1, 1, N, 1)
    return mask.cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("queries", "keys", "key_heads", "channels", "values"), [
    (600, 1000, 40, 64, 64), (1025, 515, 10, 40, 56), (1025, 1100, 10, 128, 128), (1100, 1025, 40, 120, 120),
])  # fmt: skip
def test_agrees_with_float64(kind, dtype, queries, keys, key_heads, channels, values, monkeypatch) -> None:
    """Also where the call is causal, by the blocks that the search finds, and with NaN in one query."""
    given = []
    launch = hopper_dense._launch_streaming
    monkeypatch.setattr(hopper_dense, "_launch_streaming", lambda *call: given.append(call[-1]) or launch(*call))
    batch, heads = 2, 40
    q = torch.randn(batch, queries, heads, channels, device="cuda").to(dtype).transpose(1, 2)
    k = torch.randn(batch, keys, key_heads, channels, device="cuda").to(dtype).transpose(1, 2)
    v = torch.randn(batch, keys, key_heads, values, device="cuda").to(dtype).transpose(1, 2)
    mask = mask_of(kind, batch, heads, queries, keys)
    for causal in (False, True):
        # without replays, which pass the launch by where another test has made the call
        out, _ = SAGE_ATTENTION.cuda(q, k, v, mask, causal, None, True, "unquantized")
        exact = exact_attention(q, k, v, attn_mask=mask, is_causal=causal)
        assert_kernel_close(out, exact.out, exact, UNIT[dtype] * 5, 0.0)
        again, lse = SAGE_ATTENTION.cuda(q, k, v, mask, causal, None, True, "unquantized", True, True)
        assert torch.equal(again, out)
        torch.testing.assert_close(lse.double(), exact.lse, rtol=2e-6, atol=2.2 * UNIT[dtype])
    assert [blocks is not None for blocks in given] == [True] * 4 * ON_HOPPER
    if ON_HOPPER:
        expected = mask_blocks_triton(mask, queries, keys, False)
        assert torch.equal(given[0].counts, expected.counts)
    nan = q.clone()
    nan[1, 3, 5, 0] = torch.nan
    again, _ = torch.ops.qframework.sage_attention(nan, k, v, mask, False, None, True, "unquantized")
    attends = mask.expand(batch, heads, queries, keys)[1, 3, 5].any()
    assert again[1, 3, 5].isnan().all() == attends
    assert again.isnan().sum() == values * int(attends)


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "tokens", "channels"), [(4, 900, 64), (24, 500, 64), (4, 1100, 128)])
def test_repeats_beside_another_stream(batch: int, tokens: int, channels: int) -> None:
    q, k, v = (torch.randn(batch, 16, tokens, channels, device="cuda", dtype=torch.float16) for _ in range(3))
    mask = mask_of("causal and padding", batch, 16, tokens, tokens)
    call = lambda: torch.ops.qframework.sage_attention(q, k, v, mask, False, None, False, "unquantized")[0]  # noqa: E731
    first = call()
    other, x = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda", dtype=torch.float16)
    for _ in range(100):
        with torch.cuda.stream(other):
            x = (x @ x).clamp(-1, 1)
        assert torch.equal(first, call())


@pytest.mark.gpu
def test_replays_in_a_cuda_graph_with_another_mask() -> None:
    """The blocks are found on the GPU."""
    q, k, v = (torch.randn(8, 16, 512, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    mask = mask_of("padding", 8, 16, 512, 512)
    call = lambda: torch.ops.qframework.sage_attention(q, k, v, mask, False, None, False, "unquantized")[0]  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    mask.copy_(torch.rand_like(mask, dtype=torch.float32) < 0.5)
    graph.replay()
    assert torch.equal(out, call())
    assert mask_blocks.BLOCK == hopper_dense.BLOCK_N


@pytest.mark.skipif(INTERPRET or not HAS_TRITON, reason="interpreted kernels cannot be compiled")
@pytest.mark.parametrize("quads", [False, True])
def test_the_search_for_rows_compiles_without_spilling(quads: bool, tmp_path) -> None:
    kernel = mask_blocks._row_kernel
    pointers = {"mask_ptr": "*i32" if quads else "*i1", "seen_ptr": "*i32"}
    pointers |= dict.fromkeys(("bits_ptr", "order_ptr", "counts_ptr"), "*i32")
    types = dict.fromkeys(kernel.arg_names, "i32") | pointers
    constants: dict = {"PADDED": mask_blocks._ROW_BLOCKS, "BLOCK": mask_blocks.BLOCK, "QUADS": quads}
    if quads:
        constants["seen_ptr"] = None
        del types["seen_ptr"]
    assert stack_bytes(compile_for("sm_90", kernel, types, constants, num_warps=8), tmp_path) == 0


@pytest.mark.skipif(INTERPRET or not HAS_TRITON, reason="interpreted kernels cannot be compiled")
@pytest.mark.parametrize("causal", [False, True])
def test_the_search_in_words_compiles_without_spilling(causal: bool, tmp_path) -> None:
    kernel = mask_blocks._words_kernel
    pointers = {"mask_ptr": "*i32", "bits_ptr": "*i32", "kinds_ptr": "*i8"}
    types = dict.fromkeys(kernel.arg_names, "i32") | pointers
    constants = {"CAUSAL": causal, "BLOCK": mask_blocks.BLOCK}
    assert stack_bytes(compile_for("sm_90", kernel, types, constants, num_warps=4), tmp_path) == 0


@pytest.mark.parametrize("heads", [96, 512, 100])
@pytest.mark.parametrize("tiles", [2, 3, 4, 5])
def test_programs_that_stay_take_tiles_of_all_kinds_in_turn(heads: int, tiles: int) -> None:
    programs, cached = 264, 64
    at_once = hopper_dense_plan.heads_in_turn(heads, tiles, programs, cached)
    assert hopper_dense_plan.heads_in_turn(heads, tiles, heads * tiles, cached) == cached  # a program for each tile
    if programs * 3 > heads * tiles or heads % 8:
        assert at_once == cached
        return
    kinds = [[work % (tiles * at_once) // at_once for work in range(p, heads * tiles, programs)] for p in (0, 5, 100)]
    for of_program in kinds:  # among so many in a row, each kind about as often as any other
        counts = [of_program[: len(of_program) // tiles * tiles].count(kind) for kind in range(tiles)]
        assert max(counts) - min(counts) <= 2
