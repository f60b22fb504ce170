"""An attention choice as rich tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.table import Table

from qframework.attention.layer_choice import OFF, LayerChoice, Measurement

Layers = Mapping[str, LayerChoice]
Criteria = Mapping[str, float]


def compact(layers: Layers, criteria: Criteria) -> Table:
    """A row for each layer: cosine similarity of every variant, and what was chosen."""
    variants = _variants(layers.values())
    table = Table(title=_title(layers, criteria), caption="cosine similarity in percent" if variants else None)
    table.add_column("layer", overflow="fold")
    table.add_column("query", no_wrap=True)
    for variant in variants:
        table.add_column(variant, justify="right", no_wrap=True)
    table.add_column("chosen", no_wrap=True)
    for name, layer in layers.items():
        cells = [_cosine(layer, variant) for variant in variants]
        table.add_row(name, "x".join(map(str, layer.query)), *cells, f"[bold]{layer.variant}[/]")
    return table


def detailed(layers: Layers, criteria: Criteria) -> Table:
    """A row for each layer and variant, with every number."""
    table = Table(title=_title(layers, criteria))
    numbers = ["cosine, %", "relative L1", "RMSE"]
    timed = any(measured.seconds is not None for layer in layers.values() for measured in layer.measurements.values())
    if timed:
        numbers.append("us")
    for column in ("layer", "variant", *numbers, "chosen"):
        table.add_column(column, overflow="fold", justify="right" if column in numbers else "left")
    for name, layer in layers.items():
        for index, (variant, measured) in enumerate(layer.measurements.items()):
            chosen = "yes" if variant == layer.variant else ""
            time = [_microseconds(measured)] if timed else []
            table.add_row(name if index == 0 else "", variant, *_numbers(measured), *time, chosen)
        table.add_section()
    return table


def text(table: Table, width: int = 120) -> str:
    """The table as plain text."""
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip("\n")


def _title(layers: Layers, criteria: Criteria) -> str:
    quantized = sum(layer.variant != OFF for layer in layers.values())
    thresholds = ", ".join(f"{name} {value:g}" for name, value in criteria.items())
    return f"{quantized} of {len(layers)} attention layers quantized" + (f" ({thresholds})" if criteria else "")


def _variants(layers: Iterable[LayerChoice]) -> list[str]:
    return list(dict.fromkeys(variant for layer in layers for variant in layer.measurements))


def _cosine(layer: LayerChoice, variant: str) -> str:
    measured = layer.measurements.get(variant)
    if measured is None or measured.error:
        return "-"
    return f"[green]{_percent(measured.cosine)}[/]" if variant == layer.variant else _percent(measured.cosine)


def _percent(cosine: float) -> str:
    """In percent, rounded down, so that a value below the threshold does not appear to reach it."""
    return f"{math.floor(cosine * 1e5) / 1e3:.3f}"


def _microseconds(measured: Measurement) -> str:
    return "" if measured.seconds is None else f"{measured.seconds * 1e6:.1f}"


def _numbers(measured: Measurement) -> tuple[str, str, str]:
    if measured.error:
        return measured.error, "", ""
    return _percent(measured.cosine), f"{measured.relative_l1:.4f}", f"{measured.rmse:.2e}"
