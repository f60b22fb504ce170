"""A GPT trained by one process and by several that share every batch: equality of losses, and speedup.

    python -m benchmarks.training_processes --device cuda --compile --output DATE-h200.json

Runs ``examples/train_gpt.py`` as a user does, alone and under ``torchrun``, with one GPU per process on CUDA. Seeds and
batches are equal, so gradients differ only by rounding. The final loss may differ from that of a single process by the
bound of INT8 against BF16; otherwise, and if a run fails, the exit status is 1.
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
PATIENCE = 30.0  # seconds to wait for processes to end
SCRIPT = REPOSITORY / "examples" / "train_gpt.py"
DEFAULT = ("bf16", per_block((1, 128)))
# Wide enough for products rather than the host to limit a fast GPU, and with a learning rate low enough to avoid jumps
# of the loss, after which rounding differences would grow to those between seeds.
SETTINGS = {
    "width": 2048, "heads": 16, "depth": 2, "context": 512, "batch_size": 64, "learning_rate": 1e-4, "steps": 200,
}  # fmt: skip
SMOKE = {"width": 32, "heads": 2, "depth": 1, "context": 32, "batch_size": 4, "learning_rate": 1e-3, "steps": 4}
BOUND = 100 * SUBJECTS["gpt"].bound  # percent of the loss


@dataclass(frozen=True)
class Run:
    """The speed and losses of one run, or why it failed."""

    configuration: str
    processes: int
    examples_per_second: float = 0.0
    validation_loss: float = 0.0
    losses: list[float] = field(default_factory=list)  # of every step
    failed: str = ""

    def apart(self, alone: Run) -> float:
        """The difference of the final loss from that of a single process, in percent."""
        return 100 * abs(self.validation_loss / alone.validation_loss - 1)

    def furthest(self, alone: Run) -> float:
        """The largest difference of a training loss, in percent."""
        pairs = zip(self.losses, alone.losses, strict=True)
        return max(100 * abs(mine / other - 1) for mine, other in pairs)


def train(configuration: str, processes: int, options: argparse.Namespace, folder: Path) -> Run:
    """Run the script and read its files."""
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
    """The arguments of the script."""
    chosen = {**CONFIGURATIONS[configuration], **(SMOKE if options.smoke else SETTINGS), "device": options.device}
    if "block_size" in chosen:
        chosen["block_size"] = block_size_name(chosen["block_size"])
    chosen |= {"evaluate_every": 0, "checkpoint_every": 0}
    named = [text for name, value in chosen.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    return [*named, "--quiet", *(["--compile"] if options.compile else [])]


def read_run(configuration: str, processes: int, folder: Path) -> Run:
    """Read the script's files."""
    summary = json.loads((folder / SUMMARY).read_text())
    with (folder / LOSSES).open() as file:
        losses = [float(f"{float(row['loss']):.7g}") for row in csv.DictReader(file)]
    return Run(configuration, processes, summary["examples_per_second"], summary["validation"]["loss"], losses)


# All runs together


def missed(runs: Sequence[Run]) -> list[str]:
    """Messages for failed runs and for losses that are too far apart."""
    reasons = [f"{run.configuration}, {run.processes} processes: {run.failed}" for run in runs if run.failed]
    for run, alone in beside_alone(runs):
        if not run.apart(alone) <= BOUND:
            reasons.append(
                f"{run.configuration}: the loss of {run.processes} processes must be within {BOUND:g} percent of one "
                f"process's, got {run.apart(alone):.3g}"
            )
    return reasons


def beside_alone(runs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Each run of several processes with the run of one process."""
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
    """Write the runs as JSON."""
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
    parser.add_argument(
        "--processes", type=integers, default=[1, 2], help="numbers of processes, 1 first (default: 1,2)"
    )
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
