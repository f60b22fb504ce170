"""What is called when ``quantize_`` has changed a model, so that integrations can describe it as their library does.

It is here, and not beside ``quantize_``, since integrations must not import that: it takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_listeners: dict[str, Callable[[Any, Any], None]] = {}


def when_quantized(library: str, function: Callable[[Any, Any], None]) -> None:
    """Call ``function(model, linear_config)`` at the end of each ``quantize_``; one function for each library."""
    _listeners[library] = function


def tell_quantized(model: Any, config: Any) -> None:
    """Call all functions."""
    for function in tuple(_listeners.values()):
        function(model, config)
