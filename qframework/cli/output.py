"""Prints results as tables or JSON, and checks the files that a command writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from qframework.errors import QFrameworkError
from qframework.outputs import check_output_file


def journal_and_plot(output: Path, plot: bool) -> tuple[Path, Path | None]:
    """The files to write beside ``output``. Raises QFrameworkError if any of the three cannot be written."""
    check_output_file(output, "--output", make_folder=True)
    journal, drawn = output.with_suffix(".journal.jsonl"), output.with_suffix(".png") if plot else None
    if drawn == output:
        raise QFrameworkError(f"--output must not be the name of its own plot, got {output}. Pass --no-plot")
    for path in filter(None, (journal, drawn)):
        check_output_file(path, f"--output {output}")
    return journal, drawn


def print_result(title: str, result: Mapping[str, Any], as_json: bool) -> None:
    """Print one object as a table of names and values, or as JSON."""
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        print_table(title, result)


def print_table(title: str, values: Mapping[str, Any]) -> None:
    """Print names and values, one per line."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in values.items():
        table.add_row(name.replace("_", " "), _format(value))
    print_rich(table)


def print_rows(title: str, rows: list[dict[str, Any]], as_json: bool) -> None:
    """Print objects with the same keys as a table with a column for each key, or as JSON."""
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table(title=title)
    for name, value in rows[0].items():
        number = isinstance(value, int | float)
        widest = max(len(_format(row[name])) for row in rows) if number else None
        justify: Literal["left", "right"] = "right" if number else "left"
        table.add_column(name.replace("_", " "), justify=justify, overflow="fold", min_width=widest)
    for row in rows:
        table.add_row(*map(_format, row.values()))
    print_rich(table)


def print_rich(table: Table) -> None:
    """Print a table without interpreting markup; a pipe or a narrow terminal cuts nothing off."""
    console = Console(markup=False, highlight=False)
    needed = console.measure(table).minimum
    console.width = max(console.width, needed)
    console.print(table)


def _format(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
