"""PT2E quantization: configurations, the quantizer, its observers and calibration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qframework.lazy import lazy_names

if TYPE_CHECKING:
    from qframework.quantizer.attention_config import (
        AttentionConfig,
        QuantizationConfig,
        dynamic_attention,
        static_attention,
    )
    from qframework.quantizer.bias_correction import correct_bias
    from qframework.quantizer.calibration import calibrate
    from qframework.quantizer.config import (
        ActivationConfig,
        LinearConfig,
        WeightConfig,
        dynamic_int8,
        qattn_paper,
        static_int8,
    )
    from qframework.quantizer.quantizer import QFrameworkQuantizer, fallbacks
    from qframework.quantizer.recipe import Recipe, Smooth
    from qframework.quantizer.split_range import split_gelu_ranges
    from qframework.quantizer.static_observer import uncalibrated
    from qframework.quantizer.weight_rounding import round_weights

__all__ = [
    "ActivationConfig",
    "AttentionConfig",
    "LinearConfig",
    "QFrameworkQuantizer",
    "QuantizationConfig",
    "Recipe",
    "Smooth",
    "WeightConfig",
    "calibrate",
    "correct_bias",
    "dynamic_attention",
    "dynamic_int8",
    "fallbacks",
    "qattn_paper",
    "round_weights",
    "split_gelu_ranges",
    "static_attention",
    "static_int8",
    "uncalibrated",
]

_MODULE_OF = {
    "ActivationConfig": "config",
    "AttentionConfig": "attention_config",
    "LinearConfig": "config",
    "QFrameworkQuantizer": "quantizer",
    "QuantizationConfig": "attention_config",
    "Recipe": "recipe",
    "Smooth": "recipe",
    "WeightConfig": "config",
    "calibrate": "calibration",
    "correct_bias": "bias_correction",
    "dynamic_attention": "attention_config",
    "dynamic_int8": "config",
    "fallbacks": "quantizer",
    "qattn_paper": "config",
    "round_weights": "weight_rounding",
    "split_gelu_ranges": "split_range",
    "static_attention": "attention_config",
    "static_int8": "config",
    "uncalibrated": "static_observer",
}

__getattr__ = lazy_names(__name__, _MODULE_OF)
