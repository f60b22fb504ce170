"""Registers with other libraries; ``import qframework`` arranges that this is called once they are imported."""

from __future__ import annotations

import logging

logger = logging.getLogger("qframework")


def register_with_transformers() -> None:
    """Register attention and quantization with transformers; a failure is logged, and does not end its import."""
    try:
        from qframework.integrations.transformers import register

        register()
    except (ImportError, AttributeError, ValueError) as error:
        logger.warning(
            "qframework: cannot register with transformers: %s. attn_implementation='qframework' and "
            "quantization_config=QFrameworkConfig() do not work in this process",
            error,
        )
