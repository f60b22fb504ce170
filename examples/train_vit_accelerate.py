"""Train the ViT of train_vit_digits.py in INT8 with Hugging Face accelerate; one line converts the model.

    python examples/train_vit_accelerate.py
    accelerate launch --num_processes 2 examples/train_vit_accelerate.py

Batches, learning rates and losses are those of ``train_vit_digits.py``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset

from demos.training_loop import PRECISIONS, RunConfig, adamw, mixed_seed
from demos.training_tasks import DigitsTask
from qframework.evaluation import digits_vit
from qframework.evaluation.schedule import warmup_cosine
from qframework.files import write_json
from qframework.kernels.blocks.format import parse_block_size
from qframework.outputs import output_file
from qframework.training import convert_to_int8_training

RUN = RunConfig(steps=1500, batch_size=32, learning_rate=7e-4, warmup=0.07, precision="int8")


class Examples(IterableDataset):
    """The images and labels of all batches of a run, in order."""

    def __init__(self, task: DigitsTask, config: RunConfig) -> None:
        super().__init__()
        self.task, self.config = task, config

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for step in range(self.config.steps):
            torch.manual_seed(mixed_seed(self.config.seed, step))
            yield from zip(*self.task.batch(self.config.seed, step, self.config.batch_size), strict=True)


def train(task: DigitsTask, config: RunConfig, cpu: bool = False) -> list[float]:
    """Train, and return the loss of each step, the mean over all processes."""
    accelerator = Accelerator(
        mixed_precision="no" if config.precision == "fp32" else "bf16",
        dataloader_config=DataLoaderConfiguration(split_batches=True, dispatch_batches=True),
        cpu=cpu,
    )
    torch.manual_seed(config.seed)
    model = task.build(config.seed)
    if config.precision == "int8":
        # The only line that INT8 adds. This model is too small to be faster in INT8.
        convert_to_int8_training(model, config.block_size, skip_slower=False)

    optimizer = adamw(model, config)
    scheduler = LambdaLR(optimizer, lambda step: warmup_cosine(step, config.steps, config.warmup))
    loader = DataLoader(Examples(task, config), batch_size=config.batch_size)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    losses = []
    model.train()
    for images, labels in loader:
        with accelerator.autocast():
            loss = task.loss(model, images, labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if len(losses) % 100 == 0 or len(losses) == config.steps:
            accelerator.print(f"{config.label}: step {len(losses)}, loss {losses[-1]:.4f}")
    accelerator.end_training()
    return losses


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--precision", choices=PRECISIONS, default="int8", help="default: %(default)s")
    parser.add_argument("--block-size", type=parse_block_size, default=RUN.block_size, metavar="SIZE")
    parser.add_argument("--steps", type=int, default=RUN.steps, metavar="N", help="default: %(default)s")
    parser.add_argument("--cpu", action="store_true", help="also if there is a GPU")
    parser.add_argument("--smoke", action="store_true", help="a quick check: a tiny model and a few steps")
    parser.add_argument("--output", type=output_file, metavar="FILE", help="the losses as JSON")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Train, print, write."""
    options = parse_arguments(arguments)
    chosen = {"steps": options.steps, "precision": options.precision, "block_size": options.block_size}
    task, config = DigitsTask(), replace(RUN, **chosen)
    if options.smoke:
        task = DigitsTask(replace(digits_vit.SIZES["base"], embed_dim=48, depth=1))
        config = replace(config, steps=4, batch_size=8)
    losses = train(task, config, options.cpu)
    if options.output is not None and int(os.environ.get("RANK", "0")) == 0:
        write_json(options.output, losses)
    return 0


if __name__ == "__main__":
    sys.exit(main())
