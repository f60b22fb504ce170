"""Options, processes and output that ``examples/imagenet_timm.py`` and ``examples/coco_sam.py`` share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.console import Console

from qframework.compat.logs import silence_torchao_at_import
from qframework.errors import QFrameworkError
from qframework.evaluation.comparison import Configuration, Settings, compare, standard_configurations
from qframework.evaluation.comparison_results import Results
from qframework.evaluation.distributed import Processes, device_of_process, joined_processes
from qframework.evaluation.tasks import Task
from qframework.files import atomic_write
from qframework.outputs import check_output_file

BAD_INPUT = 2
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MakeTask = Callable[[argparse.Namespace], Task]


def comparison_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options of both scripts."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only N images, spread evenly over all")
    parser.add_argument("--calibration-images", type=int, default=512, metavar="N", help="default: %(default)s")
    parser.add_argument("--configurations", metavar="A,B", help="rows to measure, by name (default: all)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda (with torchrun: one GPU per process), cuda:1, ...")
    parser.add_argument("--dtype", choices=_DTYPES, default="float32", help="of everything that is not INT8")
    parser.add_argument(
        "--workers", type=int, default=0, metavar="N", help="processes that read images (default: 0, none)"
    )
    parser.add_argument("--repeats", type=int, default=20, metavar="N", help="timed calls; the result is their median")
    parser.add_argument("--eager", action="store_true", help="compile nothing; INT8 is then simulated in float")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE.json",
        help="save results here, resume from it, and write Markdown beside it",
    )
    parser.add_argument("--restart", action="store_true", help="discard the results in --output")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    return parser


def run_script(make_task: MakeTask, options: argparse.Namespace) -> int:
    """Make the task, compare, print and write; returns the exit code, 2 for bad input with one line on stderr."""
    silence_torchao_at_import()
    with ExitStack() as stack:
        processes = Processes()
        try:
            processes = stack.enter_context(joined_processes())
            results = _compare(make_task, options, processes)
        except (QFrameworkError, OSError, ModuleNotFoundError) as error:
            if processes.is_first:
                print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
            return BAD_INPUT
    if processes.is_first:
        _show(results, options.output)
    return 0


def _compare(make_task: MakeTask, options: argparse.Namespace, processes: Processes) -> Results:
    dtype, device = _DTYPES[options.dtype], device_of_process(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # for libraries that allocate on the current device
    settings = Settings(device, dtype, not options.eager, options.repeats, not options.quiet)
    chosen = _chosen(standard_configurations(dtype), options.configurations)
    if options.output is not None:
        _check_output(options.output)
    results = Results.open(options.output, restart=options.restart, processes=processes)
    return compare(make_task(options), chosen, settings, processes=processes, results=results)


def _check_output(output: Path) -> None:
    """Raise QFrameworkError unless the results and their Markdown can be written to two different files."""
    check_output_file(output, "--output", make_folder=True)
    if output.suffix == ".md":
        raise QFrameworkError(f"--output must be FILE.json, since the Markdown goes beside it, got {output}")
    check_output_file(output.with_suffix(".md"), f"--output {output}")


def _chosen(configurations: dict[str, Configuration], names: str | None) -> dict[str, Configuration]:
    """The configurations with these names."""
    if names is None:
        return configurations
    wanted = [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in configurations]
    if unknown:
        raise QFrameworkError(f"--configurations must be chosen from {', '.join(configurations)}, got {unknown[0]!r}")
    return {name: configuration for name, configuration in configurations.items() if name in wanted}


def _show(results: Results, output: Path | None) -> None:
    Console(markup=False, highlight=False).print(results.table())
    if output is not None:
        with atomic_write(output.with_suffix(".md")) as file:
            file.write(results.markdown().encode())


def read_names(path: Path | None) -> list[str] | None:
    """The nonempty lines of a text file; None for no file."""
    if path is None:
        return None
    return [line for line in map(str.strip, path.read_text().splitlines()) if line]
