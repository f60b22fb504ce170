"""The configurations of the accuracy benchmark: the standard ones, other observers, and single steps of the recipe."""

from __future__ import annotations

from dataclasses import replace

from qframework.evaluation.comparison import Configuration, standard_configurations
from qframework.quantizer import QuantizationConfig, Recipe, static_int8

BEST = Recipe.best()
_STANDARD = standard_configurations()
MAIN = {
    **_STANDARD,
    **{f"{name} (best recipe)": replace(_STANDARD[name], recipe=BEST) for name in ("INT8-D", "INT8-D + attention")},
}
"""FP32, min-max static INT8, dynamic INT8 (INT8-D), both with attention, and the best recipe."""


def _min_max(**steps: object) -> Configuration:
    return Configuration(QuantizationConfig(static_int8()), replace(Recipe(), **steps))  # type: ignore[arg-type]


def _observer(name: str) -> Configuration:
    return Configuration(QuantizationConfig(static_int8(observer=name)))


STEPS = {
    "INT8, percentile": _observer("percentile"),
    "INT8, MSE": _observer("mse"),
    "INT8, entropy": _observer("entropy"),
    "INT8, smoothing": _min_max(smooth=BEST.smooth),
    "INT8, smoothing, channel scales": _min_max(smooth=BEST.smooth, channel_scales=True),
    "INT8, split GELU": _min_max(split_gelu=True),
    "INT8, GPTQ": _min_max(weight_rounding="gptq"),
    "INT8, bias correction": _min_max(bias_correction=True),
}
"""Other observers, and min-max scales with single steps of the recipe."""
