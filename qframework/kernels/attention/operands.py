"""Operands of the attention kernels: heads in dense or packed (variable-length) tensors, strides, scales."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qframework.errors import UnsupportedError
from qframework.kernels.attention.mask_blocks import MaskBlocks
from qframework.kernels.attention.variants import KEYS_PER_FP16_SUM, AttentionVariant, fp8_ranges
from qframework.kernels.runtime.triton import tl, triton

_MAX_OFFSET = 2**31 - 1
LOG2_E = math.log2(math.e)


class AttentionShape(NamedTuple):
    """Sizes of a tensor of heads: dense ``(B, H, N, D)``, or packed ``(total, H, D)`` with ``starts (B + 1,)`` int32.

    ``tokens`` is N, or the longest sequence when packed; ``total`` the tokens of all sequences, N when dense.
    """

    batch: int
    heads: int
    tokens: int
    channels: int
    starts: Tensor | None = None
    total: int = 0

    @classmethod
    def of(cls, x: Tensor, starts: Tensor | None = None, longest: int = 0) -> AttentionShape:
        """Sizes of ``x``; ``starts`` and ``longest`` belong to a packed tensor."""
        if starts is None:
            batch, heads, tokens, channels = x.shape
            return cls(batch, heads, tokens, channels, total=tokens)
        return cls(starts.numel() - 1, x.shape[1], longest, x.shape[2], starts, x.shape[0])

    def strides(self, x: Tensor) -> tuple[int, int, int]:
        """Strides of batch, head and token in elements; a batch stride of 0 for packed tensors."""
        if self.starts is None:
            return x.stride(0), x.stride(1), x.stride(2)
        return 0, x.stride(1), x.stride(0)


def last_contiguous(x: Tensor) -> Tensor:
    """``x`` itself where its last dimension is contiguous, else a contiguous copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def check_offsets(operator: str, **tensors: Tensor) -> None:
    """Raise UnsupportedError where a head spans more than 2**31 elements: kernels use 32-bit offsets within a head."""
    for name, x in tensors.items():
        token = -2 if x.ndim == 4 else 0
        span = (x.shape[token] - 1) * x.stride(token) if x.shape[token] else 0
        if span > _MAX_OFFSET:
            raise UnsupportedError(
                f"{operator}: the tokens of {name} must span at most {_MAX_OFFSET} elements, got {span} with shape "
                f"{tuple(x.shape)} and strides {x.stride()}. Make it contiguous."
            )


def query_memory_order(batch: int, heads: int, tokens: int, channels: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """An uninitialized (B, H, N, D) with memory order (B, N, H, D), so that merging the heads is a view."""
    return like.new_empty((batch, tokens, heads, channels), dtype=dtype).transpose(1, 2)


@triton.jit
def sequence_of(starts_ptr, b, TOTAL, LONGEST):
    """Start and length of packed sequence ``b``, clamped to the tensor and to the longest length of the launch."""
    start = tl.minimum(tl.maximum(tl.load(starts_ptr + b), 0), TOTAL)
    end = tl.minimum(tl.maximum(tl.load(starts_ptr + b + 1), start), TOTAL)
    return start.to(tl.int64), tl.minimum(end - start, LONGEST)


class QuantizedQK(NamedTuple):
    """Queries and keys as integers with their scales, and smooth Q's exact logits of each block of queries.

    Variants that multiply Q and K in 16 bit have them here as they are, without scales.
    """

    q: Tensor  # (B, H, N, D) int8, or half the channels for INT4; packed (total, H, D) with variable lengths
    q_scale: Tensor | None  # (B, H, Gq) fp32; None: q is float, and the kernel quantizes it
    k: Tensor  # (B, Hkv, Nk, D) int8
    k_scale: Tensor | None  # (B, Hkv, Gk) fp32
    channels: int  # D, which INT4 halves
    row_bias: Tensor | None = None  # (B, H, ceil(N / QUERY_BLOCK), Nk) fp32, base-2 logits
    offsets: Tensor | None = None  # (B, H, N) fp32, base-2 logits of each query and K's mean, below a soft cap
    k_norm: Tensor | None = None  # (B, Hkv) fp32, the largest norm of a key, for the integer exponential on Hopper
    factor: float = 1.0  # from products, times the scales, to base-2 logits; 1 where it is folded into the scales
    marked: bool = True  # a row of q that starts with -qmax - 1 stands for NaN; False for q of other quantizers


class Values(NamedTuple):
    """Values as the second product reads them."""

    v: Tensor  # (B, Hkv, Nk, Dv), or (B, Hkv, Dv, P) when `transposed`
    scale: Tensor | None = None  # (B, Hkv, Dv) fp32 per channel, or (B, Hkv, 1)
    mean: Tensor | None = None  # (B, Hkv, Dv) fp32, smooth V
    paired: bool = False  # the keys of `transposed` values are in the order variants.PAIRED, for Hopper's kernel

    def channels(self, transposed: bool) -> int:
        return self.v.shape[-2 if transposed else -1]


class Lengths(NamedTuple):
    """Packed sequences: where each starts, ``(B + 1,)`` int32, and the longest."""

    q_starts: Tensor
    k_starts: Tensor
    longest_q: int
    longest_k: int


class Bias(NamedTuple):
    """What becomes of the logits Q K^T: they are capped, if at all, and then masks and biases are added."""

    mask: Tensor | None = None  # bool or float, (M, H, N, Nk); batch b uses b % M, other dimensions of 1 broadcast
    rel_h: Tensor | None = None  # (B, H, N, Kh)
    rel_w: Tensor | None = None  # (B, H, N, Kw)
    causal: bool = False
    blocks: MaskBlocks | None = None  # those of the mask with causality, where they were computed already
    softcap: float | None = None  # logits s become softcap * tanh(s / softcap)

    @property
    def only_bool(self) -> bool:
        """Whether keys are left out at most, and nothing is added to the logits."""
        return self.rel_h is None and (self.mask is None or self.mask.dtype == torch.bool)

    @property
    def adds_nothing(self) -> bool:
        """Whether there is neither a mask nor relative positions; there may be causality."""
        return self.mask is None and self.rel_h is None

    def masks_of(self, batch: int) -> Tensor | None:
        """The mask with a batch of 1 or ``batch``."""
        if self.mask is None or self.mask.shape[0] in (1, batch):
            return self.mask
        return self.mask.repeat(batch // self.mask.shape[0], 1, 1, 1)


def transposes_values(pv: str) -> bool:
    """8-bit products read V along the tokens."""
    return pv in ("int8", "fp8")


def p_range(variant: AttentionVariant) -> float:
    """The quantized value of 1 in P. It is 1/64 for FP16 sums over a block of keys, so that they do not exceed V."""
    if variant.pv == "fp8":
        return fp8_ranges(variant.accumulator)[0]
    if variant.pv == "int8":
        return 127.0
    return 1.0 / KEYS_PER_FP16_SUM if variant.accumulator == "fp16" else 1.0


LINEAR_EXCESS = -1 - 2 * math.log2(math.log(2))
"""Octaves by which weights with a linear mantissa exceed exact ones on average, 0.058: ``(1 + f) / 2^f`` is
``1 / (2 ln(2)^2)`` in the mean of f from 0 to 1."""


def lse_shift(variant: AttentionVariant) -> float:
    """Octaves by which the sum of a row's weights exceeds that of its exponentials, on average."""
    return math.log2(p_range(variant)) + (LINEAR_EXCESS if variant.exponential == "integer" else 0.0)
