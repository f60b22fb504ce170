"""The backward pass of cuDNN's attention, with the result and log-sum-exp of another forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

from qframework.compat.missing import optional

_CUDNN: Any = optional(torch.ops.aten, "torch.ops.aten._scaled_dot_product_cudnn_attention_backward", None)

Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor, Tensor]]
"""``(dQ, dK, dV)`` from the gradient of the result, query, key, value, the result, its log-sum-exp, whether attention
is causal, and the scale of the logits.

Weights are ``exp(scale Q K^T - lse)``; ``rowsum(out * grad)`` is subtracted in rows of their gradient. Tensors are
``(B, H, N, D)`` in 16 bit, key and value may have fewer heads, ``lse (B, H, N)`` is float32.
"""


def has_kernel(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> bool:
    """Whether cuDNN has a backward pass, without mask and dropout, for such ``(..., H, N, D)`` on a GPU from Hopper on.

    It depends on sizes, dtypes and the chip alone.
    """
    channels = query.shape[-1]
    square = not is_causal or query.shape[-2] == key.shape[-2]
    if value.shape[-1] != channels or channels % 8 or channels > 128 or not square or query.dtype.itemsize != 2:
        return False
    return _CUDNN is not None and torch.cuda.get_device_capability(query.device) >= (9, 0)


def fused_backward(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Backward | None:
    """cuDNN's backward pass for ``(B, H, N, D)``, if it :func:`has_kernel` and PyTorch's settings allow it.

    None where deterministic algorithms are asked for: it adds in any order.
    """
    if not has_kernel(query, key, value, is_causal) or torch.are_deterministic_algorithms_enabled():
        return None
    params = SDPAParams(query, key, value, None, 0.0, is_causal, query.shape[1] != key.shape[1])
    return _by_cudnn if can_use_cudnn_attention(params) else None


_GAPS = {False: 7, True: 9}  # tokens between the keys of two sequences, by whether heads come first in dO


def _by_cudnn(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch keeps cuDNN's plans by the strides of query, key and value only, and a plan reads the result and its
    gradient by the strides that it was made with. All calls from here have one layout of the result, and two of its
    gradient, which a gap between sequences of keys tells apart. No other call of attention has such gaps.
    """
    query, out = _tokens_first(query), _tokens_first(out)
    heads_first = next((order for order in _GAPS if key.stride() == _strides_of_keys(key, order)), None)
    if heads_first is None:
        heads_first = grad.is_contiguous()
        key = place_of_keys(key, heads_first).copy_(key)
    grad = grad.contiguous() if heads_first else _tokens_first(grad)
    none = _no_dropout(query)
    sizes = (None, None, None, query.shape[2], key.shape[2])
    return _CUDNN(grad, query, key, value, out, lse.unsqueeze(-1), none, none, *sizes, 0.0, is_causal, scale=scale)


def place_of_keys(key: Tensor, heads_first: bool = False) -> Tensor:
    """An uninitialized tensor like ``key (B, Hkv, N, D)`` in the layout that the backward pass reads without a copy.

    ``heads_first`` says whether the gradient of the result is expected to be (B, H, N, Dv) in memory instead of
    (B, N, H, Dv), which saves a copy of it.
    """
    batch, heads, tokens, channels = key.shape
    return key.new_empty((batch, tokens + _GAPS[heads_first], heads, channels))[:, :tokens].transpose(1, 2)


def _strides_of_keys(key: Tensor, heads_first: bool) -> tuple[int, ...]:
    _, heads, tokens, channels = key.shape
    return (tokens + _GAPS[heads_first]) * heads * channels, channels, heads * channels, 1


def _tokens_first(x: Tensor) -> Tensor:
    """``(B, H, N, D)`` as (B, N, H, D) in memory, without gaps."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _no_dropout(like: Tensor) -> Tensor:
    """The seed and the offset where nothing is dropped; nothing reads them."""
    return torch.empty((), dtype=torch.int64, device=like.device)


__all__ = ["Backward", "fused_backward", "has_kernel", "place_of_keys"]
