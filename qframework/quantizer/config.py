"""What to quantize a linear layer to: activation, weight and output, checked on construction.

Configurations are frozen, hashable and turn into JSON and back (``to_dict``, ``from_dict``). The presets cover the
usual choices::

    static_int8()                        one scale per layer from calibration, weights per output channel
    static_int8("per_token")             one scale per position (token), as QAttn uses for SAM
    static_int8(observer="percentile", percentile=99.9)
    dynamic_int8()                       one scale per token, computed from the data; needs no calibration
    qattn_paper()                        static, and every linear output is requantized too
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Self, get_args

from qframework.arguments import is_count, is_number
from qframework.errors import UnsupportedError
from qframework.numerics import ActivationGranularity, WeightGranularity

OutputPolicy = Literal["consumer", "always"]
ObserverArgs = Mapping[str, float] | tuple[tuple[str, float], ...]


def _is_share(value: object) -> bool:
    return is_number(value) and 0 < value <= 1


def _is_margin(value: object) -> bool:
    return is_number(value) and 0 <= value <= 10


def _is_percentile(value: object) -> bool:
    return is_number(value) and 0 < value <= 100


def _is_bins(value: object) -> bool:
    return is_count(value) and 256 <= value <= 2**20 and value % 2 == 0


@dataclass(frozen=True)
class _ArgRule:
    accepts: Callable[[object], bool]
    accepted: str


_BINS = _ArgRule(_is_bins, "an even number from 256 to 1048576")


@dataclass(frozen=True)
class _ObserverRule:
    granularities: tuple[str, ...]
    args: dict[str, _ArgRule] = field(default_factory=dict)


ACTIVATION_OBSERVERS: dict[str, _ObserverRule] = {
    "minmax": _ObserverRule(("per_tensor", "per_token"), {"margin": _ArgRule(_is_margin, "a number from 0 to 10")}),
    "moving_average": _ObserverRule(
        ("per_tensor", "per_token"), {"averaging_constant": _ArgRule(_is_share, "a number in (0, 1]")}
    ),
    "percentile": _ObserverRule(
        ("per_tensor",), {"percentile": _ArgRule(_is_percentile, "a number in (0, 100]"), "bins": _BINS}
    ),
    "mse": _ObserverRule(("per_tensor",), {"bins": _BINS}),
    "entropy": _ObserverRule(("per_tensor",), {"bins": _BINS}),
}
ASYMMETRIC_OBSERVERS = ("minmax", "moving_average", "percentile", "mse")
WEIGHT_OBSERVERS = ("minmax", "mse")


def check_choice(owner: str, name: str, value: object, accepted: tuple[str, ...]) -> None:
    """Raise UnsupportedError unless ``value`` is one of ``accepted``."""
    if value not in accepted:
        raise UnsupportedError(f"{owner}: {name} must be {_one_of(accepted)}, got {value!r}")


def check_bool(owner: str, name: str, value: object) -> None:
    """Raise UnsupportedError unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise UnsupportedError(f"{owner}: {name} must be True or False, got {value!r}")


def _one_of(accepted: Iterable[str]) -> str:
    names = list(map(repr, accepted))
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"


def _check_observer_args(observer: str, args: tuple[tuple[str, Any], ...]) -> None:
    rules = ACTIVATION_OBSERVERS[observer].args
    for name, value in args:
        if name not in rules:
            must = f"arguments must be {_one_of(rules)}" if rules else "it must have no arguments"
            raise UnsupportedError(f"observer {observer!r}: {must}, got {name!r}")
        if not rules[name].accepts(value):
            raise UnsupportedError(f"observer {observer!r}: {name} must be {rules[name].accepted}, got {value!r}")


def check_keys(cls: type, values: Mapping[str, Any]) -> None:
    """Raise UnsupportedError unless ``values`` is a mapping from fields of the dataclass ``cls``."""
    if not isinstance(values, Mapping):
        raise UnsupportedError(f"{cls.__name__}: values must be a mapping as to_dict() returns it, got {values!r}")
    known = [f.name for f in fields(cls)]
    for name in values:
        if name not in known:
            raise UnsupportedError(f"{cls.__name__}: fields must be {_one_of(known)}, got {name!r}")


@dataclass(frozen=True)
class JsonConfig:
    """Base of configurations, which convert to JSON and back. ``nested`` lists the fields that hold configurations."""

    nested: ClassVar[dict[str, type[JsonConfig]]] = {}

    def to_dict(self) -> dict[str, Any]:
        """JSON-able description; ``from_dict`` reads it back."""
        return {each.name: _jsonable(getattr(self, each.name)) for each in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of ``to_dict``. Raises UnsupportedError for unknown fields or values."""
        check_keys(cls, values)
        nested = {name: kind for name, kind in cls.nested.items() if values.get(name) is not None}
        return cls(**{**values, **{name: kind.from_dict(values[name]) for name, kind in nested.items()}})


def _jsonable(value: Any) -> Any:
    if isinstance(value, JsonConfig):
        return value.to_dict()
    if not isinstance(value, tuple):
        return value
    return dict(value) if all(isinstance(each, tuple) for each in value) else list(value)  # observer_args are pairs


@dataclass(frozen=True)
class ActivationConfig(JsonConfig):
    """How the input of a linear is quantized: INT8 with float32 scales.

    Attributes:
        granularity: ``"per_tensor"`` or ``"per_token"``. A static per-token scale belongs to a position: the activation
            ``(B, N, C)`` has scales ``(N, 1)``, ``(B, H, W, C)`` has ``(H, W, 1)``.
        dynamic: compute the scale from the data at run time instead of calibrating it.
        observer: ``"minmax"``, ``"moving_average"``, ``"percentile"``, ``"mse"`` or ``"entropy"``; the last three work
            per tensor only. For static activations only.
        observer_args: arguments of the observer, a mapping; stored as sorted pairs so that the configuration hashes.
        symmetric: False for a static scale per tensor with a zero point, found from the smallest and the largest value:
            up to twice as fine where nearly all values have one sign, as behind GELU. With ``"percentile"`` and
            ``"mse"`` both ends are clipped at the same magnitude. Not for ``"entropy"``.

    Raises:
        UnsupportedError: for a combination that no kernel or observer implements.
    """

    granularity: ActivationGranularity = "per_tensor"
    dynamic: bool = False
    observer: str = "minmax"
    observer_args: ObserverArgs = ()
    symmetric: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "observer_args", tuple(sorted(dict(self.observer_args).items())))
        check_choice("ActivationConfig", "granularity", self.granularity, get_args(ActivationGranularity))
        check_choice("ActivationConfig", "observer", self.observer, tuple(ACTIVATION_OBSERVERS))
        check_bool("ActivationConfig", "dynamic", self.dynamic)
        check_bool("ActivationConfig", "symmetric", self.symmetric)
        if not self.symmetric:
            self._check_asymmetric()
        if self.dynamic:
            self._check_dynamic()
        else:
            self._check_static()

    def _check_dynamic(self) -> None:
        if self.observer != "minmax" or self.observer_args:
            raise UnsupportedError(
                "ActivationConfig: a dynamic activation, whose scale comes from the data, must not have an observer, "
                f"got observer={self.observer!r} with arguments {dict(self.observer_args)}"
            )

    def _check_asymmetric(self) -> None:
        """Raise UnsupportedError for a zero point without one static scale, or with an observer of magnitudes alone."""
        if self.dynamic or self.granularity != "per_tensor" or self.observer not in ASYMMETRIC_OBSERVERS:
            kind = "dynamic" if self.dynamic else "static"
            raise UnsupportedError(
                "ActivationConfig: symmetric must be True except for a static activation per tensor with an observer "
                f"that is {_one_of(ASYMMETRIC_OBSERVERS)}, got False for a {kind} one with granularity "
                f"{self.granularity!r} and observer {self.observer!r}"
            )

    def _check_static(self) -> None:
        accepted = ACTIVATION_OBSERVERS[self.observer].granularities
        if self.granularity not in accepted:
            observers = (n for n, rule in ACTIVATION_OBSERVERS.items() if self.granularity in rule.granularities)
            raise UnsupportedError(
                f"ActivationConfig: granularity must be {_one_of(accepted)} for observer {self.observer!r}, got "
                f"{self.granularity!r}. Observers that support it: {', '.join(map(repr, observers))}"
            )
        _check_observer_args(self.observer, self.observer_args)  # type: ignore[arg-type]


@dataclass(frozen=True)
class WeightConfig(JsonConfig):
    """How the weight ``(N, K)`` of a linear is quantized: symmetric INT8 with float32 scales.

    Attributes:
        granularity: ``"per_tensor"`` (one scale) or ``"per_channel"`` (one for each of the N output channels).
        observer: ``"minmax"``, or ``"mse"``: clip where the mean squared rounding error is smallest.

    Raises:
        UnsupportedError: for an unknown value.
    """

    granularity: WeightGranularity = "per_channel"
    observer: str = "minmax"

    def __post_init__(self) -> None:
        check_choice("WeightConfig", "granularity", self.granularity, get_args(WeightGranularity))
        check_choice("WeightConfig", "observer", self.observer, WEIGHT_OBSERVERS)


@dataclass(frozen=True)
class LinearConfig(JsonConfig):
    """How a linear layer is quantized.

    Attributes:
        activation: how its input is quantized.
        weight: how its weight is quantized.
        output: ``"consumer"`` quantizes an output only where a quantized layer reads it (linear -> GELU -> linear is
            quantized after the GELU), so that residual sums stay in float. ``"always"`` requantizes the output itself,
            with the activation's granularity and observer, as QAttn does for static quantization.

    Raises:
        UnsupportedError: for an unknown value, or ``output="always"`` with a dynamic activation: a dynamic layer's
            output is float (QAttn eq. 9).
    """

    activation: ActivationConfig = field(default_factory=ActivationConfig)
    weight: WeightConfig = field(default_factory=WeightConfig)
    output: OutputPolicy = "consumer"
    nested: ClassVar[dict[str, type[JsonConfig]]] = {"activation": ActivationConfig, "weight": WeightConfig}

    def __post_init__(self) -> None:
        for name, cls in self.nested.items():
            if not isinstance(getattr(self, name), cls):
                raise UnsupportedError(
                    f"LinearConfig: {name} must be of type {cls.__name__}, got {getattr(self, name)!r}"
                )
        check_choice("LinearConfig", "output", self.output, get_args(OutputPolicy))
        if self.output == "always" and self.activation.dynamic:
            raise UnsupportedError(
                "LinearConfig: output must be 'consumer' for a dynamic activation, whose output is float, got 'always'"
            )


def static_int8(
    activation: ActivationGranularity = "per_tensor",
    weight: WeightGranularity = "per_channel",
    observer: str = "minmax",
    symmetric: bool = True,
    **observer_args: float,
) -> LinearConfig:
    """Static INT8: activation scales are calibrated, an output is quantized where a quantized layer reads it.

    Args:
        activation: ``"per_tensor"`` or ``"per_token"``.
        weight: ``"per_channel"`` or ``"per_tensor"``.
        observer: see ActivationConfig.
        symmetric: False for activations with a zero point, see ActivationConfig.
        **observer_args: its arguments: ``margin`` of ``"minmax"``, the share by which the range is wider than what
            calibration saw, ``averaging_constant`` of ``"moving_average"``, ``percentile`` of
            ``"percentile"``, ``bins`` of ``"percentile"``, ``"mse"`` and ``"entropy"``.

    Raises:
        UnsupportedError: for an unknown value or combination.
    """
    return LinearConfig(ActivationConfig(activation, False, observer, observer_args, symmetric), WeightConfig(weight))


def dynamic_int8(
    activation: ActivationGranularity = "per_token", weight: WeightGranularity = "per_channel"
) -> LinearConfig:
    """Dynamic INT8: activation scales come from the data at run time; needs no calibration.

    Raises:
        UnsupportedError: for an unknown granularity.
    """
    return LinearConfig(ActivationConfig(activation, True), WeightConfig(weight))


def qattn_paper(
    weight: WeightGranularity = "per_channel",
    activation: ActivationGranularity = "per_tensor",
    dynamic: bool = False,
) -> LinearConfig:
    """QAttn's linear layers: static ones requantize every output to INT8 (eq. 6), dynamic ones return float (eq. 9).

    The paper's ``per_channel`` is ``weight``, its ``input_per_channel`` is ``activation="per_token"`` and its
    ``is_dynamic`` is ``dynamic`` (Algorithm 1).

    Raises:
        UnsupportedError: for an unknown granularity.
    """
    output: OutputPolicy = "consumer" if dynamic else "always"
    return LinearConfig(ActivationConfig(activation, dynamic), WeightConfig(weight), output)
