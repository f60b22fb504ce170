"""How a model is to be quantized and compiled, as a file: what ``tune`` writes and ``qframework quantize`` takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qframework.backend.options import parse_options
from qframework.errors import FileFormatError, UnsupportedError
from qframework.files import read_json
from qframework.quantizer import AttentionConfig, LinearConfig, QFrameworkQuantizer, Recipe

FORMAT = 1


@dataclass(frozen=True)
class Plan:
    """Everything between a float model and a compiled one.

    Attributes:
        quantizer: what is quantized, and how.
        options: of ``torch.compile(..., backend="qframework")``.
        recipe: steps around the calibration.
    """

    quantizer: QFrameworkQuantizer
    options: dict[str, Any] = field(default_factory=dict)
    recipe: Recipe | None = None

    @property
    def needs_calibration(self) -> bool:
        """Whether a rule has static scales, or a recipe measures."""
        configs = [
            rule.config_of(kind)
            for rule in self.quantizer.rules
            for kind in (LinearConfig, AttentionConfig)
            if rule.says(kind)
        ]
        return self.recipe is not None or any(map(_is_static, configs))

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
        """Inverse of ``to_dict``; also reads what ``Tuning.to_dict`` gives, and leaves out what it measured.

        Raises:
            FileFormatError: no configuration, or one of a newer format.
            UnsupportedError: rules, options or a recipe that this version does not know.
        """
        if not isinstance(values, Mapping) or not isinstance(values.get("format"), int) or "quantizer" not in values:
            raise FileFormatError("this is no plan: it holds no format or no quantizer")
        if values["format"] > FORMAT:
            raise FileFormatError(
                f"this plan has format {values['format']}; this version reads formats up to {FORMAT}: upgrade "
                "qframework"
            )
        options, recipe = values.get("options") or {}, values.get("recipe")
        if not isinstance(options, Mapping):
            raise UnsupportedError(f"options={options!r}; accepted: a mapping, as torch.compile takes it")
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
            FileFormatError: not such a file, or one of a newer format.
            FileNotFoundError: there is no such file.
            UnsupportedError: rules, options or a recipe that this version does not know.
        """
        values = read_json(path, "plan")
        try:
            return cls.from_dict(values)
        except FileFormatError as error:
            raise FileFormatError(f"{path}: {error}") from error


def _is_static(config: LinearConfig | AttentionConfig | None) -> bool:
    if isinstance(config, AttentionConfig):
        return config.is_static
    return config is not None and not config.activation.dynamic
