"""Attention of INT8 training: modules whose attention computes its gradient in 8 bit (SageBwd)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from qframework.attention import use_sage_attention
from qframework.training.block_dispatch import fallbacks

AttentionGradient = Literal["float", "int8", "mixed"]
"""``"float"``: attention does not change. The others: ``backward`` of :func:`~qframework.attention.sage_attention`."""


class Int8Attention(nn.Module):
    """A module of another class, whose calls of ``F.scaled_dot_product_attention`` compute their gradients in 8 bit.

    Only while gradients are enabled: attention of an evaluation does not change. Calls with a mask run in
    PyTorch, counted in ``qframework.attention.fallbacks``. A module that never calls the function is counted in
    ``qframework.training.fallbacks``, unless it is compiled.
    """

    attention_gradient: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, inside the scope."""
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # Dynamo traces the scope, but not what it counts
            with use_sage_attention(backward=self.attention_gradient):  # type: ignore[arg-type]
                return super().forward(*args, **kwargs)
        scope = _CountingScope(backward=self.attention_gradient)  # type: ignore[arg-type]
        with scope:
            result = super().forward(*args, **kwargs)
        if scope.calls == 0:
            name = type(self).__mro__[2].__name__
            reason = f"attention of {name} without F.scaled_dot_product_attention"
            fallbacks.note(reason, f"INT8 training: {reason}: its gradient is computed in float")
        return result


class _CountingScope(use_sage_attention):
    """The scope, which also counts calls of attention."""

    calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls += func is F.scaled_dot_product_attention
        return super().__torch_function__(func, types, args, kwargs)
