"""The gradient of quantized attention, which is that of exact attention at the same inputs (straight-through).

Formula: rounding has no useful derivative and is treated as the identity. With ``S`` the logits,
``P = softmax(S)`` and ``O = P V``::

    dV = P^T dO        dS = P * (dO V^T - rowsum(dO * O) + dlse)        dQ = scale dS K        dK = scale dS^T Q
    dmask = dS         drel_h = dS summed over key columns              drel_w = dS summed over key rows

With a soft cap, dQ and dK take ``dS * (1 - tanh(Q K^T scale / softcap)^2)`` in place of dS.

Autograd saves only the inputs. The backward operators recompute attention through ``F.scaled_dot_product_attention``,
whose fused kernels need O(N) memory; relative positions, a causal mask combined with another mask, a soft cap and the
gradient of the log-sum-exp build N x N tensors.

A row whose mask is the lowest float32 everywhere has equal weights in the forward pass, since its logits are rounded
away. On a CPU the gradient uses those weights. On a GPU, where finding such rows would cost a synchronization, it uses
the weights of the logits without the mask. Float32 products are PyTorch's, in TF32 where that is allowed.

Smoothing cancels in the softmax and does not affect the gradient. The operators are plain torch, so they have no
separate reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import qframework.kernels.attention.pipeline  # noqa: F401  (declares the operators)
from qframework.compat.dispatch import AUTOGRAD_KEYS, exclude_dispatch_key
from qframework.errors import UnsupportedError
from qframework.kernels.attention.arguments import (
    SageAttentionArguments,
    VarlenArguments,
    cast_mask,
    check_sequences,
)
from qframework.kernels.runtime.operator import LIBRARY, declare
from qframework.numerics import exact_matmul

_ARGUMENTS = len(SageAttentionArguments._fields)
_VARLEN_INPUTS = 3


class _Inputs(NamedTuple):
    """The inputs that can have a gradient."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    rel_h: Tensor | None = None
    rel_w: Tensor | None = None


class _Settings(NamedTuple):
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    softcap: float | None = None


def _triangle(query: Tensor, key: Tensor) -> Tensor:
    return torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()


def _masked(logits: Tensor, mask: Tensor) -> Tensor:
    return logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask


def _biases(x: _Inputs) -> Iterator[Tensor]:
    """Terms that are added to the logits or mask them."""
    if x.rel_h is not None and x.rel_w is not None:
        yield (x.rel_h.unsqueeze(-1) + x.rel_w.unsqueeze(-2)).flatten(-2)
    if x.attn_mask is not None:
        yield x.attn_mask


def _one_mask(x: _Inputs, is_causal: bool) -> tuple[Tensor | None, bool]:
    """All biases as one SDPA ``attn_mask``, and whether ``is_causal`` stays a flag."""
    mask: Tensor | None = None
    for part in _biases(x):
        mask = part if mask is None else _masked(mask.float(), part)
    if is_causal and mask is not None:
        visible = _triangle(x.query, x.key)
        mask = mask & visible if mask.dtype == torch.bool else _masked(mask, visible)
        is_causal = False
    return mask, is_causal


_ROUNDED, _ABSORBED = -(2.0**8), -(2.0**20)


def _highest(mask: Tensor) -> Tensor:
    """The maximum of each row of a float mask, ``(..., 1)``; 0 where it is -inf or NaN."""
    return mask.detach().amax(-1, keepdim=True).nan_to_num(0.0, neginf=0.0)


def _raised(mask: Tensor) -> Tensor:
    """A float mask with very low rows shifted to a maximum of 0: the same softmax, but a precise log-sum-exp.

    PyTorch's fused kernels compute the weights from the log-sum-exp; in a row of the lowest float each would be 1.
    """
    top = _highest(mask)
    return mask - torch.where(top < _ROUNDED, top, 0.0)


def _absorbs(mask: Tensor) -> bool:
    """Whether rows of a float mask round all logits away; False on a GPU, where the check would synchronize."""
    return mask.device.type == "cpu" and bool((_highest(mask) < _ABSORBED).any())


def _attention(x: _Inputs, settings: _Settings) -> Tensor:
    """SDPA; 3-D tensors get a batch dimension, which PyTorch's fused kernels require."""
    if settings.softcap is not None:
        return _weighted_values(x, settings)
    mask, is_causal = _one_mask(x, settings.is_causal)
    mask = mask if mask is None else torch.atleast_2d(mask)  # PyTorch's kernels read its last two sizes
    if mask is not None and mask.dtype != torch.bool:
        if _absorbs(mask):
            return _weighted_values(x, settings)
        mask = cast_mask(_raised(mask), x.query.dtype)
    three = x.query.ndim == 3
    query, key, value = (t.unsqueeze(0) if three else t for t in (x.query, x.key, x.value))
    out = F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=is_causal, scale=settings.scale, enable_gqa=settings.enable_gqa
    )
    return out.squeeze(0) if three else out


def _logits(x: _Inputs, settings: _Settings) -> tuple[Tensor, Tensor]:
    """Float32 logits ``(..., Hq, Nq, Nk)`` minus each row's maximum, and the maxima, -inf for fully masked rows."""
    scale = x.query.shape[-1] ** -0.5 if settings.scale is None else settings.scale
    logits = exact_matmul(x.query.float(), _of_all_heads(x.key, x, settings).float().mT) * scale
    if settings.softcap is not None:
        logits = settings.softcap * torch.tanh(logits / settings.softcap)
    mask, is_causal = _one_mask(x, settings.is_causal)
    for part in (mask, _triangle(x.query, x.key) if is_causal else None):
        logits = logits if part is None else _masked(logits, part)
    top = logits.detach().amax(-1, keepdim=True)
    dead = top == -torch.inf  # constant weights, so that the gradient is 0 and not NaN
    return (logits - top.masked_fill(dead, 0.0)).masked_fill(dead, 0.0), top


def _of_all_heads(x: Tensor, inputs: _Inputs, settings: _Settings) -> Tensor:
    """Heads of keys or values repeated to those of the queries."""
    if not settings.enable_gqa or x.ndim == 3:
        return x
    return x.repeat_interleave(inputs.query.shape[-3] // x.shape[-3], dim=-3)


def _weighted_values(x: _Inputs, settings: _Settings) -> Tensor:
    """Attention from explicit logits, with the rounding of the forward pass."""
    logits, top = _logits(x, settings)
    weights = logits.softmax(-1).masked_fill(top == -torch.inf, 0.0)
    return exact_matmul(weights, _of_all_heads(x.value, x, settings).float()).to(x.query.dtype)


def _log_sum_exp(x: _Inputs, settings: _Settings) -> Tensor:
    """``(..., Hq, Nq)`` float32 from explicit logits."""
    logits, top = _logits(x, settings)
    return logits.logsumexp(-1).masked_fill(top.squeeze(-1) == -torch.inf, -torch.inf) + top.squeeze(-1)


def _exact_gradients(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    x: _Inputs,
    settings: _Settings,
    needed: Sequence[bool],
    create_graph: bool = False,
) -> list[Tensor]:
    """Gradients of the inputs that are ``needed``, in their order."""
    if x.query.numel() == 0 or x.key.numel() == 0:
        return [torch.zeros_like(t) for t, need in zip(x, needed, strict=True) if need and t is not None]
    outputs: list[Tensor] = []
    if grad_out is not None:
        outputs.append(_attention(x, settings))
    if grad_lse is not None:
        outputs.append(_log_sum_exp(x, settings))
    grads = [g for g in (grad_out, grad_lse) if g is not None]
    if grad_out is not None and not create_graph:
        grads[0] = _in_order_of(outputs[0], grad_out)
    wanted = [t for t, need in zip(x, needed, strict=True) if need and t is not None]
    found = torch.autograd.grad(outputs, wanted, grads, create_graph=create_graph, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]


def _in_order_of(out: Tensor, grad: Tensor) -> Tensor:
    """The gradient in ``out``'s memory order.

    PyTorch finds cuDNN's plans by the strides of query, key and value, and a plan reads the gradient by the strides
    that it was made with: gradients in changing orders gave wrong results on an H100 (PyTorch 2.11).
    """
    return grad if grad.stride() == out.stride() else torch.empty_like(out).copy_(grad)


@contextmanager
def _autograd(device: str) -> Iterator[None]:
    """Enable autograd in an operator, which under a dispatch mode (such as a profiler) runs below it."""
    autograd, in_place = AUTOGRAD_KEYS
    with (
        torch.enable_grad(),
        torch.autocast(device, enabled=False),
        exclude_dispatch_key(autograd, False),
        exclude_dispatch_key(in_place, False),
    ):
        yield


def _recompute(
    grad_out: Tensor | None, grad_lse: Tensor | None, x: _Inputs, settings: _Settings, needed: Sequence[bool]
) -> list[Tensor]:
    """First derivatives, without a graph of their own."""
    # an active use_sage_attention must not intercept this SDPA
    with _autograd(x.query.device.type), torch.DisableTorchFunction():
        leaves = _Inputs._make(t if t is None else t.detach().requires_grad_(n) for t, n in zip(x, needed, strict=True))
        return [g.contiguous() for g in _exact_gradients(grad_out, grad_lse, leaves, settings, needed)]


# Dense ----------------------------------------------------------------------------------------------------------------


class BackwardArguments(NamedTuple):
    """The arguments of ``qframework::sage_attention_backward``."""

    grad_out: Tensor | None
    grad_lse: Tensor | None
    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    rel_h: Tensor | None
    rel_w: Tensor | None
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    softcap: float | None
    needed: list[bool]

    def check(self) -> None:
        """Nothing to check: autograd calls this operator with inputs of the forward pass."""


def _sage_attention_backward(x: BackwardArguments) -> list[Tensor]:
    settings = _Settings(x.is_causal, x.scale, x.enable_gqa, x.softcap)
    return _recompute(x.grad_out, x.grad_lse, _Inputs(*x[2:8]), settings, x.needed)


def _empty_gradients(inputs: Sequence[Any], needed: list[bool]) -> list[Tensor]:
    return [t.new_empty(t.shape) for t, need in zip(inputs, needed, strict=True) if need]


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x = SageAttentionArguments(*inputs)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x.query, x.key, x.value, x.attn_mask, x.rel_h, x.rel_w)
    ctx.settings = _Settings(x.is_causal, x.scale, x.enable_gqa, x.softcap)
    ctx.return_lse = x.return_lse


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    passed = len(ctx.needs_input_grad)  # the dispatcher drops trailing arguments that equal their defaults
    flags = (*ctx.needs_input_grad, *(False,) * (_ARGUMENTS - passed))
    needed = [*flags[:4], *flags[10:12]]
    grad_lse = grad_lse if ctx.return_lse else None
    if grad_out is None and grad_lse is None:
        return (None,) * passed
    inputs = _Inputs(*ctx.saved_tensors)
    if torch.is_grad_enabled():  # create_graph=True: only the math kernel has second derivatives
        with sdpa_kernel(SDPBackend.MATH), torch.DisableTorchFunction():
            # Aliases keep the gradients of inputs apart that are the same tensor or computed from each other.
            aliases = _Inputs._make(t if t is None else t.view_as(t) for t in inputs)
            found = _exact_gradients(grad_out, grad_lse, aliases, ctx.settings, needed, create_graph=True)
    else:
        found = torch.ops.qframework.sage_attention_backward(grad_out, grad_lse, *inputs, *ctx.settings, needed)
    rest = iter(found)
    query, key, value, mask, rel_h, rel_w = (next(rest) if need else None for need in needed)
    return (query, key, value, mask, None, None, None, None, None, None, rel_h, rel_w, None)[:passed]


# Packed sequences -----------------------------------------------------------------------------------------------------


class VarlenBackwardArguments(NamedTuple):
    """The arguments of ``qframework::sage_attention_varlen_backward``."""

    grad_out: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    is_causal: bool
    scale: float | None
    softcap: float | None
    needed: list[bool]

    def check(self) -> None:
        """Nothing to check: autograd calls this operator with inputs of the forward pass."""


def _sage_attention_varlen_backward(x: VarlenBackwardArguments) -> list[Tensor]:
    """Processes one sequence after another; reading the offsets synchronizes with the device."""
    settings = _Settings(x.is_causal, x.scale, True, x.softcap)
    inputs = (x.query, x.key, x.value)
    found = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in inputs]
    sequences = (
        check_sequences("q", x.cu_seqlens_q, x.query.shape[0]),
        check_sequences("k", x.cu_seqlens_k, x.key.shape[0]),
    )
    for q, k in zip(*sequences, strict=True):
        heads = (t[tokens].transpose(0, 1).unsqueeze(0) for t, tokens in zip(inputs, (q, k, k), strict=True))
        grad = x.grad_out[q].transpose(0, 1).unsqueeze(0)
        gradients = iter(_recompute(grad, None, _Inputs(*heads), settings, [*x.needed, False, False, False]))
        for total, tokens, need in zip(found, (q, k, k), x.needed, strict=True):
            if need:
                total[tokens] = next(gradients).squeeze(0).transpose(0, 1)
    return [total for total, need in zip(found, x.needed, strict=True) if need]


def _save_varlen_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x = VarlenArguments(*inputs)
    ctx.save_for_backward(x.query, x.key, x.value, x.cu_seqlens_q, x.cu_seqlens_k)
    ctx.settings = (x.is_causal, x.scale, x.softcap)


def _varlen_backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "sage_attention_varlen: create_graph must be False, since there are no second derivatives, got True. "
            "Call sage_attention on one sequence at a time"
        )
    passed = len(ctx.needs_input_grad)
    needed = list(ctx.needs_input_grad[:_VARLEN_INPUTS])
    found = iter(
        torch.ops.qframework.sage_attention_varlen_backward(grad_out, *ctx.saved_tensors, *ctx.settings, needed)
    )
    return (*(next(found) if need else None for need in needed), *(None,) * (passed - _VARLEN_INPUTS))


SAGE_ATTENTION_BACKWARD = declare(
    "sage_attention_backward(Tensor? grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, "
    "Tensor? attn_mask, Tensor? rel_h, Tensor? rel_w, bool is_causal, float? scale, bool enable_gqa, float? softcap, "
    "bool[] needed) -> Tensor[]",
    BackwardArguments,
    everywhere=_sage_attention_backward,
    fake=lambda x: _empty_gradients(x[2:8], x.needed),
)
SAGE_ATTENTION_VARLEN_BACKWARD = declare(
    "sage_attention_varlen_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, "
    "Tensor cu_seqlens_k, bool is_causal, float? scale, float? softcap, bool[] needed) -> Tensor[]",
    VarlenBackwardArguments,
    everywhere=_sage_attention_varlen_backward,
    fake=lambda x: _empty_gradients((x.query, x.key, x.value), x.needed),
)
torch.library.register_autograd("qframework::sage_attention", _backward, setup_context=_save_inputs, lib=LIBRARY)
torch.library.register_autograd(
    "qframework::sage_attention_varlen", _varlen_backward, setup_context=_save_varlen_inputs, lib=LIBRARY
)
