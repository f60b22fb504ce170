"""PyTorch functions that run attention inside, but that a torch function mode intercepts as a whole.

They are the function behind ``nn.MultiheadAttention``, and backward passes, where activation checkpointing runs the
forward again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qframework.compat.functions import without_handover

_HIDING = {
    "torch.nn.functional.multi_head_attention_forward": F.multi_head_attention_forward,
    "torch.Tensor.backward": Tensor.backward,
    "torch.autograd.backward": torch.autograd.backward,
    "torch.autograd.grad": torch.autograd.grad,
}
multi_head_attention_forward, _tensor_backward, _backward, _grad = (
    without_handover(function, name) for name, function in _HIDING.items()
)


def to_run_inside(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """The copy of ``func`` that a scope must run with itself active; None for all other functions."""
    if func is F.multi_head_attention_forward:
        return multi_head_attention_forward
    if func is Tensor.backward:
        return _tensor_backward
    if func is torch.autograd.backward:
        return _backward
    if func is torch.autograd.grad:
        return _grad
    return None
