"""Dropout of attention's weights; its mask is recomputed from a seed in every pass.

Formula: a weight of query m and key n of a head is dropped where the upper 31 bits of ``mix(a[m] ^ b[n])`` are below
``round(2^31 p)``. ``a`` is the first word of Philox4x32-7 with key ``seed`` and counter ``(m, head, 0, 0)``, ``b`` the
second word for ``(n, head, 0, 0)``, and ``mix`` the finalizer of MurmurHash3 (Appleby 2011), which changes half of the
bits for every bit that differs. A tile thus needs Philox for its rows and columns alone. Weights that are kept are
multiplied by ``1 / (1 - p)``. The mask does not depend on tiles or on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qframework.kernels.runtime.random import philox, philox_ref
from qframework.kernels.runtime.triton import tl, triton

_LEVELS = 2**31
_WORD = 0xFFFFFFFF


def threshold_of(p: float) -> int:
    """Random 31-bit numbers below this are dropped; at most 2^31 - 1."""
    return min(round(p * _LEVELS), _LEVELS - 1)


def factor_of(p: float) -> float:
    """The factor of weights that are kept; 0 if all are dropped."""
    return 0.0 if p >= 1.0 else 1.0 / (1.0 - threshold_of(p) / _LEVELS)


def keep_ref(seed: Tensor, heads: int, queries: Tensor, keys: int, p: float) -> Tensor:
    """Which weights of some ``queries`` are kept, (heads, queries, keys) bool; ``heads`` are those of all sequences."""
    head = torch.arange(heads, device=seed.device)[:, None]
    rows = philox_ref(seed, queries[None, :], head)[0]
    columns = philox_ref(seed, torch.arange(keys, device=seed.device)[None, :], head)[1]
    x = rows[:, :, None] ^ columns[:, None, :]
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _WORD
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _WORD
    return ((x ^ (x >> 16)) >> 1) >= threshold_of(p)


@triton.jit
def query_words(seed, m, head):
    """The random word of each query."""
    a, _, _, _ = philox(seed, m.to(tl.uint32), (m * 0 + head).to(tl.uint32))
    return a


@triton.jit
def key_words(seed, n, head):
    """The random word of each key."""
    _, b, _, _ = philox(seed, n.to(tl.uint32), (n * 0 + head).to(tl.uint32))
    return b


@triton.jit
def kept(a, b, threshold):
    """Which weights are kept, for words of queries and keys that broadcast to a tile."""
    x = a ^ b
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return ((x ^ (x >> 16)) >> 1).to(tl.int32) >= threshold
