"""``qframework doctor``."""

from __future__ import annotations

import json
from collections.abc import Mapping

import typer

from qframework.cli.command import Json, failed_check
from qframework.cli.output import print_table

EXAMPLES = """\
[bold]Examples[/]

qframework doctor

qframework doctor --json
"""


def doctor(as_json: Json = False) -> None:
    """Show devices, versions and the kernels that will run on this machine; exit with 1 if the backend cannot work."""
    from qframework.diagnosis import diagnose

    report = diagnose()
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        for section, values in report.items():
            if isinstance(values, Mapping):
                print_table(section, values)
        for note in report["notes"]:
            typer.echo(note)
    if report["problems"]:
        raise failed_check("; ".join(report["problems"]))
