"""Files of tiles that were measured on this machine (local_tiles.py, tile_candidates.py)."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qframework.compat.triton import OutOfResources
from qframework.errors import FileFormatError
from qframework.kernels.linear import launch, local_tiles
from qframework.kernels.linear.local_tiles import Chip, MeasuredTile, read_tiles, save_tiles, tile_path
from qframework.kernels.linear.tile import Tile
from qframework.kernels.linear.tile_candidates import allowed, candidates
from qframework.kernels.linear.tiles import choose_tile, general_tile, has_table

GPU = torch.device("cuda", 0)
ADA = Chip("NVIDIA L40S", (8, 9), 142)
SLOW, FAST = Tile(64, 64, 128, 4, 3), Tile(64, 128, 128, 4, 3)
ROW = MeasuredTile(2048, 768, 3072, "float", FAST, 20.0, 30.5)


@pytest.fixture(autouse=True)
def a_machine_with_an_l40s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv(local_tiles.FOLDER, str(tmp_path))
    monkeypatch.setattr(local_tiles, "this_chip", lambda _: ADA)
    monkeypatch.setattr(local_tiles, "chip_of", lambda _: (ADA.capability, ADA.multiprocessors))
    local_tiles.forget_tiles()
    local_tiles.fallbacks.clear()
    yield
    local_tiles.forget_tiles()
    local_tiles.fallbacks.clear()


def write(*rows: MeasuredTile) -> Path:
    path = tile_path(ADA)
    save_tiles(path, ADA, {"triton": "3.8"}, "2026-01-02", rows)
    return path


def test_the_file_is_read_at_run_time() -> None:
    heuristic = choose_tile(1576, 768, 3072, *ADA[1:], "float")
    assert heuristic != FAST
    assert local_tiles.tile_for(GPU, 1576, 768, 3072, "float", False, False) == heuristic
    write(ROW)
    assert local_tiles.tile_for(GPU, 1576, 768, 3072, "float", False, False) == heuristic, "read once in a process"
    local_tiles.forget_tiles()
    chosen = {
        case: local_tiles.tile_for(GPU, *case[:3], case[3], True, case[4])
        for case in [
            (1576, 768, 3072, "float", False),
            (2048, 768, 3072, "residual", False),
            (2049, 768, 3072, "float", False),
            (1576, 3072, 768, "float", False),
            (1576, 768, 3072, "float", True),
        ]
    }
    assert [tile == FAST for tile in chosen.values()] == [True, True, False, False, False], (
        "the bucket of rows, any epilogue that has no entry of its own; not for float32 results"
    )
    assert not local_tiles.fallbacks


def test_a_file_goes_before_the_shipped_table() -> None:
    key = (256, 768, 768)
    (shipped,) = {general_tile(197, 768, 768, (9, 0), 132, "float")}
    other = next(tile for tile in candidates((9, 0), 197) if tile != shipped)
    assert general_tile(197, 768, 768, (9, 0), 132, "float", local={(*key, "float"): other}) == other
    assert general_tile(197, 768, 768, (9, 0), 132, "float", local={(*key, "int8"): other}) == shipped
    assert has_table((9, 0))
    assert not has_table((8, 0))


def test_files_have_the_name_of_the_chip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert tile_path(ADA) == tmp_path / "nvidia-l40s-sm_89-142.json"
    monkeypatch.delenv(local_tiles.FOLDER)
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert tile_path(ADA) == Path("/cache/qframework/tiles/nvidia-l40s-sm_89-142.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert tile_path(Chip("../A/B c", (8, 0), 1)) == Path.home() / ".cache/qframework/tiles/a-b-c-sm_80-1.json"


def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    document = copy.deepcopy(json.loads(write(ROW).read_text()))
    inner = document
    for step in path[:-1]:
        inner = inner[step]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return document


BROKEN: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "format": (("format",), 2, "an object of format 1"),
    "other chip": (("chip", "multiprocessors"), 84, "must be of the chip"),
    "no chip": (("chip",), None, "must be of the chip"),
    "tiles": (("tiles",), {}, "tiles must be a list"),
    "a row": (("tiles", 0), 5, "each of tiles must have m, n, k"),
    "a field": (("tiles", 0, "k"), None, "each of tiles must have m, n, k"),
    "rows": (("tiles", 0, "m"), 1576, "m must be a power of two, got 1576"),
    "negative": (("tiles", 0, "n"), -3, "n must be a positive number"),
    "boolean": (("tiles", 0, "k"), True, "k must be a positive number"),
    "huge": (("tiles", 0, "k"), 10**30, "k must be a positive number"),
    "epilogue": (("tiles", 0, "epilogue"), ["float"], "epilogue must be one of float"),
    "time": (("tiles", 0, "microseconds"), 0, "microseconds must be a positive number"),
    "tile": (("tiles", 0, "tile"), [1], "tile must have block_m"),
    "a missing choice": (("tiles", 0, "tile", "group_m"), None, "tile must have block_m"),
    "a type": (("tiles", 0, "tile", "tma"), 1, "tile must have block_m"),
    "not measured": (("tiles", 0, "tile", "block_m"), 96, "must be one that this version measures on the chip"),
    "of Hopper": (("tiles", 0, "tile", "specialized"), "pingpong", "must be one that this version measures"),
    "stages": (("tiles", 0, "tile", "num_stages"), 1000, "must be one that this version measures"),
}


@pytest.mark.parametrize(("path", "value", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_named_and_not_used(
    path: tuple[Any, ...], value: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    document = changed(path, value)
    file = tile_path(ADA)
    file.write_text(json.dumps(document))
    expect_unused(file, message, caplog)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"format": NaN}', '{"format": 1, "format": 1}', "\0"])
def test_a_file_that_is_no_json(text: str, caplog: pytest.LogCaptureFixture) -> None:
    file = tile_path(ADA)
    file.write_text(text)
    expect_unused(file, "is not a file of qframework tune-kernels" if text else "", caplog)


def expect_unused(file: Path, message: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(FileFormatError, match=str(file)) as error:
        read_tiles(file, ADA)
    assert message in str(error.value)
    heuristic = choose_tile(1576, 768, 3072, *ADA[1:], "float")
    for _ in range(2):
        assert local_tiles.tile_for(GPU, 1576, 768, 3072, "float", False, False) == heuristic
    assert dict(local_tiles.fallbacks) == {"file of tiles": 1}
    assert str(file) in caplog.text


def test_a_folder_or_an_unreadable_place_is_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tile_path(ADA).mkdir()
    assert local_tiles.local_table(GPU) == {}
    monkeypatch.setenv(local_tiles.FOLDER, str(tmp_path / "file"))
    (tmp_path / "file").touch()
    local_tiles.forget_tiles()
    assert local_tiles.local_table(GPU) == {}
    assert local_tiles.fallbacks["file of tiles"] == 2


def test_a_shape_cannot_be_named_twice() -> None:
    file = write(ROW, ROW._replace(tile=SLOW))
    with pytest.raises(FileFormatError, match="once"):
        read_tiles(file, ADA)


def test_a_tile_that_does_not_fit_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that another version of Triton has measured."""
    write(ROW)
    asked = []

    class Operands:
        a = torch.empty(0, device="meta")

    def calls(x: Any, out: Any, device: Any, tile: Tile | None) -> list[Tile]:
        return [tile or local_tiles.tile_for(GPU, 1576, 768, 3072, "float", False, False)]  # type: ignore[list-item]

    def launched(chosen: list[Tile]) -> None:
        asked.extend(chosen)
        if chosen == [FAST]:
            raise OutOfResources(120_000, 99_000, "shared memory")

    monkeypatch.setattr(launch, "_calls", calls)
    monkeypatch.setattr(launch, "_launch_all", launched)
    monkeypatch.setattr(launch, "ignore_tiles", lambda _, error: local_tiles.ignore_tiles(GPU, error))
    heuristic = choose_tile(1576, 768, 3072, *ADA[1:], "float")
    launch.write_result(Operands, torch.empty(0))  # type: ignore[arg-type]
    launch.write_result(Operands, torch.empty(0))  # type: ignore[arg-type]
    assert asked == [FAST, heuristic, heuristic]
    assert dict(local_tiles.fallbacks) == {"tile that does not run": 1}
    assert str(tile_path(ADA)) in caplog.text
    with pytest.raises(OutOfResources):  # a tile that was asked for
        launch.write_result(Operands, torch.empty(0), FAST)  # type: ignore[arg-type]


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_whatever_is_chosen_may_be_in_a_file(capability: tuple[int, int]) -> None:
    known = allowed(capability)
    for m in (65, 197, 1576, 12608, 50432):
        assert set(candidates(capability, m)) <= known
        for n, k in ((768, 768), (2304, 768), (1024, 4096), (16, 32), (8192, 48)):
            for epilogue in ("float", "residual", "int8", "activation", "all"):
                assert choose_tile(m, n, k, capability, 108, epilogue) in known
