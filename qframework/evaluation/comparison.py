"""Compare configurations of one model on one task: one row each with accuracy, speed and memory.

Counts are saved every few batches, so an interrupted comparison resumes, even with another number of processes.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import qframework
from qframework.backend import explain
from qframework.conversion.exported import export_model, quantize_exported
from qframework.errors import QFrameworkError
from qframework.evaluation.comparison_results import Partial, Results, Row
from qframework.evaluation.distributed import Processes
from qframework.evaluation.memory import activation_bytes
from qframework.evaluation.progress import progress_bar
from qframework.evaluation.size import weight_bytes
from qframework.evaluation.speed import throughput
from qframework.evaluation.tasks import Mapped, Task, weights_digest
from qframework.quantizer import (
    QFrameworkQuantizer,
    QuantizationConfig,
    Recipe,
    dynamic_attention,
    dynamic_int8,
    static_attention,
    static_int8,
)
from qframework.versions import installed_version

FLOAT_NAMES = {torch.float32: "FP32", torch.float16: "FP16", torch.bfloat16: "BF16"}
_BATCHES_BETWEEN_SAVES = 16  # of each process


@dataclass(frozen=True)
class Configuration:
    """How a task's module runs: in float, or quantized by ``config`` with the steps of ``recipe``."""

    config: QuantizationConfig | None = None
    recipe: Recipe | None = None

    @property
    def needs_calibration(self) -> bool:
        """Whether a scale is static, or a recipe reads data."""
        if self.config is None:
            return False
        linear, attention = self.config.linear, self.config.attention
        is_static = linear is not None and not linear.activation.dynamic
        return is_static or (attention is not None and attention.mode == "static") or self.recipe is not None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able description."""
        return {
            "config": None if self.config is None else self.config.to_dict(),
            "recipe": None if self.recipe is None else self.recipe.to_dict(),
        }


def standard_configurations(dtype: torch.dtype = torch.float32) -> dict[str, Configuration]:
    """Float, static INT8 and dynamic INT8 (INT8-D), without and with attention, and static INT8 with the best recipe.

    Raises:
        QFrameworkError: ``dtype`` is not float32, float16 or bfloat16.
    """
    if dtype not in FLOAT_NAMES:
        raise QFrameworkError(
            f"standard_configurations: dtype must be one of {', '.join(map(str, FLOAT_NAMES))}, got {dtype}"
        )
    static, dynamic = QuantizationConfig(static_int8()), QuantizationConfig(dynamic_int8())
    with_attention = QuantizationConfig(static_int8(), static_attention())
    return {
        FLOAT_NAMES[dtype]: Configuration(),
        "INT8": Configuration(static),
        "INT8 + attention": Configuration(with_attention),
        "INT8-D": Configuration(dynamic),
        "INT8-D + attention": Configuration(QuantizationConfig(dynamic_int8(), dynamic_attention("sage_b"))),
        "INT8 (best recipe)": Configuration(static, Recipe.best()),
        "INT8 + attention (best recipe)": Configuration(with_attention, Recipe.best()),
    }


@dataclass(frozen=True)
class Settings:
    """How every row is measured.

    Attributes:
        device: of this process.
        dtype: of the module outside its INT8 operators.
        compiled: compile with Inductor, quantized modules with ``backend="qframework"``. Otherwise everything runs
            eagerly, and quantized modules simulate INT8 in float.
        repeats: timed calls.
        show_progress: draw progress bars on stderr.
    """

    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32
    compiled: bool = True
    repeats: int = 20
    show_progress: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Everything the figures depend on."""
        on = torch.device(self.device)
        name = torch.cuda.get_device_name(on) if on.type == "cuda" else on.type
        packages = ("torch", "torchao", "timm", "transformers")
        versions = {package: installed_version(package) for package in packages} | {
            "qframework": qframework.__version__
        }
        dtype = str(self.dtype).removeprefix("torch.")
        return {"device": name, "dtype": dtype, "compiled": self.compiled, "versions": versions}


def compare(
    task: Task,
    configurations: Mapping[str, Configuration],
    settings: Settings | None = None,
    *,
    processes: Processes | None = None,
    results: Results | None = None,
) -> Results:
    """Measure the task's module under each configuration; every process calls this with equal arguments.

    The figures do not depend on the number of processes. The float module is moved to the settings' device and is not
    changed otherwise.

    Args:
        task: what is measured.
        configurations: by the name of their row.
        settings: how it is measured.
        processes: those that share the batches.
        results: rows measured before, which are kept, and the file to write; see ``Results.open``. None writes nothing.

    Returns:
        The results with a row for each configuration, in this order.

    Raises:
        CalibrationError: a configuration needs calibration data and the task has none.
        QFrameworkError: ``results`` belong to another comparison; every image is damaged; the processes made different
            models from the same configuration.
    """
    settings, processes = settings or Settings(), processes or Processes()
    chosen = dict(configurations)
    needing = [name for name, configuration in chosen.items() if configuration.needs_calibration]
    if needing and task.calibration() is None:
        raise QFrameworkError(
            f"compare: task must have calibration images for configuration {needing[0]!r}, got none. Give it some, or "
            "choose configurations without static scales and recipes"
        )
    results = results or Results()
    results.begin(description(task, settings), {name: each.to_dict() for name, each in chosen.items()})
    bench = _Bench(task, settings, processes, results)
    for name in [name for name in chosen if name not in results.rows]:
        results.add(bench.row(name, chosen[name]))
    return results


def description(task: Task, settings: Settings) -> dict[str, Any]:
    """Everything the figures depend on besides the configurations."""
    return {**task.describe(), **settings.to_dict()}


class _Bench:
    """One task under one set of settings."""

    def __init__(self, task: Task, settings: Settings, processes: Processes, results: Results) -> None:
        self.task, self.settings, self.processes, self.results = task, settings, processes, results
        self.example = task.example().to(settings.device, settings.dtype)

    @torch.no_grad()
    def row(self, name: str, configuration: Configuration) -> Row:
        """Quantize, compile, count, time."""
        module = self._module(configuration)
        report = None if configuration.config is None else explain(module, (self.example,))
        run = self._compiled(module, configuration)
        counted = self._count(name, run)
        row = Row(
            configuration=name,
            figures=self.task.figures(counted.counts),
            counts=counted.counts,
            damaged=counted.damaged,
            lowered_linears=report.lowered if report else 0,
            linears=report.total if report else _linears(module),
            lowered_attentions=report.attention_lowered if report else 0,
            weight_bytes=weight_bytes(module),
            peak_bytes=weight_bytes(module) + activation_bytes(run, self.example),
            images_per_second=self._speed(run),
            processes=self.processes.size,
        )
        del module, run
        self._forget()
        return row

    def _module(self, configuration: Configuration) -> nn.Module:
        float_module = self.task.module.to(self.settings.device)
        if self.settings.dtype != torch.float32:
            float_module = copy.deepcopy(float_module).to(self.settings.dtype)
        if configuration.config is None:
            return float_module
        quantizer = QFrameworkQuantizer().set_global(configuration.config)
        calibration = self._calibration() if configuration.needs_calibration else None
        exported = export_model(float_module, self.example)
        show = self.settings.show_progress and self.processes.is_first
        converted = quantize_exported(exported, quantizer, calibration, recipe=configuration.recipe, show_progress=show)
        self._check_alike(converted)
        return converted

    def _calibration(self) -> Iterable[Tensor]:
        batches = self.task.calibration()
        assert batches is not None, "compare() checks this"
        return Mapped(batches, lambda batch: batch.to(self.example.device, self.settings.dtype))

    def _check_alike(self, converted: torch.fx.GraphModule) -> None:
        """Every process calibrates on its own; raise QFrameworkError unless all of them got the same model."""
        digest = _digest(converted)
        if len(set(self.processes.gather([digest]))) > 1:
            raise QFrameworkError(
                "compare: all processes must make the same model from a configuration, got different ones. Give all of "
                "them devices of one kind, or use one process"
            )

    def _compiled(self, module: nn.Module, configuration: Configuration) -> Callable[[Tensor], Tensor]:
        if not self.settings.compiled:
            return module
        backend = "inductor" if configuration.config is None else "qframework"
        return torch.compile(module, backend=backend, dynamic=True)

    def _count(self, name: str, run: Callable[[Tensor], Tensor]) -> Partial:
        """The counts of all batches, resumed from the results."""
        counted = self.results.partial(name, self.task.counted)
        todo = range(counted.batches, len(self.task))
        mine = self.processes.mine(todo)
        show = self.settings.show_progress and self.processes.is_first
        with progress_bar(f"{name}: evaluating", len(mine), show) as advance:
            batches = self.task.batches(mine)
            for stage in _stages(todo, _BATCHES_BETWEEN_SAVES * self.processes.size):
                part = self._count_batches(run, itertools.islice(batches, len(self.processes.mine(stage))), advance)
                counted = self._merged(counted, part, stage.stop)
                self.results.keep(counted)
        return counted

    def _count_batches(
        self, run: Callable[[Tensor], Tensor], batches: Iterator[Any], advance: Callable[[], None]
    ) -> Partial:
        counts, damaged = dict.fromkeys(self.task.counted, 0), []
        for batch in batches:
            damaged += [list(image) for image in batch.damaged]
            for key, value in self.task.count(run, batch, self.example.device, self.settings.dtype).items():
                counts[key] += value
            advance()
        return Partial("", 0, counts, damaged)

    def _merged(self, before: Partial, mine: Partial, batches: int) -> Partial:
        sums = self.processes.sum(list(mine.counts.values()))
        counts = {key: before.counts[key] + value for key, value in zip(mine.counts, sums, strict=True)}
        damaged = sorted(before.damaged + self.processes.gather(mine.damaged))
        return Partial(before.configuration, batches, counts, damaged)

    def _speed(self, run: Callable[[Tensor], Tensor]) -> float:
        self.processes.wait()  # all measure at the same time, since they may share the bottleneck
        return self.processes.add_speeds(throughput(run, self.example, repeats=self.settings.repeats))

    def _forget(self) -> None:
        """Free compiled code: it keeps its module alive and counts toward Dynamo's recompile limit."""
        torch.compiler.reset()
        gc.collect()
        if self.example.is_cuda:
            torch.cuda.empty_cache()


def _stages(batches: range, size: int) -> Iterator[range]:
    return (batches[start : start + size] for start in range(0, len(batches), size))


def _linears(module: nn.Module) -> int:
    return sum(isinstance(layer, nn.Linear) for layer in module.modules())


def _digest(converted: torch.fx.GraphModule) -> str:
    """SHA-256 of the graph's code, which holds the scales, and of all weights."""
    return hashlib.sha256((converted.code + weights_digest(converted)).encode()).hexdigest()
