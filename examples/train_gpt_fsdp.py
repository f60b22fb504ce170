"""Train the GPT of train_gpt.py in INT8 with FSDP2 and 8-bit optimizer states, one process per GPU.

    torchrun --nproc-per-node 2 examples/train_gpt_fsdp.py --device cuda --gather int8
    python examples/train_gpt_fsdp.py --smoke

Every process holds a share of the master weights, the gradients and the states of torchao's AdamW8bit. Processes share
each batch, and the losses are their means. With ``--gather int8`` the weights of linears travel as INT8 blocks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from demos.training_loop import RunConfig, autocast, mixed_seed
from demos.training_tasks import TextTask
from qframework.evaluation.distributed import device_of_process, joined_processes
from qframework.evaluation.schedule import warmup_cosine
from qframework.files import write_json
from qframework.outputs import output_file
from qframework.training import conversion_report, convert_to_int8_training, gather_in_int8

RUN = RunConfig(steps=1000, batch_size=32, learning_rate=1e-3, precision="int8")
SMOKE_TASK = {"width": 64, "depth": 2, "heads": 2, "context": 32, "windows": 4, "limit": 200_000}
Optimizer = Callable[..., torch.optim.Optimizer]


def eight_bit() -> Optimizer:
    """torchao's AdamW with states in 8 bits."""
    from torchao.optim import AdamW8bit

    return AdamW8bit


OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {"adamw8bit": eight_bit, "adamw": lambda: torch.optim.AdamW}


def sharded(model: nn.Module, gather: str = "float") -> nn.Module:
    """Shard block by block, after the conversion."""
    if gather == "int8":
        gather_in_int8(model)
    for block in conversion_report(model).blocks:
        fully_shard(model.get_submodule(block))
    return fully_shard(model)


def train(
    task: TextTask, config: RunConfig, device: torch.device, optimizer: str = "adamw8bit", gather: str = "float"
) -> list[float]:
    """The loss of each step, the mean over all processes of ``torch.distributed`` if it is initialized."""
    processes, rank = (distributed.get_world_size(), distributed.get_rank()) if distributed.is_initialized() else (1, 0)
    torch.manual_seed(config.seed)
    model = task.build(config.seed).to(device)
    convert_to_int8_training(model, config.block_size, skip_slower=False)
    if processes > 1:
        sharded(model, gather)
    update = OPTIMIZERS[optimizer]()(model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        update, partial(warmup_cosine, total=config.steps, warmup=config.warmup)
    )
    losses = []
    for step in range(config.steps):
        torch.manual_seed(mixed_seed(config.seed, step))
        inputs, targets = (
            part.chunk(processes)[rank].to(device) for part in task.batch(config.seed, step, config.batch_size)
        )
        with autocast("bf16", device):
            loss = task.loss(model, inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        update.step()
        scheduler.step()
        update.zero_grad()
        loss = loss.detach() / processes
        if processes > 1:
            distributed.all_reduce(loss)
        losses.append(loss.item())
    return losses


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda (with torchrun: one GPU per process), cuda:1, ...")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw8bit", help="default: %(default)s")
    parser.add_argument("--gather", choices=("float", "int8"), default="float", help="weights; default: %(default)s")
    parser.add_argument("--steps", type=int, default=RUN.steps, metavar="N", help="default: %(default)s")
    parser.add_argument("--output", type=output_file, metavar="FILE", help="the losses as JSON")
    parser.add_argument("--smoke", action="store_true", help="a quick check: a tiny model and a few steps")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Train, print, write."""
    options = parse_arguments(arguments)
    task, config = TextTask(), replace(RUN, steps=options.steps)
    if options.smoke:
        task, config = TextTask(**SMOKE_TASK), replace(config, steps=6, batch_size=8)
    device = device_of_process(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with joined_processes("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo") as processes:
        losses = train(task, config, device, options.optimizer, options.gather)
    if processes.is_first:
        print(f"{options.optimizer}: {len(losses)} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}")
        if options.output is not None:
            write_json(options.output, losses)
    return 0


if __name__ == "__main__":
    sys.exit(main())
