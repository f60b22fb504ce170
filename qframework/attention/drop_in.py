"""Quantized attention in unchanged models that call ``F.scaled_dot_product_attention``.

The scope is a ``torch.overrides.TorchFunctionMode``: PyTorch passes it every call inside the scope on its thread. No
function is patched, so nothing has to be restored. torch.compile traces it too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from qframework.attention.api import Backward, attend, autocast, check_backward, spec_of
from qframework.attention.handover import to_run_inside
from qframework.attention.layer_choice import OFF
from qframework.attention.left_to_pytorch import fallbacks
from qframework.attention.plain import plain_attention
from qframework.compat.dispatch import FakeTensor
from qframework.compat.functions import function_mode_stack
from qframework.errors import UnsupportedError
from qframework.kernels.attention.arguments import MAX_HEAD_DIM
from qframework.kernels.attention.int8_gradient.int8_gradient import check_forward
from qframework.kernels.attention.variants import AttentionVariant, resolve
from qframework.kernels.runtime.operator import transform_in_force
from qframework.numerics import FLOAT_DTYPES

_EXPORTED_SDPA = torch.ops.aten.scaled_dot_product_attention.default
_PLAIN_TYPES = (Tensor, torch.nn.Parameter, FakeTensor)


class use_sage_attention(TorchFunctionMode):
    """A scope in which every ``F.scaled_dot_product_attention`` runs quantized::

        with use_sage_attention():
            model(x)

    That includes ``nn.MultiheadAttention`` (``need_weights=False``), transformers' ``"sdpa"``, diffusers' native
    backend and exported graphs. Scopes nest, and the innermost applies; ``variant="off"`` inside another scope restores
    PyTorch's attention. A scope applies to the thread that entered it.

    A scope around a compiled function makes it recompile; a compiled function may also contain the scope. When
    compiling, ``nn.TransformerEncoderLayer`` under ``torch.no_grad()`` uses PyTorch's fused layer, which the scope
    cannot intercept, unless ``torch.backends.mha.set_fastpath_enabled(False)``.

    With activation checkpointing the backward pass runs the forward again: put the backward pass inside the scope, or
    the scope inside the checkpointed function. Calls in TorchScript functions are not intercepted.

    Calls that a variant does not support fall back to PyTorch: dropout, float64, tensor subclasses, head dimensions
    above 256, transforms of ``torch.func``, forward-mode derivatives, devices other than CPU and CUDA. Each reason is
    logged once and counted in :data:`fallbacks`, as are calls of diffusers' other backends.

    Args:
        variant: ``"auto"``, a name of ``qframework.kernels.attention.variants.VARIANTS``, an ``AttentionVariant``, or
            ``"off"``.
        smooth_k: subtract the mean over tokens from the keys.
        backward: what computes gradients, as for :func:`~qframework.attention.sage_attention`. With ``"int8"`` and
            ``"mixed"`` calls with a mask fall back, and those with dropout do not.

    Raises:
        UnsupportedError: an unknown variant or backward.
    """

    def __init__(
        self, variant: str | AttentionVariant = "auto", *, smooth_k: bool = True, backward: Backward = "exact"
    ) -> None:
        super().__init__()
        check_backward(backward)
        self.variant = checked_spec(variant)
        if backward != "exact" and self.variant != OFF:
            _check_forward(self.variant)
        self.smooth_k = smooth_k
        self.backward = backward

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inside = to_run_inside(func)
        if inside is not None and _first_subclass(types) is None:
            with self:
                return inside(*args, **kwargs)
        if func is F.scaled_dot_product_attention or func is _EXPORTED_SDPA:
            return self._attention(func, types, args, kwargs)
        if func is Tensor.unflatten:  # Dynamo of torch 2.11 cannot trace its super() under a function mode
            return torch.unflatten(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self, func: Callable[..., Tensor], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        subclass = _first_subclass(types)
        if subclass is not None:
            note_fallback(f"tensor subclass {subclass}")
            return func(*args, **kwargs)  # dispatches to the subclass
        if self.variant == OFF:
            return _pytorch(func, args, kwargs)
        return attention_or_fallback(self.variant, self.smooth_k, func, *args, backward=self.backward, **kwargs)


def attention_elsewhere(reason: str) -> None:
    """To be called where attention runs that no scope can intercept: counts ``reason`` if there is a scope."""
    for mode in reversed(function_mode_stack()):
        if isinstance(mode, use_sage_attention):
            if mode.variant != OFF:
                _note_elsewhere(reason)
            return


def attention_or_fallback(
    variant: str,
    smooth_k: bool,
    func: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    backward: str = "exact",
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Quantized attention; falls back to ``func`` (PyTorch's) where the variant does not support the call.

    With a ``softcap`` or ``sinks``, which PyTorch's attention does not take, it falls back to plain torch.
    """
    dropped = dropout_p if backward == "exact" else 0.0  # other gradients are computed with dropout
    reason = why_not(query, key, value, attn_mask, dropped, is_causal)
    if reason is None and backward != "exact" and attn_mask is not None:
        reason = f"attn_mask with backward={backward!r}"
    if reason is None and enable_gqa and key.shape[-3:-2] != value.shape[-3:-2]:
        reason = "enable_gqa with other heads in value than in key"
    if reason is None:
        arguments = (query, key, value, attn_mask, is_causal, scale, enable_gqa, variant, smooth_k)
        try:
            return attend(*arguments, backward=backward, dropout_p=dropout_p, softcap=softcap, sinks=sinks)[0]
        except UnsupportedError as error:
            reason = str(error)
    note_fallback(reason)
    args = (query, key, value, attn_mask, dropout_p, is_causal)
    if softcap is not None or sinks is not None:
        return plain_attention(*args, scale, enable_gqa, softcap, sinks)
    return _pytorch(func, args, {"scale": scale, "enable_gqa": enable_gqa})


def checked_spec(variant: str | AttentionVariant) -> str:
    """The spec of a variant; ``"auto"`` and ``"off"`` pass through. Raises UnsupportedError for an unknown one."""
    return _checked(spec_of(variant))


@torch.compiler.assume_constant_result
def _checked(spec: str) -> str:
    return spec if spec in ("auto", OFF) else resolve(spec).spec


@torch.compiler.assume_constant_result
def _check_forward(spec: str) -> None:
    check_forward(spec)


def why_not(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool
) -> str | None:
    """Why no variant supports this call, without sizes, so that equal reasons count together; None if supported."""
    if dropout_p != 0.0:  # also what PyTorch refuses
        return "dropout"
    transform = transform_in_force(query, key, value, attn_mask)
    if transform is not None:
        return transform
    if query.is_nested or query.layout != torch.strided:
        return "nested or sparse tensors"
    if attn_mask is not None and is_causal:
        return "attn_mask together with is_causal"
    if query.device.type not in ("cpu", "cuda", "meta"):
        return f"device {query.device.type}"
    dtype = autocast(query, key, value)[0].dtype
    if dtype not in FLOAT_DTYPES:
        return f"dtype {dtype}"
    if not 3 <= max(query.ndim, key.ndim, value.ndim) <= 5 or min(query.ndim, key.ndim, value.ndim) < 2:
        return "tensors of fewer than 3 or more than 5 dimensions"
    if max(query.shape[-1], value.shape[-1]) > MAX_HEAD_DIM or min(query.shape[-1], value.shape[-1]) < 1:
        return f"a head dimension outside 1 to {MAX_HEAD_DIM}"
    return None


# Dynamo calls this while tracing instead of tracing into it: the graph must contain neither logging nor counting.
@torch.compiler.assume_constant_result
def note_fallback(reason: str) -> None:
    """Count a fallback and log the first for each reason."""
    fallbacks.note(reason, f"use_sage_attention: {reason}; falling back to PyTorch's attention")


@torch.compiler.assume_constant_result
def _note_elsewhere(reason: str) -> None:
    fallbacks.note(reason, f"use_sage_attention: {reason}, so the scope has no effect on it")


def _pytorch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """PyTorch's own attention, hidden from enclosing scopes: the innermost scope applies."""
    with torch.DisableTorchFunction():
        return func(*args, **kwargs)


def _first_subclass(types: Any) -> str | None:
    for kind in types:
        if kind not in _PLAIN_TYPES:
            return kind.__name__
    return None
