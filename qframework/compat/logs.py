"""Silences warnings of other libraries that a user of the command line cannot fix."""

from __future__ import annotations

import logging


def silence_torchao_at_import() -> None:
    """Silence PyTorch 2.15's warning that torchao 0.18 uses a deprecated registration at import."""
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
