"""Tiles of int8_linear: a table of measurements per chip, else an estimate or a rule.

``python -m benchmarks.tune_int8_linear`` measures and writes the table, whose keys are chip, bucket of rows, columns,
inner size and epilogue. On Hopper, a shape without an entry takes the tile with the least estimated time
(tile_costs.py); elsewhere the first candidate of its chip that gives every multiprocessor work. Nothing is tuned at run
time; ``qframework tune-kernels`` measures a machine's own table (local_tiles.py).

Only Hopper's table is measured. The candidates of other chips follow from the sizes that CUDA's programming guide lists
for their compute capability:

- **A100** (sm_80, 108 multiprocessors): 163 KB of shared memory for a program. 128 x 128 with rounds of 128 channels
  takes 32 KB a stage; three stages hide the latency of cp.async and leave a multiprocessor one program of 8 warps,
  whose accumulator takes 64 registers a thread. 64 x 128 with 4 warps fits twice, which fills the tail of smaller
  problems.
- **L4, L40S, RTX 4090** (sm_89) and RTX 30 (sm_86): 99 KB for a program, 100 KB for a multiprocessor. Rounds of 64
  channels take 16 KB a stage, so two programs of three stages fit and one computes while the other stores. The three
  differ in multiprocessors (58, 142, 128), which decides from which size on the largest tile gives all of them work.
- **RTX 5090** (sm_120, 170 multiprocessors): the same memory, and INT8 by ``mma.sync`` as before; neither ``wgmma`` nor
  ``tcgen05``. The same candidates.
- **B200** (sm_100, 148 multiprocessors): 227 KB, and INT8 by ``tcgen05`` where Triton knows it, else ``mma.sync``.
  A100's tiles, since nothing else could be measured; TMA and deeper stages are left to a measurement on the chip.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from importlib.resources import files
from types import MappingProxyType
from typing import TypeAlias

from qframework.kernels.linear.tile import (
    COOPERATIVE,
    MAX_FEW_ROWS,
    PINGPONG,
    THIRDS,
    WIDE,
    Epilogue,
    FewRowsTile,
    Tile,
)
from qframework.kernels.linear.tile_costs import COSTS, GATED_COSTS, fastest_for_long_rows, fastest_tile, tile_us
from qframework.kernels.runtime.gluon import HAS_GLUON
from qframework.kernels.runtime.launch import power_of_2

Table: TypeAlias = Mapping[tuple[int, int, int, Epilogue], Tile]
"""Tiles by bucket of rows, columns, inner size and epilogue."""
# Candidates for a chip, largest first. The last one also serves all smaller problems.
_BY_POINTERS = [Tile(128, 128, 128, 8, 3, subtiles=2), Tile(64, 128, 128, 4, 3), Tile(64, 64, 128, 4, 4)]
_CANDIDATES: dict[str, list[Tile]] = {
    "sm_90 wide": [
        Tile(128, 128, 128, 4, 3, programs=2, subtiles=4, tma=True, tma_store=True),
        Tile(64, 128, 128, 4, 3, programs=3, tma=True, tma_store=True),
        Tile(64, 64, 128, 4, 4, tma=True, tma_store=True),
    ],
    "sm_90 by pointers": _BY_POINTERS,
    "sm_100": _BY_POINTERS,
    "sm_80": [*_BY_POINTERS, Tile(16, 64, 128, 4, 4)],
    "99 KB": [
        Tile(128, 128, 64, 8, 3, subtiles=2),
        Tile(64, 128, 64, 4, 3),
        Tile(64, 64, 128, 4, 3),
        Tile(16, 64, 128, 4, 4),
    ],
}
GATED = tuple(GATED_COSTS)  # of them, half of the rows are each weight's
_MANY_ROUNDS = 4  # of the largest tile, for which estimates were hardly fitted
INTERPRETED = Tile(32, 32, 32, 4, 1)  # small, to exercise masks and loops
INTERPRETED_FEW_ROWS = FewRowsTile(64, 16, 32, 4, 1, parts=2)
INTERPRETED_GATED = INTERPRETED_FEW_ROWS._replace(parts=1)


def choose_tile(
    m: int,
    n: int,
    k: int,
    capability: tuple[int, int],
    processors: int,
    epilogue: Epilogue,
    tma: bool = True,
    wide: bool = False,
    local: Table = MappingProxyType({}),
) -> Tile | FewRowsTile:
    """Tile for a problem on a chip.

    Args:
        m: rows of ``a (M, K)``.
        n: rows of ``b (N, K)``, columns of the result.
        k: the inner size.
        capability: CUDA's, (9, 0) for Hopper.
        processors: multiprocessors of the chip.
        epilogue: what the kernel keeps in registers beside the accumulator, and what it stores.
        tma: whether addresses and strides of the operands suit tensor descriptors.
        wide: whether the result is float32, or the residual has another dtype than the result; the table does not
            cover these.
        local: what was measured on the machine itself; it takes precedence over the shipped table.
    """
    if 0 < m <= MAX_FEW_ROWS and k > 0:
        return few_rows_tile(m, n, k, processors)
    return general_tile(m, n, k, capability, processors, epilogue, tma, wide, local)


def general_tile(
    m: int,
    n: int,
    k: int,
    capability: tuple[int, int],
    processors: int,
    epilogue: Epilogue,
    tma: bool = True,
    wide: bool = False,
    local: Table = MappingProxyType({}),
) -> Tile:
    """``choose_tile`` for any number of rows."""
    chip = chip_key(capability)
    if chip == "sm_90":
        wide |= not HAS_GLUON
        if tma and not wide:
            found = _measured(chip, m, n, k, epilogue, local)
            return _with_room(found or _on_hopper(m, n, k, processors, epilogue), epilogue)
        chip = "sm_90 by pointers" if not tma else "sm_90 wide"
    elif not wide and (found := _measured(chip, m, n, k, epilogue, local)):
        return found
    for tile in _CANDIDATES[chip]:
        if m > tile.block_m // 2 and _tiles(tile, m, n) >= processors * max(tile.programs, 1):
            return _of_few_channels(tile, k)
    return _of_few_channels(fastest_tile(m, n, k, processors, tma=False) if capability == (9, 0) else tile, k)


def _on_hopper(m: int, n: int, k: int, processors: int, epilogue: Epilogue) -> Tile:
    """The tile of a shape that is in no table."""
    many = _tiles(PINGPONG, m, n) >= _MANY_ROUNDS * processors
    tile = PINGPONG if many else fastest_tile(m, n, k, processors)
    if tile == PINGPONG and k >= 2048 and not epilogue.startswith("activation"):
        large = WIDE if epilogue in ("residual", "all") else _cooperative(n, processors)
        return fastest_for_long_rows((PINGPONG, THIRDS, large), m, n, k, processors)
    return _of_few_channels(tile, k)


def _cooperative(n: int, processors: int) -> Tile:
    """A cooperative tile. For many columns, several rows of tiles take turns, so that they read parts of b together."""
    return COOPERATIVE._replace(group_m=4) if 2 * _tiles(COOPERATIVE, 1, n) > processors else COOPERATIVE


def gated_tile(m: int, n: int, k: int, processors: int) -> Tile:
    """Tile of a gated linear's kernel, which only Hopper has, for ``n`` columns of each weight.

    It is the one with the least estimate for a plain product of both weights: within 8 percent of the fastest of
    four on an H100 (``other/2026-11-28-h100-gated-linear.json``). Large problems of a long K take cooperative tiles,
    which load fewer bytes. Alone they take up to 14 percent longer for an INT8 result of a K below 4,096, but three
    whole models are 3 to 11 percent faster with them on an H100 (``other/2026-11-28-hopper-gated-models.json``).
    """
    if k >= 2048 and _tiles(COOPERATIVE, m, 2 * n) >= _MANY_ROUNDS * processors:
        return COOPERATIVE._replace(group_m=4)
    return min(GATED, key=lambda tile: tile_us(tile, m, 2 * n, k, processors, GATED_COSTS))


def _of_few_channels(tile: Tile, k: int) -> Tile:
    return tile if k > 64 or tile.specialized else tile._replace(block_k=64)


def few_rows_tile(m: int, n: int, k: int, processors: int) -> FewRowsTile:
    """Tile for up to ``MAX_FEW_ROWS`` rows, narrow so that every multiprocessor reads a part of the weight.

    Every program reads all rows from L2, so tiles of more than 16 rows have 32 columns unless that leaves
    multiprocessors idle. For a long K and few columns, parts of K share a tile. Measured on an H100 only; other
    chips take the same tiles, since they are bound by memory alike.
    """
    if m <= 16:
        tile = FewRowsTile(16, 16, 256, 2, 6)
    elif m <= 32:
        wide = 10 * math.ceil(n / 32) >= 9 * processors
        tile = FewRowsTile(32, 32, 256, 4, 4) if wide else FewRowsTile(32, 16, 512, 4, 4)
    else:
        tile = FewRowsTile(64, 32, 256, 4, 4)
        programs, steps = math.ceil(n / 32), math.ceil(k / 256)
        worthwhile = k >= 4096 and (2 * programs <= processors or k >= 8192)
        fitting = [p for p in (2, 4) if p * programs <= 2 * processors and steps >= 4 * p]
        if worthwhile and fitting:
            tile = tile._replace(parts=max(fitting))
        elif math.ceil(n / 16) <= 2 * processors:
            tile = tile._replace(block_n=16)
    columns = power_of_2(k)
    return tile._replace(block_k=min(tile.block_k, max(32, columns)), ahead=max(256, min(1024, columns)))


def gated_few_rows_tile(m: int, n: int, k: int, processors: int) -> FewRowsTile:
    """As ``few_rows_tile`` for a gated linear: a tile has 16 columns of each of both weights, and all of K."""
    return few_rows_tile(m, n, k, processors)._replace(block_n=16, parts=1)


def _with_room(tile: Tile, epilogue: Epilogue) -> Tile:
    """One stage less for a cooperative tile of 256 rows with a residual, which needs its shared memory."""
    needs_room = tile.specialized == "cooperative" and tile.block_m == 256 and epilogue in ("residual", "all")
    return tile._replace(num_stages=min(tile.num_stages, 3)) if needs_room else tile


def _tiles(tile: Tile, m: int, n: int) -> int:
    return math.ceil(m / tile.block_m) * math.ceil(n / tile.block_n)


def _measured(chip: str, m: int, n: int, k: int, epilogue: Epilogue, local: Table) -> Tile | None:
    """The tile in one of the tables, falling back to the entry with a plain epilogue."""
    plain: Epilogue = "float"
    keys = ((bucket(m), n, k, epilogue), (bucket(m), n, k, plain))
    tables = (local, _table(chip))
    return next((table[key] for key in keys for table in tables if key in table), None)


def unmeasured(capability: tuple[int, int]) -> set[Tile]:
    """All that is chosen on a chip without a measurement of the machine: heuristic and shipped table."""
    chip = chip_key(capability)
    found = {*_CANDIDATES.get(chip, []), *_table(chip).values()}
    if chip == "sm_90":
        found |= {WIDE, THIRDS, COOPERATIVE, COOPERATIVE._replace(group_m=4), *COSTS}
        found |= {_with_room(tile, "residual") for tile in found}
    return found


def has_table(capability: tuple[int, int]) -> bool:
    """Whether the package ships measured tiles for chips of a compute capability."""
    return bool(_table(chip_key(capability)))


def chip_key(capability: tuple[int, int]) -> str:
    """The chips that share candidates: by compute capability, or ``"99 KB"``, their shared memory, for all others."""
    return {(8, 0): "sm_80", (9, 0): "sm_90", (10, 0): "sm_100", (10, 3): "sm_100"}.get(capability, "99 KB")


def bucket(m: int) -> int:
    """The power of two that holds ``m`` rows."""
    return 1 << (m - 1).bit_length()


@functools.cache
def _table(chip: str) -> Table:
    path = files("qframework.kernels.linear") / f"tiles_{chip}.json"
    if not path.is_file():
        return {}
    rows = json.loads(path.read_text())["tiles"]
    return {(row["m"], row["n"], row["k"], row["epilogue"]): Tile(**row["tile"]) for row in rows}
