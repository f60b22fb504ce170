"""PT2E quantization: configurations, the quantizer, its observers and calibration."""

from qframework.quantizer.calibrate import calibrate
from qframework.quantizer.config import (
    ActivationConfig,
    LinearConfig,
    WeightConfig,
    dynamic_int8,
    qattn_paper,
    static_int8,
)
from qframework.quantizer.quantizer import QFrameworkQuantizer

__all__ = [
    "ActivationConfig",
    "LinearConfig",
    "QFrameworkQuantizer",
    "WeightConfig",
    "calibrate",
    "dynamic_int8",
    "qattn_paper",
    "static_int8",
]
