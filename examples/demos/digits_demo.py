"""The whole workflow on real images: compares a trained ViT in FP32 and in static and dynamic INT8 in one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from qframework.backend import explain
from qframework.conversion.exported import export_model, quantize_copy
from qframework.evaluation import digits
from qframework.evaluation.accuracy import top1
from qframework.evaluation.progress import progress_bar
from qframework.evaluation.size import weight_bytes
from qframework.evaluation.speed import throughput
from qframework.evaluation.sqnr import layer_sqnr
from qframework.files import write_json
from qframework.quantizer import (
    QFrameworkQuantizer,
    QuantizationConfig,
    dynamic_attention,
    dynamic_int8,
    static_attention,
    static_int8,
)

CONFIGURATIONS = {
    "static INT8": QuantizationConfig(static_int8()),
    "dynamic INT8": QuantizationConfig(dynamic_int8()),
    "static + attention": QuantizationConfig(static_int8(), static_attention()),
    "dynamic + attention": QuantizationConfig(dynamic_int8(), dynamic_attention("sage_b")),
}
MAX_TOP1_LOSS = 0.5
MAX_WEIGHT_SHARE = 0.30


@dataclass(frozen=True)
class DemoRow:
    """One configuration of the model. ``top1`` in percent; ``worst_sqnr_db`` is None where nothing is quantized."""

    configuration: str
    top1: float
    images_per_second: float
    weight_bytes: int
    worst_sqnr_db: float | None
    lowered_linears: int
    linears: int


@dataclass(frozen=True)
class Demo:
    """The result of ``run_demo``: FP32 and CONFIGURATIONS, and FP32 compiled by Inductor for comparison."""

    rows: list[DemoRow]
    compiled_fp32_images_per_second: float

    def failures(self) -> list[str]:
        """The failed checks: more than 0.5 points of top-1 lost, or more than 30 percent of the weight bytes."""
        fp32, *quantized = self.rows
        return [message for row in quantized for message in _failures(row, fp32)]

    def write_json(self, path: Path) -> None:
        """Write the rows as a list of objects."""
        write_json(path, [asdict(row) for row in self.rows], indent=2)

    def table(self) -> Table:
        """The rows as a table for the terminal."""
        table = Table(
            title="A vision transformer on handwritten digits",
            caption="FP32: the float model, eager. INT8: compiled with backend='qframework'.\n"
            "SQNR: of the worst layer's output, in dB. Lowered: linear layers in INT8.\n"
            "INT8 attention on a CPU runs the kernels' reference, which is exact but slow.\n"
            f"FP32 compiled by Inductor: {self.compiled_fp32_images_per_second:,.0f} images/s.",
        )
        table.add_column("configuration", no_wrap=True)
        for name in ("top-1 %", "images/s", "weight bytes", "SQNR", "lowered"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(*_cells(row, self.rows[0]))
        return table


def _failures(row: DemoRow, fp32: DemoRow) -> list[str]:
    messages = []
    if fp32.top1 - row.top1 > MAX_TOP1_LOSS:
        messages.append(
            f"{row.configuration}: top-1 {row.top1:.2f} % is more than {MAX_TOP1_LOSS} points below FP32's "
            f"{fp32.top1:.2f} %"
        )
    if row.weight_bytes > MAX_WEIGHT_SHARE * fp32.weight_bytes:
        messages.append(
            f"{row.configuration}: {row.weight_bytes:,} weight bytes are more than {MAX_WEIGHT_SHARE:.0%} of FP32's "
            f"{fp32.weight_bytes:,}"
        )
    return messages


def _cells(row: DemoRow, fp32: DemoRow) -> tuple[str, ...]:
    return (
        row.configuration,
        f"{row.top1:.2f}",
        f"{row.images_per_second:,.0f}",
        f"{row.weight_bytes:,} ({row.weight_bytes / fp32.weight_bytes:.0%})",
        "" if row.worst_sqnr_db is None else f"{row.worst_sqnr_db:.1f}",
        f"{row.lowered_linears} / {row.linears}",
    )


def run_demo(
    model: nn.Module,
    data: digits.Digits,
    *,
    device: torch.device | str = "cpu",
    batch_size: int = 128,
    repeats: int = 20,
    show_progress: bool = True,
) -> Demo:
    """Measure ``model`` in FP32, then quantize it by PT2E, compile and measure it under each of CONFIGURATIONS.

    Top-1 is measured on the held-out images, SQNR and throughput on one batch of them.
    """
    bench = _Bench(model.to(device), data, torch.device(device), batch_size, repeats)
    steps = len(CONFIGURATIONS) + 2
    with progress_bar("Measuring FP32, static and dynamic INT8", steps, show_progress) as advance, torch.no_grad():
        quantized = []
        for name, config in CONFIGURATIONS.items():
            quantized.append(bench.quantized(name, config))
            advance()
        fp32 = bench.fp32(linears=quantized[0].linears)
        advance()
        compiled = bench.images_per_second(torch.compile(bench.model, dynamic=True))
        advance()
    return Demo([fp32, *quantized], compiled)


@dataclass(frozen=True)
class _Bench:
    """What all configurations share: the model, the data and the device."""

    model: nn.Module
    data: digits.Digits
    device: torch.device
    batch_size: int
    repeats: int

    @property
    def images(self) -> Tensor:
        return self.data.held_out.tensors[0][: self.batch_size].to(self.device)

    def fp32(self, linears: int) -> DemoRow:
        top1_, speed = self._top1(self.model), self.images_per_second(self.model)
        return DemoRow("FP32", top1_, speed, weight_bytes(self.model), None, 0, linears)

    def quantized(self, name: str, config: QuantizationConfig) -> DemoRow:
        calibration = digits.loader(self.data.calibration, self.batch_size)
        quantizer = QFrameworkQuantizer().set_global(config)
        float_exported, converted = quantize_copy(export_model(self.model, self.images), quantizer, calibration)
        report = explain(converted, (self.images,))
        sqnr = layer_sqnr(float_exported, converted, self.images)
        fast = torch.compile(converted, backend="qframework", dynamic=True)
        return DemoRow(
            name,
            self._top1(fast),
            self.images_per_second(fast),
            weight_bytes(converted),
            min(sqnr.values()),
            report.lowered,
            report.total,
        )

    def images_per_second(self, model: Callable[[Tensor], Tensor]) -> float:
        return throughput(model, self.images, repeats=self.repeats)

    def _top1(self, model: Callable[..., Any]) -> float:
        return top1(model, digits.loader(self.data.held_out, self.batch_size), device=self.device)
