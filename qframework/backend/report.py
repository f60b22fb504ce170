"""What the backend did to each layer of a model."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class LayerReport:
    """One linear layer: whether it was lowered, to which operator, and if not, why.

    ``fallback`` marks a layer that was asked to be quantized and could not be.
    """

    name: str
    lowered: bool
    operator: str
    reason: str
    fallback: bool = False


@dataclass
class Report:
    """The linear layers of a model in the order of the graph. ``str()`` gives a table."""

    layers: list[LayerReport] = field(default_factory=list)

    @property
    def lowered(self) -> int:
        """How many layers became an INT8 operator."""
        return sum(layer.lowered for layer in self.layers)

    @property
    def total(self) -> int:
        """How many linear layers the model has."""
        return len(self.layers)

    def __str__(self) -> str:
        table = Table(title=f"{self.lowered} of {self.total} linear layers lowered")
        for column in ("layer", "lowered", "operator", "why not"):
            table.add_column(column, overflow="fold")
        for layer in self.layers:
            table.add_row(layer.name, "yes" if layer.lowered else "no", layer.operator, layer.reason)
        console = Console(width=120, record=False, color_system=None)
        with console.capture() as capture:
            console.print(table)
        return capture.get().rstrip("\n")
