"""Attention for Hopper: what its kernel (hopper_kernel.py) computes, and its launch.

Used for large dense problems without bias or log-sum-exp; triton.py handles all others.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from qframework.kernels.attention.hopper_kernel import BLOCK_M, BLOCK_N, ROWS, Form
from qframework.kernels.attention.mask_blocks import mask_blocks_triton
from qframework.kernels.attention.operands import Bias, QuantizedQK, query_memory_order
from qframework.kernels.attention.prepare import can_prepare
from qframework.kernels.attention.variants import KEY_BLOCK, AttentionVariant, fits_hopper, token_groups
from qframework.kernels.runtime.chip import chip_of
from qframework.kernels.runtime.gluon import HAS_GLUON
from qframework.kernels.runtime.launch import cdiv, launch

LEAST_TOKENS = 512  # from which a pass that quantizes Q pays; triton.py quantizes Q within its kernel

if HAS_GLUON:
    from qframework.kernels.attention.hopper_kernel import kernel
    from qframework.kernels.runtime.gluon import TensorDescriptor, gl


def fits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: AttentionVariant,
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
    masked: bool = False,
) -> bool:
    """Whether the kernel computes this dense attention, and is faster than the general one.

    Args:
        q: ``(B, H, N, D)`` of any dtype, before or after quantization, as are the others.
        k: ``(B, Hkv, Nk, D)``.
        v: ``(B, Hkv, Nk, Dv)``, as it is multiplied.
        variant: Q and K in INT8 with whole blocks of keys in a group, or in 16 bit; P and V in 16 bit, FP32 sums.
        dtype: of the result.
        capability: CUDA's, None for a CPU.
        masked: whether there is a bool mask.
    """
    integer = variant.exponential == "integer"
    if capability != (9, 0) or (v.dtype != dtype and not integer):
        return False
    half = variant.accumulator == "fp16" and v.dtype == torch.float16
    if variant.pv != "fp16" or half or variant.smooth_q or v.dtype.itemsize != 2 or not _reads(q, v, variant):
        return False
    (batch, heads, queries, channels), keys, values = q.shape, k.shape[2], v.shape[3]
    if not takes(batch, heads, queries, keys, channels, values, variant, masked, chip_of(v.device)[1]):
        return False
    read = (q, k, v) if q.dtype == torch.int8 or not variant.quantizes_qk else (v,)  # else Q and K are quantized first
    return all(_addressable(x) for x in read)


def takes(
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    channels: int,
    values: int,
    variant: AttentionVariant,
    masked: bool,
    processors: int,
) -> bool:
    """Whether the kernel takes these sizes: it can, and enough of its tiles are at work to be the faster one."""
    least = LEAST_TOKENS if variant.quantizes_qk else KEY_BLOCK
    if masked and channels <= 64:  # the blocks of the mask are an additional pass
        least = max(least, BLOCK_N + 1)
    large = cdiv(queries, BLOCK_M) * heads * batch >= processors and min(queries, keys) >= least
    return HAS_GLUON and large and fits_hopper(channels, variant.qk_bits) and values <= 128 and values % 8 == 0


def _reads(q: Tensor, v: Tensor, variant: AttentionVariant) -> bool:
    """Whether the kernel reads Q and K as the variant has them."""
    if not variant.quantizes_qk:
        return q.dtype == v.dtype and variant.exponential == "exact"
    q_groups, k_groups = (token_groups(variant.granularity, role) for role in ("query", "key"))
    single = q_groups.groups == k_groups.groups == 1 and (variant.exponential == "exact" or can_prepare(variant))
    return variant.qk_bits == 8 and single and k_groups.span % KEY_BLOCK == 0


def _addressable(x: Tensor) -> bool:
    """Whether TMA can address the heads: 16-byte strides and a 16-byte start."""
    strides = all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in x.stride()[:3])
    return strides and x.stride(3) == 1 and x.data_ptr() % 16 == 0


def _describe(x: Tensor, rows: int, channels: int) -> Any:
    """Gluon's descriptor of heads ``(B, H, N, channels)``, for blocks of ``rows`` tokens of a head."""
    block = [1, 1, rows, channels]
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout(rows, channels, x.dtype))


@functools.cache
def layout(rows: int, channels: int, dtype: torch.dtype) -> Any:
    """Layout of such a block in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, channels], getattr(gl, str(dtype).removeprefix("torch.")))


def form_of(variant: AttentionVariant, channels: int, values: int, masked: bool) -> Form:
    """The kernel's form for heads of so many channels in Q and K, and in V."""
    padded = 64 if max(channels, values) <= 64 else 128
    spans = (token_groups(variant.granularity, role).span for role in ("query", "key"))
    q_span, k_span = spans if variant.quantizes_qk else (0, 0)
    return Form(padded, padded, q_span, k_span, integer=variant.exponential == "integer", masked=masked)


def attention_hopper(
    qk: QuantizedQK, v: Tensor, variant: AttentionVariant, logit_scale: float, bias: Bias, dtype: torch.dtype
) -> Tensor:
    """Launch the kernel for operands that :func:`fits` accepts; ``out (B, H, N, Dv)``, in memory (B, N, H, Dv).

    ``bias`` is a bool mask, causality, both or nothing.
    """
    (batch, heads, tokens, channels), keys, values = qk.q.shape, qk.k.shape[2], v.shape[3]
    form = form_of(variant, channels, values, bias.mask is not None)
    out = query_memory_order(batch, heads, tokens, values, qk.q, dtype)
    q_scale, k_scale = (out, out) if qk.q_scale is None or qk.k_scale is None else (qk.q_scale, qk.k_scale)
    items = cdiv(tokens, BLOCK_M) * heads * batch
    uneven = bias.causal or bias.mask is not None
    at_once = next(count for count in (32, 16, 8, 4, 2, 1) if heads * batch % count == 0) if uneven else 1
    blocks: tuple[Any, ...] = (out, out, out, 1, 1, 1)
    if bias.mask is not None:
        found = bias.blocks or mask_blocks_triton(bias.mask, tokens, keys, bias.causal)
        blocks = (found.bits, found.order, found.counts, *found.order.shape[:3])
    launch(kernel, (min(items, chip_of(v.device)[1]),))(
        _describe(qk.q, ROWS, form.block_d),
        _describe(qk.k, BLOCK_N, form.block_d),
        _describe(v, BLOCK_N, form.block_dv),
        _describe(out, ROWS, form.block_dv),
        q_scale,
        k_scale,
        out if qk.k_norm is None else qk.k_norm,
        q_scale.shape[2],
        k_scale.shape[2],
        logit_scale,
        heads,
        heads // qk.k.shape[1],
        tokens,
        keys,
        items,
        at_once,
        *blocks,
        CAUSAL=bias.causal and bias.mask is None,
        FORM=form,
        num_warps=4,
    )
    return out
