"""SAM's attention class in transformers."""

from __future__ import annotations

from qframework.compat.missing import explained

with explained():
    from transformers.models.sam.modeling_sam import SamVisionSdpaAttention

__all__ = ["SamVisionSdpaAttention"]
