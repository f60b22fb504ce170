"""The attention class of SAM-HQ's image encoder in transformers, quantized. It imports the model."""

from __future__ import annotations

from qframework.attention.sam import SamSageAttention
from qframework.compat.transformers_sam_hq import SamHQVisionSdpaAttention


class SamHQVisionSageAttention(SamSageAttention, SamHQVisionSdpaAttention):
    """SAM-HQ's attention, quantized."""
