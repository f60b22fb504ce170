"""The module of diffusers that qframework is registered with once it is imported"""

from __future__ import annotations

QUANTIZERS = "diffusers.quantizers.auto"  # the registries of quantization; whatever loads a model imports them
