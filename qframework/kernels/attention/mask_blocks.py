"""A bool mask as a kernel of attention reads it: the blocks of keys that a tile of queries attends to, and their bits.

Formula: a block of BLOCK queries and BLOCK keys is kept whole, in part or not at all. A tile of queries visits its
partial blocks, then its whole ones, which need no mask; softmax does not depend on the order. Causality is part of the
mask. A tile that keeps nothing visits block 0, whose bits are all 0.

Layout: ``mask (M, H, N, Nk)``, any strides. One that broadcasts over batch, heads or queries has one entry for all of
them. Bits are stored, and defined, for partial blocks and block 0 alone. Internal to Hopper's attention.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qframework.kernels.runtime.launch import cdiv, launch, power_of_2
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import tl, triton

BLOCK = 128
WORDS = BLOCK // 32
_NONE, _PARTIAL, _WHOLE = (tl.constexpr(n) for n in range(3))


class MaskBlocks(NamedTuple):
    """The blocks of every tile of queries; T is the number of tiles, 1 if the mask broadcasts over queries."""

    bits: Tensor  # (M, H, T, blocks, BLOCK, WORDS) int32: bit j of word w is 1 where key 32 w + j is kept
    order: Tensor  # (M, H, T, blocks) int32: the blocks to visit, partial ones first
    counts: Tensor  # (M, H, T, 2) int32: the number of partial blocks, and of blocks to visit
    seen: Tensor | None  # (M, Hkv or 1, Nk) int32: 1 for a key that some query attends to


@triton.jit(do_not_specialize=["H", "GROUP", "N", "NK", "TILES", "BLOCKS"])
def _classify_kernel(
    mask_ptr,  # (M, H, N, Nk) bool
    bits_ptr,
    kinds_ptr,  # (M, H, T, blocks) int8
    seen_ptr,  # (M, H // GROUP, Nk) int32, zeroed, or None
    H,
    GROUP,  # query heads of a key head; 1 where the mask broadcasts over heads
    N,
    NK,
    TILES,
    BLOCKS,
    stride_m,
    stride_h,
    stride_n,
    stride_k,
    CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Grid (blocks * T * H * M,); one block of the mask."""
    wait_for_previous_kernel(OVERLAP)
    pid = tl.program_id(0).to(tl.int64)
    block, tile, head = (pid % BLOCKS).to(tl.int32), (pid // BLOCKS % TILES).to(tl.int32), pid // BLOCKS // TILES
    row, key = tile * BLOCK + tl.arange(0, BLOCK), block * BLOCK + tl.arange(0, BLOCK)
    inside = (row < N)[:, None] & (key < NK)[None, :]
    ptrs = mask_ptr + head // H * stride_m + head % H * stride_h + row[:, None].to(tl.int64) * stride_n
    kept = tl.load(ptrs + key[None, :] * stride_k, mask=inside, other=0).to(tl.int32)
    if CAUSAL:
        kept = tl.where(key[None, :] <= row[:, None], kept, 0)
    some = tl.max(tl.max(kept, 1), 0)
    every = tl.min(tl.min(tl.where((row < N)[:, None], kept, 1), 1), 0)  # queries beyond the last change nothing
    kind = tl.where(every == 1, _WHOLE, tl.where(some == 1, _PARTIAL, _NONE))
    tl.store(kinds_ptr + pid, kind.to(tl.int8))
    if seen_ptr is not None:
        seen_ptrs = seen_ptr + head // GROUP * NK + key
        tl.atomic_max(seen_ptrs, 1, mask=(tl.max(kept, 0) == 1) & (key < NK), sem="relaxed")
    if kind == _PARTIAL or block == 0:
        words = tl.sum(tl.reshape(kept, (BLOCK, BLOCK // 32, 32)) << tl.arange(0, 32)[None, None, :], 2)
        out = tl.arange(0, BLOCK)[:, None] * (BLOCK // 32) + tl.arange(0, BLOCK // 32)[None, :]
        tl.store(bits_ptr + pid * BLOCK * (BLOCK // 32) + out, words)


@triton.jit(do_not_specialize=["BLOCKS"])
def _order_kernel(
    kinds_ptr,  # (tiles of all heads, blocks) int8
    order_ptr,
    counts_ptr,
    BLOCKS,
    PADDED: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Grid (tiles of all heads,)."""
    wait_for_previous_kernel(OVERLAP)
    tile = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, PADDED)
    kind = tl.load(kinds_ptr + tile * BLOCKS + block, mask=block < BLOCKS, other=0).to(tl.int32)
    kind = tl.where((tl.max(kind, 0) == _NONE) & (block == 0), _PARTIAL, kind)
    partial, whole = (kind == _PARTIAL).to(tl.int32), (kind == _WHOLE).to(tl.int32)
    partials = tl.sum(partial, 0)
    at = tl.where(kind == _PARTIAL, tl.cumsum(partial, 0), partials + tl.cumsum(whole, 0)) - 1
    tl.store(order_ptr + tile * BLOCKS + at, block, mask=kind != _NONE)
    tl.store(counts_ptr + tile * 2, partials)
    tl.store(counts_ptr + tile * 2 + 1, partials + tl.sum(whole, 0))


def mask_blocks_triton(mask: Tensor, queries: int, keys: int, causal: bool, key_heads: int = 0) -> MaskBlocks:
    """The blocks of a bool ``mask``, 4-D, which broadcasts to ``queries`` and ``keys``. Does not synchronize.

    With ``key_heads``, the number of K's heads, also the keys that are seen.
    """
    batch, heads, rows = (1 if mask.shape[i] == 1 or mask.stride(i) == 0 else mask.shape[i] for i in range(3))
    queries = queries if rows > 1 or causal else BLOCK
    mask = mask[:, :, :rows].expand(*mask.shape[:2], queries, keys)
    tiles, blocks = cdiv(queries, BLOCK), cdiv(keys, BLOCK)
    bits, order, counts = (
        torch.empty((batch, heads, tiles, *size), dtype=torch.int32, device=mask.device)
        for size in ((blocks, BLOCK, WORDS), (blocks,), (2,))
    )
    kinds = torch.empty(order.shape, dtype=torch.int8, device=mask.device)
    group = heads // key_heads if key_heads and heads > 1 else 1
    seen = mask.new_zeros((batch, heads // group, keys), dtype=torch.int32) if key_heads else None
    launch(_classify_kernel, (kinds.numel(),))(
        mask, bits, kinds, seen, heads, group, queries, keys, tiles, blocks, *mask.stride(),
        CAUSAL=causal, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    launch(_order_kernel, (kinds.numel() // blocks,))(
        kinds, order, counts, blocks, PADDED=max(power_of_2(blocks), 16), num_warps=1
    )
    return MaskBlocks(bits, order, counts, seen)
