"""What was measured of one layer, or of one assignment of choices to layers."""

from __future__ import annotations

from dataclasses import dataclass

from qframework.tuning.assignment import Assignment


@dataclass(frozen=True)
class LayerSensitivity:
    """One layer quantized in one way, all others in float.

    Attributes:
        kind: ``"linear"`` or ``"attention"``.
        layer: its name.
        choice: ``"static"``, ``"dynamic"`` or a variant of attention.
        sqnr_db: of the layer's output; None where it is exact or, after a recipe, has no counterpart in float.
        output_sqnr_db: of the model's output; None where it is exact.
        metric: of the model.
        drop: how much lower that is than in float; negative where it is higher.
    """

    kind: str
    layer: str
    choice: str
    sqnr_db: float | None
    output_sqnr_db: float | None
    metric: float
    drop: float

    @property
    def label(self) -> str:
        """The layer's name; a module may be a linear and an attention at once."""
        return self.layer if self.kind == "linear" else f"{self.layer} ({self.kind})"


@dataclass(frozen=True)
class Trial:
    """An assignment whose metric was measured, converted but not compiled; its speed is estimated from its layers."""

    assignment: Assignment
    metric: float
    drop: float
    estimated_images_per_second: float


@dataclass(frozen=True)
class Measured:
    """An assignment measured whole, as it will run: compiled for the device. See ``tune`` where it was not."""

    assignment: Assignment
    metric: float
    drop: float
    images_per_second: float
