"""Function modes, and PyTorch functions that a mode intercepts as a whole.

Such a function calls ``has_torch_function`` first, and the mode then handles the call while it is inactive, so that it
misses the calls inside. A copy that skips this check can run under the active mode instead.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from qframework.compat.missing import explained, note_missing

with explained():
    from torch.overrides import _get_current_function_mode as current_function_mode
    from torch.overrides import _get_current_function_mode_stack as function_mode_stack

_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _never(*_: Any) -> bool:
    return False


def without_handover(function: Any, name: str) -> Callable[..., Any] | None:
    """A copy of ``function``, called ``name``, without the check; None, with a warning, if it does not have one."""
    code = getattr(function, "__code__", None)
    if code is None or not set(_QUESTIONS) & set(code.co_names):
        note_missing(f"has_torch_function in {name}")
        return None
    names = {key: value for key, value in function.__globals__.items() if key != "__name__"}
    names.update(dict.fromkeys(_QUESTIONS, _never))
    copy = FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


__all__ = ["current_function_mode", "function_mode_stack", "without_handover"]
