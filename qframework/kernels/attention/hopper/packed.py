"""Packed sequences in specialized_kernel.py: which calls, and their launch.

Calls with everything in 16 bit, and those of the integer exponential, which prepare_packed.py quantizes. Other variants
with Q and K in INT8 are left to the general kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qframework.kernels.attention.hopper.packed_items import EDGE, most_items, packed_items_triton
from qframework.kernels.attention.hopper.prepare import can_prepare
from qframework.kernels.attention.hopper.softmax import ROWS
from qframework.kernels.attention.hopper.specialized import addressable, form_of, reads, slices_of, takes
from qframework.kernels.attention.operands import Lengths, QuantizedQK
from qframework.kernels.attention.variants import AttentionVariant
from qframework.kernels.runtime.chip import capability_of, chip_of
from qframework.kernels.runtime.gluon import HAS_GLUON
from qframework.kernels.runtime.launch import cdiv, launch

if HAS_GLUON:
    from qframework.kernels.attention.hopper.specialized_kernel import kernel


def fits_packed(q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, lengths: Lengths) -> bool:
    """Whether the kernel computes packed sequences ``(total, H, channels)``, and is faster than the general one.

    Lengths are on the device: their mean decides.
    """
    if variant.quantizes_qk and not (variant.exponential == "integer" and can_prepare(variant)):
        return False
    half = variant.accumulator == "fp16" and v.dtype == torch.float16
    if capability_of(q.device) != (9, 0) or variant.pv != "fp16" or half or variant.smooth_q or v.dtype.itemsize != 2:
        return False
    if not reads(q, v, variant):
        return False
    (total, heads, channels), values = q.shape, v.shape[2]
    sequences = max(lengths.q_starts.numel() - 1, 1)
    mean = cdiv(total, sequences), cdiv(k.shape[0], sequences)
    if not takes(sequences, heads, *mean, channels, values, variant, False, chip_of(q.device)[1]):
        return False
    read = [] if variant.quantizes_qk else [q, k]
    read += [] if variant.quantizes_qk and v.dtype != torch.bfloat16 else [v]  # others are quantized first
    return max(total, k.shape[0]) < EDGE and all(addressable(x[None]) for x in read)


def attention_packed(
    qk: QuantizedQK,
    v: Tensor,
    variant: AttentionVariant,
    logit_scale: float,
    causal: bool,
    lengths: Lengths,
    dtype: torch.dtype,
) -> Tensor:
    """Launch the kernel for packed sequences that :func:`fits_packed` accepts; ``out (total, H, Dv)``.

    For the integer exponential ``qk`` and ``v`` are those of prepare_packed.py.
    """
    (total, heads, channels), (keys, key_heads, values) = qk.q.shape, v.shape
    form = form_of(variant, channels, values, False, packed=True)
    out = v.new_empty((total, heads, values), dtype=dtype)
    items = packed_items_triton(lengths, out, keys, causal)
    q_scale, k_scale = (out, out) if qk.q_scale is None or qk.k_scale is None else (qk.q_scale, qk.k_scale)
    queries = slices_of(qk.q, ROWS, form.block_d, form.rest_d)
    launch(kernel, (min(most_items(lengths, total, heads), chip_of(v.device)[1]),))(
        *queries,
        *slices_of(qk.k, form.block_n, form.block_d, form.rest_d),
        *slices_of(v, form.block_n, form.block_dv, form.rest_dv),
        *slices_of(out, ROWS, form.block_dv, form.rest_dv),
        queries[0],
        q_scale,
        k_scale,
        out if qk.k_norm is None else qk.k_norm,
        out,
        out,
        q_scale.shape[2],
        k_scale.shape[2],
        logit_scale,
        0.0,
        heads,
        heads // key_heads,
        *[0] * 3,
        1,
        1,
        items,
        *[out] * 3,
        *[1] * 3,
        out,
        *[0] * 3,
        CAUSAL=causal,
        FORM=form,
        num_warps=4,
    )
    return out
