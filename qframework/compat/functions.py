"""Function modes, and the functions of PyTorch that hand themselves to a mode as a whole.

They ask ``has_torch_function`` first, and the mode then gets the call with itself switched off: what they call inside
would be missed. A copy of such a function that never asks can run under the mode instead.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from qframework.compat.missing import explained, note_missing

with explained():
    from torch.overrides import _get_current_function_mode as current_function_mode

_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _never(*_: Any) -> bool:
    return False


def without_handover(function: Any, name: str) -> Callable[..., Any] | None:
    """A copy of ``function``, called ``name``, that never asks; None, noted, where it does not ask by these names."""
    code = getattr(function, "__code__", None)
    if code is None or not set(_QUESTIONS) & set(code.co_names):
        note_missing(f"has_torch_function in {name}")
        return None
    names = {key: value for key, value in function.__globals__.items() if key != "__name__"}
    names.update(dict.fromkeys(_QUESTIONS, _never))
    copy = FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


__all__ = ["current_function_mode", "without_handover"]
