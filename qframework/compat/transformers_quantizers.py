"""What transformers offers to quantization while it loads: base classes, registries, operations on tensors"""

from __future__ import annotations

from qframework.compat.missing import explained

with explained():
    from transformers.core_model_loading import ConversionOps
    from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

__all__ = [
    "ConversionOps",
    "HfQuantizer",
    "QuantizationConfigMixin",
    "register_quantization_config",
    "register_quantizer",
]
