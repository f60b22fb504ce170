"""The base class of quantization configurations: that of transformers, or of diffusers if only that is installed"""

from __future__ import annotations

import importlib.util

from qframework.compat.missing import explained

with explained():
    if importlib.util.find_spec("transformers") is not None:
        from transformers.utils.quantization_config import QuantizationConfigMixin
    else:
        from diffusers.quantizers.quantization_config import QuantizationConfigMixin

__all__ = ["QuantizationConfigMixin"]
