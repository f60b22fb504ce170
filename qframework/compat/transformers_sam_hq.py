"""SAM-HQ's attention class in transformers."""

from __future__ import annotations

from qframework.compat.missing import explained

with explained():
    from transformers.models.sam_hq.modeling_sam_hq import SamHQVisionSdpaAttention

__all__ = ["SamHQVisionSdpaAttention"]
