"""Attention for Hopper by many small programs: which calls, and the launches of three kernels.

window_kernel.py computes many windows one after the other, resident_kernel.py keeps all keys of a head in
shared memory, stream_kernel.py lets them pass through and may be causal. The first two add a mask or bias, the
third visits the blocks of a bool mask (mask_blocks.py), in 16 bit. dense_plan.py chooses between them.
Heads have up to 64 channels; wider ones leave too few programs per multiprocessor to hide their latency, but for causal
ones of about 128, and with a mask or bias. Scales are one per tensor or head, and their product with the softmax scale
must be positive: maxima are taken before scaling.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qframework.kernels.attention.hopper import specialized
from qframework.kernels.attention.hopper.bias import NO_BIAS, DenseBias
from qframework.kernels.attention.hopper.dense_plan import (
    MAX_CHANNELS,
    DensePlan,
    heads_in_turn,
    plan,
    plan_masked,
    plan_of,
    slices_of,
    split,
)
from qframework.kernels.attention.hopper.piece_form import BLOCK_N, HALF, ROWS, PieceForm
from qframework.kernels.attention.mask_blocks import MaskBlocks
from qframework.kernels.attention.operands import LOG2_E, query_memory_order
from qframework.kernels.runtime.chip import capability_of, chip_of
from qframework.kernels.runtime.gluon import HAS_GLUON
from qframework.kernels.runtime.launch import cdiv, launch, power_of_2

MAX_SLICED = 96  # channels with a mask or relative positions in 16 bit, as slices of 64 and 16 or 32
MAX_COLUMNS = 128  # heights and widths of relative positions
WIDE = range(113, 129)  # channels of causal heads in 16 bit that stream as well, in blocks of 64 keys,
WIDE_QUERIES = 8192  # up to so many queries, the most that were timed
WIDE_MASKED = 1024  # tokens from which they do with a bool mask, causal or not
_MASK_KEYS = 255  # up to which a mask costs less where all keys of a head stay in shared memory
_ROW_MASK_KEYS = 192  # up to which a mask without rows costs less where all keys stay in shared memory

if HAS_GLUON:
    from qframework.kernels.attention.hopper.resident_kernel import kernel as resident
    from qframework.kernels.attention.hopper.stream_kernel import kernel as streaming
    from qframework.kernels.attention.hopper.window_kernel import kernel as windowed


class DenseScales(NamedTuple):
    """Scales ``(1,)`` or ``(heads,)`` fp32 of Q, K, V and of an INT8 result; None where there is none."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    out: Tensor | None = None


def fits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dtype: torch.dtype,
    causal: bool = False,
    bias: DenseBias | None = NO_BIAS,
) -> bool:
    """Whether the kernels compute a dense call, without a bias also its log-sum-exp, and are the faster ones.

    Args:
        q: ``(B, H, N, D)`` int8, or in 16 bit, as the others.
        k: ``(B, Hkv, Nk, D)``.
        v: ``(B, Hkv, Nk, Dv)``.
        dtype: of the result: 16 bit, or int8 for int8 operands.
        causal: whether query ``i`` attends to keys ``0..i`` only, without a bias.
        bias: of :func:`~qframework.kernels.attention.hopper.bias.dense_bias`.
    """
    int8 = q.dtype == torch.int8
    if bias is None or not HAS_GLUON or capability_of(q.device) != (9, 0):
        return False
    wide = causal and not int8 and q.shape[3] == v.shape[3] and q.shape[3] in WIDE and q.shape[2] <= WIDE_QUERIES
    if max(q.shape[3], v.shape[3]) > (MAX_CHANNELS if int8 or bias.is_empty else MAX_SLICED) and not wide:
        return False
    if not q.dtype == k.dtype == v.dtype or (dtype != q.dtype if not int8 else dtype == torch.float32):
        return False
    if not int8 and q.dtype.itemsize != 2:
        return False
    widest = max(q.shape[3], v.shape[3])
    if bias.heights is not None and bias.heights.dtype != q.dtype:
        return False
    if not bias.is_empty and not takes_bias(q.shape[2], k.shape[2], widest, int8, bias.itemsize, bias.columns):
        return False
    whole = v.shape[3] * dtype.itemsize % 16 == 0  # of the result's rows
    return whole and all(specialized.addressable(x) for x in (q, k, v))


def takes_bias(queries: int, keys: int, channels: int, int8: bool, itemsize: int, columns: int = 0) -> bool:
    """Whether a call has a kernel here with a mask of ``itemsize`` bytes for each number, or relative positions."""
    return columns <= MAX_COLUMNS and not plan(1, queries, keys, channels, int8, 1, False, itemsize, columns).stream


def fits_mask(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, row: bool = False) -> bool:
    """Whether the streaming kernel computes a call of :func:`fits` in 16 bit with the blocks of a bool mask.

    ``row``: the mask is the same for all queries, as that of padding.
    """
    (batch, heads, queries, channels), keys = q.shape, k.shape[2]
    if q.dtype == torch.int8 or not fits(q, k, v, dtype, causal=channels in WIDE):
        return False
    return takes_mask(batch, heads, queries, keys, channels, v.shape[3], chip_of(q.device)[1], row)


def takes_mask(
    batch: int, heads: int, queries: int, keys: int, channels: int, values: int, processors: int, row: bool = False
) -> bool:
    """Whether these sizes are large enough for the streaming kernel with a bool mask, whose blocks are a pass more.

    The kernel that keeps all keys of a head skips none, and is faster with few keys.
    """
    widest = max(channels, values)
    large = cdiv(queries, 2 * ROWS) * heads * batch >= processors and min(queries, keys) > BLOCK_N
    if channels in WIDE:
        large = large and min(queries, keys) >= WIDE_MASKED and queries <= WIDE_QUERIES
        return HAS_GLUON and large and channels == values and channels % 8 == 0
    streams = keys > (_ROW_MASK_KEYS if row else _MASK_KEYS) or not takes_bias(queries, keys, widest, False, 2)
    large = large and streams
    return HAS_GLUON and large and widest <= MAX_CHANNELS and channels % 8 == values % 8 == 0


def takes(queries: int, keys: int, channels: int, values: int, itemsize: int, columns: int = 0) -> bool:
    """Whether a call in 16 bit with a mask or relative positions has a kernel here, if its strides can be addressed."""
    widest = max(channels, values)
    whole = channels % 8 == values % 8 == 0 and widest <= MAX_SLICED
    return HAS_GLUON and whole and takes_bias(queries, keys, widest, False, itemsize, columns)


def attention_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: DenseScales,
    logit_scale: float,
    dtype: torch.dtype,
    how: DensePlan | None = None,
    *,
    causal: bool = False,
    bias: DenseBias = NO_BIAS,
    blocks: MaskBlocks | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """``softmax(q k^T logit_scale + bias) v`` with the scales, for operands that :func:`fits` accepts.

    Args:
        q: ``(B, H, N, D)``, see :func:`fits`; with no key there is nothing to compute.
        k: ``(B, Hkv, Nk, D)``.
        v: ``(B, Hkv, Nk, Dv)``.
        scales: dequantize Q, K and V, and quantize an int8 result.
        logit_scale: from ``q k``, dequantized, to logits in base 2.
        dtype: of the result.
        how: by default chosen by :func:`plan_of`.
        causal: query ``i`` attends to keys ``0..i``, without a bias.
        bias: a mask or bias that :func:`fits` accepts with the operands, in natural logits.
        blocks: of a bool mask and of causality, for a call of :func:`fits_mask` with neither here.
        lse: ``(B, H, N)`` float32, contiguous, is overwritten with the natural log-sum-exp of logits; without ``bias``.

    Returns:
        ``(B, H, N, Dv)``, in memory (B, N, H, Dv). A row whose keys are all masked is zero.
    """
    how = how or (plan_masked(q) if blocks is not None else plan_of(q, k, v, bias, causal))
    out = query_memory_order(q.shape[0], q.shape[1], q.shape[2], v.shape[3], q, dtype)
    if how.stream:
        _launch_streaming(q, k, v, scales, logit_scale, out, lse, how, causal, blocks)
    elif how.windows:
        _launch_windows(q, k, v, logit_scale, out, how, bias)
    else:
        _launch_resident(q, k, v, scales, logit_scale, out, lse, how, bias)
    return out


def _form(q: Tensor, k: Tensor, v: Tensor, out: Tensor, how: DensePlan, bias: DenseBias) -> PieceForm:
    """The form of the two kernels that keep all keys of a head."""
    (block_d, rest_d), (block_dv, rest_dv) = slices_of(q.shape[3]), slices_of(v.shape[3])
    int8, pieces = q.dtype == torch.int8, split(k.shape[2])
    return PieceForm(
        block_d,
        block_dv,
        how.warpgroups,
        pieces.first,
        pieces.second,
        halves=int8,
        masked=pieces.masked,
        int8_values=int8,
        whole_values=v.shape[3] == block_dv,
        reuses_query=out.dtype == q.dtype and (block_d, rest_d) == (block_dv, rest_dv),
        added=bias.added,
        step=bias.step,
        columns=bias.columns,
        rest_d=rest_d,
        rest_dv=rest_dv,
        queries=how.queries,
    )


def _launch_windows(
    q: Tensor, k: Tensor, v: Tensor, logit_scale: float, out: Tensor, how: DensePlan, bias: DenseBias
) -> None:
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    form = _form(q, k, v, out, how, bias)
    sizes = (form.first, form.second or form.first)
    launch(windowed, (how.parts,))(
        specialized.describe(q, ROWS, form.block_d),
        *(specialized.describe(k, n, form.block_d) for n in sizes),
        *(specialized.describe(v, n, form.block_dv) for n in sizes),
        specialized.describe(out, ROWS, form.block_dv),
        *bias.arguments,
        logit_scale,
        heads,
        heads // k.shape[1],
        queries,
        keys,
        *bias.sizes,
        batch * heads,
        FORM=form,
        num_warps=4,
        maxnreg=how.registers,
    )


def _launch_resident(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: DenseScales,
    logit_scale: float,
    out: Tensor,
    lse: Tensor | None,
    how: DensePlan,
    bias: DenseBias,
) -> None:
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    form = _form(q, k, v, out, how, bias)
    rows, sizes = ROWS * how.warpgroups, (form.first, form.second or form.first, BLOCK_N)
    descs = []
    for d, dv in ((form.block_d, form.block_dv), (form.rest_d or form.block_d, form.rest_dv or form.block_dv)):
        descs += [specialized.describe(q, rows, d), *(specialized.describe(k, n, d) for n in sizes)]
        descs += [*(specialized.describe(v, n, dv) for n in sizes), specialized.describe(out, rows, dv)]
    launch(resident, (how.parts * heads * batch,))(
        *descs,
        v,
        *v.stride()[:3],
        *scales,
        lse,
        logit_scale,
        heads,
        heads // k.shape[1],
        queries,
        keys,
        v.shape[3],
        how.parts,
        *bias.arguments,
        *bias.sizes,
        *bias.width_arguments,
        _one(logit_scale),
        V_LAYOUT=specialized.layout(form.first, form.block_dv, torch.float16 if form.int8_values else v.dtype),
        PER_HEAD=_per_head(scales),
        FORM=form,
        BLOCKS=split(keys).blocks,
        num_warps=4 * how.warpgroups,
        maxnreg=how.registers,
    )


def streaming_form(
    channels: int,
    values: int,
    queries: int,
    keys: int,
    int8: bool,
    same: bool,
    causal: bool,
    several: bool,
    masked: bool = False,
) -> PieceForm:
    """The streaming kernel's form; ``same``: the result's dtype is that of queries; ``several`` tiles a program."""
    block_d, block_dv = (max(power_of_2(n), 32) for n in (channels, values))
    wide = max(block_d, block_dv) > 64
    pieces = split(keys)
    # With a mask the last block is one of those kept in part, and one form serves all lengths.
    first, second = (HALF, 0) if wide else (HALF, HALF) if causal or masked else (pieces.first, pieces.second)
    return PieceForm(
        block_d,
        block_dv,
        warpgroups=1,
        first=first,
        second=second,
        halves=not wide,
        masked=keys % HALF != 0 if wide else pieces.masked and not masked,
        int8_values=int8,
        whole_values=values == block_dv,
        reuses_query=wide and same and block_d == block_dv,
        causal=causal,
        clipped=causal and queries > keys,
        block_n=HALF if wide else BLOCK_N,
        several=several,
        by_mask=masked,
    )


def _launch_streaming(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: DenseScales,
    logit_scale: float,
    out: Tensor,
    lse: Tensor | None,
    how: DensePlan,
    causal: bool,
    blocks: MaskBlocks | None,
) -> None:
    (batch, heads, queries, channels), keys, values = q.shape, k.shape[2], v.shape[3]
    int8, masked = q.dtype == torch.int8, blocks is not None
    uneven = blocks is not None and blocks.order.shape[2] > 1  # tiles of a head visit different blocks
    tiles = cdiv(queries, 2 * ROWS)
    items = tiles * heads * batch
    form = streaming_form(
        channels, values, queries, keys, int8, out.dtype == q.dtype, causal, how.parts < items, masked
    )
    mask = (None,) * 6 if blocks is None else (blocks.bits, blocks.order, blocks.counts, *blocks.order.shape[:3])
    launch(streaming, (how.parts,))(
        specialized.describe(q, ROWS, form.block_d),
        specialized.describe(k, form.block_n, form.block_d),
        specialized.describe(v, form.block_n, form.block_dv),
        specialized.describe(out, ROWS, form.block_dv),
        *scales,
        lse,
        logit_scale,
        heads,
        heads // k.shape[1],
        queries,
        keys,
        tiles,
        heads_in_turn(batch * heads, tiles, how.parts, specialized.heads_at_once(q, k, v)) if causal or uneven else 1,
        items,
        *mask,
        V_LAYOUT=specialized.layout(form.block_n, form.block_dv, torch.float16 if int8 else v.dtype),
        PER_HEAD=_per_head(scales),
        FORM=form,
        num_warps=4,
        maxnreg=how.registers,
    )


def _per_head(scales: DenseScales) -> tuple[bool, ...]:
    return tuple(scale is not None and scale.numel() > 1 for scale in scales)


def _one(logit_scale: float) -> float:
    """A power of two about the inverse of the natural scale, in float16: factors times its inverse do not overflow."""
    return 2.0 ** min(max(math.ceil(math.log2(LOG2_E / logit_scale)), -14), 15)
