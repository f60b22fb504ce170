"""A bool mask as a kernel of attention reads it: the blocks of keys that a tile of queries attends to, and their bits.

Formula: a block of BLOCK queries and BLOCK keys is kept whole, in part or not at all. A tile of queries visits its
partial blocks, then its whole ones, which need no mask; softmax does not depend on the order. Causality is part of the
mask. A tile that keeps nothing visits block 0, whose bits are all 0. A block of the queries' own places that keeps what
causality would is visited first: kernels that know such blocks mask it without bits.

Layout: ``mask (M, H, N, Nk)``, any strides. One that broadcasts over batch, heads or queries has one entry for all of
them. Bits are stored, and defined, for partial blocks and block 0 alone. Hopper's attention finds them itself, or takes
them from the operator ``qframework::mask_blocks``, so that the layers of a compiled model share those of their mask.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qframework.errors import QFrameworkError
from qframework.kernels.runtime.checks import check_dtype
from qframework.kernels.runtime.chip import check_device
from qframework.kernels.runtime.launch import cdiv, launch, power_of_2
from qframework.kernels.runtime.operator import declare
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import tl, triton

BLOCK = 128
WORDS = BLOCK // 32
_ROW_BLOCKS = 64  # of a mask that broadcasts over queries, up to which one program reads all of them
_NONE, _PARTIAL, _WHOLE, _OWN = (tl.constexpr(n) for n in range(4))


class MaskBlocks(NamedTuple):
    """The blocks of every tile of queries; T is the number of tiles, 1 if the mask broadcasts over queries."""

    bits: Tensor  # (M, H, T, blocks, BLOCK, WORDS) int32: bit j of word w is 1 where key 32 w + j is kept
    order: Tensor  # (M, H, T, blocks) int32: the blocks to visit, partial ones first
    counts: Tensor  # (M, H, T, 3) int32: partial blocks, blocks to visit, whether the first is causal, of own places
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
    if (kind == _PARTIAL) & (block == tile) & (N <= NK):
        as_causal = (kept == (key[None, :] <= row[:, None]).to(tl.int32)) | (row >= N)[:, None]
        kind = tl.where(tl.min(tl.min(as_causal.to(tl.int32), 1), 0) == 1, _OWN, kind)
    tl.store(kinds_ptr + pid, kind.to(tl.int8))
    if seen_ptr is not None:
        seen_ptrs = seen_ptr + head // GROUP * NK + key
        tl.atomic_max(seen_ptrs, 1, mask=(tl.max(kept, 0) == 1) & (key < NK), sem="relaxed")
    if kind == _PARTIAL or kind == _OWN or block == 0:  # noqa: SIM109  (no tuples in kernels)
        words = tl.sum(tl.reshape(kept, (BLOCK, BLOCK // 32, 32)) << tl.arange(0, 32)[None, None, :], 2)
        out = tl.arange(0, BLOCK)[:, None] * (BLOCK // 32) + tl.arange(0, BLOCK // 32)[None, :]
        tl.store(bits_ptr + pid * BLOCK * (BLOCK // 32) + out, words)


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _joined(four, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Bits (ROWS, WORDS) of (ROWS, 8 WORDS) words of four bools, which a multiplication brings together."""
    bits = (four * 0x01020408 >> 24) & 15
    place = tl.arange(0, 8) * 4
    return tl.sum(tl.reshape(bits, (ROWS, WORDS, 8)) << place[None, None, :], 2)


@triton.jit
def _kept_words(mask_ptr, row, key, N, NK, stride_n, CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    """Bits (BLOCK, WORDS) of the rows ``row`` (BLOCK,) and the keys from ``key`` on, a multiple of 4 of which exist."""
    QUADS: tl.constexpr = BLOCK // 4
    WORDS: tl.constexpr = BLOCK // 32
    quad = key // 4 + tl.arange(0, QUADS)
    inside = (row < N)[:, None] & (quad * 4 < NK)[None, :]
    four = tl.load(mask_ptr + row[:, None].to(tl.int64) * stride_n + quad[None, :], mask=inside, other=0)
    words = _joined(four, BLOCK, WORDS)
    if CAUSAL:
        words = words & _causal_words(row, key, WORDS)
    return words


@triton.jit
def _causal_words(row, key, WORDS: tl.constexpr):
    """The bits of keys from ``key`` on up to each row's own place."""
    count = row[:, None] + 1 - key - 32 * tl.arange(0, WORDS)[None, :]
    some = (1 << tl.minimum(tl.maximum(count, 0), 31)) - 1
    return tl.where(count >= 32, -1, some)


@triton.jit
def _kind_of_words(words, row, key, N, NK, own, BLOCK: tl.constexpr):
    """The kind of a block; ``own``: whether it is that of the queries' own places."""
    WORDS: tl.constexpr = BLOCK // 32
    there = (row < N)[:, None] & (words == words)
    found = tl.where(words != 0, 1, 0) | tl.where((words != -1) & there, 2, 0)
    found |= tl.where((words != _causal_words(row, key, WORDS)) & there, 4, 0)
    found = tl.reduce(tl.reshape(found, (BLOCK * WORDS,)), 0, _either)
    partial = tl.where((found & 4 == 0) & own & (N <= NK), _OWN, _PARTIAL)
    return tl.where(found & 2 == 0, _WHOLE, tl.where(found & 1 == 1, partial, _NONE))


@triton.jit(do_not_specialize=["H", "N", "NK", "TILES", "BLOCKS"])
def _words_kernel(
    mask_ptr,  # (M, H, N, Nk / 4) int32, four bools each
    bits_ptr,
    kinds_ptr,  # (M, H, T, blocks) int8
    H,
    N,
    NK,  # a multiple of 4
    TILES,
    BLOCKS,
    stride_m,
    stride_h,
    stride_n,
    CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """As _classify_kernel without ``seen``, faster."""
    wait_for_previous_kernel(OVERLAP)
    WORDS: tl.constexpr = BLOCK // 32
    pid = tl.program_id(0).to(tl.int64)
    block, entry = (pid % BLOCKS).to(tl.int32), pid // BLOCKS
    tile, head = (entry % TILES).to(tl.int32), entry // TILES
    base = mask_ptr + head // H * stride_m + head % H * stride_h
    row, key = tile * BLOCK + tl.arange(0, BLOCK), block * BLOCK
    words = _kept_words(base, row, key, N, NK, stride_n, CAUSAL, BLOCK)
    kind = _kind_of_words(words, row, key, N, NK, tile == block, BLOCK)
    tl.store(kinds_ptr + pid, kind.to(tl.int8))
    stored = (words == words) & ((kind == _PARTIAL) | (kind == _OWN) | (block == 0))
    place = tl.arange(0, BLOCK)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    tl.store(bits_ptr + pid * (BLOCK * WORDS) + place, words, mask=stored)


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
    _store_order(kind, block, order_ptr + tile * BLOCKS, counts_ptr + tile * 3)


@triton.jit(do_not_specialize=["H", "GROUP", "NK", "BLOCKS"])
def _row_kernel(
    mask_ptr,  # (M, H, 1, Nk) bool
    bits_ptr,
    order_ptr,
    counts_ptr,
    seen_ptr,  # as in _classify_kernel, with the next two
    H,
    GROUP,
    NK,
    BLOCKS,
    stride_m,
    stride_h,
    stride_k,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    QUADS: tl.constexpr = False,  # the mask is (M, H, 1, Nk / 4) int32, four bools each, and there is no `seen`
    OVERLAP: tl.constexpr = False,
):
    """Grid (H * M,); all blocks of a mask that broadcasts over queries, such as that of padding, in one launch."""
    wait_for_previous_kernel(OVERLAP)
    WORDS: tl.constexpr = BLOCK // 32
    head = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, PADDED)
    base = mask_ptr + head // H * stride_m + head % H * stride_h
    if QUADS:
        quad = block[:, None] * (BLOCK // 4) + tl.arange(0, BLOCK // 4)[None, :]
        words = _joined(tl.load(base + quad, mask=quad * 4 < NK, other=0), PADDED, WORDS)
        found = tl.where(words != 0, 1, 0) | tl.where(words != -1, 2, 0)
        found = tl.reduce(found, 1, _either)
        kind = tl.where(found & 2 == 0, _WHOLE, tl.where(found & 1 == 1, _PARTIAL, _NONE))
    else:
        key = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        kept = tl.load(base + key.to(tl.int64) * stride_k, mask=key < NK, other=0).to(tl.int32)
        kind = tl.where(tl.min(kept, 1) == 1, _WHOLE, tl.where(tl.max(kept, 1) == 1, _PARTIAL, _NONE))
        if seen_ptr is not None:
            tl.atomic_max(seen_ptr + head // GROUP * NK + key, 1, mask=kept == 1, sem="relaxed")
        words = tl.sum(tl.reshape(kept, (PADDED, WORDS, 32)) << tl.arange(0, 32)[None, None, :], 2)
    _store_order(kind, block, order_ptr + head * BLOCKS, counts_ptr + head * 3)
    first = (bits_ptr + (head * BLOCKS + block) * (BLOCK * WORDS))[:, None, None]
    stored = ((kind == _PARTIAL) | (block == 0))[:, None, None]
    for start in tl.static_range(0, BLOCK, 32):
        row = start + tl.arange(0, 32)
        place = row[None, :, None] * WORDS + tl.arange(0, WORDS)[None, None, :]
        copies = tl.broadcast_to(words[:, None, :], (PADDED, 32, WORDS))
        tl.store(first + place, copies, mask=stored & (copies == copies))


@triton.jit
def _store_order(kind, block, order_ptr, counts_ptr):
    """The order and the counts of a tile, of the kinds of its blocks."""
    kind = tl.where((tl.max(kind, 0) == _NONE) & (block == 0), _PARTIAL, kind)
    partial, whole = (kind == _PARTIAL).to(tl.int32), (kind == _WHOLE).to(tl.int32)
    own = tl.max((kind == _OWN).to(tl.int32), 0)
    partials = own + tl.sum(partial, 0)
    at = tl.where(kind == _PARTIAL, own + tl.cumsum(partial, 0), partials + tl.cumsum(whole, 0)) - 1
    tl.store(order_ptr + tl.where(kind == _OWN, 0, at), block, mask=kind != _NONE)
    tl.store(counts_ptr, partials)
    tl.store(counts_ptr + 1, partials + tl.sum(whole, 0))
    tl.store(counts_ptr + 2, own)


class MaskSizes(NamedTuple):
    """Sizes of a 4-D mask, 1 where it broadcasts or repeats itself (stride 0)."""

    batch: int
    heads: int
    rows: int

    @staticmethod
    def of(mask: Tensor) -> MaskSizes:
        return MaskSizes(*(1 if mask.shape[i] == 1 or mask.stride(i) == 0 else mask.shape[i] for i in range(3)))


def _group(heads: int, key_heads: int) -> int:
    """Query heads of the mask for each head of keys that are seen."""
    return heads // key_heads if key_heads and heads > 1 else 1


def mask_blocks_ref(
    mask: Tensor, queries: int, keys: int, causal: bool, key_heads: int = 0, sizes: MaskSizes | None = None
) -> MaskBlocks:
    """:func:`mask_blocks_triton` in torch. It stores the bits of all blocks."""
    batch, heads, rows = sizes or MaskSizes.of(mask)
    queries = queries if rows > 1 or causal else BLOCK
    tiles, blocks = cdiv(queries, BLOCK), cdiv(keys, BLOCK)
    mask = mask[:batch, :heads, :rows].expand(batch, heads, queries, keys)
    if causal:
        mask = mask & mask.new_ones(queries, keys).tril()
    kept = mask.new_zeros(batch, heads, tiles * BLOCK, blocks * BLOCK)
    kept[:, :, :queries, :keys] = mask
    kept = kept.view(batch, heads, tiles, BLOCK, blocks, BLOCK).transpose(3, 4)
    beyond = (torch.arange(tiles * BLOCK, device=mask.device) >= queries).view(tiles, 1, BLOCK, 1)
    whole = (kept | beyond).flatten(-2).all(-1)
    partial = kept.flatten(-2).any(-1) & ~whole
    own = torch.zeros_like(partial)
    for tile in range(min(tiles, blocks) if queries <= keys else 0):
        as_causal = (kept[..., tile, tile, :, :] == mask.new_ones(BLOCK, BLOCK).tril()) | beyond[tile]
        own[..., tile, tile] = partial[..., tile, tile] & as_causal.flatten(-2).all(-1)
    partial[..., 0] |= ~(whole | partial).any(-1)
    rank = 2 - 2 * partial.to(torch.int32) - whole.to(torch.int32) - own.to(torch.int32)
    order = rank.argsort(dim=-1, stable=True).to(torch.int32)
    counts = torch.stack([partial.sum(-1), (partial | whole).sum(-1), own.any(-1)], -1).to(torch.int32)
    words = kept.unflatten(-1, (WORDS, 32)).long() << torch.arange(32, device=mask.device)
    bits = words.sum(-1)
    bits = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32)
    seen = None
    if key_heads:
        seen = mask.unflatten(1, (-1, _group(heads, key_heads))).any(2).any(2).to(torch.int32)
    return MaskBlocks(bits.contiguous(), order, counts, seen)


def mask_blocks_triton(
    mask: Tensor, queries: int, keys: int, causal: bool, key_heads: int = 0, sizes: MaskSizes | None = None
) -> MaskBlocks:
    """The blocks of a bool ``mask``, 4-D, which broadcasts to ``queries`` and ``keys``. Does not synchronize.

    With ``key_heads``, the number of K's heads, also the keys that are seen. ``sizes`` tells what the mask repeats,
    where its strides do not.
    """
    batch, heads, rows = sizes or MaskSizes.of(mask)
    queries = queries if rows > 1 or causal else BLOCK
    mask = mask[:, :, :rows].expand(*mask.shape[:2], queries, keys)
    blocks = cdiv(keys, BLOCK)
    found = _empty_blocks(mask, MaskSizes(batch, heads, rows), queries, keys)
    group = _group(heads, key_heads)
    seen = mask.new_zeros((batch, heads // group, keys), dtype=torch.int32) if key_heads else None
    quads = _quads(mask) if seen is None else None
    if found.order.shape[2] == 1 and rows == 1 and not causal and blocks <= _ROW_BLOCKS:
        read = mask if quads is None else quads
        launch(_row_kernel, (batch * heads,))(
            read, *found[:3], seen, heads, group, keys, blocks, *read.stride()[:2], read.stride(3),
            PADDED=max(power_of_2(blocks), 16), BLOCK=BLOCK, QUADS=quads is not None, num_warps=8,
        )  # fmt: skip
        return found._replace(seen=seen)
    kinds = torch.empty(found.order.shape, dtype=torch.int8, device=mask.device)
    if quads is not None:
        launch(_words_kernel, (kinds.numel(),))(
            quads, found.bits, kinds, heads, queries, keys, kinds.shape[2], blocks, *quads.stride()[:3], CAUSAL=causal,
            BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    else:
        launch(_classify_kernel, (kinds.numel(),))(
            mask, found.bits, kinds, seen, heads, group, queries, keys, kinds.shape[2], blocks, *mask.stride(),
            CAUSAL=causal, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    launch(_order_kernel, (kinds.numel() // blocks,))(
        kinds, found.order, found.counts, blocks, PADDED=max(power_of_2(blocks), 16), num_warps=1
    )
    return found._replace(seen=seen)


def _quads(mask: Tensor) -> Tensor | None:
    """The mask in words of four bools, or None where its keys, strides or address are no multiples of them."""
    strides = mask.stride(3) == 1 and all(stride % 4 == 0 for stride in mask.stride()[:3])
    return mask.view(torch.int32) if strides and mask.shape[3] % 4 == 0 and mask.data_ptr() % 16 == 0 else None


def _empty_blocks(like: Tensor, sizes: MaskSizes, queries: int, keys: int) -> MaskBlocks:
    """Uninitialized, for tiles of so many queries."""
    blocks = cdiv(keys, BLOCK)
    tiles = (sizes.batch, sizes.heads, cdiv(queries, BLOCK))
    bits, order, counts = (
        torch.empty((*tiles, *size), dtype=torch.int32, device=like.device)
        for size in ((blocks, BLOCK, WORDS), (blocks,), (3,))
    )
    return MaskBlocks(bits, order, counts, None)


class MaskBlocksArguments(NamedTuple):
    """The arguments of ``qframework::mask_blocks``.

    Its results are the fields of :class:`MaskBlocks`; ``seen`` has no elements with ``key_heads`` 0.
    """

    mask: Tensor  # bool, up to 4-D
    sizes: list[int]  # MaskSizes: a compiler may copy what an expanded mask repeats
    queries: int
    keys: int
    is_causal: bool = False
    key_heads: int = 0

    def check(self) -> None:
        """Raise QFrameworkError for an invalid argument."""
        check_dtype("mask_blocks", "mask", self.mask, (torch.bool,))
        limits = (*[1] * (4 - self.mask.ndim), *self.mask.shape)
        broadcasts = len(limits) == 4 and limits[2] in (1, self.queries) and limits[3] in (1, self.keys)
        if not broadcasts:
            raise QFrameworkError(
                f"mask_blocks: mask must have up to 4 dimensions that broadcast to {self.queries} queries and "
                f"{self.keys} keys, got shape {tuple(self.mask.shape)}"
            )
        if len(self.sizes) != 3 or any(size not in (1, limit) for size, limit in zip(self.sizes, limits, strict=False)):
            raise QFrameworkError(f"mask_blocks: sizes must be 1 or those of the mask {limits[:3]}, got {self.sizes}")
        if self.key_heads and self.sizes[1] > 1 and self.sizes[1] % self.key_heads:
            raise QFrameworkError(
                f"mask_blocks: key_heads must divide the mask's {self.sizes[1]} heads, got {self.key_heads}"
            )

    @property
    def given(self) -> tuple[Tensor, int, int, bool, int, MaskSizes]:
        """The arguments of both implementations."""
        mask = self.mask.reshape(*[1] * (4 - self.mask.ndim), *self.mask.shape)
        return mask, self.queries, self.keys, self.is_causal, self.key_heads, MaskSizes(*self.sizes)

    def empty_result(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Uninitialized results."""
        sizes = MaskSizes(*self.sizes)
        found = _empty_blocks(self.mask, sizes, self.queries if sizes.rows > 1 or self.is_causal else BLOCK, self.keys)
        shape = (sizes.batch, sizes.heads // _group(sizes.heads, self.key_heads), self.keys) if self.key_heads else (0,)
        return *found[:3], self.mask.new_empty(shape, dtype=torch.int32)


def _results(found: MaskBlocks) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *found[:3], found.counts.new_empty(0) if found.seen is None else found.seen


def _mask_blocks_cuda(x: MaskBlocksArguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_device(x.mask.device)
    return _results(mask_blocks_triton(*x.given))


MASK_BLOCKS = declare(
    "mask_blocks(Tensor mask, int[] sizes, int queries, int keys, bool is_causal=False, int key_heads=0) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    MaskBlocksArguments,
    cpu=lambda x: _results(mask_blocks_ref(*x.given)),
    cuda=_mask_blocks_cuda,
    fake=MaskBlocksArguments.empty_result,
)
