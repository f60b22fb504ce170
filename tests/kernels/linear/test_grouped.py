"""int8_grouped_linear, the linears of experts, on every implementation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.linear import grouped
from qframework.kernels.linear.grouped import (
    FEW_ROWS,
    INT8_GROUPED_LINEAR,
    MANY_ROWS,
    SOME_ROWS,
    Int8GroupedLinearArguments,
    choose_tile,
    int8_grouped_linear,
    int8_grouped_linear_ref,
    int8_grouped_linear_triton,
)
from qframework.kernels.runtime.triton import INTERPRET

GROUPS = {
    "even": [40, 40, 40],
    "empty ones": [0, 7, 0, 0, 130, 0],
    "one has all": [0, 0, 90],
    "rows of no expert": [3, 150, 20, -100],  # the last number: rows behind the experts
    "no row has an expert": [0, 0, -33],
    "single": [65],
    "many": [1, 0, 2] * 11,
}
SHAPES = [(64, 128), (48, 100), (200, 256), (17, 16)]  # N, K


def case(groups: list[int], n: int, k: int, place: str) -> tuple[Tensor, ...]:
    """Full-range operands."""
    generator = torch.Generator().manual_seed(n + len(groups))
    counts = [count for count in groups if count >= 0]
    rows = sum(map(abs, groups))
    a = torch.randint(-127, 128, (rows, k), dtype=torch.int8, generator=generator)
    b = torch.randint(-127, 128, (len(counts), n, k), dtype=torch.int8, generator=generator)
    a_scale = (0.5 + torch.rand(rows, 1, generator=generator)) / 73
    b_scale = (0.5 + torch.rand(len(counts), n, generator=generator)) / 73
    offsets = torch.tensor(counts).cumsum(0).int()
    return tuple(x.to(place) for x in (a, a_scale, b, b_scale, offsets))


@pytest.fixture
def run(implementation: str) -> Any:
    return {"cpu": torch.ops.qframework.int8_grouped_linear, "triton": INT8_GROUPED_LINEAR.cuda}[implementation]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("groups", GROUPS)
def test_each_expert_has_its_rows(run: Any, place: str, groups: str, shape: tuple[int, int]) -> None:
    operands = case(GROUPS[groups], *shape, place)
    found = run(*operands, torch.float32).cpu()
    expected = int8_grouped_linear_ref(Int8GroupedLinearArguments(*(x.cpu() for x in operands)))
    torch.testing.assert_close(found, expected, rtol=3e-7, atol=0)  # two products, rounded in either order
    behind = int(operands[4][-1])
    assert not found[behind:].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_of_the_result(run: Any, place: str, dtype: torch.dtype) -> None:
    operands = case([30, 4, 0, 61], 40, 64, place)
    exact = run(*operands, torch.float32)
    found = run(*operands, dtype)
    assert found.dtype == dtype
    cut = dtype == torch.bfloat16 and INTERPRET  # Triton's interpreter does not round to bfloat16
    torch.testing.assert_close(found, exact.to(dtype), rtol=2**-7 if cut else 0, atol=0)


@pytest.mark.parametrize("block_m", [16, 32, 64, 128])
def test_tiles(implementation: str, place: str, block_m: int) -> None:
    """Groups that end at, before and behind the end of a tile."""
    if implementation == "cpu":
        pytest.skip("has no tiles")
    tile = choose_tile(128, 1, 130, 64)._replace(block_m=block_m)
    operands = case([block_m, block_m - 1, block_m + 1, 0, 1, -2 * block_m - 1], 130, 64, place)
    found = int8_grouped_linear_triton(Int8GroupedLinearArguments(*operands), tile).cpu()
    expected = int8_grouped_linear_ref(Int8GroupedLinearArguments(*(x.cpu() for x in operands)))
    torch.testing.assert_close(found, expected, rtol=3e-7, atol=0)


def test_a_program_writes_rows_of_its_expert_alone(implementation: str, place: str) -> None:
    """Programs run at the same time: another's rows must not be written first or last."""
    if implementation == "cpu":
        pytest.skip("has no programs")
    a, a_scale, b, b_scale, offsets = case([5, 20, -9], 32, 64, place)
    for tile, rows in enumerate((range(5), range(5, 21), range(21, 25), range(25, 34))):
        out = torch.full((34, 32), torch.nan, device=place)
        grid = grouped._int8_grouped_linear_kernel[(tile + 1, 1)]
        sizes = {"T": 34, "N": 32, "K": 64, "E": 2, "stride_a": 64, "EXPERTS": 2, "EVEN_K": True}
        grid(a, a_scale, b, b_scale, offsets, out, **sizes, BLOCK_M=16, BLOCK_N=32, BLOCK_K=64)
        assert out.isnan().all(1).nonzero().flatten().tolist() == list(range(rows.stop, 34))


def test_strided_rows(run: Any, place: str) -> None:
    a, *rest = case([20, 31], 32, 64, place)
    wide = torch.cat([a, a.flip(1)], 1)
    assert torch.equal(run(wide[:, :64], *rest), run(a, *rest))
    assert torch.equal(run(a.t().contiguous().t(), *rest), run(a, *rest))
    b = rest[1].transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(run(a, rest[0], b, *rest[2:]), run(a, *rest))


@pytest.mark.parametrize("sizes", [(0, 3, 8, 16), (5, 0, 8, 16), (5, 3, 0, 16), (5, 3, 8, 0)])
def test_empty(run: Any, place: str, sizes: tuple[int, int, int, int]) -> None:
    rows, experts, n, k = sizes
    given = (torch.ones(rows, k, dtype=torch.int8), torch.ones(rows, 1), torch.ones(experts, n, k, dtype=torch.int8))
    found = run(*(x.to(place) for x in (*given, torch.ones(experts, n), torch.full((experts,), rows).int())))
    assert found.shape == (rows, n)
    assert not found.any()


def test_tiles_by_the_rows_of_an_expert() -> None:
    found = [choose_tile(8 * rows, 8, 16384, 4096, (9, 0)) for rows in (0, 1, 8, 9, 128, 129, 4096)]
    assert found == [FEW_ROWS] * 3 + [SOME_ROWS] * 2 + [MANY_ROWS] * 2
    assert choose_tile(8 * 129, 8, 512, 4096, (9, 0)) == SOME_ROWS, "too few large tiles for all multiprocessors"
    others = {rows: choose_tile(8 * rows, 8, 4096, 4096, (8, 0)).block_m for rows in (0, 16, 25, 64, 512)}
    assert others == {0: 16, 16: 16, 25: 32, 64: 64, 512: 128}


@pytest.mark.parametrize("inputs", [4096, 2880, 260])
def test_tiles_fit_shared_memory(inputs: int) -> None:
    for capability, room in (((8, 0), 163), ((8, 9), 99), ((9, 0), 227), ((12, 0), 99), (None, 163)):
        for rows in (0, 8, 64, 4096):
            tile = choose_tile(8 * rows, 8, 4096, inputs, capability)
            assert tile.num_stages * (tile.block_m + tile.block_n) * tile.block_k <= room * 1024


@pytest.mark.parametrize(("run", "most"), [("", 1.05), ("-2", 1.07)], ids=["made from", "others"])
def test_the_chosen_tile_is_nearly_the_fastest_that_was_measured(run: str, most: float) -> None:
    path = Path(__file__).parents[3] / f"benchmarks/results/other/2026-11-30-h200-grouped-linear{run}.json"
    behind = []
    for case in json.loads(path.read_text())["records"]:
        rows, sizes = case["tokens"] * case["per_token"], (case["experts"], case["outputs"], case["inputs"])
        times = {name: us for name, us in case["us"].items() if name.startswith("int8 (")}
        if case["inputs"] % 16 == 0:
            behind.append(times[f"int8 {tuple(choose_tile(rows, *sizes, (9, 0)))}"] / min(times.values()))
    assert len(behind) == 32
    assert max(behind) < most
    assert math.prod(behind) ** (1 / len(behind)) < 1.01


def test_offsets_out_of_range_reach_no_other_memory(implementation: str, place: str) -> None:
    """A GPU clamps them, without waiting for itself."""
    a, a_scale, b, b_scale, _ = case([10, 10, 10], 16, 32, place)
    for ends in ([-5, 12, 99], [20, 5, 30]):
        offsets = torch.tensor(ends, dtype=torch.int32, device=place)
        if implementation == "cpu":
            with pytest.raises(QFrameworkError, match="offsets must not decrease, from 0 to a's 30 rows at most"):
                torch.ops.qframework.int8_grouped_linear(a, a_scale, b, b_scale, offsets)
        else:
            out = INT8_GROUPED_LINEAR.cuda(a, a_scale, b, b_scale, offsets)
            clamped = INT8_GROUPED_LINEAR.cuda(a, a_scale, b, b_scale, offsets.clamp(0, 30))
            assert out.shape == (30, 16)
            if ends[0] < 0:
                assert torch.equal(out, clamped)


A, A_SCALE, B, B_SCALE, OFFSETS = case([10, 20], 16, 32, "cpu")


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"a": A.float()}, UnsupportedError, "a must have dtype int8"),
        ({"b": B[0]}, QFrameworkError, r"a and b must have shapes \(T, K\) and \(E, N, K\)"),
        ({"b": B[..., :30]}, QFrameworkError, r"got \(30, 32\) and \(2, 16, 30\)"),
        ({"a_scale": A_SCALE[:, 0]}, QFrameworkError, "a_scale must have shape"),
        ({"b_scale": B_SCALE[0]}, QFrameworkError, "b_scale must have shape"),
        ({"offsets": OFFSETS[:1]}, QFrameworkError, "offsets must have shape"),
        ({"offsets": OFFSETS.long()}, UnsupportedError, "offsets must have dtype int32"),
        ({"out_dtype": torch.int8}, UnsupportedError, "out_dtype must be float32, float16 or bfloat16"),
    ],
)
def test_errors(given: dict[str, Any], kind: type[Exception], message: str) -> None:
    arguments = {"a": A, "a_scale": A_SCALE, "b": B, "b_scale": B_SCALE, "offsets": OFFSETS} | given
    with pytest.raises(kind, match=f"int8_grouped_linear: .*{message}"):
        int8_grouped_linear(**arguments)


def test_opcheck() -> None:
    torch.library.opcheck(
        torch.ops.qframework.int8_grouped_linear.default, (A, A_SCALE, B, B_SCALE, OFFSETS, torch.float16)
    )
