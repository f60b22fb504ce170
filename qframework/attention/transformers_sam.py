"""The attention class of SAM's image encoder in transformers, quantized. It imports the model."""

from __future__ import annotations

from qframework.attention.sam import SamSageAttention
from qframework.compat.transformers_sam import SamVisionSdpaAttention


class SamVisionSageAttention(SamSageAttention, SamVisionSdpaAttention):
    """SAM's attention, quantized."""
