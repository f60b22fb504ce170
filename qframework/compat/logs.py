"""Warnings of other libraries that a user of the command line cannot mend."""

from __future__ import annotations

import logging


def silence_torchao_at_import() -> None:
    """torchao 0.18 registers an enumeration at import, which PyTorch 2.15 says is deprecated."""
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
