"""Tiles of the attention kernel, by chip and problem."""

from __future__ import annotations

from typing import NamedTuple

import torch

from qframework.kernels.runtime.chip import capability_of


class AttentionTile(NamedTuple):
    """Queries and keys of one step, warps and pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def holding(self, span: int) -> AttentionTile:
        """The tile with at least ``span`` rows, so that it holds whole groups of queries."""
        if self.block_m >= span:
            return self
        return self._replace(block_m=span, num_warps=8 if span >= 128 else self.num_warps)


INTERPRETED = AttentionTile(32, 64, 4, 1)  # small, to exercise masks and loops; the reference's block of keys


def choose_attention_tile(queries: int, head_dim: int, pv: str, capability: tuple[int, int]) -> AttentionTile:
    """Tile for ``queries`` rows of a head; ``capability`` is CUDA's.

    The numerics require tiles of queries that divide QUERY_BLOCK and steps of at most KEYS_PER_FP16_SUM keys. Wide
    heads use fewer rows, so that the accumulator stays in registers.
    """
    if head_dim > 128:
        return AttentionTile(64 if queries > 32 else 32, 32 if pv == "fp32" else 64, 4, 2)
    if queries <= 32:
        return AttentionTile(32, 64, 4, 2)
    if capability[0] == 9:  # swept on an H100: two small programs hide each other's softmax better than one large one
        if head_dim > 64 and pv == "fp16" and queries > 64:
            return AttentionTile(128, 64, 8, 3)  # 4 warps spill registers, most with a mask or a bias
        return AttentionTile(64, 64, 4, 3)
    stages = 2 if capability in ((8, 6), (8, 9), (12, 0), (12, 1)) else 3
    return AttentionTile(128 if queries > 64 else 64, 64, 8 if head_dim > 64 and queries > 64 else 4, stages)


def attention_tile(device: torch.device, queries: int, head_dim: int, pv: str) -> AttentionTile:
    """:func:`choose_attention_tile` for a device."""
    capability = capability_of(device)
    return INTERPRETED if capability is None else choose_attention_tile(queries, head_dim, pv, capability)
