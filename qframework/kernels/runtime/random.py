"""Random numbers of kernels: the counter-based generator Philox4x32-7, in Triton and in plain torch, bit for bit.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011).
"""

from __future__ import annotations

import torch
from torch import Tensor

from qframework.kernels.runtime.triton import tl, triton

PHILOX_ROUNDS = (
    7  # the fewest that pass all tests of Salmon et al. (2011); more would take longer than the INT8 traffic
)
_ROUNDS = tl.constexpr(PHILOX_ROUNDS)
_WORD = 0xFFFFFFFF


def philox_ref(seed: Tensor, c0: Tensor, c1: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words of Philox4x32-7 for counters ``(c0, c1, 0, 0)``, int64 tensors below 2^32 that broadcast.

    The 64-bit products may overflow, which leaves
    their bits correct; only the bits are used.
    """
    key0, key1 = int(seed) & _WORD, (int(seed) >> 32) & _WORD
    c0, c1 = torch.broadcast_tensors(c0, c1)
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    for _ in range(PHILOX_ROUNDS):
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((second >> 32) & _WORD) ^ c1 ^ key0, second & _WORD
        c2, c3 = ((first >> 32) & _WORD) ^ c3 ^ key1, first & _WORD
        key0, key1 = (key0 + 0x9E3779B9) & _WORD, (key1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


@triton.jit
def philox(seed, c0, c1):
    """Four words of Philox4x32-7 with counter ``(c0, c1, 0, 0)`` and key ``seed``, as ``philox_ref``.

    Triton's Philox takes two instructions for each 64-bit product, one of them slow.
    """
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c2 = c0 * 0
    c3 = c0 * 0
    for _ in tl.static_range(_ROUNDS):
        first, second = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1 = (second >> 32).to(tl.uint32) ^ c1 ^ k0, second.to(tl.uint32)
        c2, c3 = (first >> 32).to(tl.uint32) ^ c3 ^ k1, first.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3
