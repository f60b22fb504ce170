"""Registers with other libraries; ``import qframework`` arranges that this is called once they are imported.

The module of a library registers at its end, so that it also does if it is what imports the library.
"""

from __future__ import annotations

import importlib
import logging

logger = logging.getLogger("qframework")

_OFFERED = {
    "transformers": "attn_implementation='qframework' and quantization_config=QFrameworkConfig() do not work",
    "diffusers": "quantization_config=QFrameworkConfig() does not work",
    "diffusers_attention": "Attention backends that use_sage_attention cannot quantize are not counted",
}


def register_with(library: str) -> None:
    """Register what qframework offers to a library; a failure is logged, and does not end the library's import."""
    try:
        importlib.import_module(f"qframework.integrations.{library}")
    except (ImportError, AttributeError, ValueError) as error:
        logger.warning("qframework: cannot register with %s: %s. %s in this process", library, error, _OFFERED[library])
