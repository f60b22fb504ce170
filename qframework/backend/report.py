"""Reports of what the backend did to each layer of a model."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from qframework.graph.shapes import short_shapes


@dataclass(frozen=True)
class LayerReport:
    """One linear layer or attention: whether it was lowered, to which operator, and if not, or only in part, why.

    ``fallback`` marks a layer that should be quantized and could not be. ``kind`` is ``"linear"`` or ``"attention"``.
    """

    name: str
    lowered: bool
    operator: str
    reason: str
    fallback: bool = False
    kind: str = "linear"

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", short_shapes(self.reason))


@dataclass
class Report:
    """The linear layers and attentions of a model in the order of the graph. ``str()`` gives a table.

    ``notes`` are sentences on the model as a whole.
    """

    layers: list[LayerReport] = field(default_factory=list)
    notes: tuple[str, ...] = ()

    def of(self, kind: str) -> Report:
        """The layers of one kind, ``"linear"`` or ``"attention"``."""
        return Report([layer for layer in self.layers if layer.kind == kind])

    @property
    def lowered(self) -> int:
        """How many linear layers became an INT8 operator."""
        return self._lowered("linear")

    @property
    def total(self) -> int:
        """How many linear layers the model has."""
        return self._total("linear")

    @property
    def attention_lowered(self) -> int:
        """How many attentions became an operator of this package."""
        return self._lowered("attention")

    @property
    def attention_total(self) -> int:
        """How many attentions the model has, including those written as products around a softmax."""
        return self._total("attention")

    @property
    def summary(self) -> str:
        """What was lowered, in one line."""
        text = f"{self.lowered} of {self.total} linear layers lowered"
        return text + (
            f", {self.attention_lowered} of {self.attention_total} attentions" if self.attention_total else ""
        )

    def _lowered(self, kind: str) -> int:
        return sum(layer.lowered for layer in self.layers if layer.kind == kind)

    def _total(self, kind: str) -> int:
        return sum(layer.kind == kind for layer in self.layers)

    def __str__(self) -> str:
        table = Table(title=self.summary)
        for column in ("layer", "lowered", "operator", "why not"):
            table.add_column(column, overflow="fold")
        for layer in self.layers:
            table.add_row(layer.name, "yes" if layer.lowered else "no", layer.operator, layer.reason)
        console = Console(width=120, record=False, color_system=None)
        with console.capture() as capture:
            console.print(table)
            for note in self.notes:
                console.print(note, markup=False)
        return capture.get().rstrip("\n")
