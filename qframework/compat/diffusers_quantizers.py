"""What diffusers offers to quantization while it loads: base class, registries, modules that need more than 8 bits"""

from __future__ import annotations

import re
from typing import Any

from qframework.compat.missing import explained

with explained():
    from diffusers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
    from diffusers.quantizers.base import DiffusersQuantizer

__all__ = ["DiffusersQuantizer", "register_method", "sensitive_modules"]


def register_method(method: str, configuration: type, quantizer: type) -> None:
    """Add a method of quantization to the registries."""
    AUTO_QUANTIZATION_CONFIG_MAPPING[method] = configuration
    AUTO_QUANTIZER_MAPPING[method] = quantizer


@explained()
def sensitive_modules(model: Any) -> set[str]:
    """Names of the modules whose weights ``enable_layerwise_casting`` does not store in 8 bits by default."""
    from diffusers.hooks.layerwise_casting import DEFAULT_SKIP_MODULES_PATTERN

    patterns = (*DEFAULT_SKIP_MODULES_PATTERN, *(model._skip_layerwise_casting_patterns or ()))
    found: set[str] = set()
    for name, _ in model.named_modules():  # parents come before their children
        if name.rpartition(".")[0] in found or any(re.search(pattern, name) for pattern in patterns):
            found.add(name)
    return found
