"""A recipe: the steps around ``prepare_pt2e`` and ``calibrate`` that keep a model's accuracy in static INT8.

The steps run before and after preparation, and each has its own switch::

    recipe   = Recipe.best()
    exported = torch.export.export(model, (x,)).module()
    recipe.before_prepare(exported, quantizer, data)     splits ranges, smooths and scales channels; same function
    prepared = prepare_pt2e(exported, quantizer)
    calibrate(prepared, data)
    recipe.after_calibrate(prepared, data)               rounds weights, corrects biases
    converted = convert_pt2e(prepared)

The observers, which choose the scales, belong to the quantizer: ``static_int8(observer="mse")``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from torch.fx import GraphModule

from qframework.arguments import check_can_be_read_again, is_count, is_number
from qframework.errors import UnsupportedError
from qframework.quantizer.arguments import check_exported, check_prepared
from qframework.quantizer.calibration import Batch
from qframework.quantizer.channel_scales import scale_channels
from qframework.quantizer.config import JsonConfig, check_bool, check_choice
from qframework.quantizer.quantizer import QFrameworkQuantizer, check_quantizer
from qframework.quantizer.smooth import smooth

WeightRounding = Literal["nearest", "gptq"]


@dataclass(frozen=True)
class Smooth(JsonConfig):
    """How quantization difficulty moves from activations to weights: a scale ``s`` per channel, searched per layer.

    The scale of channel j is ``s_j = max|x_j| ** a / max|w_j| ** (1 - a)`` (SmoothQuant eq. 4, arXiv:2211.10438), the
    input becomes ``x_j / s_j`` and the weight ``w_j * s_j``. Each group of layers takes the strength ``a``, or no
    smoothing, that gives the least squared error of its quantized outputs.

    Attributes:
        strengths: the candidates for ``a``, each from 0 (equalizes weights) to 1 (equalizes activations). A single
            candidate is used where it is better than no smoothing.
        samples: rows (tokens) of calibration data on which errors are measured; extremes are taken over all data.

    Raises:
        UnsupportedError: no strength, one outside [0, 1], or no samples.
    """

    strengths: tuple[float, ...] = tuple(k / 10 for k in range(11))
    samples: int = 1024

    def __post_init__(self) -> None:
        given = tuple(self.strengths) if isinstance(self.strengths, Iterable) else ()
        if not given or not all(is_number(a) and 0 <= a <= 1 for a in given):
            raise UnsupportedError(
                f"Smooth: strengths must be at least one number from 0 to 1, got {given or self.strengths!r}"
            )
        object.__setattr__(self, "strengths", given)
        if not is_count(self.samples):
            raise UnsupportedError(f"Smooth: samples must be a positive integer, got {self.samples!r}")


@dataclass(frozen=True)
class Recipe(JsonConfig):
    """The steps around calibration; ``Recipe()`` does nothing.

    Attributes:
        smooth: move scales from a layer to the one before it, where that costs nothing at run time: from linears to
            their LayerNorm or RMSNorm, from the projection after attention to the values, from linear to linear through
            ReLU.
        channel_scales: multiply the input of static layers that no layer before them can scale (after a GELU, for
            example) by a constant for each channel, which the backend computes as part of the quantization. Uses the
            strengths of ``smooth``.
        split_gelu: quantize the result of a GELU as two tensors, its negative and its positive part, each with its own
            scale (PTQ4ViT, arXiv:2111.12293), at the cost of a second matrix product.
        weight_rounding: ``"nearest"`` or ``"gptq"``.
        bias_correction: subtract the mean quantization error of each layer's output from its bias.
        batches: how many batches of the calibration data these steps use; None for all.

    Raises:
        UnsupportedError: for an unknown value.
    """

    smooth: Smooth | None = None
    channel_scales: bool = False
    split_gelu: bool = False
    weight_rounding: WeightRounding = "nearest"
    bias_correction: bool = False
    batches: int | None = None
    nested: ClassVar[dict[str, type[JsonConfig]]] = {"smooth": Smooth}

    def __post_init__(self) -> None:
        if self.smooth is not None and not isinstance(self.smooth, Smooth):
            raise UnsupportedError(f"Recipe: smooth must be a Smooth or None, got {self.smooth!r}")
        for name in ("channel_scales", "split_gelu", "bias_correction"):
            check_bool("Recipe", name, getattr(self, name))
        check_choice("Recipe", "weight_rounding", self.weight_rounding, get_args(WeightRounding))
        if self.batches is not None and not is_count(self.batches):
            raise UnsupportedError(f"Recipe: batches must be None or a positive integer, got {self.batches!r}")

    @classmethod
    def best(cls) -> Recipe:
        """The steps that help most models and cost almost nothing at run time: all but ``split_gelu``."""
        return cls(smooth=Smooth(), channel_scales=True, weight_rounding="gptq", bias_correction=True)

    def before_prepare(
        self, exported: GraphModule, quantizer: QFrameworkQuantizer, data: Iterable[Batch]
    ) -> dict[str, Any]:
        """Rewrite the float graph in place so that it quantizes better; its function stays the same up to rounding.

        The parameters of the original model do not change; ``exported`` gets new ones.

        Args:
            exported: from ``torch.export.export(...).module()``.
            quantizer: the one it will be prepared with; only layers that it quantizes are considered.
            data: calibration batches as ``calibrate`` takes them. Each step runs them once more.

        Returns:
            A JSON-able summary of the enabled steps: ``{"split_gelu": number of split layers,
            "smooth": {layer: strength}, "channel_scales": {layer: strength}}``.

        Raises:
            UnsupportedError: ``exported`` is not an exported model, or ``quantizer`` not a QFrameworkQuantizer.
            CalibrationError: ``data`` is an iterator, which the first step would exhaust, or does not fit the model.
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
            CalibrationError: ``prepared`` is not prepared; ``data`` is an iterator, which the first step would exhaust,
                or does not fit the model.
        """
        check_can_be_read_again(data, "Recipe.after_calibrate")
        check_prepared(prepared, "Recipe.after_calibrate: prepared")
        if self.weight_rounding != "nearest":
            from qframework.quantizer.weight_rounding import round_weights

            round_weights(prepared, data, method=self.weight_rounding, batches=self.batches)
        if self.bias_correction:
            from qframework.quantizer.bias_correction import correct_bias

            correct_bias(prepared, data, batches=self.batches)
