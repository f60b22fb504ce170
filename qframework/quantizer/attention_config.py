"""What to quantize attention to, and a configuration for linears and attention at once.

::

    static_attention()                   INT8 queries, keys and values with calibrated scales (QAttn)
    static_attention("per_head")         one scale for each head
    dynamic_attention()                  16 bit in and out, quantized inside the kernel (SageAttention); no calibration
    dynamic_attention("sage2pp_int8")    a variant by name
    QuantizationConfig(linear=static_int8(), attention=static_attention())
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from qframework.errors import UnsupportedError
from qframework.kernels.attention.variants import resolve
from qframework.quantizer.config import (
    ActivationConfig,
    LinearConfig,
    ObserverArgs,
    OutputPolicy,
    check_choice,
    check_keys,
)

AttentionGranularity = Literal["per_tensor", "per_head"]
_PER_HEAD_OBSERVERS = ("minmax", "moving_average")


@dataclass(frozen=True)
class AttentionConfig:
    """How ``scaled_dot_product_attention`` is quantized.

    Attributes:
        mode: ``"static"``: INT8 queries, keys and values with calibrated scales, softmax in float32 (QAttn). Anything
            else is a variant that quantizes inside the kernel and is not calibrated: ``"auto"``, a name such as
            ``"sage_b"`` or ``"sage2_int8"``, or the spec of an AttentionVariant.
        granularity: static only. ``"per_tensor"``, or ``"per_head"``: one scale for each head of the queries, keys and
            values ``(..., H, N, D)``.
        observer: static only, see ActivationConfig; per head ``"minmax"`` or ``"moving_average"``.
        observer_args: arguments of the observer.
        output: static only. ``"consumer"`` quantizes the output only where a quantized linear reads it, ``"always"``
            quantizes the output itself, per tensor (QAttn).
        smooth_k: variants only. Subtract the mean key, which changes no softmax (SageAttention, section 4.2).

    Raises:
        UnsupportedError: for an unknown value, or a setting that the mode does not have.
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
        if not isinstance(self.smooth_k, bool):
            raise UnsupportedError(f"AttentionConfig: smooth_k={self.smooth_k!r}; accepted: True, False")
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
        self.activation()  # knows the observers and their arguments
        if not self.smooth_k:
            raise UnsupportedError("AttentionConfig: smooth_k=False with mode='static', which smooths nothing")
        if self.granularity == "per_head" and self.observer not in _PER_HEAD_OBSERVERS:
            raise UnsupportedError(
                f"AttentionConfig: observer {self.observer!r} does not work 'per_head'; accepted: "
                f"{', '.join(_PER_HEAD_OBSERVERS)}, or granularity='per_tensor'"
            )

    def _check_variant(self) -> None:
        if not isinstance(self.mode, str):
            raise UnsupportedError(
                f"AttentionConfig: mode={self.mode!r}; accepted: 'static', 'auto' or a variant's name"
            )
        if self.mode != "auto":
            resolve(self.mode)
        given = {"granularity": self.granularity, "observer": self.observer, "output": self.output}
        changed = [f"{k}={v!r}" for k, v in given.items() if v != getattr(AttentionConfig, k)]
        changed += [f"observer_args={dict(self.observer_args)}"] * bool(self.observer_args)
        if changed:
            raise UnsupportedError(
                f"AttentionConfig: {', '.join(changed)} with mode={self.mode!r}, which quantizes inside the kernel; "
                "accepted: with mode='static'"
            )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able description; ``from_dict`` reads it back."""
        return {
            "mode": self.mode,
            "granularity": self.granularity,
            "observer": self.observer,
            "observer_args": dict(self.observer_args),
            "output": self.output,
            "smooth_k": self.smooth_k,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AttentionConfig:
        """Inverse of ``to_dict``. Raises UnsupportedError for unknown fields or values."""
        check_keys(cls, values)
        return cls(**values)


@dataclass(frozen=True)
class QuantizationConfig:
    """How the linears and the attention of a part of a model are quantized; None leaves the kind in float.

    Raises:
        UnsupportedError: for a value that is no configuration of its kind.
    """

    linear: LinearConfig | None = None
    attention: AttentionConfig | None = None

    def __post_init__(self) -> None:
        kinds = (("linear", LinearConfig, "a LinearConfig"), ("attention", AttentionConfig, "an AttentionConfig"))
        for name, cls, words in kinds:
            value = getattr(self, name)
            if value is not None and not isinstance(value, cls):
                raise UnsupportedError(f"QuantizationConfig: {name}={value!r}; accepted: None or {words}")

    def to_dict(self) -> dict[str, Any]:
        """JSON-able description; ``from_dict`` reads it back."""
        return {
            "linear": self.linear and self.linear.to_dict(),
            "attention": self.attention and self.attention.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> QuantizationConfig:
        """Inverse of ``to_dict``. Raises UnsupportedError for unknown fields or values."""
        check_keys(cls, values)
        linear, attention = values.get("linear"), values.get("attention")
        return cls(
            None if linear is None else LinearConfig.from_dict(linear),
            None if attention is None else AttentionConfig.from_dict(attention),
        )


def static_attention(
    granularity: AttentionGranularity = "per_tensor", observer: str = "minmax", **observer_args: float
) -> AttentionConfig:
    """Static INT8 attention (QAttn): scales of queries, keys and values are calibrated.

    Args:
        granularity: ``"per_tensor"`` or ``"per_head"``.
        observer: see AttentionConfig.
        **observer_args: its arguments, as of static_int8.

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
            "dynamic_attention: variant='static'; accepted: static_attention() for calibrated scales"
        )
    return AttentionConfig(variant, smooth_k=smooth_k)
