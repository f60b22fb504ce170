"""Whether blocks of 128 x 128 diverge by their format or by a kernel: INT8 training against rounding in plain PyTorch.

    python -m benchmarks.training_simulation --device cuda --graphs --output DATE-h100.json

The GPT of training_parity is trained by the kernels, and by a simulation without any of them (simulated_gpt.py), from
equal weights on equal batches: if the simulation diverges too, the format is the reason. It is also trained with only
the activations in blocks, and only the gradients. Beside the losses, the mean gradients of the kernels and of the
simulation are compared, with the weights that the kernels' run has at some steps. Rounding amplifies the order of a
sum, so a simulation in FP32 is compared with one in FP64 as well: the kernels should be no further from it.

The file is written after every run. ``--limit`` skips runs that would begin later.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import argument_parser
from benchmarks.machine import describe_machine
from benchmarks.simulated_gpt import SimulatedGPT, SimulatedTask, Sizes
from benchmarks.tables import table as markdown
from demos.training_loop import Outcome, Place, RunConfig, train
from demos.training_tasks import TextTask
from qframework.devices import device_name
from qframework.files import write_text
from qframework.kernels.blocks.format import BlockSize, block_size_name, parse_block_size
from qframework.training import convert_to_int8_training

SCHEMA = 1
CONFIG = RunConfig(1500, 64, 1e-3, seed=1)  # of training_parity's GPT; of its seeds the one that diverges first
EVERY = 100  # steps between evaluations
BATCHES, BATCH = 8, 16  # of a mean gradient
KERNELS, SIMULATED = "kernels", "simulated"
FLOAT, ACTIVATIONS, GRADIENTS = "bf16", "simulated, only activations", "simulated, only gradients"
RUNS = (KERNELS, SIMULATED, FLOAT, GRADIENTS, ACTIVATIONS)


@dataclass(frozen=True)
class Distance:
    """Of two mean gradients of the blocks' parameters, relative to that in floats, at a step of the kernels' run."""

    step: int
    pair: str
    distance: float


def configured(name: str, task: TextTask, size: BlockSize) -> tuple[TextTask, RunConfig]:
    """The task and the settings of a run."""
    if name in (FLOAT, KERNELS):
        options: dict[str, Any] = {"precision": "bf16"} if name == FLOAT else {"precision": "int8", "block_size": size}
        return task, replace(CONFIG, **options)
    sizes = Sizes(None if name == GRADIENTS else size, None if name == ACTIVATIONS else size)
    return SimulatedTask(**asdict(task), sizes=sizes), CONFIG


def run(name: str, task: TextTask, size: BlockSize, place: Place) -> Outcome:
    """One run, from its checkpoint."""
    its_task, config = configured(name, task, size)
    return train(its_task, config, place)


def distances(task: TextTask, trained: Mapping[str, Tensor], size: BlockSize, step: int, device: str) -> list[Distance]:
    """Of the gradients at the weights ``trained``."""
    gpt = task.build(0)
    gpt.load_state_dict(trained)
    gpt.to(device)
    batches = [task.batch(CONFIG.seed + 1, number, BATCH) for number in range(BATCHES)]
    sizes = Sizes(size, size)

    def of(model: nn.Module) -> Tensor:
        return mean_gradient(task, model, batches, device)

    exact = of(copy.deepcopy(gpt).double())
    wide = of(SimulatedGPT(copy.deepcopy(gpt).double(), sizes))
    narrow = of(SimulatedGPT(copy.deepcopy(gpt), sizes))
    kernels = of(convert_to_int8_training(copy.deepcopy(gpt), block_size=size, skip_slower=False))
    pairs = {
        "kernels and simulation in FP64": (kernels, wide),
        "simulations in FP32 and FP64": (narrow, wide),
        "simulation in FP64 and floats": (wide, exact),
        "kernels and floats": (kernels, exact),
    }
    return [Distance(step, name, float((a - b).norm() / exact.norm())) for name, (a, b) in pairs.items()]


def mean_gradient(task: TextTask, model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], device: str) -> Tensor:
    """Of the parameters in blocks, over all batches, in one FP64 vector."""
    model.zero_grad()
    for inputs, targets in batches:
        (task.loss(model, inputs.to(device), targets.to(device)) / len(batches)).backward()
    inside = (parameter.grad for name, parameter in model.named_parameters() if ".h." in name)
    return torch.cat([grad.double().flatten() for grad in inside if grad is not None])


def measure(options: argparse.Namespace, task: TextTask, document: dict[str, Any], folder: Path) -> None:
    """Make all runs, and write ``document`` after each."""
    end = time.monotonic() + options.limit
    for name in options.runs:
        if time.monotonic() > end:
            break
        place = Place(torch.device(options.device), folder=folder / name, graphs=options.graphs)
        place = replace(place, evaluate_every=EVERY if options.steps >= EVERY else 1)
        for stop in [*options.compare, options.steps] if name == KERNELS else [options.steps]:
            outcome = run(name, task, options.block_size, replace(place, stop_after=stop))
            if name == KERNELS:
                state = {key: value.cpu() for key, value in outcome.model.state_dict().items()}
                document["distances"] += map(asdict, distances(task, state, options.block_size, stop, options.device))
        document["runs"][name] = [[step, row["loss"]] for step, row in sorted(outcome.curves.validation.items())]
        print(f"{name}: {document['runs'][name][-1]}", flush=True)
        if options.output:
            write_text(options.output, json.dumps(document, indent=1) + "\n")


def tables(document: dict[str, Any]) -> str:
    """Markdown: the losses of the runs, and the distances of gradients."""
    runs = {name: dict(map(tuple, rows)) for name, rows in document["runs"].items()}
    steps = sorted({step for rows in runs.values() for step in rows})
    header = ["loss after steps", *map(str, steps)]
    lines = [[name, *(f"{rows[step]:.3f}" if step in rows else "" for step in steps)] for name, rows in runs.items()]
    losses = markdown(header, lines)
    found = [Distance(**row) for row in document["distances"]]
    at = sorted({row.step for row in found})
    values = {(row.pair, row.step): row.distance for row in found}
    pairs = dict.fromkeys(row.pair for row in found)
    rows = [[pair, *(f"{values[pair, step]:.4f}" for step in at)] for pair in pairs]
    return losses + "\n" + markdown(["distance of gradients after steps", *map(str, at)], rows)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argument_parser("training_simulation", __doc__, "document")
    parser.add_argument("--device", type=device_name, default="cpu", help="cpu or cuda")
    parser.add_argument("--graphs", action="store_true", help="replay each step as a CUDA graph")
    parser.add_argument("--block-size", type=parse_block_size, default=128, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=1000, help="of 1,500 in the schedule (default: %(default)s)")
    parser.add_argument("--compare", type=int, nargs="*", default=[600], help="steps, besides the last")
    parser.add_argument("--limit", type=float, default=1e6, help="seconds after which no run begins")
    parser.add_argument(
        "--runs", type=lambda text: [RUNS[int(number)] for number in text.split(",")], default=list(RUNS),
        help="numbers of " + "; ".join(f"{number} {name}" for number, name in enumerate(RUNS)),
    )  # fmt: skip
    options = parser.parse_args(argv)
    if options.smoke:
        options.steps, options.compare = 2, [1]
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Train, compare, print, write."""
    options = parse_arguments(argv)
    task = TextTask(width=128, depth=1, heads=2, context=16, windows=4, limit=300_000) if options.smoke else TextTask()
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "benchmark": "training_simulation",
        "smoke": options.smoke,
        "machine": describe_machine(options.device),
        "settings": {**task.settings, **CONFIG.settings, "block_size": block_size_name(options.block_size)},
        "runs": {},
        "distances": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        measure(options, task, document, Path(folder))
    print(tables(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
