"""A recipe: what is done around ``prepare_pt2e`` and ``calibrate`` so that static INT8 keeps a model's accuracy.

The steps stand on either side of preparation, and each is switched on its own::

    recipe   = Recipe.best()
    exported = torch.export.export(model, (x,)).module()
    recipe.before_prepare(exported, quantizer, data)     split ranges, smoothing, channel scales: the same function
    prepared = prepare_pt2e(exported, quantizer)
    calibrate(prepared, data)
    recipe.after_calibrate(prepared, data)               weight rounding, bias correction
    converted = convert_pt2e(prepared)

The observers, which choose the scales, belong to the quantizer: ``static_int8(observer="mse")``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from torch.fx import GraphModule

from qframework.arguments import check_can_be_read_again, is_count, is_number
from qframework.errors import UnsupportedError
from qframework.quantizer.arguments import check_exported, check_prepared
from qframework.quantizer.calibration import Batch
from qframework.quantizer.channel_scales import scale_channels
from qframework.quantizer.config import check_choice, check_keys
from qframework.quantizer.quantizer import QFrameworkQuantizer, check_quantizer
from qframework.quantizer.smooth import smooth

WeightRounding = Literal["nearest", "gptq"]


@dataclass(frozen=True)
class Smooth:
    """How the difficulty of activations is moved into weights: a scale ``s`` for each channel, searched for each layer.

    The scale of channel j is ``s_j = max|x_j| ** a / max|w_j| ** (1 - a)`` (SmoothQuant eq. 4, arXiv:2211.10438), the
    input becomes ``x_j / s_j`` and the weight ``w_j * s_j``. Of all strengths ``a``, and of no smoothing, each group of
    layers takes the one of least squared error of its quantized outputs.

    Attributes:
        strengths: the candidates for ``a``, each from 0 (all weights alike) to 1 (all activations alike). One alone is
            taken where it is better than none.
        samples: rows (tokens) of calibration data that errors are measured on; extremes are those of all data.

    Raises:
        UnsupportedError: no strength, one outside [0, 1], or no samples.
    """

    strengths: tuple[float, ...] = tuple(k / 10 for k in range(11))
    samples: int = 1024

    def __post_init__(self) -> None:
        if not isinstance(self.strengths, Iterable):
            raise UnsupportedError(f"Smooth: strengths={self.strengths!r}; accepted: numbers from 0 to 1, at least one")
        object.__setattr__(self, "strengths", tuple(self.strengths))
        if not self.strengths or not all(is_number(a) and 0 <= a <= 1 for a in self.strengths):
            raise UnsupportedError(f"Smooth: strengths={self.strengths!r}; accepted: numbers from 0 to 1, at least one")
        if not is_count(self.samples):
            raise UnsupportedError(f"Smooth: samples={self.samples!r}; accepted: a positive number")

    def to_dict(self) -> dict[str, Any]:
        """JSON-able description; ``from_dict`` reads it back."""
        return {"strengths": list(self.strengths), "samples": self.samples}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Smooth:
        """Inverse of ``to_dict``. Raises UnsupportedError for unknown fields or values."""
        check_keys(cls, values)
        return cls(**values)


@dataclass(frozen=True)
class Recipe:
    """The steps around calibration; ``Recipe()`` does nothing.

    Attributes:
        smooth: scales moved between a layer and the one before it, where that takes them for nothing: LayerNorm or
            RMSNorm to its linears, values to the projection behind attention, linear to linear through ReLU.
        channel_scales: static layers whose input no layer before them can scale (behind a GELU, say) have it multiplied
            by a constant for each channel, which the backend computes as part of its quantization. Strengths as of
            ``smooth``.
        split_gelu: the input behind a GELU is quantized as two tensors, its negative and its positive part, each with a
            scale of its own (PTQ4ViT, arXiv:2111.12293), at the price of a second matrix product.
        weight_rounding: ``"nearest"`` or ``"gptq"``.
        bias_correction: the mean of each layer's quantization error is taken off its bias.
        batches: how many batches of the calibration data these steps see; None: all.

    Raises:
        UnsupportedError: for an unknown value.
    """

    smooth: Smooth | None = None
    channel_scales: bool = False
    split_gelu: bool = False
    weight_rounding: WeightRounding = "nearest"
    bias_correction: bool = False
    batches: int | None = None

    def __post_init__(self) -> None:
        if self.smooth is not None and not isinstance(self.smooth, Smooth):
            raise UnsupportedError(f"Recipe: smooth={self.smooth!r}; accepted: a Smooth, or None for no smoothing")
        for name in ("channel_scales", "split_gelu", "bias_correction"):
            if not isinstance(getattr(self, name), bool):
                raise UnsupportedError(f"Recipe: {name}={getattr(self, name)!r}; accepted: True, False")
        check_choice("Recipe", "weight_rounding", self.weight_rounding, get_args(WeightRounding))
        if self.batches is not None and not is_count(self.batches):
            raise UnsupportedError(f"Recipe: batches={self.batches!r}; accepted: None or a positive number")

    @classmethod
    def best(cls) -> Recipe:
        """The steps that are worth having together and cost next to nothing at run time: all but ``split_gelu``."""
        return cls(smooth=Smooth(), channel_scales=True, weight_rounding="gptq", bias_correction=True)

    def before_prepare(
        self, exported: GraphModule, quantizer: QFrameworkQuantizer, data: Iterable[Batch]
    ) -> dict[str, Any]:
        """Rewrite the float graph in place so that it quantizes better; what it computes stays the same to rounding.

        The parameters of the model that was exported are not touched: changed ones are replaced in ``exported`` alone.

        Args:
            exported: from ``torch.export.export(...).module()``.
            quantizer: the one it will be prepared with; only what it quantizes is looked at.
            data: calibration batches as ``calibrate`` takes them. Every step runs them once more.

        Returns:
            What was done, JSON-able: ``{"split_gelu": layers split, "smooth": {layer: strength},
            "channel_scales": {layer: strength}}``, with the steps that are switched on.

        Raises:
            UnsupportedError: ``exported`` is no exported model, or ``quantizer`` no QFrameworkQuantizer.
            CalibrationError: ``data`` is an iterator, which would be used up by the first step, or does not fit.
        """
        check_can_be_read_again(data, "Recipe.before_prepare")
        check_exported(exported, "Recipe.before_prepare: exported")
        check_quantizer(quantizer, "Recipe.before_prepare")
        done: dict[str, Any] = {}
        if self.split_gelu:
            from qframework.quantizer.split_range import split_gelu_ranges

            done["split_gelu"] = split_gelu_ranges(exported, quantizer)
        if self.smooth is not None:
            done["smooth"] = smooth(exported, quantizer, data, **vars(self.smooth), batches=self.batches)
        if self.channel_scales:
            search = vars(self.smooth or Smooth())
            done["channel_scales"] = scale_channels(exported, quantizer, data, **search, batches=self.batches)
        return done

    def after_calibrate(self, prepared: GraphModule, data: Iterable[Batch]) -> None:
        """Round the weights and correct the biases of the calibrated graph, in place, before ``convert_pt2e``.

        Raises:
            CalibrationError: ``prepared`` is not prepared; ``data`` is an iterator, which would be used up by the first
                step, or does not fit.
        """
        check_can_be_read_again(data, "Recipe.after_calibrate")
        check_prepared(prepared, "Recipe.after_calibrate: prepared")
        if self.weight_rounding != "nearest":
            from qframework.quantizer.weight_rounding import round_weights

            round_weights(prepared, data, method=self.weight_rounding, batches=self.batches)
        if self.bias_correction:
            from qframework.quantizer.bias_correction import correct_bias

            correct_bias(prepared, data, batches=self.batches)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able description; ``from_dict`` reads it back."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**values, "smooth": self.smooth and self.smooth.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """Inverse of ``to_dict``. Raises UnsupportedError for unknown fields or values."""
        check_keys(cls, values)
        smooth = values.get("smooth")
        return cls(**{**values, "smooth": None if smooth is None else Smooth.from_dict(smooth)})
