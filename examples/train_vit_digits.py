"""Train a timm vision transformer with its blocks in INT8, on handwritten digits.

    python examples/train_vit_digits.py [--precision fp32|bf16|int8] [--device cuda] [--output runs/digits]
    torchrun --nproc-per-node 2 examples/train_vit_digits.py --device cuda --output runs/digits

The digits come with scikit-learn; a third is held out. ``--output`` saves a checkpoint, the losses as CSV and PNG, and
the last figures. Running the same command again resumes an interrupted run, with the same losses as without the
interruption.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from demos.training_loop import RunConfig
from demos.training_script import run_training, training_parser
from demos.training_tasks import DigitsTask
from qframework.evaluation import digits_vit

RUN = RunConfig(steps=1500, batch_size=32, learning_rate=7e-4, warmup=0.07)
SMOKE = {"embed_dim": 48, "depth": 1}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = training_parser(__doc__, RUN)
    parser.add_argument("--size", choices=digits_vit.SIZES, default="base", help="of the model; default: %(default)s")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.steps, options.batch_size = 4, 8
    return options


def main(arguments: list[str] | None = None) -> int:
    """Train, print, write."""
    options = parse_arguments(arguments)
    config = replace(digits_vit.SIZES[options.size], **(SMOKE if options.smoke else {}))
    return run_training(DigitsTask(config), RUN, options)


if __name__ == "__main__":
    sys.exit(main())
