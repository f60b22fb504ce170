"""The attention class of SAM's image encoder in transformers, quantized.

It imports the model, so :func:`qframework.attention.transformers.register` imports it only once the model is.
"""

from __future__ import annotations

from functools import partial

from qframework.attention.sam import SamSageAttention
from qframework.compat.transformers_sam import SAM_VISION_ATTENTION_CLASSES, SamVisionSdpaAttention


class SamVisionSageAttention(SamSageAttention, SamVisionSdpaAttention):
    """SAM's attention, quantized."""


def register_sam(name: str, variant: str, smooth_k: bool) -> None:
    """Register ``name`` as an attention class of SAM's encoder."""
    SAM_VISION_ATTENTION_CLASSES[name] = partial(SamVisionSageAttention, variant=variant, smooth_k=smooth_k)
