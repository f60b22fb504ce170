"""Silences warnings of other libraries that users cannot fix."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


def silence_torchao_at_import() -> None:
    """Silence PyTorch 2.15's warning that torchao 0.18 uses a deprecated registration at import."""
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)


@contextlib.contextmanager
def silenced_onnxscript() -> Iterator[None]:
    """Silence onnxscript's warnings of constants that it tried to fold and left as they were."""
    logger = logging.getLogger("onnxscript")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
