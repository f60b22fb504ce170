"""A recipe: the steps around ``prepare_pt2e`` and ``calibrate`` that keep a model's accuracy in static INT8.

The steps run before and after preparation, and each has its own switch::

    recipe   = Recipe.best()
    exported = torch.export.export(model, (x,)).module()
    recipe.before_prepare(exported, quantizer, data)     rotates, smooths, chooses observers, ...; same function
    prepared = prepare_pt2e(exported, quantizer)
    calibrate(prepared, data)
    recipe.after_calibrate(prepared, data)               rounds weights, corrects biases
    converted = convert_pt2e(prepared)

The observers, which choose the scales, belong to the quantizer: ``static_int8(observer="mse")``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from torch.fx import GraphModule

from qframework.arguments import check_can_be_read_again, is_count, is_number
from qframework.errors import UnsupportedError
from qframework.graph.rewrites.read_after_writes import read_after_writes
from qframework.quantizer.activation_choice import choose_activations
from qframework.quantizer.arguments import check_exported, check_prepared
from qframework.quantizer.attention_choice import choose_heads
from qframework.quantizer.calibration import Batch
from qframework.quantizer.channel_scales import scale_channels
from qframework.quantizer.config import JsonConfig, check_bool, check_choice
from qframework.quantizer.hadamard_inputs import turn_dynamic_inputs
from qframework.quantizer.layer_costs import DEVICES
from qframework.quantizer.output_error import OutputError, Snapshot, held_out
from qframework.quantizer.quantizer import QFrameworkQuantizer, check_quantizer
from qframework.quantizer.rotate import rotate
from qframework.quantizer.rotate_heads import rotate_heads
from qframework.quantizer.shift import shift_channels, shift_dynamic_inputs
from qframework.quantizer.smooth import smooth

WeightRounding = Literal["nearest", "gptq"]
# A step on data; with a former result for the same graph, it applies that instead of searching again.
_Steps = dict[str, Callable[[Iterable[Batch], dict[str, Any] | None], dict[str, Any]]]
# The share of the error of weights rounded to nearest that GPTQ leaves, by amplitude: 1/4 of the squared error.
_GPTQ_ERROR = 0.5
# With guard, a step must reduce the squared error of the output, by this share if it may fit noise.
_GAINS = {"smooth": 0.05, "channel_scales": 0.05, "shift": -0.1, "dynamic_shift": 0.0, "hadamard": 0.0}


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
        rotate: change the basis of residual streams so that no channel stands out, where that costs nothing at run time
            (pre-norm models) and reduces the error (qframework/quantizer/rotate.py).
        shift: subtract a constant from each channel where a bias before can take it, and a number from lopsided dynamic
            inputs, as behind GELU, where that reduces the error (qframework/quantizer/shift.py).
        smooth: move scales from a layer to the one before it, where that costs nothing at run time: from linears to
            their LayerNorm or RMSNorm, from the projection after attention to the values, from linear to linear through
            ReLU.
        channel_scales: multiply inputs that no layer before them can scale (after a GELU, for example) by a constant
            for each channel, which the backend computes as part of the quantization. Uses the strengths of ``smooth``.
        split_gelu: quantize the result of a GELU as two tensors, its negative and its positive part, each with its own
            scale (PTQ4ViT, arXiv:2111.12293), at the cost of a second matrix product.
        choose_observers: give each static input the observer with the least error of the model's output
            (qframework/quantizer/activation_choice.py).
        zero_points: give a static input a zero point where its range is lopsided, as behind GELU, and that reduces the
            error of the model's output. Costs an addition in the layer before; all else is symmetric.
        margins: widen ranges from extremes, those of linears by a fifth or more, chosen by the error of the layer's
            output on data that they do not come from. Costs nothing at run time.
        reach: let ``channel_scales`` give each channel of a static input the room that its largest values in single
            examples suggest (qframework/quantizer/channel_statistics.py), and margins start from that. Costs nothing at
            run time.
        hadamard: turn dynamic inputs behind activations, without their mean, by Hadamard matrices in blocks of channels
            where that reduces the error of the model's output (qframework/quantizer/hadamard_inputs.py). On a GPU it is
            a part of their quantization, which takes twice as long.
        rotate_heads: change the bases of queries and keys of static attention, head by head, where linears compute them
            and that reduces the error of the logits (qframework/quantizer/rotate_heads.py): by invertible matrices,
            found by gradient descent on calibration data. Costs nothing at run time.
        attention_heads: give static attention a scale for each head instead of one for each tensor, where that reduces
            the error of the model's output (qframework/quantizer/attention_choice.py).
        dynamic_share: the inputs that harm the output most for their cost may have scales per token, computed at run
            time. 1 stands for the time that this would take for all inputs: a pass over the channels of each, of which
            those behind a norm count less, since its kernel computes them (qframework/quantizer/layer_costs.py). All
            of a ViT-S takes 23 percent of a static model's time on an H100 and 31 on a CPU with AMX, so that a share of
            0.14 takes up to 3.5 and 4.3; 0 for none.
        float_layers: layers that are not behind a norm may also stay in float within the budget of ``dynamic_share``,
            where that gains more for its cost. In 16 bit on a GPU, one of no more than about a thousand results costs
            less in float than with a scale per token; on a CPU it costs several times as much.
        device: where the converted model will run, whose prices ``dynamic_share`` and ``float_layers`` count:
            ``"cuda"``, in 16 bit, or ``"cpu"``, in float32. None for the device and the dtype that the model has while
            it is calibrated. Name it for a model that is calibrated on a CPU and deployed on a GPU, or that runs under
            autocast.
        guard: hold the first batch, or half of the only one, out from all steps that fit data, and undo each that does
            not reduce the error of the model's output for that batch; ``smooth`` and ``channel_scales`` by 5 percent.
            ``shift`` is kept up to 10 percent more, which is noise: it costs nothing, and layers are judged alone.
            ``qframework.quantize`` also compares the whole with no recipe (qframework/conversion/recipe_check.py).
        weight_rounding: ``"nearest"`` or ``"gptq"``.
        bias_correction: subtract the mean quantization error of each layer's output from its bias.
        batches: how many batches of the calibration data these steps use; None for all.

    Raises:
        UnsupportedError: for an unknown value.
    """

    smooth: Smooth | None = None
    channel_scales: bool = False
    split_gelu: bool = False
    rotate: bool = False
    shift: bool = False
    choose_observers: bool = False
    zero_points: bool = False
    margins: bool = False
    reach: bool = False
    hadamard: bool = False
    rotate_heads: bool = False
    attention_heads: bool = False
    dynamic_share: float = 0.0
    float_layers: bool = False
    device: str | None = None
    guard: bool = False
    weight_rounding: WeightRounding = "nearest"
    bias_correction: bool = False
    batches: int | None = None
    nested: ClassVar[dict[str, type[JsonConfig]]] = {"smooth": Smooth}

    def __post_init__(self) -> None:
        if self.smooth is not None and not isinstance(self.smooth, Smooth):
            raise UnsupportedError(f"Recipe: smooth must be a Smooth or None, got {self.smooth!r}")
        switches = ("channel_scales", "split_gelu", "rotate", "shift", "choose_observers", "zero_points", "margins")
        for name in (
            *switches,
            "reach",
            "hadamard",
            "rotate_heads",
            "attention_heads",
            "float_layers",
            "guard",
            "bias_correction",
        ):
            check_bool("Recipe", name, getattr(self, name))
        if not is_number(self.dynamic_share) or not 0 <= self.dynamic_share <= 1:
            raise UnsupportedError(f"Recipe: dynamic_share must be a number from 0 to 1, got {self.dynamic_share!r}")
        if self.device not in (None, *DEVICES):
            raise UnsupportedError(
                f"Recipe: device must be None, {' or '.join(map(repr, DEVICES))}, got {self.device!r}"
            )
        check_choice("Recipe", "weight_rounding", self.weight_rounding, get_args(WeightRounding))
        if self.batches is not None and not is_count(self.batches):
            raise UnsupportedError(f"Recipe: batches must be None or a positive integer, got {self.batches!r}")

    @classmethod
    def best(cls, device: str | None = None) -> Recipe:
        """The steps that help most models and cost little: all but ``split_gelu``, ``reach`` and ``hadamard``.

        Args:
            device: where the converted model will run, ``"cuda"`` or ``"cpu"``; None for the model's device.

        Raises:
            UnsupportedError: for another device.
        """
        return cls(
            rotate=True,
            shift=True,
            smooth=Smooth(),
            channel_scales=True,
            choose_observers=True,
            zero_points=True,
            margins=True,
            rotate_heads=True,
            attention_heads=True,
            dynamic_share=0.14,
            float_layers=True,
            device=device,
            guard=True,
            weight_rounding="gptq",
            bias_correction=True,
        )

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
            A JSON-able summary of the enabled steps: ``{"rotate": [a RotatedStream as a mapping for each],
            "shift": {layer: what was subtracted}, "dynamic_shift": {layer: the number},
            "split_gelu": number of split layers, "smooth": {layer: strength}, "channel_scales": {layer: strength},
            "activations": {layer: observer, "zero_point", "dynamic" or "float", "+ margin"},
            "hadamard": {layer: block size}, "rotate_heads": {layer: error}, "attention": {layer: "per_head"}}``.

        Raises:
            UnsupportedError: ``exported`` is not an exported model, ``quantizer`` not a QFrameworkQuantizer, or a
                linear to quantize has a dtype without a kernel.
            CalibrationError: ``data`` is an iterator, which the first step would exhaust, or does not fit the model.
        """
        check_can_be_read_again(data, "Recipe.before_prepare")
        check_exported(exported, "Recipe.before_prepare: exported")
        check_quantizer(quantizer, "Recipe.before_prepare")
        quantizer.expose_linears(exported)
        quantizer.check_dtypes(exported)
        read_after_writes(exported)
        done: dict[str, Any] = {}
        if self.rotate:
            strengths = () if self.smooth is None else self.smooth.strengths[::3]  # enough to compare two bases
            turned = rotate(exported, quantizer, data, strengths=strengths, batches=self.batches)
            done["rotate"] = [each._asdict() for each in turned]
        if self.split_gelu:
            from qframework.quantizer.split_range import split_gelu_ranges

            done["split_gelu"] = split_gelu_ranges(exported, quantizer)
        before, after = self._rewrites(exported, quantizer)
        guard: _Guard | None = None
        if self.guard and (before or after or self._chooses):
            guard = _Guard(exported, quantizer, data, self)
        done.update(_run(before, data, guard))
        if self._chooses:
            done["activations"] = choose_activations(
                exported,
                quantizer,
                data,
                observers=self.choose_observers,
                zero_points=self.zero_points,
                margins=self.margins,
                reach=self.reach,
                dynamic_share=self.dynamic_share,
                float_layers=self.float_layers,
                device=self.device,
                hadamard=self.hadamard,
                batches=self.batches,
                judge=None if guard is None else guard.error.errors,
            )
        done.update(_run(after, data, guard))
        if self.rotate_heads:
            done["rotate_heads"] = rotate_heads(exported, quantizer, data, batches=self.batches)
        if self.attention_heads or self.margins:
            done["attention"] = choose_heads(
                exported, quantizer, data, heads=self.attention_heads, margins=self.margins, batches=self.batches
            )
        return done

    def _rewrites(self, exported: GraphModule, quantizer: QFrameworkQuantizer) -> tuple[_Steps, _Steps]:
        """The steps that change the float graph, by name: those before inputs are chosen, and those after."""
        search: dict[str, Any] = {**vars(self.smooth or Smooth()), "batches": self.batches}
        once = {name: search[name] for name in ("samples", "batches")}
        before: _Steps = {}
        after: _Steps = {}
        if self.hadamard:
            after["hadamard"] = lambda data, known: turn_dynamic_inputs(exported, quantizer, data, chosen=known, **once)
        if self.shift:
            before["shift"] = lambda data, known: shift_channels(exported, quantizer, data, **once)
            once_corrected = {**once, "corrects_bias": self.bias_correction}
            after["dynamic_shift"] = lambda data, known: shift_dynamic_inputs(
                exported, quantizer, data, chosen=known, **once_corrected
            )
        if self.smooth is not None:
            before["smooth"] = lambda data, known: smooth(exported, quantizer, data, chosen=known, **search)
        if self.channel_scales:
            fitted = {"zero_points": self.zero_points, "reach": self.reach, **self._fitted_later}
            before["channel_scales"] = lambda data, known: scale_channels(
                exported, quantizer, data, chosen=known, **fitted, **search
            )
        return before, after

    @property
    def _fitted_later(self) -> dict[str, Any]:
        """What the steps after calibration will do about the errors of rounded weights."""
        rounding = 1.0 if self.weight_rounding == "nearest" else _GPTQ_ERROR
        return {"rounding": rounding, "corrects_bias": self.bias_correction}

    @property
    def _chooses(self) -> bool:
        return self.choose_observers or self.zero_points or self.margins or self.dynamic_share > 0

    def after_calibrate(self, prepared: GraphModule, data: Iterable[Batch]) -> None:
        """Round the weights and correct the biases of the calibrated graph, in place, before ``convert_pt2e``.

        Raises:
            CalibrationError: ``prepared`` is not prepared; ``data`` is an iterator, which the first step would exhaust,
                or does not fit the model.
        """
        check_can_be_read_again(data, "Recipe.after_calibrate")
        check_prepared(prepared, "Recipe.after_calibrate: prepared")
        judged, fitted = held_out(prepared, data, self.batches)
        steps = list(self._fits(prepared))
        if not (self.guard and judged and steps):
            if len(steps) > 1:
                self._fit_both(prepared, data, self.batches)
            for step in steps if len(steps) == 1 else []:
                step(data, self.batches)
            return
        from qframework.quantizer.held_out import HeldOut

        judge = HeldOut(prepared, judged)
        if len(steps) > 1 and judge.keep_if_better(lambda: self._fit_both(prepared, fitted, None)):
            return
        for step in steps:
            judge.keep_if_better(functools.partial(step, fitted, None))

    def _fits(self, prepared: GraphModule) -> Iterator[Callable[[Iterable[Batch], int | None], None]]:
        """The steps that fit weights and biases to data, each for itself."""
        if self.weight_rounding != "nearest":
            yield lambda data, batches: self._round(prepared, data, batches, centered=False)
        if self.bias_correction:
            from qframework.quantizer.bias_correction import correct_bias

            yield lambda data, batches: correct_bias(prepared, data, batches=batches)

    def _round(self, prepared: GraphModule, data: Iterable[Batch], batches: int | None, *, centered: bool) -> None:
        from qframework.quantizer.weight_rounding import round_weights

        method: Any = self.weight_rounding
        round_weights(prepared, data, method=method, batches=batches, centered=centered)

    def _fit_both(self, prepared: GraphModule, data: Iterable[Batch], batches: int | None) -> None:
        """Weights that leave the mean of the output to the biases, and these."""
        from qframework.quantizer.bias_correction import correct_bias

        self._round(prepared, data, batches, centered=True)
        correct_bias(prepared, data, batches=batches)


class _Guard:
    """The error of the model's output on data held out from ``fitted``."""

    def __init__(
        self, exported: GraphModule, quantizer: QFrameworkQuantizer, data: Iterable[Batch], recipe: Recipe
    ) -> None:
        judged, self.fitted = held_out(exported, data, recipe.batches)
        learned = recipe._fitted_later
        self.exported, self.error = (
            exported,
            OutputError(exported, quantizer, self.fitted, judged or self.fitted, **learned),
        )


def _run(steps: _Steps, data: Iterable[Batch], guard: _Guard | None) -> dict[str, dict[str, Any]]:
    """What each step did; nothing if it was undone, because the error of the output did not become smaller.

    A step is judged after it ran on what the guard fits to, and repeated on all of ``data`` if it is kept: the ranges
    of channels that it did not see would otherwise widen the scales that ``calibrate`` finds.
    """
    if guard is None:
        return {name: step(data, None) for name, step in steps.items()}
    done: dict[str, dict[str, Any]] = {}
    least = guard.error.measure() if steps else 0.0
    for name, step in steps.items():
        before = Snapshot(guard.exported)
        known = step(guard.fitted, None)
        after = guard.error.measure() if known else least
        before.restore()
        done[name] = {}
        if after < (1 - _GAINS.get(name, 0.0)) * least:
            least, done[name] = after, step(data, known)
    return done
