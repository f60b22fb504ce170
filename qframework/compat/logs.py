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
    """Silence onnxscript's warnings of constants that it tried to fold or share and left as they were."""
    loggers = [logging.getLogger(name) for name in ("onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
