"""Functions of PyTorch that hand themselves to a function mode as a whole.

They ask ``has_torch_function`` first, and the mode then gets the call with itself switched off: what they call inside
would be missed. A copy of such a function that never asks can run under the mode instead.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _never(*_: Any) -> bool:
    return False


def _without_handover(function: Any) -> Callable[..., Any]:
    names = {name: value for name, value in function.__globals__.items() if name != "__name__"}
    names.update(dict.fromkeys(_QUESTIONS, _never))
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


multi_head_attention_forward = _without_handover(F.multi_head_attention_forward)
_tensor_backward = _without_handover(Tensor.backward)
_backward = _without_handover(torch.autograd.backward)
_grad = _without_handover(torch.autograd.grad)


def to_run_inside(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """The copy of ``func`` that a scope must run inside itself; None for functions that hide nothing.

    Attention is inside of ``nn.MultiheadAttention``, and of a backward pass where activation checkpointing runs the
    forward again.
    """
    if func is F.multi_head_attention_forward:
        return multi_head_attention_forward
    if func is Tensor.backward:
        return _tensor_backward
    if func is torch.autograd.backward:
        return _backward
    if func is torch.autograd.grad:
        return _grad
    return None
