"""Results on standard output: tables for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import typer
from rich.console import Console
from rich.table import Table


def print_result(title: str, result: Mapping[str, Any], as_json: bool) -> None:
    """One object: a table of names and values, or JSON."""
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        print_table(title, result)


def print_table(title: str, values: Mapping[str, Any]) -> None:
    """Names and values, one to a line."""
    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in values.items():
        table.add_row(name.replace("_", " "), _format(value))
    print_rich(table)


def print_rows(title: str, rows: list[dict[str, Any]], as_json: bool) -> None:
    """Objects of the same keys: a table with a column for each key, or JSON."""
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name.replace("_", " "))
    for row in rows:
        table.add_row(*map(_format, row.values()))
    print_rich(table)


def print_rich(table: Table) -> None:
    """A table as it is."""
    Console(markup=False, highlight=False).print(table)


def _format(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
