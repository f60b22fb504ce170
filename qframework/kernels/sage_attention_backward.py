"""The gradient of quantized attention: that of exact attention at the same inputs.

Formula: rounding has no useful derivative, so the gradient passes straight through it. With ``S`` the logits,
``P = softmax(S)`` and ``O = P V``::

    dV = P^T dO        dS = P * (dO V^T - rowsum(dO * O) + dlse)        dQ = scale dS K        dK = scale dS^T Q
    dmask = dS         drel_h = dS summed over key columns              drel_w = dS summed over key rows

Nothing of the forward pass is kept but its inputs. The backward operators recompute through
``F.scaled_dot_product_attention``, whose own kernels keep this at O(N) memory; only relative positions, a causal mask
beside another mask, and the gradient of the log-sum-exp build N x N tensors.

Smoothing changes nothing here: it cancels in the softmax. Reference: the operators are their own, being plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import qframework.kernels.sage_attention  # noqa: F401  (defines the operators)
from qframework.errors import UnsupportedError
from qframework.kernels._common import LIBRARY

_VARLEN_INPUTS = 3


def combined_mask(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, rel_h: Tensor | None, rel_w: Tensor | None, is_causal: bool
) -> tuple[Tensor | None, bool]:
    """What of masks and relative positions goes to SDPA as one ``attn_mask``, and whether ``is_causal`` stays a flag."""
    mask = attn_mask
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(query.dtype)
    if rel_h is not None and rel_w is not None:
        bias = (rel_h.unsqueeze(-1) + rel_w.unsqueeze(-2)).flatten(-2).to(query.dtype)
        mask = bias if mask is None else _add(bias, mask)
    if is_causal and mask is not None:
        visible = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        return (mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, -torch.inf)), False
    return mask, is_causal


def _add(bias: Tensor, mask: Tensor) -> Tensor:
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask


def _log_sum_exp(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None, enable_gqa: bool
) -> Tensor:
    """``(..., Hq, Nq)`` float32 from explicit logits; only its gradient needs them."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    logits = query.float() @ key.float().mT * scale
    if is_causal:
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        logits = _add(logits, mask)
    dead = (logits == -torch.inf).all(-1, keepdim=True)  # their log-sum-exp is a constant -inf: no gradient, not NaN
    return logits.masked_fill(dead, 0.0).logsumexp(-1).masked_fill(dead.squeeze(-1), -torch.inf)


def exact_gradients(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    inputs: Sequence[Tensor | None],
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    needed: Sequence[bool],
    create_graph: bool = False,
) -> list[Tensor]:
    """Gradients of the ``inputs`` (query, key, value, attn_mask, rel_h, rel_w) that are ``needed``, in their order."""
    query, key, value, attn_mask, rel_h, rel_w = inputs
    assert query is not None
    assert key is not None
    assert value is not None
    mask, is_causal = combined_mask(query, key, attn_mask, rel_h, rel_w, is_causal)
    outputs, grads = [], []
    if grad_out is not None:
        outputs.append(_attention(query, key, value, mask, is_causal, scale, enable_gqa))
        grads.append(grad_out)
    if grad_lse is not None:
        outputs.append(_log_sum_exp(query, key, mask, is_causal, scale, enable_gqa))
        grads.append(grad_lse)
    wanted = [x for x, need in zip(inputs, needed, strict=True) if need and x is not None]
    found = torch.autograd.grad(outputs, wanted, grads, create_graph=create_graph, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """SDPA; 3-D tensors get a batch of one, without which PyTorch has no fused kernel for them."""
    if query.ndim == 3:
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        return _attention(query, key, value, mask, is_causal, scale, enable_gqa).squeeze(0)
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _sage_attention_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    rel_h: Tensor | None,
    rel_w: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    needed: list[bool],
) -> list[Tensor]:
    inputs = (query, key, value, attn_mask, rel_h, rel_w)
    with torch.enable_grad(), torch._C.DisableTorchFunction():  # an active use_sage_attention must not see this SDPA
        leaves = [x if x is None else x.detach().requires_grad_(n) for x, n in zip(inputs, needed, strict=True)]
        gradients = exact_gradients(grad_out, grad_lse, leaves, is_causal, scale, enable_gqa, needed)
    return [g.contiguous() for g in gradients]


def _sage_attention_backward_fake(
    grad_out, grad_lse, query, key, value, attn_mask, rel_h, rel_w, is_causal, scale, enable_gqa, needed
):
    inputs = (query, key, value, attn_mask, rel_h, rel_w)
    return [x.new_empty(x.shape) for x, n in zip(inputs, needed, strict=True) if n]


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    query, key, value, attn_mask, is_causal, scale, enable_gqa, _, _, return_lse, rel_h, rel_w = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, attn_mask, rel_h, rel_w)
    ctx.settings = (is_causal, scale, enable_gqa)
    ctx.return_lse = return_lse


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    flags = ctx.needs_input_grad
    needed = [*flags[:4], *flags[10:12]]
    grad_lse = grad_lse if ctx.return_lse else None
    if grad_out is None and grad_lse is None:
        return (None,) * len(flags)
    inputs, settings = ctx.saved_tensors, ctx.settings
    if torch.is_grad_enabled():  # create_graph=True: second derivatives, which only the math kernel has
        with sdpa_kernel(SDPBackend.MATH), torch._C.DisableTorchFunction():
            found = exact_gradients(grad_out, grad_lse, inputs, *settings, needed, create_graph=True)
    else:
        found = torch.ops.qframework.sage_attention_backward(grad_out, grad_lse, *inputs, *settings, needed)
    rest = iter(found)
    query, key, value, mask, rel_h, rel_w = (next(rest) if need else None for need in needed)
    return query, key, value, mask, None, None, None, None, None, None, rel_h, rel_w


def _sage_attention_varlen_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    is_causal: bool,
    scale: float | None,
    needed: list[bool],
) -> list[Tensor]:
    """One sequence after another; the lengths are read back from the device, which costs one synchronization."""
    found = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)]
    flags = [*needed, False, False, False]
    for q, k in zip(_ranges(cu_seqlens_q), _ranges(cu_seqlens_k), strict=True):
        heads = [x[tokens].transpose(0, 1) for x, tokens in ((query, q), (key, k), (value, k))]
        gradients = iter(
            _sage_attention_backward(
                grad_out[q].transpose(0, 1), None, *heads, None, None, None, is_causal, scale, True, flags
            )
        )
        for total, tokens, need in zip(found, (q, k, k), needed, strict=True):
            if need:
                total[tokens] = next(gradients).transpose(0, 1)
    return [total for total, need in zip(found, needed, strict=True) if need]


def _ranges(cu_seqlens: Tensor) -> list[slice]:
    bounds = cu_seqlens.tolist()
    return [slice(start, end) for start, end in zip(bounds, bounds[1:], strict=False)]


def _sage_attention_varlen_backward_fake(
    grad_out, query, key, value, cu_seqlens_q, cu_seqlens_k, is_causal, scale, needed
):
    return [x.new_empty(x.shape) for x, n in zip((query, key, value), needed, strict=True) if n]


def _save_varlen_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, cu_seqlens_q, cu_seqlens_k, _, _, is_causal, scale, *_ = inputs
    ctx.save_for_backward(query, key, value, cu_seqlens_q, cu_seqlens_k)
    ctx.settings = (is_causal, scale)


def _varlen_backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "sage_attention_varlen: create_graph=True asks for second derivatives; accepted: first derivatives here, "
            "or sage_attention on one sequence at a time"
        )
    flags = ctx.needs_input_grad
    needed = list(flags[:_VARLEN_INPUTS])
    found = iter(
        torch.ops.qframework.sage_attention_varlen_backward(grad_out, *ctx.saved_tensors, *ctx.settings, needed)
    )
    gradients = [next(found) if need else None for need in needed]
    return (*gradients, *(None,) * (len(flags) - _VARLEN_INPUTS))


LIBRARY.define(
    "sage_attention_backward(Tensor? grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, "
    "Tensor? attn_mask, Tensor? rel_h, Tensor? rel_w, bool is_causal, float? scale, bool enable_gqa, bool[] needed) "
    "-> Tensor[]"
)
LIBRARY.define(
    "sage_attention_varlen_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, "
    "Tensor cu_seqlens_k, bool is_causal, float? scale, bool[] needed) -> Tensor[]"
)
for _name, _implementation, _fake in (
    ("sage_attention_backward", _sage_attention_backward, _sage_attention_backward_fake),
    ("sage_attention_varlen_backward", _sage_attention_varlen_backward, _sage_attention_varlen_backward_fake),
):
    torch.library.impl(LIBRARY, _name, "CompositeExplicitAutograd")(_implementation)
    torch.library.register_fake(f"qframework::{_name}", _fake, lib=LIBRARY)
torch.library.register_autograd("qframework::sage_attention", _backward, setup_context=_save_inputs, lib=LIBRARY)
torch.library.register_autograd(
    "qframework::sage_attention_varlen", _varlen_backward, setup_context=_save_varlen_inputs, lib=LIBRARY
)
