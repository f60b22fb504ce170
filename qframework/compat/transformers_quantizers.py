"""What transformers offers to quantization while it loads: base classes, registries, operations on tensors"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from qframework.compat.missing import explained

with explained():
    from transformers.core_model_loading import ConversionOps
    from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer

__all__ = [
    "ConversionOps",
    "HfQuantizer",
    "initialize",
    "is_initialized",
    "mark_initialized",
    "register_quantization_config",
    "register_quantizer",
]


def mark_initialized(tensor: Tensor) -> None:
    """Tell transformers that a tensor has its value from the checkpoint."""
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]


def is_initialized(tensor: Tensor) -> bool:
    """Whether a tensor has its value from the checkpoint."""
    return getattr(tensor, "_is_hf_initialized", False)


@explained()
def initialize(model: Any, module: nn.Module) -> None:
    """Give a new module the values that transformers gives to such a module of ``model``."""
    model._init_weights(module)
