"""The calls of ``sage_attention`` that ``variant="auto"`` leaves to PyTorch, which is faster there."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qframework.attention.plain import plain_attention
from qframework.compat.dispatch import forward_level, functorch_transforms_active
from qframework.fallbacks import Fallbacks
from qframework.kernels.attention.arguments import SageAttentionArguments, cast_mask
from qframework.kernels.attention.auto import (
    Hopper,
    Masking,
    gradient_in_pytorch_is_faster,
    hopper_of,
    pytorch_is_faster,
)

fallbacks = Fallbacks()
"""How often attention ran in PyTorch's kernels, by reason: calls that no variant supports, and those that ``"auto"``
left to PyTorch, which is faster. A compiled call counts once, when traced."""

# Kinds of calls known to be valid and left to PyTorch with their operands as they are. Finding one takes a tenth of the
# time of checking a call again.
known_kinds: set[tuple[Any, ...]] = set()
MAX_KINDS = 1024


def kind_of(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, enable_gqa: bool) -> tuple[Any, ...] | None:
    """All that decides, without a mask, whether a call is valid and left to PyTorch; None where more may matter."""
    if torch.compiler.is_compiling() or not type(query) is type(key) is type(value) is Tensor:
        return None
    if not (query.is_cuda or query.is_cpu) or forward_level() >= 0 or functorch_transforms_active():
        return None
    if torch.is_autocast_enabled("cuda" if query.is_cuda else "cpu"):
        return None
    return (
        *(query.shape, query.dtype, query.device, key.shape, key.dtype, key.device),
        *(value.shape, value.dtype, value.device, is_causal, enable_gqa, torch.backends.cuda.cudnn_sdp_enabled()),
        torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad),
    )


def handed_over(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None, enable_gqa: bool
) -> Tensor | None:
    """The result of PyTorch's attention for a call of a kind that is left to it; None for others."""
    if kind_of(query, key, value, is_causal, enable_gqa) not in known_kinds:
        return None
    note_left_to_pytorch("cuda" if query.is_cuda else "cpu")
    with torch.DisableTorchFunction():
        return F.scaled_dot_product_attention(
            query, key, value, None, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def remember(kind: tuple[Any, ...] | None) -> None:
    """Let later calls of the kind go to PyTorch at once."""
    if kind is None:
        return
    if len(known_kinds) >= MAX_KINDS:
        known_kinds.clear()
    known_kinds.add(kind)


def is_left_to_pytorch(call: SageAttentionArguments, sinks: Tensor | None) -> bool:
    """Whether PyTorch's attention is what ``"auto"`` means for this call, which is not checked yet.

    With a soft cap or sinks, which PyTorch's attention does not take, that is plain torch.
    """
    query, key, value, mask = call.query, call.key, call.value, call.attn_mask
    if (mask is not None and call.is_causal) or min(key.ndim, value.ndim) < query.ndim or key.ndim < 3:
        return False
    masking: Masking = "causal" if call.is_causal else "none"
    if mask is not None:
        masking = "bool" if mask.dtype == torch.bool else "float"
    operands = [x for x in (query, key, value, mask, sinks) if x is not None]
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in operands)
    chip = _hopper_of(query.device)
    no_kernel = call.softcap is not None or sinks is not None
    return pytorch_is_faster(query, key.shape[-2], value.shape[-1], masking, chip, gradients, no_kernel)


def is_gradient_left_to_pytorch(call: SageAttentionArguments) -> bool:
    """The same for a call without a mask whose gradient is ``"mixed"``, backward pass included."""
    query, key, value = call.query, call.key, call.value
    if min(key.ndim, value.ndim) < query.ndim or key.ndim < 3:
        return False
    return gradient_in_pytorch_is_faster(query, key, value, call.is_causal, _hopper_of(query.device))


# Dynamo calls the next two while tracing instead of tracing into them.
@torch.compiler.assume_constant_result
def _hopper_of(device: torch.device) -> Hopper | None:
    return hopper_of(device)


@torch.compiler.assume_constant_result
def note_left_to_pytorch(device: str) -> None:
    """Count a call, and log the first."""
    fallbacks.note(*_left_to_pytorch(device))


@functools.cache
def _left_to_pytorch(device: str) -> tuple[str, str]:
    """The reason that counts calls left to PyTorch, and its message."""
    reason = f"PyTorch's attention is faster on this {device} device"
    return reason, f"attention: {reason} for some calls, or all, and 'auto' takes it. Name a variant to quantize"


def attend_with_pytorch(call: SageAttentionArguments, sinks: Tensor | None) -> Tensor:
    """PyTorch's attention, hidden from enclosing scopes, with this package's masks: a row of False gives zeros."""
    if call.softcap is not None or sinks is not None:
        return plain_attention(
            call.query, call.key, call.value, call.attn_mask, 0.0, call.is_causal, call.scale, call.enable_gqa,
            call.softcap, sinks,
        )  # fmt: skip
    mask = call.attn_mask
    if mask is not None:
        mask = torch.atleast_2d(mask)  # PyTorch's kernels read its last two sizes
        if mask.dtype == torch.bool:  # of which cuDNN averages the values of a row of False
            mask = torch.zeros_like(mask, dtype=call.query.dtype).masked_fill(~mask, -torch.inf)
        mask = cast_mask(mask, call.query.dtype)
    with torch.DisableTorchFunction():
        return F.scaled_dot_product_attention(
            call.query, call.key, call.value, mask, 0.0, call.is_causal, scale=call.scale, enable_gqa=call.enable_gqa
        )
