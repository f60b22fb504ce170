"""The variant that ``"auto"`` selects: the fastest of those that are accurate for any input, as far as measured."""

from __future__ import annotations

from torch import Tensor

from qframework.kernels.attention import hopper
from qframework.kernels.attention.variants import FAST_FP16_SUMS, VARIANTS, AttentionVariant
from qframework.kernels.runtime.chip import capability_of

LONG = 2048  # keys from which formats with fewer bits are faster

# On data-center chips FP16 accumulation is no faster, and may overflow. A block of keys loads one scale per warp.
_16_BIT = AttentionVariant(8, "per_block", "fp16", "fp32").spec
_FP8 = AttentionVariant(8, "per_warp", "fp8", "fp32").spec


def choose_variant(q: Tensor, k: Tensor, v: Tensor, keys: int, plain: bool) -> str:
    """The name or spec for these queries, keys and values.

    FP8 products need compute capability 8.9 and are faster for long sequences only. INT4 is emulated and never fastest.

    On Hopper, quantizing Q and K takes longer than it saves, except with the integer exponential for long sequences.
    Its kernel (``hopper.py``) computes ``plain`` calls only: dense, without mask, bias or log-sum-exp. FP32 operands
    are quantized on every chip.

    Args:
        q: ``(B, H, N, D)``; it may be packed, as K and V, if the call is not plain.
        k: ``(B, Hkv, Nk, D)``.
        v: ``(B, Hkv, Nk, Dv)``.
        keys: the number of keys of the longest sequence.
        plain: whether the call is plain, see above.
    """
    capability = capability_of(q.device)
    if capability is None:
        return _16_BIT
    if capability == (9, 0) and q.dtype.itemsize == 2:
        integer = VARIANTS["integer_exp"]
        long = plain and min(q.shape[2], keys) >= LONG
        fast = long and hopper.fits(q, k, v, integer, q.dtype, capability)
        return (integer if fast else VARIANTS["unquantized"]).spec
    if keys < LONG:
        return _16_BIT
    if capability in FAST_FP16_SUMS and capability >= (8, 9):
        return "sage2pp_int8"  # FP16 accumulation doubles the rate of FP8 there
    return _FP8 if capability >= (9, 0) else _16_BIT
