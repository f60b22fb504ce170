"""Registers with other libraries once they are imported; ``import qframework`` calls ``install``."""

from __future__ import annotations

import logging

from qframework.import_hook import when_imported

logger = logging.getLogger("qframework")


def install() -> None:
    """Register attention and quantization with transformers when it can load models; now, if it can."""
    when_imported("transformers.modeling_utils", _register_with_transformers)


def _register_with_transformers() -> None:
    try:
        from qframework.integrations.transformers import register

        register()
    except (ImportError, AttributeError, ValueError) as error:  # importing transformers must not fail because of this
        logger.warning(
            "qframework: cannot register with transformers: %s. attn_implementation='qframework' and "
            "quantization_config=QFrameworkConfig() do not work in this process",
            error,
        )
