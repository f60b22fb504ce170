"""Packed sequences for specialized_kernel.py: its list of items, and TMA descriptors that end with a sequence.

An item is a tile of queries of a head. Lengths are known to the device alone, so a kernel writes the list: sequences
with the most keys first, so that the programs, which take every n-th item, end at about the same time; then heads, so
that the tiles of a head share its keys in the L2 cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qframework.kernels.attention.mask_blocks import BLOCK
from qframework.kernels.attention.operands import Lengths, sequence_of
from qframework.kernels.runtime.gluon import HAS_GLUON
from qframework.kernels.runtime.launch import cdiv, launch
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import tl, triton

RECORD = 8  # int32 of an item: tile, head, sequence, first query, queries, first key, keys, nothing
EDGE = 2**30  # a packed tensor has fewer tokens
_MOST = 2**31 - 2**16  # the size of dimensions that hold any token
_TURN = 2**34  # EDGE of these elements are 2^64, which addresses leave out

if HAS_GLUON:
    from qframework.kernels.runtime.gluon import TensorDescriptor


@triton.jit(do_not_specialize=["BATCH", "Q_TOTAL", "K_TOTAL", "LONGEST_Q", "LONGEST_K", "WIDTH"])
def _packed_items_kernel(
    q_starts_ptr,  # (B + 1,) int32
    k_starts_ptr,
    items_ptr,  # (1 + items, RECORD) int32: the number of items, then each
    out_ptr,  # (Q_TOTAL, WIDTH), whose rows after the last sequence are cleared
    BATCH,
    H,
    Q_TOTAL,
    K_TOTAL,
    LONGEST_Q,
    LONGEST_K,
    WIDTH,
    CAUSAL: tl.constexpr,
    TILE: tl.constexpr,
    RECORD: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Grid (B,); program b finds its place among the sequences and writes its items."""
    wait_for_previous_kernel(OVERLAP)
    b = tl.program_id(0)
    q_start, queries = sequence_of(q_starts_ptr, b, Q_TOTAL, LONGEST_Q)
    k_start, keys = sequence_of(k_starts_ptr, b, K_TOTAL, LONGEST_K)
    tiles = tl.cdiv(queries, TILE)
    work = tl.minimum(keys, queries) if CAUSAL else keys
    before = 0
    total = 0
    for first in range(0, BATCH, 128):
        other = first + tl.arange(0, 128)
        valid = other < BATCH
        at, next_at = tl.minimum(other, BATCH - 1), tl.minimum(other, BATCH - 1) + 1
        q_from = tl.minimum(tl.maximum(tl.load(q_starts_ptr + at), 0), Q_TOTAL)
        q_to = tl.minimum(tl.maximum(tl.load(q_starts_ptr + next_at), q_from), Q_TOTAL)
        k_from = tl.minimum(tl.maximum(tl.load(k_starts_ptr + at), 0), K_TOTAL)
        k_to = tl.minimum(tl.maximum(tl.load(k_starts_ptr + next_at), k_from), K_TOTAL)
        their_queries, their_work = tl.minimum(q_to - q_from, LONGEST_Q), tl.minimum(k_to - k_from, LONGEST_K)
        if CAUSAL:
            their_work = tl.minimum(their_work, their_queries)
        theirs = tl.where(valid, tl.cdiv(their_queries, TILE), 0)
        earlier = (their_work > work) | ((their_work == work) & (other < b))
        before += tl.sum(tl.where(earlier, theirs, 0), 0)
        total += tl.sum(theirs, 0)
    if b == 0:
        tl.store(items_ptr, total * H)
    column = tl.arange(0, RECORD)
    for start in range(0, tiles * H, 16):
        item = start + tl.arange(0, 16)
        head, tile = item // tiles, tiles - 1 - item % tiles  # under causality the last tile takes longest
        sizes = tl.where(column == 3, q_start.to(tl.int32), tl.where(column == 4, queries, 0))
        sizes = tl.where(column == 5, k_start.to(tl.int32), tl.where(column == 6, keys, sizes))
        sizes = tl.where(column == 2, b, sizes)
        record = tl.where((column == 0)[None, :], tile[:, None], sizes[None, :])
        record = tl.where((column == 1)[None, :], head[:, None], record)
        place = (1 + before * H + item)[:, None] * RECORD + column[None, :]
        tl.store(items_ptr + place, record, mask=(item < tiles * H)[:, None])
    if b == BATCH - 1:
        end = Q_TOTAL.to(tl.int64) * WIDTH
        for cleared in range((q_start + queries) * WIDTH, end, 1024):
            spare = cleared + tl.arange(0, 1024)
            tl.store(out_ptr + spare, 0.0, mask=spare < end)


def most_items(lengths: Lengths, queries: int, heads: int) -> int:
    """An upper bound of the number of items of ``queries`` packed tokens, without reading their lengths."""
    sequences = lengths.q_starts.numel() - 1
    return min(cdiv(queries, BLOCK) + sequences, cdiv(lengths.longest_q, BLOCK) * sequences) * heads


def packed_items_triton(lengths: Lengths, out: Tensor, keys: int, causal: bool) -> Tensor:
    """The items of packed queries, ``(1 + items, RECORD)`` int32; clears rows of ``out`` that belong to no sequence.

    Args:
        lengths: of the sequences; starts that are out of range are clamped, as in the general kernel.
        out: ``(total, H, Dv)``, contiguous.
        keys: all keys in memory.
        causal: whether a query attends to keys up to its own place.
    """
    queries, heads, channels = out.shape
    sequences = lengths.q_starts.numel() - 1
    items = torch.empty((1 + most_items(lengths, queries, heads), RECORD), dtype=torch.int32, device=out.device)
    launch(_packed_items_kernel, (sequences,))(
        lengths.q_starts,
        lengths.k_starts,
        items,
        out,
        sequences,
        heads,
        queries,
        keys,
        lengths.longest_q,
        lengths.longest_k,
        heads * channels,
        CAUSAL=causal,
        TILE=BLOCK,
        RECORD=RECORD,
        num_warps=4,
    )
    return items


def ragged(x: Tensor, rows: int, channels: int, layout: Any) -> Any:
    """Descriptor of packed heads ``(total, H, channels)`` for blocks of ``rows`` tokens that end with a sequence.

    TMA leaves out what is beyond the size of a dimension. Tokens are addressed by two dimensions, the second with EDGE
    tokens: token n of a sequence of L tokens that starts at s is (s + L, EDGE - L + n), so that those from L on are
    outside. A third dimension has coordinate EDGE and the stride 2^34 elements less a token, so that the sum of the
    addresses is right modulo 2^64.
    """
    token, head = x.stride(0), x.stride(1) if x.shape[1] > 1 else 16  # one head may have any stride, TMA needs one
    shape = [_MOST, _MOST, x.shape[1], EDGE, x.shape[2]]
    return TensorDescriptor(x, shape, [_TURN - token, token, head, token, 1], [1, 1, 1, rows, channels], layout)
