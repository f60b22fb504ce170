"""One rule of a quantizer: a selector of layers and their configuration; converts to JSON and back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import reduce
from typing import Any, Literal, get_args

from torch.fx import Node

from qframework.errors import UnsupportedError
from qframework.quantizer.attention_config import AttentionConfig, QuantizationConfig
from qframework.quantizer.config import LinearConfig, check_choice, check_keys

Config = LinearConfig | AttentionConfig | QuantizationConfig
Kind = type[LinearConfig] | type[AttentionConfig]
NodeFilter = Callable[[Node], bool]
RuleKind = Literal["global", "module_type", "filter", "module_name"]


@dataclass(frozen=True)
class Rule:
    """One call of a ``set_`` method: which layers it selects, and their configuration (None for float)."""

    kind: RuleKind
    selector: Any
    config: Config | None

    def says(self, kind: Kind) -> bool:
        """Whether the rule applies to linears (LinearConfig) or attention (AttentionConfig); None applies to both."""
        return self.config is None or isinstance(self.config, (kind, QuantizationConfig))

    def config_of(self, kind: Kind) -> LinearConfig | AttentionConfig | None:
        """The configuration of a kind to which the rule applies."""
        if isinstance(self.config, QuantizationConfig):
            return self.config.linear if kind is LinearConfig else self.config.attention
        return self.config

    def to_dict(self) -> dict[str, Any]:
        """JSON-able description; types and functions by their qualified name."""
        selector = self.selector
        if selector is not None and not isinstance(selector, str):
            selector = qualified_name(selector)
        return {"kind": self.kind, "selector": selector, "config": self.config and self.config.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Rule:
        """Inverse of ``to_dict``, except for filters, whose function cannot be restored from its name.

        Raises:
            UnsupportedError: a filter, a type that is not imported, or values that ``to_dict`` does not write.
        """
        check_keys(cls, values)
        kind, selector = values.get("kind"), values.get("selector")
        check_choice("Rule", "kind", kind, get_args(RuleKind))
        if kind == "filter":
            raise UnsupportedError(
                "Rule: kind must be 'global', 'module_type' or 'module_name' to be read back, got 'filter' with the "
                f"function {selector!r}. Call set_filter with the function itself"
            )
        if kind == "module_type":
            selector = _imported_type(selector)
        return cls(kind, selector, _config_from(values.get("config")))  # type: ignore[arg-type]


def qualified_name(thing: Any) -> str:
    """Module and qualified name of a type or function, or of the type of anything else."""
    module = getattr(thing, "__module__", type(thing).__module__)
    return f"{module}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"


def _imported_type(name: Any) -> type:
    """The type with a qualified name. Looks it up without importing, since an import named in a file would run code."""
    parts = name.split(".") if isinstance(name, str) else []
    for end in range(len(parts) - 1, 0, -1):
        found = reduce(
            lambda thing, part: getattr(thing, part, None), parts[end:], sys.modules.get(".".join(parts[:end]))
        )
        if isinstance(found, type):
            return found
    raise UnsupportedError(
        f"Rule: the module type must be the qualified name of a type whose module is imported, got {name!r}"
    )


def _config_from(values: Any) -> Config | None:
    """The configuration that ``values`` describe; its kind follows from its fields."""
    if values is None:
        return None
    if not isinstance(values, Mapping):
        raise UnsupportedError(f"Rule: config must be None or what a configuration's to_dict() returns, got {values!r}")
    kinds = (LinearConfig, AttentionConfig, QuantizationConfig)
    fitting = [kind for kind in kinds if set(values) <= {field.name for field in fields(kind)}]
    if len(fitting) != 1:
        names = ", ".join(map(repr, values)) or "none"
        raise UnsupportedError(
            f"Rule: config must have the fields of one of {', '.join(kind.__name__ for kind in kinds)}, as to_dict() "
            f"writes them, got {names}"
        )
    return fitting[0].from_dict(values)
