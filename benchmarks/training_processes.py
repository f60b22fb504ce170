"""A GPT trained by one process and by several that share every batch: the same losses, and how much faster.

    python -m benchmarks.training_processes --device cuda --compile --output DATE-h200.json

Runs ``examples/train_gpt.py`` as a user does, alone and under ``torchrun``, on CUDA one GPU for each process. The seed
is the same, and with it every batch: the gradients differ by rounding only, so the loss after the last step may be as
far from a single process's as INT8 may be from BF16's. Exit status 1 where a run fails or is further away.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.harness import argument_parser, comma_separated, integers
from benchmarks.machine import REPOSITORY, describe_machine
from benchmarks.tables import table as markdown
from benchmarks.training_parity import CONFIGURATIONS, SUBJECTS, per_block
from demos.training_files import LOSSES, SUMMARY
from qframework.files import write_text
from qframework.kernels.blocks.format import block_size_name

SCHEMA = 1
PATIENCE = 30.0  # seconds, for processes to end
SCRIPT = REPOSITORY / "examples" / "train_gpt.py"
DEFAULT = ("bf16", per_block((1, 128)))
# Wide enough that on a fast GPU the products count, not the host; slow enough that losses fall without a jump, after
# which runs that differ by rounding are as far apart as seeds are.
SETTINGS = {
    "width": 2048, "heads": 16, "depth": 2, "context": 512, "batch_size": 64, "learning_rate": 1e-4, "steps": 200,
}  # fmt: skip
SMOKE = {"width": 32, "heads": 2, "depth": 1, "context": 32, "batch_size": 4, "learning_rate": 1e-3, "steps": 4}
BOUND = 100 * SUBJECTS["gpt"].bound  # percent of the loss


@dataclass(frozen=True)
class Run:
    """What one run left: its speed, its losses, and why there are none."""

    configuration: str
    processes: int
    examples_per_second: float = 0.0
    validation_loss: float = 0.0
    losses: list[float] = field(default_factory=list)  # of every step
    failed: str = ""

    def apart(self, alone: Run) -> float:
        """How far the loss after the last step is from that of a single process, in percent."""
        return 100 * abs(self.validation_loss / alone.validation_loss - 1)

    def furthest(self, alone: Run) -> float:
        """The same of training losses, at the step where it is most."""
        pairs = zip(self.losses, alone.losses, strict=True)
        return max(100 * abs(mine / other - 1) for mine, other in pairs)


def train(configuration: str, processes: int, options: argparse.Namespace, folder: Path) -> Run:
    """One run of the script, from its start to its files."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    threads = max((os.cpu_count() or 1) // processes, 1)
    process = subprocess.Popen(
        [sys.executable, *launcher, str(SCRIPT), *script_arguments(configuration, options), "--output", str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = process.communicate(timeout=options.limit)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its processes
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=PATIENCE)
        process.kill()
        return Run(configuration, processes, failed=f"not done after {options.limit:g} s")
    if process.returncode:
        print(said, file=sys.stderr)
        return Run(configuration, processes, failed=f"exit status {process.returncode}")
    return read_run(configuration, processes, folder)


def script_arguments(configuration: str, options: argparse.Namespace) -> list[str]:
    """How the script is told."""
    chosen = {**CONFIGURATIONS[configuration], **(SMOKE if options.smoke else SETTINGS), "device": options.device}
    if "block_size" in chosen:
        chosen["block_size"] = block_size_name(chosen["block_size"])
    chosen |= {"evaluate_every": 0, "checkpoint_every": 0}
    named = [text for name, value in chosen.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    return [*named, "--quiet", *(["--compile"] if options.compile else [])]


def read_run(configuration: str, processes: int, folder: Path) -> Run:
    """What the script wrote."""
    summary = json.loads((folder / SUMMARY).read_text())
    with (folder / LOSSES).open() as file:
        losses = [float(f"{float(row['loss']):.7g}") for row in csv.DictReader(file)]
    return Run(configuration, processes, summary["examples_per_second"], summary["validation"]["loss"], losses)


# All runs together


def missed(runs: Sequence[Run]) -> list[str]:
    """What failed, and which losses are too far apart."""
    reasons = [f"{run.configuration}, {run.processes} processes: {run.failed}" for run in runs if run.failed]
    for run, alone in beside_alone(runs):
        if not run.apart(alone) <= BOUND:
            reasons.append(
                f"{run.configuration}: the loss of {run.processes} processes is {run.apart(alone):.3g} percent from "
                f"one process's, at most {BOUND:g} accepted"
            )
    return reasons


def beside_alone(runs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Each run of several processes with that of one."""
    alone = {run.configuration: run for run in runs if run.processes == 1 and not run.failed}
    several = (run for run in runs if run.processes > 1 and not run.failed)
    return [(run, alone[run.configuration]) for run in several if run.configuration in alone]


def table(runs: Sequence[Run]) -> str:
    """Markdown: one line for each run."""
    header = [
        "",
        "processes",
        "examples/s",
        "times one process",
        "validation loss",
        "from one process's, percent",
        "training loss, the step furthest from one process's, percent",
        f"at most {BOUND:g} percent",
    ]
    alone = {id(run): other for run, other in beside_alone(runs)}
    lines = []
    for run in runs:
        cells = [run.configuration, str(run.processes)]
        if run.failed:
            cells += ["", "", "", "", "", run.failed]
        else:
            cells += [f"{run.examples_per_second:.1f}", "", f"{run.validation_loss:.4f}", "", "", ""]
        if (other := alone.get(id(run))) is not None:
            cells[3] = f"{run.examples_per_second / other.examples_per_second:.2f}"
            cells[5:7] = f"{run.apart(other):.3f}", f"{run.furthest(other):.3f}"
            cells[7] = "PASS" if run.apart(other) <= BOUND else "too far"
        lines.append(cells)
    return markdown(header, lines)


def write(path: Path, runs: Sequence[Run], options: argparse.Namespace) -> None:
    """As JSON."""
    document = {
        "schema": SCHEMA,
        "benchmark": "training_processes",
        "smoke": options.smoke,
        "machine": describe_machine(options.device),
        "settings": {**(SMOKE if options.smoke else SETTINGS), "compiled": options.compile},
        "runs": [asdict(run) for run in runs],
    }
    write_text(path, json.dumps(document, indent=1) + "\n")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argument_parser("training_processes", __doc__, "document")
    parser.add_argument("--processes", type=integers, default=[1, 2], help="how many, 1 first (default: 1,2)")
    parser.add_argument("--configurations", type=comma_separated(CONFIGURATIONS), default=list(DEFAULT))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compile", action="store_true", help="torch.compile the models")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one run (default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, compare, print, write."""
    options = parse_arguments(argv)
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as folder:
        for configuration in options.configurations:
            for processes in options.processes:
                name = f"{configuration}-{processes}"
                runs.append(train(configuration, processes, options, Path(folder, name)))
                print(f"{name}: {runs[-1].failed or f'{runs[-1].examples_per_second:.1f} examples/s'}", flush=True)
                if options.output:
                    write(options.output, runs, options)
    print(table(runs))
    reasons = missed(runs)
    for reason in reasons:
        print(reason, file=sys.stderr)
    return int(bool(reasons))


if __name__ == "__main__":
    sys.exit(main())
