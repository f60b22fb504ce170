"""Measuring tiles of int8_linear for ``qframework tune-kernels``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qframework.errors import QFrameworkError
from qframework.kernels.linear.local_tiles import Chip, MeasuredTile, read_tiles
from qframework.kernels.linear.reference import int8_linear_ref
from qframework.kernels.linear.tile import Tile
from qframework.kernels.linear.tile_candidates import candidates
from qframework.kernels.linear.tiles import choose_tile
from qframework.tuning import kernel_tiles
from qframework.tuning.kernel_tiles import TileProblem, TileTimes, make_operands, measure_tiles, tile_problems

ADA = Chip("NVIDIA L40S", (8, 9), 142)
CPU = torch.device("cpu")


def test_problems_of_a_model_with_the_plain_ones_first() -> None:
    found = tile_problems([768, 1024], [197, 1576])
    assert len(found) == 2 * 2 * 12
    assert [problem.epilogue for problem in found[:17]] == ["float"] * 16 + ["int8"]
    assert TileProblem(197, 3072, 768, "activation") in found
    assert TileProblem(1576, 1024, 4096, "residual") in found


@pytest.mark.parametrize(("widths", "rows"), [([], [197]), ([100], [197]), ([0], [197]), ([768], []), ([768], [64])])
def test_bad_problems(widths: list[int], rows: list[int]) -> None:
    with pytest.raises(QFrameworkError, match=r"widths must be|rows must be more than 64"):
        tile_problems(widths, rows)


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> dict[Tile, float]:
    """Times by tile instead of measurements; unknown ones take 10 us."""
    times: dict[Tile, float] = {}
    monkeypatch.setattr(kernel_tiles, "compile_tiles", lambda *_: None)
    monkeypatch.setattr(kernel_tiles, "cold_copies", lambda operands, _: [operands])
    monkeypatch.setattr(kernel_tiles, "microseconds", lambda _, tile: times.get(tile, 10.0))
    return times


@pytest.mark.parametrize("epilogue", ["float", "int8", "residual", "activation", "activation_float"])
def test_every_candidate_is_compared_with_the_reference(
    epilogue: Any, on_the_cpu: dict[Tile, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = TileProblem(70, 48, 32, epilogue)
    before = choose_tile(*problem[:3], *ADA[1:], epilogue)
    wrong, broken, *right = (tile for tile in candidates(ADA.capability, problem.m) if tile != before)

    def sometimes_wrong(operands: Any, out: torch.Tensor, tile: Tile) -> None:
        if tile == broken:
            raise ValueError("does not compile")
        out.copy_(int8_linear_ref(operands))
        if tile == wrong:
            out[69, 47] += 2

    monkeypatch.setattr(kernel_tiles, "write_result", sometimes_wrong)
    on_the_cpu |= {wrong: 1.0, broken: 1.0, right[0]: 9.0}
    times = measure_tiles(problem, CPU, ADA)
    assert times is not None
    assert set(times.microseconds) == {before, *right}
    assert times.best() == MeasuredTile(128, 48, 32, epilogue, right[0], 9.0, 10.0)


def test_noise_is_no_gain() -> None:
    before, other = candidates(ADA.capability, 197)[:2]
    times = TileTimes(TileProblem(197, 768, 768, "float"), before, {before: 10.0, other: 9.9})
    assert times.best() == MeasuredTile(256, 768, 768, "float", before, 10.0, 10.0)


@pytest.mark.parametrize("off", [0.0, 2.0**-9])
def test_what_counts_as_right(off: float) -> None:
    exact = torch.linspace(-4, 4, 4001).half()
    assert kernel_tiles.is_right((exact.float() * (1 + off)).half(), exact) is (off == 0)
    integers = torch.arange(-120, 121, dtype=torch.int8).repeat(10)
    near, far = integers.clone(), integers.clone()
    near[5] += 1
    far[5] += 2
    assert kernel_tiles.is_right(near, integers)
    assert not kernel_tiles.is_right(far, integers)
    assert not kernel_tiles.is_right(integers + 1, integers)


def test_the_reference_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = make_operands(TileProblem(70, 48, 32, "activation_float"), CPU)
    whole = kernel_tiles.int8_linear_ref_in_chunks(operands)
    monkeypatch.setattr(kernel_tiles, "_CHUNK", 32)
    assert torch.equal(kernel_tiles.int8_linear_ref_in_chunks(operands), whole)


def times_of(problem: TileProblem) -> TileTimes:
    before, other = candidates(ADA.capability, problem.m)[:2]
    return TileTimes(problem, before, {before: 10.0, other: 5.0})


def test_the_file_grows_with_each_shape_and_time_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, problems = tmp_path / "tiles.json", tile_problems([768], [197])
    path.write_text("broken")
    seen: list[int] = []

    def measure(problem: TileProblem, *_: Any) -> TileTimes | None:
        seen.append(0 if len(seen) == 0 else len(read_tiles(path, ADA)))
        return None if problem is problems[2] else times_of(problem)

    monkeypatch.setattr(kernel_tiles, "measure_tiles", measure)
    clock = iter(range(100))
    monkeypatch.setattr(kernel_tiles.time, "monotonic", lambda: float(next(clock)))
    noted: list[TileTimes | None] = []
    found = kernel_tiles.tune_tiles(problems, CPU, ADA, path, 4.5, noted.append)
    assert seen == [0, 1, 2, 2, 3], "from 4.5 seconds on, nothing begins"
    assert len(found) == 4
    assert noted.count(None) == 1
    assert read_tiles(path, ADA) == sorted(found)
    kernel_tiles.tune_tiles(tile_problems([1024], [197])[:1], CPU, ADA, path, 0.0)
    assert len(read_tiles(path, ADA)) == 5, "other shapes stay"


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    from qframework.kernels.linear.local_tiles import this_chip

    device = torch.device("cuda", 0)
    found = kernel_tiles.tune_tiles(
        tile_problems([768], [197])[:1], device, this_chip(device), tmp_path / "tiles.json", 0.0
    )
    assert len(found) == 1
    assert 0 < found[0].microseconds <= found[0].microseconds_before
