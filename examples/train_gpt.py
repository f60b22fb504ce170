"""Train transformers' GPT-2 with its blocks in INT8, on the source files of Python's standard library.

    python examples/train_gpt.py [--precision fp32|bf16|int8] [--device cuda --compile] [--output runs/gpt]
    torchrun --nproc-per-node 2 examples/train_gpt.py --device cuda --output runs/gpt

A token is a byte, every twentieth file is held out, and the loss is in nats per byte. ``--output`` saves a checkpoint,
the losses as CSV and PNG, and the last figures. Running the same command again resumes an interrupted run, with the
same losses as without the interruption.
"""

from __future__ import annotations

import argparse
import sys

from demos.training_loop import RunConfig
from demos.training_script import run_training, training_parser
from demos.training_tasks import TextTask

RUN = RunConfig(steps=2000, batch_size=64, learning_rate=1e-3)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = training_parser(__doc__, RUN)
    shape = TextTask()
    parser.add_argument("--width", type=int, default=shape.width, metavar="N", help="channels; default: %(default)s")
    parser.add_argument("--depth", type=int, default=shape.depth, metavar="N", help="blocks; default: %(default)s")
    parser.add_argument("--heads", type=int, default=shape.heads, metavar="N", help="default: %(default)s")
    parser.add_argument("--context", type=int, default=shape.context, metavar="N", help="bytes; default: %(default)s")
    parser.add_argument("--dropout", type=float, default=shape.dropout, help="default: %(default)s")
    parser.add_argument("--text", metavar="FOLDER", help="Python sources; default: the standard library")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.steps, options.batch_size = 4, 4
        options.width, options.depth, options.heads, options.context = 32, 1, 2, 32
    return options


def main(arguments: list[str] | None = None) -> int:
    """Train, print, write."""
    options = parse_arguments(arguments)
    task = TextTask(
        width=options.width,
        depth=options.depth,
        heads=options.heads,
        context=options.context,
        dropout=options.dropout,
        windows=8 if options.smoke else TextTask.windows,
        folder=options.text,
        limit=500_000 if options.smoke else None,
    )
    return run_training(task, RUN, options)


if __name__ == "__main__":
    sys.exit(main())
