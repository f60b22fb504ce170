"""Training in one process or several that resumes after an interruption with exactly the same losses.

Before each step, the generators are seeded from (seed, step, process), and a batch depends on (seed, step) alone. A
checkpoint therefore needs only the weights, the optimizer and the step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from demos.training_files import CHECKPOINT, Checkpoint, Curves, load_checkpoint, save_checkpoint
from demos.training_graph import StepGraph
from qframework.errors import QFrameworkError, UnsupportedError
from qframework.evaluation.distributed import Processes
from qframework.evaluation.progress import progress_bar
from qframework.evaluation.schedule import warmup_cosine
from qframework.kernels.blocks.format import DEFAULT_BLOCK_SIZE, BlockSize, block_size_name, named_block_size
from qframework.training.convert import Mode, convert_to_int8_training

PRECISIONS = ("fp32", "bf16", "int8")
_FLUSH_EVERY = 20  # steps between reading losses, which waits for the GPU


@dataclass(frozen=True)
class RunConfig:
    """Everything besides the task that the losses depend on.

    Args:
        steps: of the optimizer.
        batch_size: examples per step, over all processes and micro-batches.
        learning_rate: peak; rises linearly over ``warmup`` of the steps, then falls to zero along a cosine.
        weight_decay: of AdamW, for matrices; vectors have none.
        clip: maximum norm of the gradients.
        accumulate: micro-batches per step.
        seed: of the weights, the batches and dropout.
        precision: ``"fp32"``, ``"bf16"`` (autocast) or ``"int8"`` (bf16 with INT8 blocks).
        mode: of INT8, see convert_to_int8_training.
        block_size: of INT8 per block, see convert_to_int8_training.
    """

    steps: int
    batch_size: int
    learning_rate: float
    warmup: float = 0.05
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.98)
    clip: float = 1.0
    accumulate: int = 1
    seed: int = 0
    precision: str = "fp32"
    mode: Mode = "per_block"
    block_size: BlockSize = DEFAULT_BLOCK_SIZE

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_size", named_block_size("RunConfig", self.block_size))
        if self.precision not in PRECISIONS:
            raise UnsupportedError(
                f"RunConfig: precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}"
            )
        if self.mode not in get_args(Mode):
            raise UnsupportedError(f"RunConfig: mode must be one of {', '.join(get_args(Mode))}, got {self.mode!r}")
        if min(self.steps, self.batch_size, self.accumulate) < 1:
            raise QFrameworkError(
                f"RunConfig: steps, batch_size and accumulate must be at least 1, got {self.steps}, {self.batch_size}, "
                f"{self.accumulate}"
            )

    @property
    def label(self) -> str:
        """``fp32``, ``bf16``, ``per_block_32``, ``per_block_1x128``, ``per_token``, ..."""
        if self.precision != "int8":
            return self.precision
        return f"per_block_{block_size_name(self.block_size)}" if self.mode == "per_block" else self.mode

    @property
    def settings(self) -> dict[str, Any]:
        """The fields after a JSON round trip, with lists for tuples."""
        return json.loads(json.dumps(asdict(self)))


class TrainingTask(Protocol):
    """A model, its data and its loss."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """JSON-able; with the RunConfig, everything the losses depend on."""

    def build(self, seed: int) -> nn.Module:
        """The untrained float model, on the CPU; its weights from the global generator."""

    def batch(self, seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of ``size`` examples on the CPU; equal in all processes."""

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over the examples."""

    def evaluate(self, model: nn.Module, seed: int, device: torch.device) -> dict[str, float]:
        """Figures on held-out data, including ``"loss"``; ``model`` is in eval mode."""


@dataclass
class Place:
    """Where and how a run is carried out; up to rounding, the losses do not depend on it.

    Args:
        device: of this process.
        processes: the processes that share every batch.
        folder: for the checkpoint; None writes none.
        evaluate_every: steps between validations; 0 validates only at the end.
        checkpoint_every: steps between checkpoints; 0 writes one only at the end.
        stop_after: stop early after this many steps; None trains to the end.
        compiled: compile the model with ``torch.compile``.
        graphs: replay each step, optimizer included, as one CUDA graph; on a GPU, in one process.
        check_finite: report NaN and infinity with the layer's name; INT8 only.
        restart: discard an existing checkpoint.
        show_progress: draw a progress bar.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    processes: Processes = field(default_factory=Processes)
    folder: Path | None = None
    evaluate_every: int = 0
    checkpoint_every: int = 0
    stop_after: int | None = None
    compiled: bool = False
    graphs: bool = False
    check_finite: bool = False
    restart: bool = False
    show_progress: bool = False


@dataclass
class Outcome:
    """The result of a run.

    ``examples_per_second`` counts the steps of this call in all processes, without the first 20 if there are more,
    which compile and tune.
    """

    model: nn.Module
    curves: Curves
    examples_per_second: float
    finished: bool


def train(task: TrainingTask, config: RunConfig, place: Place | None = None) -> Outcome:
    """Train from the checkpoint in ``place.folder``, or from the start.

    Raises:
        QFrameworkError: the batch cannot be split evenly, or the checkpoint belongs to another run.
    """
    return train_together(task, [(config, place or Place())])[0]


def train_together(task: TrainingTask, runs: Sequence[tuple[RunConfig, Place]]) -> list[Outcome]:
    """``train`` for several runs that take turns after each step; with ``graphs`` their steps overlap on the GPU.

    Raises:
        QFrameworkError: see ``train``.
        UnsupportedError: ``graphs`` without a GPU or in several processes.
    """
    for config, place in runs:
        _check(config, place)
    devices = [place.device for _, place in runs if place.device.type == "cuda"]
    with torch.random.fork_rng(devices=list(dict.fromkeys(devices))), _deterministic():
        begun = [_Run(task, config, place) for config, place in runs]
        waiting = [(run, run.steps()) for run in begun]
        while waiting:
            waiting = [(run, steps) for run, steps in waiting if run.advance(steps)]
        return [run.outcome() for run in begun]


def _check(config: RunConfig, place: Place) -> None:
    shares = place.processes.size * config.accumulate
    if config.batch_size % shares:
        raise QFrameworkError(
            f"train: batch_size must be a multiple of {place.processes.size} processes times {config.accumulate} "
            f"micro-batches, got {config.batch_size}"
        )
    if place.graphs and (place.device.type != "cuda" or place.processes.size > 1):
        raise UnsupportedError(
            f"train: graphs must be False without a GPU and in several processes, got device {place.device} and "
            f"{place.processes.size} processes"
        )


class _Run:
    """A run in progress."""

    def __init__(self, task: TrainingTask, config: RunConfig, place: Place) -> None:
        self.task, self.config, self.place = task, config, place
        self.settings = {"task": dict(task.settings), **config.settings}
        self.stream = torch.cuda.Stream(place.device) if place.graphs else None
        self.curves = Curves()
        self.pending: list[Tensor] = []  # losses of this process that have not been read
        self.rate = 0.0  # examples per second
        with self._on_stream():
            self.model = prepared_model(task, config, place)
            self.optimizer = adamw(self.model, config, in_graph=place.graphs)
            self.step = self._restore()
            self.module = _wrapped(self.model, place)
        self.update = StepGraph(self._update) if place.graphs else self._update

    def advance(self, steps: Iterator[None]) -> bool:
        """Make one of ``steps``; returns whether there was one left."""
        with self._on_stream():
            return next(steps, self) is not self

    def outcome(self) -> Outcome:
        """What has been reached."""
        return Outcome(self.model, self.curves, self.rate, self.step == self.config.steps)

    def steps(self) -> Iterator[None]:
        """Make all remaining steps, one at a time."""
        config, place = self.config, self.place
        first, last = self.step, min(config.steps, place.stop_after or config.steps)
        warm = first + _FLUSH_EVERY
        timed_from, seconds = first, 0.0
        show = place.show_progress and place.processes.is_first
        with progress_bar(f"Training, {config.label}", config.steps, show) as advance:
            for _ in range(first):
                advance()
            while self.step < last:
                start = time.perf_counter()
                self._make_step()
                if len(self.pending) == _FLUSH_EVERY or self.step in (warm, last):
                    self._read_losses()
                seconds += time.perf_counter() - start
                if self.step == warm < last:
                    timed_from, seconds = warm, 0.0
                if self._due(place.evaluate_every):
                    self._evaluate()
                if self._due(place.checkpoint_every) or self.step == last:
                    self._save()
                advance()
                yield
        self.rate = (last - timed_from) * config.batch_size / seconds if seconds else 0.0

    def _on_stream(self) -> AbstractContextManager[Any]:
        """The stream of this run, whose graph overlaps with those of others."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _due(self, every: int) -> bool:
        """Whether something that happens ``every`` N steps and at the end is due; 0 means only at the end."""
        return self.step == self.config.steps or (every > 0 and self.step % every == 0)

    def _make_step(self) -> None:
        config, processes = self.config, self.place.processes
        set_learning_rate(self.optimizer, config.learning_rate * warmup_cosine(self.step, config.steps, config.warmup))
        torch.manual_seed(mixed_seed(config.seed, self.step))
        batch = self.task.batch(config.seed, self.step, config.batch_size)
        torch.manual_seed(mixed_seed(config.seed, self.step, processes.rank + 1))
        self.module.train()
        self.pending.append(self.update(*batch))
        self.step += 1

    def _update(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward, backward and optimizer; returns the loss of this process."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._accumulate(inputs, targets)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        return loss

    def _accumulate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the gradients of this process's part of the batch; returns its mean loss, a scalar on the device."""
        rank, parts, device = self.place.processes.rank, self.config.accumulate, self.place.device
        size = len(inputs) // (self.place.processes.size * parts)
        total = torch.zeros((), device=device)
        for part in range(parts):
            start = (rank * parts + part) * size
            chosen = slice(start, start + size)
            with self._without_exchange(part + 1 < parts):
                with autocast(self.config.precision, device):
                    loss = self.task.loss(self.module, inputs[chosen].to(device), targets[chosen].to(device)) / parts
                loss.backward()
            total += loss.detach()
        return total

    def _without_exchange(self, more_to_come: bool) -> AbstractContextManager[None]:
        """Skip the exchange of gradients except for the last micro-batch of a step."""
        if more_to_come and isinstance(self.module, DistributedDataParallel):
            return self.module.no_sync()
        return nullcontext()

    def _read_losses(self) -> None:
        """Append the means over all processes, so that every process has the same curve."""
        mine = torch.stack(self.pending).double().cpu().tolist()
        everyones = self.place.processes.gather([mine])
        self.curves.losses += [sum(losses) / len(losses) for losses in zip(*everyones, strict=True)]
        self.pending.clear()

    def _evaluate(self) -> None:
        """Evaluate in the first process; the others wait at the next exchange."""
        if not self.place.processes.is_first:
            return
        self.model.eval()
        torch.manual_seed(self.config.seed)
        with torch.no_grad(), autocast(self.config.precision, self.place.device):
            figures = self.task.evaluate(self.model, self.config.seed, self.place.device)
        self.curves.validation[self.step] = figures

    def _save(self) -> None:
        if self.pending:
            self._read_losses()
        if self.place.folder is None or not self.place.processes.is_first:
            return
        states = self.model.state_dict(), self.optimizer.state_dict()
        save_checkpoint(
            self.place.folder / CHECKPOINT, Checkpoint(self.settings, self.step, *states, curves=self.curves)
        )

    def _restore(self) -> int:
        """Load the checkpoint, if any; returns the step to resume at."""
        path = None if self.place.folder is None else self.place.folder / CHECKPOINT
        if path is None or self.place.restart or not path.exists():
            return 0
        checkpoint = load_checkpoint(path, self.settings, self.place.device)
        self.model.load_state_dict(checkpoint.model)
        self.optimizer.load_state_dict(checkpoint.optimizer)
        self.curves = checkpoint.curves
        return checkpoint.step


def prepared_model(task: TrainingTask, config: RunConfig, place: Place) -> nn.Module:
    """The untrained model on its device, converted if the precision is INT8."""
    torch.manual_seed(config.seed)
    model = task.build(config.seed).to(place.device)
    if config.precision == "int8":
        convert_to_int8_training(
            model,
            block_size=config.block_size,
            mode=config.mode,
            check_finite=place.check_finite,
            skip_slower=False,  # models of the examples are too small to be faster in INT8
        )
    return model


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """PyTorch's autocast to BF16; disabled for ``"fp32"``."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision != "fp32")


def adamw(model: nn.Module, config: RunConfig, in_graph: bool = False) -> torch.optim.Optimizer:
    """AdamW without weight decay for biases and norms; ``in_graph``: a CUDA graph may hold its steps."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in parameters if parameter.dim() > 1]},
        {"params": [parameter for parameter in parameters if parameter.dim() <= 1], "weight_decay": 0.0},
    ]
    decay: dict[str, Any] = {"betas": config.betas, "weight_decay": config.weight_decay}
    if not in_graph:
        return torch.optim.AdamW(groups, config.learning_rate, **decay)
    rate = torch.tensor(config.learning_rate, device=parameters[0].device)  # a graph would keep the value of a float
    return torch.optim.AdamW(groups, rate, fused=True, capturable=True, **decay)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set it for all parameters; a tensor is filled, since a CUDA graph reads its memory."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _wrapped(model: nn.Module, place: Place) -> nn.Module:
    """The model as a step calls it: compiled, and with gradient exchange."""
    module: Any = torch.compile(model) if place.compiled else model
    if place.processes.size > 1:
        module = DistributedDataParallel(module, [place.device] if place.device.type == "cuda" else None)
    return module


def mixed_seed(*numbers: int) -> int:
    """A seed that depends on all ``numbers``."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % 2**63
    return seed


@contextmanager
def _deterministic() -> Iterator[None]:
    """Use PyTorch's deterministic algorithms; it warns where it has none."""
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic  # a module whose attributes checkers do not see
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False  # saves filling every empty tensor
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
        settings.fill_uninitialized_memory = filled
