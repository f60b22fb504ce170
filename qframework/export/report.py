"""What an ONNX file holds in INT8, and what it holds in float although the model quantizes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class OnnxReport:
    """The layers of an ONNX file. ``str()`` gives a summary with a line for each layer that had to be left in float.

    ``int8`` names the linear layers with INT8 operands. ``left_in_float`` maps each layer that the model quantizes and
    QDQ cannot express to the reason. Layers that were never quantized are in neither. ``data`` is the second file with
    the weights of a model above 2 GB, else None.
    """

    path: Path
    int8: tuple[str, ...]
    left_in_float: dict[str, str] = field(default_factory=dict)
    data: Path | None = None

    def __str__(self) -> str:
        lines = [f"{self.path}: {len(self.int8)} linear layers in INT8, {len(self.left_in_float)} layers left in float"]
        return "\n".join([*lines, *(f"  {layer}: {reason}" for layer, reason in self.left_in_float.items())])
