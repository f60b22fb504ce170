"""Assignments of a choice to each layer (float, static, dynamic or an attention variant), as rules and options."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from qframework.errors import UnsupportedError
from qframework.quantizer import (
    ActivationConfig,
    AttentionConfig,
    LinearConfig,
    QFrameworkQuantizer,
    QuantizationConfig,
    dynamic_attention,
    dynamic_int8,
    static_attention,
    static_int8,
)
from qframework.tuning.layer_times import DYNAMIC, FLOAT, STATIC, kind_of
from qframework.tuning.layers import KINDS, Layer, LayerKind

Key = tuple[LayerKind, str]


# Other observers of static layers, for ``Meanings.observers``. Only a zero point takes time: an addition in the layer
# before.
OBSERVERS: Mapping[str, ActivationConfig] = {
    **{name: ActivationConfig(observer=name) for name in ("moving_average", "percentile", "mse", "entropy")},
    "zero_point": ActivationConfig(symmetric=False),
}


@dataclass(frozen=True)
class Meanings:
    """The configurations behind the choices; an attention variant is a choice by its own name.

    Attributes:
        static: of static linears.
        dynamic: of dynamic linears.
        static_attention: of static attention.
        observers: other static activations by name, which are choices as well: ``"static mse"`` is a static layer with
            the observer that ``"mse"`` names here. Attention takes those of one scale without a zero point.
    """

    static: LinearConfig = field(default_factory=static_int8)
    dynamic: LinearConfig = field(default_factory=dynamic_int8)
    static_attention: AttentionConfig = field(default_factory=static_attention)
    observers: Mapping[str, ActivationConfig] = field(default_factory=dict)

    def statics(self, kind: LayerKind) -> list[str]:
        """The static choices of a kind of layer, that of the configured observer first."""
        fits = [name for name, each in self.observers.items() if kind == "linear" or _fits_attention(each)]
        return [STATIC, *(f"{STATIC} {name}" for name in fits)]

    def linear(self, choice: str) -> LinearConfig | None:
        """The configuration of a linear. Raises UnsupportedError for an unknown choice."""
        configs = {FLOAT: None, STATIC: self.static, DYNAMIC: self.dynamic}
        if choice in self.statics("linear")[1:]:
            return replace(self.static, activation=self._observer(choice))
        if choice not in configs:
            accepted = ", ".join([FLOAT, *self.statics("linear"), DYNAMIC])
            raise UnsupportedError(f"Meanings: a linear must be one of {accepted}, got {choice!r}")
        return configs[choice]

    def attention(self, choice: str) -> AttentionConfig | None:
        """The configuration of an attention. Raises UnsupportedError for an unknown choice."""
        if choice == FLOAT:
            return None
        if kind_of(choice) != STATIC:
            return dynamic_attention(choice)
        if choice not in self.statics("attention"):
            accepted = ", ".join([FLOAT, *self.statics("attention")])
            raise UnsupportedError(f"Meanings: an attention must be one of {accepted} or a variant, got {choice!r}")
        if choice == STATIC:
            return self.static_attention
        found = self._observer(choice)
        return replace(self.static_attention, observer=found.observer, observer_args=found.observer_args)

    def adds_zero_point(self, choice: str) -> bool:
        """Whether a choice needs a zero point that the configured static choice does not."""
        return kind_of(choice) != choice and self.static.activation.symmetric and not self._observer(choice).symmetric

    def _observer(self, choice: str) -> ActivationConfig:
        return self.observers[choice.removeprefix(f"{STATIC} ")]

    def kernels(self, assignment: Assignment) -> Assignment:
        """The kernels of an assignment: equal where only values of scales differ, as between observers.

        Layers that read one tensor must have one observer, as ``tune`` gives them: two would quantize it twice.
        """
        return Assignment({key: self.kernel(choice) for key, choice in assignment.items()})

    def kernel(self, choice: str) -> str:
        """What a choice runs: ``"static"`` whatever the observer, or static with another granularity or zero points."""
        if kind_of(choice) == choice:
            return choice
        found, plain = self._observer(choice), self.static.activation
        if (found.granularity, found.symmetric) == (plain.granularity, plain.symmetric):
            return STATIC
        return f"{STATIC} {found.granularity}" + ("" if found.symmetric else " zero_point")


def _fits_attention(observer: ActivationConfig) -> bool:
    return observer.symmetric and observer.granularity == "per_tensor"


class Assignment(Mapping[Key, str]):
    """A choice for each layer, by kind and name; hashable, and equal to one with the same choices."""

    def __init__(self, choices: Mapping[Key, str] | Iterable[tuple[Key, str]]) -> None:
        self._choices: dict[Key, str] = dict(choices)

    @classmethod
    def uniform(cls, layers: Iterable[Layer], choice: str = FLOAT) -> Assignment:
        """The same choice for all ``layers``."""
        return cls({layer.key: choice for layer in layers})

    def __getitem__(self, key: Key) -> str:
        return self._choices[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._choices)

    def __len__(self) -> int:
        return len(self._choices)

    def __hash__(self) -> int:
        return hash(frozenset(self._choices.items()))

    def __repr__(self) -> str:
        return f"Assignment({self.to_dict()})"

    def changed(self, key: Key, choice: str) -> Assignment:
        """A copy with another choice for one layer."""
        return Assignment(self._choices | {key: choice})

    @property
    def is_float(self) -> bool:
        """Whether nothing is quantized."""
        return set(self._choices.values()) <= {FLOAT}

    @property
    def is_calibrated(self) -> bool:
        """Whether a scale comes from calibration."""
        return STATIC in map(kind_of, self._choices.values())

    def quantizer(self, meanings: Meanings | None = None) -> QFrameworkQuantizer:
        """The quantizer of this assignment: one rule for each module, outer modules first.

        Raises:
            UnsupportedError: the kind of layer does not have the choice.
        """
        meanings = meanings or Meanings()
        quantizer = QFrameworkQuantizer()
        names = dict.fromkeys(name for _, name in self)
        # Rules also cover submodules, and the last rule wins: inner modules must come last.
        for name in sorted(names, key=lambda name: name.count(".")):
            linear = meanings.linear(self._choices.get(("linear", name), FLOAT))
            attention = meanings.attention(self._choices.get(("attention", name), FLOAT))
            quantizer.set_module_name(glob.escape(name), QuantizationConfig(linear, attention))
        return quantizer

    def options(self) -> dict[str, Any]:
        """Options for ``torch.compile(..., backend="qframework")`` that keep float attention in float."""
        variants = {
            name: choice
            for (kind, name), choice in self.items()
            if kind == "attention" and kind_of(choice) not in (FLOAT, STATIC)
        }
        return {"attention": variants or "off"}

    def to_dict(self) -> dict[str, dict[str, str]]:
        """JSON-able: ``{"linear": {name: choice}, "attention": {name: choice}}``."""
        return {kind: {name: choice for (own, name), choice in self.items() if own == kind} for kind in KINDS}

    @classmethod
    def from_dict(cls, values: Mapping[str, Mapping[str, str]]) -> Assignment:
        """Inverse of ``to_dict``."""
        return cls({(kind, name): choice for kind in KINDS for name, choice in values[kind].items()})

    def count(self) -> dict[str, int]:
        """The number of layers by kind and choice, as ``{"linear static": 12, ...}``."""
        counts: dict[str, int] = {}
        for (kind, _), choice in self.items():
            counts[f"{kind} {choice}"] = counts.get(f"{kind} {choice}", 0) + 1
        return dict(sorted(counts.items()))
