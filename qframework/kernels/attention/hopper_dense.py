"""Attention for Hopper without masks, by many small programs: which calls, which of two kernels, and its launch.

hopper_resident_kernel.py keeps all keys of a head in shared memory, hopper_stream_kernel.py lets them pass through, and
may be causal. Heads have up to 64 channels; wider ones leave too few programs per multiprocessor to hide their latency,
but for short causal ones. Scales are one per tensor or head, and their product with the softmax scale must be positive:
maxima are taken before scaling.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qframework.kernels.attention import hopper
from qframework.kernels.attention.hopper_pieces import BLOCK_N, HALF, ROWS, PieceForm
from qframework.kernels.attention.operands import query_memory_order
from qframework.kernels.runtime.chip import capability_of, chip_of
from qframework.kernels.runtime.gluon import HAS_GLUON
from qframework.kernels.runtime.launch import cdiv, launch, power_of_2

MAX_CHANNELS = 64
_WIDE = range(113, 129)  # channels of causal heads in 16 bit that stream as well, in blocks of 64 keys,
_WIDE_QUERIES = 0  # up to so many queries: none, until the version without spills is timed (docs/experiments.md)
_SHARED_BYTES = 227 * 1024  # of a multiprocessor, for all programs
_PROGRAM_BYTES = 2048  # of each for barriers and the system
_REGISTERS = {2: 168, 3: 168, 4: 128}  # per thread, with so many warpgroups at work on a multiprocessor
_FEW_TILES = 16  # INT8: up to so many of a head, programs that stay are faster
_FEW_CAUSAL_TILES = 8  # the same for programs of two tiles under causality
_LOADING = 0.7  # time to load a head's keys and values, in tiles of queries

if HAS_GLUON:
    from qframework.kernels.attention.hopper_resident_kernel import kernel as resident
    from qframework.kernels.attention.hopper_stream_kernel import kernel as streaming
    from qframework.kernels.runtime.gluon import TensorDescriptor


class DenseScales(NamedTuple):
    """DenseScales ``(1,)`` or ``(heads,)`` fp32 of Q, K, V and of an INT8 result; None where there is none."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    out: Tensor | None = None


class Pieces(NamedTuple):
    """How keys are split: ``first`` and ``second`` (0 for none) hold the last keys, after whole blocks of 128."""

    first: int
    second: int
    blocks: int
    masked: bool  # whether the last piece holds more than the last keys


class DensePlan(NamedTuple):
    """How a call is computed."""

    stream: bool
    warpgroups: int  # of a program
    registers: int  # of a thread
    parts: int  # programs of a head, or of the whole grid where keys stream


def fits(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, causal: bool = False) -> bool:
    """Whether the kernels compute a dense call without mask or log-sum-exp, on a Hopper GPU, and are the faster ones.

    Args:
        q: ``(B, H, N, D)`` int8, or in 16 bit, as the others.
        k: ``(B, Hkv, Nk, D)``.
        v: ``(B, Hkv, Nk, Dv)``.
        dtype: of the result: 16 bit, or int8 for int8 operands.
        causal: whether query ``i`` attends to keys ``0..i`` only.
    """
    if not HAS_GLUON or capability_of(q.device) != (9, 0):
        return False
    int8 = q.dtype == torch.int8
    wide = causal and not int8 and q.shape[3] == v.shape[3] and q.shape[3] in _WIDE and q.shape[2] <= _WIDE_QUERIES
    if max(q.shape[3], v.shape[3]) > MAX_CHANNELS and not wide:
        return False
    if not q.dtype == k.dtype == v.dtype or (dtype != q.dtype if not int8 else dtype == torch.float32):
        return False
    if not int8 and q.dtype.itemsize != 2:
        return False
    whole = v.shape[3] * dtype.itemsize % 16 == 0  # of the result's rows
    return whole and all(hopper.addressable(x) for x in (q, k, v))


@functools.cache
def split(keys: int) -> Pieces:
    """Pieces of 16, 32 or 64 keys that hold few more than the keys there are."""
    blocks, before_last = divmod(keys - 1, BLOCK_N)
    rest = before_last + 1
    first = min(max(power_of_2(rest // 2 + 1), 16), HALF)
    if first >= rest:
        return Pieces(first, 0, blocks, first > rest)
    second = max(power_of_2(rest - first), 16)
    if 2 * first <= HALF and second == first:
        first, second = 2 * first, 0
    return Pieces(first, second, blocks, first + second > rest)


@functools.cache
def plan(
    heads: int, queries: int, keys: int, channels: int, int8: bool, processors: int, causal: bool = False
) -> DensePlan:
    """The kernel and its shape for ``heads`` heads of all sequences of a batch.

    The resident kernel needs three or four programs on a multiprocessor to hide their latency. A program takes several
    tiles of queries of a head where there are enough heads, since each program loads the head's keys and values.
    """
    items = cdiv(queries, 2 * ROWS) * heads
    if causal:
        programs = items if channels > MAX_CHANNELS else _causal_programs(items, items // heads, processors)
        return DensePlan(True, 2, _REGISTERS[4], programs)
    pieces = split(keys)
    element = 1 if int8 else 2
    held = pieces.first + pieces.second + pieces.blocks * BLOCK_N
    width = power_of_2(max(channels, 32))
    at_once = min(_SHARED_BYTES // (held * width * (element + 2) + 2 * ROWS * width * element + _PROGRAM_BYTES), 4)
    if at_once >= 3 or pieces.blocks == 0:
        slots = processors * max(at_once, 1)
        parts = min(
            range(1, cdiv(queries, ROWS) + 1),
            key=lambda n: (cdiv(heads * n, slots) * (cdiv(cdiv(queries, ROWS), n) + _LOADING), n),
        )
        return DensePlan(False, 1, _REGISTERS[max(at_once, 2)], parts)
    several = int8 and items // heads <= _FEW_TILES
    return DensePlan(True, 2, _REGISTERS[4], min(items, 2 * processors) if several else items)


def _causal_programs(items: int, tiles: int, processors: int) -> int:
    """Programs for ``items`` tiles, ``tiles`` of each head. Where tiles are short, a program's start counts."""
    if tiles <= 2:
        return min(items, 2 * processors)
    if items > processors and (tiles <= _FEW_CAUSAL_TILES or items <= 2 * processors):
        return cdiv(items, 2)
    return items


def attention_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: DenseScales,
    logit_scale: float,
    dtype: torch.dtype,
    how: DensePlan | None = None,
    causal: bool = False,
) -> Tensor:
    """``softmax(q k^T logit_scale) v`` with the scales, for operands that :func:`fits` accepts.

    Args:
        q: ``(B, H, N, D)``, see :func:`fits`; with no key there is nothing to compute.
        k: ``(B, Hkv, Nk, D)``.
        v: ``(B, Hkv, Nk, Dv)``.
        scales: dequantize Q, K and V, and quantize an int8 result.
        logit_scale: from ``q k``, dequantized, to logits in base 2.
        dtype: of the result.
        how: by default chosen by :func:`plan`.
        causal: query ``i`` attends to keys ``0..i``.

    Returns:
        ``(B, H, N, Dv)``, in memory (B, N, H, Dv).
    """
    (batch, heads, queries, channels), keys, values = q.shape, k.shape[2], v.shape[3]
    widest = max(channels, values)
    processors = chip_of(q.device)[1]
    how = how or plan(batch * heads, queries, keys, widest, q.dtype == torch.int8, processors, causal)
    out = query_memory_order(batch, heads, queries, values, q, dtype)
    if how.stream:
        _launch_streaming(q, k, v, scales, logit_scale, out, how, causal)
    else:
        _launch_resident(q, k, v, scales, logit_scale, out, how)
    return out


def _launch_resident(
    q: Tensor, k: Tensor, v: Tensor, scales: DenseScales, logit_scale: float, out: Tensor, how: DensePlan
) -> None:
    (batch, heads, queries, channels), keys, values = q.shape, k.shape[2], v.shape[3]
    int8 = q.dtype == torch.int8
    pieces = split(keys)
    block_d, block_dv = (max(power_of_2(n), 32) for n in (channels, values))
    rows = ROWS * how.warpgroups
    form = PieceForm(
        block_d,
        block_dv,
        how.warpgroups,
        pieces.first,
        pieces.second,
        halves=int8,
        masked=pieces.masked,
        int8_values=int8,
        whole_values=values == block_dv,
        reuses_query=out.dtype == q.dtype and block_d == block_dv,
    )
    sizes = (pieces.first, pieces.second or pieces.first, BLOCK_N)
    launch(resident, (how.parts * heads * batch,))(
        _describe(q, rows, block_d),
        *(_describe(k, n, block_d) for n in sizes),
        *(_describe(v, n, block_dv) for n in sizes),
        _describe(out, rows, block_dv),
        v,
        *v.stride()[:3],
        *scales,
        logit_scale,
        heads,
        heads // k.shape[1],
        queries,
        keys,
        values,
        how.parts,
        V_LAYOUT=hopper.layout(pieces.first, block_dv, torch.float16 if int8 else v.dtype),
        PER_HEAD=_per_head(scales),
        FORM=form,
        BLOCKS=pieces.blocks,
        num_warps=4 * how.warpgroups,
        maxnreg=how.registers,
    )


def streaming_form(
    channels: int, values: int, queries: int, keys: int, int8: bool, same: bool, causal: bool, several: bool
) -> PieceForm:
    """The streaming kernel's form; ``same``: the result's dtype is that of queries; ``several`` tiles a program."""
    block_d, block_dv = (max(power_of_2(n), 32) for n in (channels, values))
    wide = max(block_d, block_dv) > 64
    pieces = split(keys)
    first, second = (HALF, 0) if wide else (HALF, HALF) if causal else (pieces.first, pieces.second)
    return PieceForm(
        block_d,
        block_dv,
        warpgroups=1,
        first=first,
        second=second,
        halves=not wide,
        masked=keys % HALF != 0 if wide else pieces.masked,
        int8_values=int8,
        whole_values=values == block_dv,
        reuses_query=wide and same and block_d == block_dv,
        causal=causal,
        clipped=causal and queries > keys,
        block_n=HALF if wide else BLOCK_N,
        several=several,
    )


def _launch_streaming(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: DenseScales,
    logit_scale: float,
    out: Tensor,
    how: DensePlan,
    causal: bool,
) -> None:
    (batch, heads, queries, channels), keys, values = q.shape, k.shape[2], v.shape[3]
    int8 = q.dtype == torch.int8
    tiles = cdiv(queries, 2 * ROWS)
    items = tiles * heads * batch
    form = streaming_form(channels, values, queries, keys, int8, out.dtype == q.dtype, causal, how.parts < items)
    launch(streaming, (how.parts,))(
        _describe(q, ROWS, form.block_d),
        _describe(k, form.block_n, form.block_d),
        _describe(v, form.block_n, form.block_dv),
        _describe(out, ROWS, form.block_dv),
        *scales,
        logit_scale,
        heads,
        heads // k.shape[1],
        queries,
        keys,
        tiles,
        hopper.heads_at_once(q, k, v) if causal else 1,
        items,
        V_LAYOUT=hopper.layout(form.block_n, form.block_dv, torch.float16 if int8 else v.dtype),
        PER_HEAD=_per_head(scales),
        FORM=form,
        num_warps=4,
        maxnreg=how.registers,
    )


def _per_head(scales: DenseScales) -> tuple[bool, ...]:
    return tuple(scale is not None and scale.numel() > 1 for scale in scales)


def _describe(x: Tensor, rows: int, channels: int) -> Any:
    """Gluon's descriptor of heads ``(B, H, N, D)``, for blocks of ``rows`` tokens of a head."""
    block = [1, 1, rows, channels]
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, hopper.layout(rows, channels, x.dtype))
