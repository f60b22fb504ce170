"""Compile-time choices of the attention kernel, by chip and problem."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


class AttentionTile(NamedTuple):
    """Queries and keys of one step, warps and pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


INTERPRETED = AttentionTile(32, 64, 4, 1)  # small, so that masks and loops show; the reference's block of keys


def choose_attention_tile(
    queries: int, head_dim: int, pv: str, accumulator: str, capability: tuple[int, int]
) -> AttentionTile:
    """Tile for ``queries`` rows of a head; ``capability`` is CUDA's, (0, 0) stands for an AMD GPU.

    A tile of queries divides QUERY_BLOCK, and with an FP16 accumulator a step has 64 keys: both are what the numerics
    promise. Wide heads take fewer keys, so that K and V of two stages fit shared memory.
    """
    block_m = 128 if queries > 64 else 64 if queries > 32 else 32
    block_n = 64 if accumulator == "fp16" or head_dim > 64 or capability[0] < 9 else 128
    wide = head_dim > 128
    if wide:
        block_m, block_n = min(block_m, 64), 32 if pv == "fp32" else 64
    warps = 8 if block_m == 128 and (head_dim > 64 or capability[0] == 9) else 4
    stages = 2 if wide or capability in ((8, 6), (8, 9), (12, 0), (0, 0)) else 3
    return AttentionTile(block_m, block_n, warps, stages)


@functools.lru_cache(1024)
def attention_tile(device: torch.device, queries: int, head_dim: int, pv: str, accumulator: str) -> AttentionTile:
    """:func:`choose_attention_tile` for a device."""
    if device.type != "cuda":
        return INTERPRETED
    capability = (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)
    return choose_attention_tile(queries, head_dim, pv, accumulator, capability)
