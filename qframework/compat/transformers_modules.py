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
    return all(each._supports_sdpa for each in _imported_models(configuration))


@explained()
def may_ignore_implementations(configuration: type) -> bool:
    """Whether the models of this configuration, as far as imported, do not say that an implementation replaces theirs.

    Then ``attn_implementation`` may change nothing but their masks.
    """
    models = _imported_models(configuration)
    of_it = [each for each in models if each.config_class is configuration] or models
    return bool(of_it) and not any(each._supports_attention_backend or each._supports_sdpa for each in of_it)


def looks_up_implementations(configuration: type) -> bool:
    """Whether the code of this configuration's models, if imported, reads the table of implementations at all."""
    module = sys.modules.get(_code_of(configuration))
    return module is None or hasattr(module, "ALL_ATTENTION_FUNCTIONS")


def _imported_models(configuration: type) -> list[Any]:
    base: Any = sys.modules[MODELS].PreTrainedModel
    name = _code_of(configuration)
    members = vars(sys.modules.get(name, object)).values()
    models: list[Any] = [each for each in members if isinstance(each, type) and issubclass(each, base)]
    return [each for each in models if each.__module__ == name]


def _code_of(configuration: type) -> str:
    """The name of the module of its models."""
    return configuration.__module__.replace(".configuration_", ".modeling_")
