"""The file that ``tune`` writes and ``qframework quantize`` takes: how to quantize and compile a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qframework.backend.options import parse_options
from qframework.errors import FileFormatError, UnsupportedError
from qframework.files import read_json
from qframework.quantizer import QFrameworkQuantizer, Recipe

FORMAT = 1


@dataclass(frozen=True)
class Plan:
    """How to quantize and compile a float model.

    Attributes:
        quantizer: the rules of what is quantized and how.
        options: of ``torch.compile(..., backend="qframework")``.
        recipe: steps around the calibration.
    """

    quantizer: QFrameworkQuantizer
    options: dict[str, Any] = field(default_factory=dict)
    recipe: Recipe | None = None

    @property
    def needs_calibration(self) -> bool:
        """Whether a rule has static scales, or there is a recipe."""
        return self.recipe is not None or self.quantizer.needs_calibration

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; ``from_dict`` reads it back."""
        return {
            "format": FORMAT,
            "quantizer": self.quantizer.to_dict(),
            "options": self.options,
            "recipe": self.recipe and self.recipe.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """Inverse of ``to_dict``; also reads ``Tuning.to_dict`` without its measurements.

        Raises:
            FileFormatError: ``values`` are not a plan, or of a newer format.
            UnsupportedError: this version does not know the rules, options or recipe.
        """
        if not isinstance(values, Mapping) or not isinstance(values.get("format"), int) or "quantizer" not in values:
            raise FileFormatError("a plan must have a format and a quantizer")
        if values["format"] > FORMAT:
            raise FileFormatError(
                f"a plan must have a format up to {FORMAT}, got {values['format']}. Upgrade qframework"
            )
        options, recipe = values.get("options") or {}, values.get("recipe")
        if not isinstance(options, Mapping):
            raise UnsupportedError(f"Plan: options must be a mapping, as for torch.compile, got {options!r}")
        parse_options(options=options)
        return cls(
            QFrameworkQuantizer.from_dict(values["quantizer"]),
            dict(options),
            None if recipe is None else Recipe.from_dict(recipe),
        )

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read a file of ``qframework tune``.

        Raises:
            FileFormatError: the file is not a plan, or of a newer format.
            FileNotFoundError: the file does not exist.
            UnsupportedError: this version does not know the rules, options or recipe.
        """
        values = read_json(path, "a plan")
        try:
            return cls.from_dict(values)
        except FileFormatError as error:
            raise FileFormatError(f"{path}: {error}") from error
