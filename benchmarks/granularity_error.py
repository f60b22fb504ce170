"""Error of INT8 by granularity, for what a linear of a GPT multiplies in training (Jetfire, figure 5).

    python -m benchmarks.granularity_error --output benchmarks/results/other/DATE-cpu-granularity_error.json

A GPT is trained in FP32 for a while. Inputs, weights and gradients of the results of all linears in its blocks are then
quantized with one scale per tensor, token, channel or block. The error is ``|dequantized - x| / |x|`` of a tensor; the
table shows its mean over the linears. ``--plot FILE`` draws it as PNG.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import argument_parser
from benchmarks.machine import describe_machine
from benchmarks.tables import table as markdown
from benchmarks.training_gradients import learn
from demos.training_tasks import TextTask
from qframework import numerics
from qframework.files import atomic_write, write_text
from qframework.kernels.blocks.format import (
    BLOCK_SIZES,
    BlockSize,
    block_shape,
    dequantize_blocks_ref,
    quantize_blocks_ref,
)

SCHEMA = 1
KINDS = ("inputs", "weights", "gradients")
Errors = dict[str, dict[str, float]]  # by granularity and kind


def _with_scales(x: Tensor, granularity: Any) -> Tensor:
    scale = numerics.dynamic_scale(x, granularity)
    return numerics.dequantize(numerics.quantize(x, scale), scale, torch.float32)


def _per_channel(x: Tensor) -> Tensor:
    return _with_scales(x.t().contiguous(), "per_token").t()


def _in_blocks(x: Tensor, block_size: BlockSize) -> Tensor:
    return dequantize_blocks_ref(*quantize_blocks_ref(x, block_size), block_size)


GRANULARITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "per tensor": lambda x: _with_scales(x, "per_tensor"),
    "per token": lambda x: _with_scales(x, "per_token"),
    "per channel": _per_channel,
    **{"block {} x {}".format(*block_shape(size)): partial(_in_blocks, block_size=size) for size in BLOCK_SIZES},
}


def error(x: Tensor, granularity: str) -> float:
    """``|dequantized - x| / |x|`` of a matrix ``(rows, channels)``; 0 for zeros."""
    norm = float(x.double().norm())
    return float((GRANULARITIES[granularity](x).double() - x.double()).norm()) / norm if norm else 0.0


def captured(task: TextTask, model: Any, batch: tuple[Tensor, Tensor]) -> dict[str, list[Tensor]]:
    """The matrices of one step, ``(tokens, channels)`` and weights ``(outputs, inputs)``, of each linear in a block."""
    found: dict[str, list[Tensor]] = defaultdict(list)

    def keep(module: Any, inputs: tuple[Tensor], result: Tensor) -> None:
        found["inputs"].append(inputs[0].detach().flatten(0, -2))
        found["weights"].append(module.weight.detach().t().contiguous())  # GPT-2's Conv1D holds (inputs, outputs)
        result.register_hook(lambda grad: found["gradients"].append(grad.flatten(0, -2)))

    linears = [module for module in model.transformer.h.modules() if type(module).__name__ == "Conv1D"]
    hooks = [module.register_forward_hook(keep) for module in linears]
    task.loss(model, *batch).backward()
    for hook in hooks:
        hook.remove()
    return found


def measure(matrices: Mapping[str, Sequence[Tensor]]) -> Errors:
    """The mean error of each granularity and kind."""
    return {
        granularity: {kind: statistics.fmean(error(x, granularity) for x in matrices[kind]) for kind in KINDS}
        for granularity in GRANULARITIES
    }


def table(errors: Errors) -> str:
    """Markdown: one line for each granularity, in percent."""
    lines = [[name, *(f"{100 * errors[name][kind]:.2f}" for kind in KINDS)] for name in errors]
    return markdown(["one scale", *(f"{kind}, error in percent" for kind in KINDS)], lines)


def draw(errors: Errors, path: Path) -> None:
    """A panel for each kind, a bar for each granularity, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3), layout="constrained")
    FigureCanvasAgg(figure)
    for kind, axes in zip(KINDS, figure.subplots(1, len(KINDS), sharey=True), strict=True):
        colours = ["#1d4ed8" if name.startswith("block") else "#a8a29e" for name in errors]
        bars = axes.barh(list(errors), [100 * errors[name][kind] for name in errors], color=colours)
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
        axes.set_xlabel(f"error of {kind} (%)")
        axes.margins(x=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    axes.invert_yaxis()
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=120, metadata={"Software": None})


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argument_parser("granularity_error", __doc__, "document")
    parser.add_argument("--steps", type=int, default=300, help="training steps in FP32 (default: %(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="PNG")
    options = parser.parse_args(argv)
    if options.smoke:
        options.steps = 2
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Learn, measure, print, write."""
    options = parse_arguments(argv)
    smoke = TextTask(width=32, depth=1, heads=2, context=16, limit=300_000)
    task, batch = (smoke if options.smoke else TextTask(depth=4, context=128)), 4
    torch.manual_seed(0)
    model = learn(task, task.build(0), options.steps, batch)
    errors = measure(captured(task, model, task.batch(1, 0, batch)))
    print(table(errors))
    if options.plot:
        draw(errors, options.plot)
    if options.output:
        document = {
            "schema": SCHEMA,
            "benchmark": "granularity_error",
            "smoke": options.smoke,
            "machine": describe_machine("cpu"),
            "settings": {**task.settings, "steps": options.steps, "tokens": batch * task.context},
            "errors": errors,
        }
        write_text(options.output, json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
