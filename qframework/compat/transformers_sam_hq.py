"""SAM-HQ's attention class in transformers, and the table from which a model's configuration selects one."""

from __future__ import annotations

from qframework.compat.missing import explained

with explained():
    from transformers.models.sam_hq.modeling_sam_hq import SAM_HQ_VISION_ATTENTION_CLASSES, SamHQVisionSdpaAttention

__all__ = ["SAM_HQ_VISION_ATTENTION_CLASSES", "SamHQVisionSdpaAttention"]
