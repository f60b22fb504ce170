"""What to quantize attention to, and a configuration for linears and attention at once.

::

    static_attention()                   INT8 queries, keys and values with calibrated scales (QAttn)
    static_attention("per_head")         one scale for each head
    dynamic_attention()                  16-bit in and out, quantized inside the kernel (SageAttention); no calibration
    dynamic_attention("sage2pp_int8")    a variant by name
    QuantizationConfig(linear=static_int8(), attention=static_attention())
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from qframework.errors import UnsupportedError
from qframework.kernels.attention.variants import resolve
from qframework.quantizer.config import (
    ActivationConfig,
    JsonConfig,
    LinearConfig,
    ObserverArgs,
    OutputPolicy,
    check_bool,
    check_choice,
)

AttentionGranularity = Literal["per_tensor", "per_head"]
PER_HEAD_OBSERVERS = ("minmax", "moving_average")


@dataclass(frozen=True)
class AttentionConfig(JsonConfig):
    """How ``scaled_dot_product_attention`` is quantized.

    Attributes:
        mode: ``"static"``: INT8 queries, keys and values with calibrated scales, softmax in float32 (QAttn). All other
            modes are variants that quantize inside the kernel and need no calibration: ``"auto"``, a name such as
            ``"sage_b"`` or ``"sage2_int8"``, or the spec of an AttentionVariant.
        granularity: static only. ``"per_tensor"``, or ``"per_head"``: one scale for each head of the queries, keys and
            values ``(..., H, N, D)``.
        observer: static only, see ActivationConfig; per head ``"minmax"`` or ``"moving_average"``.
        observer_args: arguments of the observer.
        output: static only. ``"consumer"`` quantizes the output only where a quantized linear reads it, ``"always"``
            quantizes the output itself, per tensor (QAttn).
        smooth_k: variants only. Subtract the mean key, which does not change the softmax (SageAttention, section 4.2).

    Raises:
        UnsupportedError: for an unknown value, or a setting that does not apply to the mode.
    """

    mode: str = "static"
    granularity: AttentionGranularity = "per_tensor"
    observer: str = "minmax"
    observer_args: ObserverArgs = ()
    output: OutputPolicy = "consumer"
    smooth_k: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "observer_args", tuple(sorted(dict(self.observer_args).items())))
        check_choice("AttentionConfig", "granularity", self.granularity, get_args(AttentionGranularity))
        check_choice("AttentionConfig", "output", self.output, get_args(OutputPolicy))
        check_bool("AttentionConfig", "smooth_k", self.smooth_k)
        if self.is_static:
            self._check_static()
        else:
            self._check_variant()

    @property
    def is_static(self) -> bool:
        """Whether the scales are calibrated."""
        return self.mode == "static"

    def activation(self) -> ActivationConfig:
        """How one tensor is observed, per tensor."""
        return ActivationConfig("per_tensor", False, self.observer, self.observer_args)

    def _check_static(self) -> None:
        self.activation()  # checks the observer and its arguments
        if not self.smooth_k:
            raise UnsupportedError("AttentionConfig: smooth_k must be True for mode='static', got False")
        if self.granularity == "per_head" and self.observer not in PER_HEAD_OBSERVERS:
            raise UnsupportedError(
                f"AttentionConfig: observer must be {' or '.join(map(repr, PER_HEAD_OBSERVERS))} for "
                f"granularity='per_head', got {self.observer!r}"
            )

    def _check_variant(self) -> None:
        if not isinstance(self.mode, str):
            raise UnsupportedError(
                f"AttentionConfig: mode must be 'static', 'auto' or the name of a variant, got {self.mode!r}"
            )
        if self.mode != "auto":
            resolve(self.mode)
        given = {"granularity": self.granularity, "observer": self.observer, "output": self.output}
        changed = [f"{k}={v!r}" for k, v in given.items() if v != getattr(AttentionConfig, k)]
        changed += [f"observer_args={dict(self.observer_args)}"] * bool(self.observer_args)
        if changed:
            raise UnsupportedError(
                f"AttentionConfig: mode must be 'static' for {', '.join(changed)}, got {self.mode!r}, which quantizes "
                "inside the kernel"
            )


@dataclass(frozen=True)
class QuantizationConfig(JsonConfig):
    """How the linears and the attention of a part of a model are quantized. None leaves them in float.

    Raises:
        UnsupportedError: for a value of another type.
    """

    linear: LinearConfig | None = None
    attention: AttentionConfig | None = None
    nested: ClassVar[dict[str, type[JsonConfig]]] = {"linear": LinearConfig, "attention": AttentionConfig}

    def __post_init__(self) -> None:
        for name, cls in self.nested.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, cls):
                raise UnsupportedError(
                    f"QuantizationConfig: {name} must be of type {cls.__name__} or None, got {value!r}"
                )


def static_attention(
    granularity: AttentionGranularity = "per_tensor", observer: str = "minmax", **observer_args: float
) -> AttentionConfig:
    """Static INT8 attention (QAttn): scales of queries, keys and values are calibrated.

    Args:
        granularity: ``"per_tensor"`` or ``"per_head"``.
        observer: see AttentionConfig.
        **observer_args: arguments of the observer, as in static_int8.

    Raises:
        UnsupportedError: for an unknown value or combination.
    """
    return AttentionConfig("static", granularity, observer, tuple(observer_args.items()))


def dynamic_attention(variant: str = "auto", *, smooth_k: bool = True) -> AttentionConfig:
    """Attention that quantizes inside the kernel (SageAttention and its successors); needs no calibration.

    Args:
        variant: ``"auto"``, a name such as ``"sage_b"`` or ``"sage2_int8"``, or the spec of an AttentionVariant.
        smooth_k: subtract the mean key.

    Raises:
        UnsupportedError: for an unknown variant.
    """
    if variant == "static":
        raise UnsupportedError(
            "dynamic_attention: variant must be 'auto' or the name of a variant, got 'static'. Use static_attention() "
            "for calibrated scales"
        )
    return AttentionConfig(variant, smooth_k=smooth_k)
