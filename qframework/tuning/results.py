"""Results of measuring one layer, or one assignment of choices to layers."""

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
        sqnr_db: of the layer's output; None if it is exact, or has no counterpart in float after a recipe.
        output_sqnr_db: of the model's output; None if it is exact.
        metric: of the model.
        drop: the float model's metric minus ``metric``.
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
        """The layer's name, unique even for a module that is both a linear and an attention."""
        return self.layer if self.kind == "linear" else f"{self.layer} ({self.kind})"


@dataclass(frozen=True)
class Trial:
    """An assignment with the metric of its converted graph and a speed estimated from its layers."""

    assignment: Assignment
    metric: float
    drop: float
    estimated_images_per_second: float


@dataclass(frozen=True)
class Measured:
    """An assignment measured as a whole, as it will run: compiled, unless ``tune`` compiles nothing."""

    assignment: Assignment
    metric: float
    drop: float
    images_per_second: float
