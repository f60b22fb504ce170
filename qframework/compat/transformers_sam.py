"""SAM's attention class in transformers, and the table from which a model's configuration selects one."""

from __future__ import annotations

from qframework.compat.missing import explained

with explained():
    from transformers.models.sam.modeling_sam import SAM_VISION_ATTENTION_CLASSES, SamVisionSdpaAttention

__all__ = ["SAM_VISION_ATTENTION_CLASSES", "SamVisionSdpaAttention"]
