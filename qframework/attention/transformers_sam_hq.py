"""The attention class of SAM-HQ's image encoder in transformers, quantized.

It imports the model, so :func:`qframework.attention.transformers.register` imports it only once the model is.
"""

from __future__ import annotations

from functools import partial

from qframework.attention.sam import SamSageAttention
from qframework.compat.transformers_sam_hq import SAM_HQ_VISION_ATTENTION_CLASSES, SamHQVisionSdpaAttention


class SamHQVisionSageAttention(SamSageAttention, SamHQVisionSdpaAttention):
    """SAM-HQ's attention, quantized."""


def register_sam_hq(name: str, variant: str, smooth_k: bool) -> None:
    """Register ``name`` as an attention class of SAM-HQ's encoder."""
    SAM_HQ_VISION_ATTENTION_CLASSES[name] = partial(SamHQVisionSageAttention, variant=variant, smooth_k=smooth_k)
