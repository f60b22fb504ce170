"""Counts, by reason, what should have run in INT8 and ran in float instead, and logs each reason once."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Any

_logger = logging.getLogger("qframework")
_lock = threading.Lock()


class Fallbacks(Counter[str]):
    """How often something that should have run in INT8 ran in float, by reason.

    ``qframework.quantizer``, ``backend``, ``attention``, ``conversion``, ``export`` and ``training`` have one each,
    called ``fallbacks``.
    Compiled code counts when it is traced, not when it runs. ``clear()`` resets the counts and lets each message be
    logged once more.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._logged: set[str] = set()

    def note(self, reason: str, message: str) -> None:
        """Count ``reason``, and log ``message`` as a warning the first time."""
        with _lock:
            self[reason] += 1
            new = message not in self._logged
            if new:
                self._logged.add(message)
        if new:
            _logger.warning("qframework: %s (logged once, counted in fallbacks)", message)

    def clear(self) -> None:
        """Reset the counts, and let each message be logged once more."""
        with _lock:
            super().clear()
            self._logged.clear()
