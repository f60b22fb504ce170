"""Modules of transformers that something is registered with once they are imported, and what they say of attention."""

from __future__ import annotations

import sys
from typing import Any

from qframework.compat.missing import explained

MODELS = "transformers.modeling_utils"
SAM = "transformers.models.sam.modeling_sam"
SAM_HQ = "transformers.models.sam_hq.modeling_sam_hq"


@explained()
def sam_attention_classes() -> dict[str, Any]:
    """The table from which a SAM model's configuration selects its attention; SAM is imported."""
    return sys.modules[SAM].SAM_VISION_ATTENTION_CLASSES


@explained()
def sam_hq_attention_classes() -> dict[str, Any]:
    """The same for SAM-HQ."""
    return sys.modules[SAM_HQ].SAM_HQ_VISION_ATTENTION_CLASSES


@explained()
def all_run_with_sdpa(configuration: type) -> bool:
    """Whether transformers runs all models of this configuration, as far as imported, with PyTorch's attention."""
    base: Any = sys.modules[MODELS].PreTrainedModel
    name = configuration.__module__.replace(".configuration_", ".modeling_")
    members = vars(sys.modules.get(name, object)).values()
    models: list[Any] = [each for each in members if isinstance(each, type) and issubclass(each, base)]
    return all(each._supports_sdpa for each in models if each.__module__ == name)
