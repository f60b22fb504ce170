"""Options, processes and output that ``examples/train_vit_digits.py`` and ``examples/train_gpt.py`` share."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import get_args

import torch

from demos.training_files import LOSSES, PLOT, SUMMARY, draw_curves
from demos.training_loop import PRECISIONS, Outcome, Place, RunConfig, TrainingTask, train
from qframework.compat.logs import silence_torchao_at_import
from qframework.errors import QFrameworkError
from qframework.evaluation.distributed import Processes, device_of_process, joined_processes
from qframework.files import write_text
from qframework.kernels.blocks.format import BLOCK_SIZES, block_size_name, parse_block_size
from qframework.outputs import check_output_folder
from qframework.training.convert import Mode

BAD_INPUT = 2


def training_parser(description: str | None, defaults: RunConfig) -> argparse.ArgumentParser:
    """A parser with the options of both scripts; ``defaults`` are those of the run."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--precision", choices=PRECISIONS, default="int8", help="default: %(default)s")
    parser.add_argument("--mode", choices=get_args(Mode), default="per_block", help="of INT8; default: %(default)s")
    sizes = ", ".join(map(block_size_name, BLOCK_SIZES))
    parser.add_argument(
        "--block-size",
        type=parse_block_size,
        default=defaults.block_size,
        metavar="SIZE",
        help=f"of INT8 per block: {sizes} (tokens x channels); default: {block_size_name(defaults.block_size)}",
    )
    parser.add_argument("--steps", type=int, default=defaults.steps, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--batch-size",
        type=int,
        default=defaults.batch_size,
        metavar="N",
        help="over all processes; default: %(default)s",
    )
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="micro-batches of a step")
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu, cuda (with torchrun: one GPU per process), cuda:1, ...")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--check-finite", action="store_true", help="name the layer in which NaN or infinity appears")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="checkpoint, losses as CSV and PNG, figures")
    parser.add_argument("--evaluate-every", type=int, default=100, metavar="N", help="steps; default: %(default)s")
    parser.add_argument("--checkpoint-every", type=int, default=200, metavar="N", help="steps; default: %(default)s")
    parser.add_argument("--stop-after", type=int, metavar="N", help="stop after N steps, to resume later")
    parser.add_argument("--restart", action="store_true", help="discard the checkpoint in --output")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--smoke", action="store_true", help="a quick check: a tiny model and a few steps")
    return parser


def run_config(options: argparse.Namespace, defaults: RunConfig) -> RunConfig:
    """The run that the options describe."""
    return RunConfig(
        steps=options.steps,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        warmup=defaults.warmup,
        weight_decay=defaults.weight_decay,
        betas=defaults.betas,
        accumulate=options.accumulate,
        seed=options.seed,
        precision=options.precision,
        mode=options.mode,
        block_size=options.block_size,
    )


def run_training(task: TrainingTask, defaults: RunConfig, options: argparse.Namespace) -> int:
    """Train, print and write; returns the exit code, 2 for bad input with one line on stderr."""
    silence_torchao_at_import()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats its results only with this
    processes = Processes()
    with ExitStack() as stack:
        try:
            if options.output is not None:
                check_output_folder(options.output, "--output")
            device = device_of_process(options.device)
            if device.type == "cuda":
                torch.cuda.set_device(device)
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            processes = stack.enter_context(joined_processes(backend))
            outcome = train(task, run_config(options, defaults), _place(options, device, processes))
        except (QFrameworkError, OSError, ModuleNotFoundError) as error:
            if processes.is_first:
                print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
            return BAD_INPUT
    if processes.is_first:
        _report(outcome, run_config(options, defaults).label, options.output)
    return 0


def _place(options: argparse.Namespace, device: torch.device, processes: Processes) -> Place:
    return Place(
        device=device,
        processes=processes,
        folder=options.output,
        evaluate_every=options.evaluate_every,
        checkpoint_every=options.checkpoint_every,
        stop_after=options.stop_after,
        compiled=options.compile,
        check_finite=options.check_finite,
        restart=options.restart,
        show_progress=not options.quiet,
    )


def _report(outcome: Outcome, label: str, folder: Path | None) -> None:
    """Print one line and write the files."""
    figures = ", ".join(f"{name} {value:.4f}" for name, value in outcome.curves.last.items())
    steps, speed = len(outcome.curves.losses), outcome.examples_per_second
    ended = f"validation {figures}" if outcome.finished else "stopped: run the same command to resume"
    print(f"{label}: {steps} steps, {speed:.1f} examples/s, {ended}")
    if folder is None:
        return
    outcome.curves.write_csv(folder / LOSSES)
    summary = {"label": label, "steps": steps, "finished": outcome.finished, "validation": outcome.curves.last}
    write_text(folder / SUMMARY, json.dumps({**summary, "examples_per_second": round(speed, 1)}, indent=1) + "\n")
    draw_curves({label: [outcome.curves]}, folder / PLOT)
