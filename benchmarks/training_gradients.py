"""The cost of a block size in a single step, on any machine: the error of a GPT's gradient, and the effect of outliers.

    python -m benchmarks.training_gradients --output benchmarks/results/training/gradients/DATE-cpu.json

A GPT is trained in FP32 for a while. Every configuration then computes the mean gradient of the same batches with the
same weights, to be compared with FP32's. Random errors average out over batches, systematic errors do not. In language
models, the first token is also far larger than all others in a few channels ("massive activations"). This is reproduced
through its position embedding, followed by some more steps in FP32; the loss in INT8 then shows whether other tokens
suffer from sharing a scale with it.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import argument_parser
from benchmarks.machine import describe_machine
from benchmarks.tables import table as markdown
from benchmarks.training_parity import CONFIGURATIONS
from demos.training_tasks import TextTask
from qframework.evaluation.progress import progress_bar
from qframework.files import write_text
from qframework.training import convert_to_int8_training

SCHEMA = 1
LEARNING_RATE = 1e-3
MASSIVE_CHANNELS = 2  # of the first token's embedding, the middle of each half
COMPARED = [name for name, options in CONFIGURATIONS.items() if options["precision"] == "int8"]
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Row:
    """A configuration compared with FP32, with the same weights on the same batches."""

    configuration: str
    massive: float  # added to the first token's embedding; 0 for the trained model
    times_median: float  # the first token's largest value at the first block, over the median token's
    loss: float
    loss_fp32: float
    gradient_error: float | None = None  # |mean gradient - FP32's| / |FP32's|; None if only the loss was measured

    @property
    def percent(self) -> float:
        """The increase of the loss over FP32 in percent."""
        return 100 * (self.loss / self.loss_fp32 - 1)


def shown(items: Sequence[Any], description: str) -> Iterator[Any]:
    """The items, with a progress bar."""
    with progress_bar(description, len(items)) as advance:
        for item in items:
            yield item
            advance()


def learn(task: TextTask, model: nn.Module, steps: int, batch: int, first: int = 0) -> nn.Module:
    """Train by AdamW in FP32."""
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.1)
    for step in shown(range(first, first + steps), "FP32"):
        optimizer.zero_grad()
        task.loss(model, *task.batch(0, step, batch)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def int8(model: nn.Module, configuration: str) -> nn.Module:
    """A copy converted to INT8 training."""
    options = {name: value for name, value in CONFIGURATIONS[configuration].items() if name != "precision"}
    converted = copy.deepcopy(model)
    convert_to_int8_training(converted, **options, skip_slower=False)
    return converted


def mean_gradient(task: TextTask, model: nn.Module, batches: Sequence[Batch]) -> tuple[Tensor, float]:
    """The mean gradient of all parameters over the batches, in one vector, and the mean loss."""
    model.zero_grad()
    total = 0.0
    for inputs, targets in batches:
        loss = task.loss(model, inputs, targets) / len(batches)
        loss.backward()
        total += loss.item()
    return torch.cat(
        [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    ), total


@torch.no_grad()
def mean_loss(task: TextTask, model: nn.Module, batches: Sequence[Batch]) -> float:
    """The mean loss over the batches."""
    return sum(task.loss(model, *batch).item() for batch in batches) / len(batches)


def compare_gradients(task: TextTask, model: nn.Module, batches: Sequence[Batch], names: Sequence[str]) -> list[Row]:
    """One row for each configuration."""
    right, loss_fp32 = mean_gradient(task, model, batches)
    rows = []
    for name in shown(names, "gradients"):
        gradient, loss = mean_gradient(task, int8(model, name), batches)
        error = float((gradient - right).norm() / right.norm())
        rows.append(Row(name, 0.0, times_median(model, batches[0]), loss, loss_fp32, error))
    return rows


def compare_massive(
    task: TextTask, model: nn.Module, batches: Sequence[Batch], names: Sequence[str], massive: float
) -> list[Row]:
    """One row for each configuration, of a model trained with a first token of that size."""
    loss_fp32, times = mean_loss(task, model, batches), times_median(model, batches[0])
    losses = {name: mean_loss(task, int8(model, name), batches) for name in shown(names, f"massive {massive:g}")}
    return [Row(name, massive, times, loss, loss_fp32) for name, loss in losses.items()]


def with_massive_token(task: TextTask, model: Any, massive: float) -> nn.Module:
    """A copy whose first position embedding is larger by ``massive`` in a few channels."""
    changed = copy.deepcopy(model)
    part = task.width // MASSIVE_CHANNELS
    with torch.no_grad():
        changed.transformer.wpe.weight[0, part // 2 :: part] += massive
    return changed


@torch.no_grad()
def times_median(model: Any, batch: Batch) -> float:
    """The first token's largest value at the first block, over that of the median token."""
    tokens = batch[0]
    embedded = model.transformer.wte(tokens) + model.transformer.wpe.weight[: tokens.shape[1]]
    largest = embedded.abs().amax(-1)
    return float(largest[:, 0].mean() / largest[:, 1:].median())


def table(rows: Sequence[Row]) -> str:
    """Markdown: one line for each configuration."""
    cases = sorted({row.massive for row in rows})
    found = {(row.configuration, row.massive): row for row in rows}
    times = {massive: next(row.times_median for row in rows if row.massive == massive) for massive in cases}
    header = [
        "",
        "error of the gradient",
        *(f"loss, first token {times[massive]:.3g} times the median" for massive in cases),
    ]
    lines = []
    for name in dict.fromkeys(row.configuration for row in rows):
        error = found[name, 0.0].gradient_error
        losses = [f"{found[name, massive].percent:+.2f} %" for massive in cases]
        lines.append([name, "" if error is None else f"{error:.4f}", *losses])
    return markdown(header, lines)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argument_parser("training_gradients", __doc__, "document")
    parser.add_argument("--steps", type=int, default=800, help="training steps in FP32 (default: %(default)s)")
    parser.add_argument(
        "--settle", type=int, default=60, help="training steps with a massive token (default: %(default)s)"
    )
    parser.add_argument("--batches", type=int, default=16, help="compared batches of 4 windows (default: %(default)s)")
    parser.add_argument("--massive", type=float, nargs="*", default=[12.0, 50.0], help="added to the first token")
    options = parser.parse_args(argv)
    if options.smoke:
        options.steps = options.settle = options.batches = 2
        options.massive = options.massive[-1:]
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Learn, compare, print, write."""
    options = parse_arguments(argv)
    smoke = TextTask(width=32, depth=1, heads=2, context=16, limit=300_000)
    task, batch = (smoke if options.smoke else TextTask(depth=4)), 4
    torch.manual_seed(0)
    model = learn(task, task.build(0), options.steps, batch)
    batches = [task.batch(1, step, batch) for step in range(options.batches)]
    rows = compare_gradients(task, model, batches, COMPARED)
    for massive in options.massive:
        settled = learn(task, with_massive_token(task, model, massive), options.settle, batch, options.steps)
        rows += compare_massive(task, settled, batches, COMPARED, massive)
    print(table(rows))
    if options.output:
        document = {
            "schema": SCHEMA,
            "benchmark": "training_gradients",
            "smoke": options.smoke,
            "machine": describe_machine("cpu"),
            "settings": {
                **task.settings,
                "steps": options.steps,
                "settle": options.settle,
                "tokens": options.batches * batch * task.context,
            },
            "rows": [asdict(row) for row in rows],
        }
        write_text(options.output, json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
