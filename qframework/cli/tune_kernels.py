"""``qframework tune-kernels``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qframework.cli import command
from qframework.cli.output import print_rows
from qframework.cli.targets import device_named, names
from qframework.errors import QFrameworkError, UnsupportedError
from qframework.outputs import check_output_file

if TYPE_CHECKING:
    from qframework.kernels.linear.local_tiles import MeasuredTile

EXAMPLES = """\
[bold]Examples[/]

qframework tune-kernels

qframework tune-kernels --width 768 --rows 197,1576 --minutes 1
"""


def tune_kernels(
    width: Annotated[str, typer.Option(help="Widths of the models, such as 768 for ViT-B.")] = "768,1024",
    rows: Annotated[
        str, typer.Option(help="Rows of the linears, batch times tokens; powers of two share an entry.")
    ] = "197,1576,12608,50432",
    minutes: Annotated[float, typer.Option(min=0.1, help="Begin no measurement after this time.")] = 5.0,
    output: Annotated[Path | None, typer.Option(help="File to write; default: where the package looks for it.")] = None,
    device: command.Device = "auto",
    as_json: command.Json = False,
) -> None:
    """Measure which tiles of INT8 linears are fastest on this GPU, and keep them for all later runs.

    The package reads the file at run time. Results do not change, only speed. To have the table of a chip shipped with
    the package, send the file.
    """
    on = device_named(device)
    if on.type != "cuda":
        raise UnsupportedError(f"--device must be a GPU for tune-kernels, got {device!r}, which is {on} here")
    import torch

    from qframework.evaluation.progress import progress_bar
    from qframework.kernels.linear.local_tiles import this_chip, tile_path
    from qframework.tuning.kernel_tiles import TileTimes, tile_problems, tune_tiles

    problems = tile_problems(_numbers(width, "--width"), _numbers(rows, "--rows"))
    with torch.cuda.device(on):
        on = torch.device("cuda", torch.cuda.current_device())
        chip = this_chip(on)
        path = output or tile_path(chip)
        check_output_file(path, "--output", make_folder=True)
        failed: list[str] = []

        def note(times: TileTimes | None) -> None:
            advance()
            if times is None:
                failed.append("its first choice does not run")

        with progress_bar("Measuring tiles", len(problems), True) as advance:
            found = tune_tiles(problems, on, chip, path, 60 * minutes, note)
    if not found:
        raise command.failed_check("no tile of int8_linear runs on this GPU; see 'qframework doctor'")
    print_rows(f"{chip.name}: {path}", [_row(each) for each in found], as_json)
    gain = math.exp(sum(math.log(each.microseconds_before / each.microseconds) for each in found) / len(found))
    typer.echo(
        f"qframework: {len(found)} of {len(problems)} shapes measured, {gain:.2f} times the speed before as geometric "
        f"mean; kept in {path}",
        err=True,
    )


def _numbers(text: str, option: str) -> list[int]:
    try:
        return [int(part) for part in names(text)]
    except ValueError as error:
        raise QFrameworkError(f"{option} must be numbers separated by commas, got {text!r}") from error


def _row(each: MeasuredTile) -> dict[str, Any]:
    tile = each.tile
    special = f" {tile.specialized}" if tile.specialized else ""
    return {
        "rows": each.m,
        "columns": each.n,
        "inner": each.k,
        "epilogue": each.epilogue,
        "us": each.microseconds,
        "us_before": each.microseconds_before,
        "tile": f"{tile.block_m} x {tile.block_n} x {tile.block_k}{special}",
    }
