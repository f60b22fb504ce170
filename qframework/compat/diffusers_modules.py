"""Modules of diffusers that qframework is registered with once they are imported"""

from __future__ import annotations

QUANTIZERS = "diffusers.quantizers.auto"  # the registries of quantization; whatever loads a model imports them
ATTENTION = "diffusers.models.attention_dispatch"  # the registry of attention backends
