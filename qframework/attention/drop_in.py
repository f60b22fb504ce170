"""Quantized attention inside models that call ``F.scaled_dot_product_attention``, without touching them.

The scope is a ``torch.overrides.TorchFunctionMode``: PyTorch itself hands it every call made inside it, on its thread
alone, and takes it away at the end. Nothing is replaced, so nothing can be left behind. torch.compile traces it too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from qframework.attention.api import attend, autocast, spec_of
from qframework.attention.handover import to_run_inside
from qframework.compat.dispatch import FakeTensor
from qframework.errors import UnsupportedError
from qframework.fallbacks import Fallbacks
from qframework.kernels.attention.variants import AttentionVariant, resolve
from qframework.kernels.runtime.operator import transform_in_force
from qframework.numerics import FLOAT_DTYPES

fallbacks = Fallbacks()
"""How often :class:`use_sage_attention` left a call to PyTorch, by reason. A compiled call counts once, when traced."""

_MAX_HEAD_DIM = 256
_OFF = "off"
_EXPORTED_SDPA = torch.ops.aten.scaled_dot_product_attention.default
_PLAIN_TYPES = (Tensor, torch.nn.Parameter, FakeTensor)


class use_sage_attention(TorchFunctionMode):
    """Every ``F.scaled_dot_product_attention`` inside the scope runs quantized::

        with use_sage_attention():
            model(x)

    That includes ``nn.MultiheadAttention`` (``need_weights=False``), transformers' ``"sdpa"``, diffusers' native
    backend and exported graphs. Scopes nest and the innermost counts; ``variant="off"`` inside another scope is
    PyTorch's own attention. A scope holds for the thread that entered it.

    It may stand outside a compiled function, which is then compiled anew for it, or inside. When compiling,
    ``nn.TransformerEncoderLayer`` under ``torch.no_grad()`` stays on PyTorch's fused layer, which no scope sees, unless
    ``torch.backends.mha.set_fastpath_enabled(False)``.

    With activation checkpointing the backward pass runs the forward again and belongs inside the scope as well, or the
    scope inside the checkpointed function. TorchScript functions are not seen.

    What a variant cannot do goes to PyTorch: dropout, float64, tensor subclasses, head dimensions above 256, transforms
    of ``torch.func``, forward-mode derivatives, devices other than CPU and CUDA. Each reason is logged once and counted
    in :data:`fallbacks`.

    Args:
        variant: ``"auto"``, a name of ``qframework.kernels.attention.variants.VARIANTS``, an ``AttentionVariant``, or
            ``"off"``.
        smooth_k: subtract the mean over tokens from the keys.

    Raises:
        UnsupportedError: an unknown variant.
    """

    def __init__(self, variant: str | AttentionVariant = "auto", *, smooth_k: bool = True) -> None:
        super().__init__()
        self.variant = checked_spec(variant)
        self.smooth_k = smooth_k

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
        if func is Tensor.unflatten:  # whose super() Dynamo of torch 2.11 cannot trace under a function mode
            return torch.unflatten(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self, func: Callable[..., Tensor], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        subclass = _first_subclass(types)
        if subclass is not None:
            note_fallback(f"tensor subclass {subclass}")
            return func(*args, **kwargs)  # which hands it to the subclass
        if self.variant == _OFF:
            return _pytorch(func, args, kwargs)
        return attention_or_fallback(self.variant, self.smooth_k, func, *args, **kwargs)


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
) -> Tensor:
    """Quantized attention, or ``func`` (PyTorch's) where the variant cannot do it; counted and logged then."""
    reason = why_not(query, key, value, attn_mask, dropout_p, is_causal)
    if reason is None:
        try:
            return attend(query, key, value, attn_mask, is_causal, scale, enable_gqa, variant, smooth_k)[0]
        except UnsupportedError as error:
            reason = str(error)
    note_fallback(reason)
    args = (query, key, value, attn_mask, dropout_p, is_causal)
    return _pytorch(func, args, {"scale": scale, "enable_gqa": enable_gqa})


def checked_spec(variant: str | AttentionVariant) -> str:
    """A variant as a string, once it is known to exist; ``"auto"`` and ``"off"`` stay. Raises UnsupportedError."""
    return _checked(spec_of(variant))


@torch.compiler.assume_constant_result
def _checked(spec: str) -> str:
    return spec if spec in ("auto", _OFF) else resolve(spec).spec


def why_not(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool
) -> str | None:
    """Why no variant can do this call, in words that do not depend on sizes; None where they can."""
    if dropout_p > 0.0:
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
    if max(query.shape[-1], value.shape[-1]) > _MAX_HEAD_DIM or min(query.shape[-1], value.shape[-1]) < 1:
        return f"a head dimension outside 1 to {_MAX_HEAD_DIM}"
    return None


# Dynamo runs this while tracing instead of tracing it: neither logging nor a counter belongs into a graph.
@torch.compiler.assume_constant_result
def note_fallback(reason: str) -> None:
    """Count a call left to PyTorch and log the first of its kind."""
    fallbacks.note(reason, f"use_sage_attention: {reason}; PyTorch's attention runs instead")


def _pytorch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """PyTorch's own result. An enclosing scope must not see this call: the innermost has decided."""
    with torch.DisableTorchFunction():
        return func(*args, **kwargs)


def _first_subclass(types: Any) -> str | None:
    for kind in types:
        if kind not in _PLAIN_TYPES:
            return kind.__name__
    return None
