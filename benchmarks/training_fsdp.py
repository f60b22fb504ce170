"""Training steps under FSDP2: weights gathered in floats and in INT8, states of the optimizer in FP32 and in 8 bits.

    torchrun --nproc-per-node 2 -m benchmarks.training_fsdp --device cuda --output DATE-h100-fsdp.json

A step is forward, backward and optimizer, of a Llama-shaped model that is sharded block by block; every process has its
own examples. It is called eagerly: with so many channels the GPU, not the host, limits it. Before a case is timed, the
losses of its first steps are compared with those of the same model whose weights are gathered in FP32, and the bytes of
its collectives are counted.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from benchmarks.harness import (
    Record,
    Results,
    UnavailableError,
    WrongResultError,
    argument_parser,
    comma_separated,
    guarded,
)
from benchmarks.tables import number, scientific
from benchmarks.tables import table as markdown
from benchmarks.timing import Timing
from benchmarks.training_subjects import Subject, llama
from qframework.compat.dispatch import TorchDispatchMode
from qframework.evaluation.distributed import leave_process_group
from qframework.training import convert_to_int8_training, gather_in_int8
from qframework.training.plan import blocks_of

TOLERANCE = 5e-3  # of the loss, relative; random weights give one near the logarithm of the vocabulary
CHECKED, WARM, TIMED = 3, 2, 12  # steps; the same number in every process
PATIENCE = timedelta(seconds=90)  # of a collective, in case that another process has failed
SUBJECT = Subject(llama(4096, 11008, 4), 2, 2048)
SMOKE = Subject(llama(128, 256, 2), 2, 16)


@dataclass(frozen=True)
class Case:
    """How a model is trained: in INT8 or not, what is gathered, and the optimizer."""

    int8: bool
    gather: str  # "fp32", "bf16" or "int8"
    optimizer: str = "adamw"


CASES = {
    "bf16_gather_fp32": Case(False, "fp32"),
    "bf16_gather_bf16": Case(False, "bf16"),
    "qframework_gather_fp32": Case(True, "fp32"),
    "qframework_gather_bf16": Case(True, "bf16"),
    "qframework_gather_int8": Case(True, "int8"),
    "bf16_gather_bf16_adamw8bit": Case(False, "bf16", "adamw8bit"),
    "qframework_gather_int8_adamw8bit": Case(True, "int8", "adamw8bit"),
}


def sharded(case: Case, subject: Subject, device: torch.device) -> nn.Module:
    """The model of a case, equal in all processes before it is sharded; head and embedding are gathered in BF16."""
    torch.manual_seed(0)
    with device:
        model = subject.build(None).train()
    blocks = blocks_of(model)
    if case.int8:
        convert_to_int8_training(model, skip_slower=False)
    if case.gather == "int8":
        gather_in_int8(model)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = MixedPrecisionPolicy() if case.gather == "fp32" else half
    for block in blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def optimizer_of(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with states in FP32 or, by torchao, in 8 bits."""
    if case.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), 1e-5, foreach=True)
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise UnavailableError(f"torchao has no AdamW8bit: {error}") from error
    return AdamW8bit(model.parameters(), 1e-5)


class Step:
    """A step of this process."""

    def __init__(self, case: Case, subject: Subject, device: torch.device) -> None:
        self.device = device
        self.model = sharded(case, subject, device)
        self.optimizer = optimizer_of(case, self.model)
        torch.manual_seed(distributed.get_rank())
        self.tokens, _ = subject.inputs(device.type, smoke=False)

    def __call__(self) -> Tensor:
        """The loss, before the update."""
        loss = self.gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def gradients(self) -> Tensor:
        """Forward and backward; returns the loss."""
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.model(self.tokens).logits[:, :-1].float()
            loss = F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())
        loss.backward()
        return loss.detach()


class Received(TorchDispatchMode):
    """Counts the bytes of whole weights that this process gathers, and of whole gradients that it reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = dict.fromkeys(_COLLECTIVES.values(), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = next((kind for part, kind in _COLLECTIVES.items() if part in str(func)), None)
        if kind is not None:  # the first argument is the result, the second the operand
            tensors = args[0 if kind == "gather" else 1]
            tensors = [tensors] if isinstance(tensors, Tensor) else tensors
            self.bytes[kind] += sum(x.numel() * x.element_size() for x in tensors)
        return func(*args, **(kwargs or {}))


_COLLECTIVES = {"c10d._allgather_base_": "gather", "c10d._reduce_scatter_base_": "reduce"}


def timed(step: Callable[[], Any], device: torch.device) -> Timing:
    """The steps of this process, after all have begun; collectives keep the processes together."""
    for _ in range(WARM):
        step()
    if device.type != "cuda":
        samples = []
        for _ in range(TIMED):
            start = time.perf_counter()
            step()
            samples.append(1e3 * (time.perf_counter() - start))
        return Timing(tuple(samples))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(TIMED + 1)]
    distributed.barrier()
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return Timing(tuple(a.elapsed_time(b) for a, b in itertools.pairwise(events)))


def measure(
    identity: Record, case: Case, subject: Subject, device: torch.device, losses: dict[bool, list[float]]
) -> Record:
    """Check the first losses, then time; ``losses`` of the cases with FP32 gathered, in INT8 and not."""
    gc.collect()  # FSDP2's modules form reference cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = Step(case, subject, device)
    start = time.perf_counter()
    found = [_mean(step())]
    first_call_s = time.perf_counter() - start
    found += [_mean(step()) for _ in range(CHECKED - 1)]
    with Received() as received:  # without the optimizer's step: Dynamo compiles nothing inside of it
        step.gradients()
    step.optimizer.zero_grad()
    expected = losses.setdefault(case.int8, found)
    error = max(abs(mine / theirs - 1) for mine, theirs in zip(found, expected, strict=True))
    if not error <= TOLERANCE:
        told = " and ".join(", ".join(f"{loss:.4f}" for loss in each) for each in (expected, found))
        raise WrongResultError(f"losses must be those with FP32 gathered, got these and those: {told}", error)
    moved = {f"{kind}_mb": size / 2**20 for kind, size in received.bytes.items()}
    row = replace(identity, error=error, first_call_s=first_call_s, **moved, **timed(step, device).fields())
    return row if device.type != "cuda" else replace(row, peak_mb=torch.cuda.max_memory_allocated() / 2**20)


def _mean(loss: Tensor) -> float:
    """Of all processes."""
    distributed.all_reduce(loss)
    return loss.item() / distributed.get_world_size()


def run(results: Results, options: argparse.Namespace, device: torch.device) -> None:
    """All cases, one after the other; the first process prints and writes."""
    subject, losses = SMOKE if options.smoke else SUBJECT, dict[bool, list[float]]()
    model = f"Llama, {'2 x 128' if options.smoke else '4 x 4,096'} channels, {distributed.get_world_size()} processes"
    for provider in options.providers:
        identity = Record(
            benchmark="training_fsdp", provider=provider, op="fsdp_step", model=model, batch=subject.batch
        )
        case = CASES[provider]
        row = guarded(identity, lambda: measure(identity, case, subject, device, losses))  # noqa: B023
        if distributed.get_rank() == 0:
            results.add(row)
        if row.status not in ("ok", "unsupported"):
            break  # the other processes may wait for this one


def table(records: Sequence[Record]) -> str:
    """Markdown: one line for each case."""
    header = ["model", "gathered in", "optimizer", "ms", "MiB gathered", "MiB reduced", "peak MiB of a GPU", "error"]
    lines = []
    for row in records:
        case = CASES[row.provider]
        names = [
            "INT8" if case.int8 else "BF16",
            case.gather.upper(),
            "AdamW8bit" if "8bit" in case.optimizer else "AdamW",
        ]
        figures = (row.p50_ms, row.gather_mb, row.reduce_mb, row.peak_mb)
        lines.append([*names, *(number(value) for value in figures), scientific(row.error)])
    return markdown(header, lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit status."""
    parser = argument_parser("training_fsdp", __doc__)
    parser.add_argument("--providers", type=comma_separated(CASES), default=list(CASES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(argv)
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if options.device == "cuda" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    alone: dict[str, Any] = {"store": distributed.HashStore(), "rank": 0, "world_size": 1}  # for a look at the cases
    group = {} if distributed.is_torchelastic_launched() else alone
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE, **group)
    results = Results.start("training_fsdp", options.device, options)
    run(results, options, device)
    leave_process_group()
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
