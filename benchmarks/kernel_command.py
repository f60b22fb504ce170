"""The command of a benchmark of one kernel: options, a deadline, and a file that is written after every case."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from benchmarks.machine import describe_machine
from qframework.files import write_json
from qframework.outputs import output_file

Case = tuple[Any, Any]
"""A shape, and what of it is measured."""


def run(
    name: str,
    description: str,
    cases: Callable[[bool], Iterable[Case]],
    measure: Callable[[Any, Any, torch.device, bool], dict[str, Any]],
    argv: Sequence[str] | None,
) -> list[dict[str, Any]]:
    """Measure the cases on the GPU; returns a record for each.

    Args:
        name: of the module.
        description: what is measured, for the help and the file.
        cases: all of them, or if the argument is true those of a smoke run.
        measure: gives the record of a case, with ``"us"`` and ``"errors"`` by form; the last argument is whether
            Inductor compiles and forms are timed.
        argv: the command's arguments, by default those of the process.
    """
    parser = argparse.ArgumentParser(name, description=description)
    parser.add_argument("--output", type=output_file, help="JSON file")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which no other case begins")
    parser.add_argument("--only", default="", help="measure the shapes in whose description this text occurs")
    parser.add_argument("--smoke", action="store_true", help="one tiny shape, checked and not timed")
    arguments = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not arguments.smoke:
        parser.error("needs a GPU; --smoke does not")
    records: list[dict[str, Any]] = []
    results = {"what": description.strip(), "machine": describe_machine(device.type), "records": records}
    deadline = time.monotonic() + arguments.limit
    for shape, what in cases(arguments.smoke):
        if arguments.only not in str(shape):
            continue
        if time.monotonic() > deadline:
            print(f"not measured: {shape}, {what}")
            continue
        record = measure(shape, what, device, not arguments.smoke)
        print(*shape, what, record["us"], max(record["errors"].values()), flush=True)
        records.append(record)
        if arguments.output:
            write_json(arguments.output, results)
    return records
