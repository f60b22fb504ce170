"""The configuration of quantization that models of transformers and diffusers are loaded with."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from qframework.arguments import described
from qframework.compat.quantization_configurations import QuantizationConfigMixin
from qframework.errors import UnsupportedError, either

if TYPE_CHECKING:
    from qframework.quantizer import LinearConfig


class QuantizationMethod(StrEnum):
    """``quant_method`` in ``config.json``; diffusers reads the ``value`` of a member."""

    QFRAMEWORK = "qframework"


METHOD = QuantizationMethod.QFRAMEWORK


class QFrameworkConfig(QuantizationConfigMixin):
    """How ``from_pretrained`` of transformers or diffusers quantizes a model: its linear layers to INT8.

    Attributes:
        linear: ``dynamic_int8()`` or another LinearConfig, or what its ``to_dict`` returns.
        modules_to_not_convert: names of modules that stay in float with all that they contain: ``"lm_head"``,
            ``"model.layers.0"``, or a part between dots such as ``"vision_model"``. None: what the library leaves out
            by default. For transformers, these are the output embeddings, tied weights, and the last module; for
            diffusers, the modules that ``enable_layerwise_casting`` skips. The configuration of a quantized model
            holds the full name of every linear layer that stayed in float.

    Raises:
        UnsupportedError: a wrong field or value.
    """

    def __init__(
        self,
        linear: LinearConfig | Mapping[str, Any] | None = None,
        modules_to_not_convert: Iterable[str] | None = None,
        quant_method: str = METHOD,
        **unknown: Any,
    ) -> None:
        for name in unknown:
            raise UnsupportedError(
                f"QFrameworkConfig: fields must be {either(_FIELDS)}, got {name!r}. A file with other fields was saved "
                "by a newer qframework"
            )
        if quant_method != METHOD:
            raise UnsupportedError(f"QFrameworkConfig: quant_method must be {METHOD.value!r}, got {quant_method!r}")
        self.quant_method = METHOD
        self.linear = _checked_linear(linear)
        self.modules_to_not_convert = _checked_names(modules_to_not_convert)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able description, as in ``config.json``; ``from_dict`` reads it back."""
        return {
            "quant_method": self.quant_method.value,
            "linear": self.linear.to_dict(),
            "modules_to_not_convert": copy.copy(self.modules_to_not_convert),
        }

    def to_diff_dict(self) -> dict[str, Any]:
        """The same: transformers writes this one."""
        return self.to_dict()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield from self.to_dict().items()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QFrameworkConfig) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]


_FIELDS = ("'linear'", "'modules_to_not_convert'")


def _checked_linear(linear: LinearConfig | Mapping[str, Any] | None) -> LinearConfig:
    from qframework.quantizer import LinearConfig, dynamic_int8

    if linear is None:
        return dynamic_int8()
    if isinstance(linear, Mapping):
        linear = LinearConfig.from_dict(linear)
    if not isinstance(linear, LinearConfig):
        raise UnsupportedError(
            "QFrameworkConfig: linear must be a LinearConfig such as dynamic_int8(), its dictionary or None, got "
            f"{described(linear)}"
        )
    if linear.output != "consumer":
        raise UnsupportedError(f"QFrameworkConfig: linear must have output='consumer', got {linear.output!r}")
    if not linear.activation.dynamic and linear.activation.granularity != "per_tensor":
        raise UnsupportedError(
            "QFrameworkConfig: linear must have a dynamic activation or a static one per tensor, got a static one "
            f"{linear.activation.granularity}, whose scales depend on the length of the inputs"
        )
    if not linear.activation.symmetric:
        raise UnsupportedError("QFrameworkConfig: linear must have a symmetric activation, got symmetric=False")
    return linear


def _checked_names(names: Iterable[str] | None) -> list[str] | None:
    if names is None:
        return None
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise UnsupportedError(
            f"QFrameworkConfig: modules_to_not_convert must be None or a list of names of modules, got "
            f"{described(names)}"
        )
    listed = list(names)
    for name in listed:
        if not isinstance(name, str) or not name:
            raise UnsupportedError(
                f"QFrameworkConfig: modules_to_not_convert must hold names such as 'lm_head', got {described(name)}"
            )
    return listed
