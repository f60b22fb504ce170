"""Tiles of int8_linear that were measured on this machine, in a file for each chip.

``qframework tune-kernels`` writes ``CHIP.json`` to the folder ``QFRAMEWORK_TILES``, by default
``~/.cache/qframework/tiles`` (``XDG_CACHE_HOME`` counts), and this module reads it when a kernel is first launched on
the chip. The file takes precedence over the table that the package ships. It is only a choice among
``tile_candidates.allowed``, so no file can change a result; a file that cannot be used is named in a warning, and the
choice is made as without it.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch

from qframework.errors import FileFormatError
from qframework.fallbacks import Fallbacks
from qframework.files import read_json, write_json
from qframework.kernels.linear.tile import MAX_FEW_ROWS, Epilogue, FewRowsTile, Tile
from qframework.kernels.linear.tile_candidates import allowed
from qframework.kernels.linear.tiles import INTERPRETED, INTERPRETED_FEW_ROWS, Table, choose_tile
from qframework.kernels.runtime.chip import chip_of

_logger = logging.getLogger("qframework")
FORMAT = 1
FOLDER = "QFRAMEWORK_TILES"  # environment variable
_MAX_ROWS = 1 << 30
_EPILOGUES = get_args(Epilogue)
fallbacks = Fallbacks()
"""How often a file of tiles was not used, by reason."""


class Chip(NamedTuple):
    """A GPU: two that are equal in these take the same tiles."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int

    def to_dict(self) -> dict[str, Any]:
        """As in the file."""
        major, minor = self.capability
        return {"name": self.name, "capability": f"sm_{major}{minor}", "multiprocessors": self.multiprocessors}


class MeasuredTile(NamedTuple):
    """The fastest tile for ``m`` rows (the bucket: a power of two), with its time and that of the choice before."""

    m: int
    n: int
    k: int
    epilogue: Epilogue
    tile: Tile
    microseconds: float
    microseconds_before: float

    def to_dict(self) -> dict[str, Any]:
        """As in the file."""
        return {**self._asdict(), "tile": self.tile._asdict()}


def this_chip(device: torch.device) -> Chip:
    """The GPU ``device``."""
    return Chip(torch.cuda.get_device_name(device), *chip_of(device))


def tile_path(chip: Chip) -> Path:
    """The file of a chip, whether it exists or not."""
    words = re.sub(r"[^a-z0-9]+", "-", chip.name.lower()).strip("-")
    name = f"{words}-sm_{chip.capability[0]}{chip.capability[1]}-{chip.multiprocessors}.json"
    if folder := os.environ.get(FOLDER):
        return Path(folder, name)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "qframework", "tiles", name)


def save_tiles(path: Path, chip: Chip, versions: Mapping[str, str], date: str, tiles: Sequence[MeasuredTile]) -> None:
    """Write a file that ``read_tiles`` reads."""
    rows = [each.to_dict() for each in sorted(tiles, key=lambda each: each[:4])]
    document = {"format": FORMAT, "chip": chip.to_dict(), "versions": dict(versions), "date": date, "tiles": rows}
    write_json(path, document)


def read_tiles(path: Path, chip: Chip) -> list[MeasuredTile]:
    """The tiles in a file.

    Raises:
        FileFormatError: ``path``, which the error names, is not such a file, belongs to another chip, or names a tile
            that is not among the chip's candidates.
        FileNotFoundError: there is no such file.
    """
    document = read_json(path, "a file of qframework tune-kernels")
    try:
        return _checked(document, chip)
    except FileFormatError as error:
        raise FileFormatError(
            f"{path} cannot be used: {error}. Measure again with 'qframework tune-kernels', or remove the file"
        ) from error


def _checked(document: Any, chip: Chip) -> list[MeasuredTile]:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise FileFormatError(f"it must be an object of format {FORMAT}")
    if document.get("chip") != chip.to_dict():
        raise FileFormatError(f"it must be of the chip {chip.to_dict()}, got {str(document.get('chip'))[:200]}")
    if not isinstance(document.get("tiles"), list):
        raise FileFormatError("tiles must be a list")
    known = allowed(chip.capability)
    found = [_row(row, known) for row in document["tiles"]]
    if len({row[:4] for row in found}) != len(found):
        raise FileFormatError("tiles must name each shape and epilogue once")
    return found


def _row(row: Any, known: set[Tile]) -> MeasuredTile:
    if not isinstance(row, dict) or row.keys() != set(MeasuredTile._fields):
        raise FileFormatError(f"each of tiles must have {', '.join(MeasuredTile._fields)}, got {str(row)[:200]}")
    for name in ("m", "n", "k"):
        if type(row[name]) is not int or not 0 < row[name] <= _MAX_ROWS:
            raise FileFormatError(f"{name} must be a positive number below 2^30, got {str(row[name])[:40]!r}")
    if row["m"] & (row["m"] - 1):
        raise FileFormatError(f"m must be a power of two, got {row['m']}")
    if row["epilogue"] not in _EPILOGUES:
        raise FileFormatError(f"epilogue must be one of {', '.join(_EPILOGUES)}, got {str(row['epilogue'])[:40]!r}")
    for name in ("microseconds", "microseconds_before"):
        if type(row[name]) not in (int, float) or not (math.isfinite(row[name]) and row[name] > 0):
            raise FileFormatError(f"{name} must be a positive number, got {str(row[name])[:40]!r}")
    tile = row["tile"]
    types = {name: type(value) for name, value in Tile(0, 0, 0, 0, 0)._asdict().items()}
    if not isinstance(tile, dict) or {name: type(value) for name, value in tile.items()} != types:
        raise FileFormatError(f"tile must have {', '.join(Tile._fields)}, got {str(tile)[:200]}")
    if Tile(**tile) not in known:
        raise FileFormatError(f"tile must be one that this version measures on the chip, got {tile}")
    return MeasuredTile(**{**row, "tile": Tile(**tile)})


@functools.cache
def local_table(device: torch.device) -> Table:
    """What was measured on this machine for ``device``; empty without a file, or with one that cannot be used."""
    try:
        path = tile_path(chip := this_chip(device))
        return {row[:4]: row.tile for row in read_tiles(path, chip)}
    except FileNotFoundError:
        return {}
    except (FileFormatError, OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        fallbacks.note("file of tiles", f"int8_linear chooses its tiles without a file: {error}")
        return {}


def forget_tiles(device: torch.device | None = None) -> None:
    """Read the files again at the next launch; those of ``device`` count as empty until the process ends."""
    tile_for.cache_clear()
    if device is None:
        _ignored.clear()
        local_table.cache_clear()
    else:
        _ignored.add(device)


_ignored: set[torch.device] = set()


def ignore_tiles(device: torch.device, error: BaseException) -> bool:
    """Stop using the file after a launch failed; returns whether it was used, so that a second launch makes sense."""
    if device in _ignored or not local_table(device):
        return False
    reason = f"a tile of {tile_path(this_chip(device))} does not run: {error}. Measure again with tune-kernels"
    fallbacks.note("tile that does not run", f"int8_linear chooses its tiles without a file: {reason}")
    forget_tiles(device)
    return True


@functools.lru_cache(4096)
def tile_for(
    device: torch.device, m: int, n: int, k: int, epilogue: Epilogue, tma: bool, wide: bool
) -> Tile | FewRowsTile:
    """``choose_tile`` on ``device``, with what was measured there."""
    if device.type != "cuda":
        return INTERPRETED_FEW_ROWS if 0 < m <= MAX_FEW_ROWS and k > 0 else INTERPRETED
    capability, processors = chip_of(device)
    local = {} if device in _ignored else local_table(device)
    return choose_tile(m, n, k, capability, processors, epilogue, tma, wide, local)
