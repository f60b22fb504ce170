"""Checks ``options=`` and ``mode=`` of ``torch.compile(..., backend="qframework")`` and splits off Inductor's."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qframework.errors import UnsupportedError
from qframework.kernels.attention.variants import VARIANTS, resolve

# Our options and their values, the default first.
KNOWN_OPTIONS: dict[str, tuple[Any, ...]] = {
    "linear": ("off", "int8_dynamic"),
    "freeze_weights": (False, True),
    "experts": ("auto", "off", "int8_dynamic"),
    "attention": ("auto", "sage", "off", *VARIANTS),
}


@dataclass(frozen=True)
class BackendOptions:
    """The caller's options: ours by name, the rest as Inductor's configuration."""

    linear: str = "off"
    freeze_weights: bool = False
    experts: str = "auto"
    attention: str | Mapping[str, str] = "auto"  # for all layers, or by layer
    inductor: dict[str, Any] = field(default_factory=dict)

    @property
    def experts_in_int8(self) -> bool:
        """Whether experts are quantized: all that can be, or by default, beside frozen INT8 linears, those that pay."""
        by_default = self.experts == "auto" and self.linear == "int8_dynamic" and self.freeze_weights
        return by_default or self.experts == "int8_dynamic"


def parse_options(mode: str | None = None, options: Mapping[str, Any] | None = None) -> BackendOptions:
    """Split ``options`` and expand ``mode``; an explicit option overrides the mode.

    Raises:
        UnsupportedError: an unknown mode, option or value; the message lists the known ones.
    """
    inductor = _mode_options(mode)
    ours: dict[str, Any] = {}
    for key, value in (options or {}).items():
        if key in KNOWN_OPTIONS:
            ours[key] = _checked_value(key, value)
        else:
            inductor[_inductor_name(key)] = value
    return BackendOptions(**ours, inductor=inductor)


def _mode_options(mode: str | None) -> dict[str, Any]:
    from qframework.compat.inductor import list_mode_options

    modes = list_mode_options()
    if mode is not None and mode not in modes:
        raise UnsupportedError(f"backend 'qframework': mode must be one of {', '.join(modes)}, got {mode!r}")
    return dict(modes[mode or "default"])


def _checked_value(key: str, value: Any) -> Any:
    if key == "attention" and isinstance(value, Mapping):  # a variant for each layer, as of calibrate_attention
        return {layer: str(_checked_value(key, variant)) for layer, variant in value.items()}
    if key == "attention" and _is_variant(value):
        return value
    if not any(value is known or (value == known and isinstance(value, str)) for known in KNOWN_OPTIONS[key]):
        known = ", ".join(map(repr, KNOWN_OPTIONS[key]))
        raise UnsupportedError(f"backend 'qframework': option {key!r} must be one of {known}, got {value!r}")
    return value


def _is_variant(value: Any) -> bool:
    """Whether a value is the ``spec`` of an ``AttentionVariant``."""
    try:
        return isinstance(value, str) and value not in KNOWN_OPTIONS["attention"] and resolve(value).spec == value
    except UnsupportedError:
        return False


def _inductor_name(key: str) -> str:
    from qframework.compat.inductor import list_options

    name = key.replace("-", "_")
    known = list_options()
    if name not in known:
        ours = "; ".join(f"{k!r}: {' | '.join(map(str, v))}" for k, v in KNOWN_OPTIONS.items())
        close = difflib.get_close_matches(name, [*KNOWN_OPTIONS, *known])
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise UnsupportedError(
            f"backend 'qframework': option {key!r} is unknown.{hint} Options of qframework: {ours}. Inductor's "
            f"{len(known)} options, which torch._inductor.list_options() lists, are valid too."
        )
    return name
