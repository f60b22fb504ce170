"""PT2E quantization: configurations, the quantizer, its observers and calibration."""

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
from qframework.quantizer.quantizer import QFrameworkQuantizer
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
    "qattn_paper",
    "round_weights",
    "split_gelu_ranges",
    "static_attention",
    "static_int8",
    "uncalibrated",
]
