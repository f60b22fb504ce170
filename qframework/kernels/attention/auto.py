"""What ``"auto"`` selects: the fastest that is accurate for any input, as far as measured, PyTorch's kernel included.

:func:`pytorch_is_faster` decides between PyTorch's attention and this package's, :func:`choose_variant` among variants.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from qframework.kernels.attention.hopper import dense as hopper_dense
from qframework.kernels.attention.hopper import dense_plan as hopper_dense_plan
from qframework.kernels.attention.hopper import packed as hopper_packed
from qframework.kernels.attention.hopper import specialized
from qframework.kernels.attention.operands import Bias, Lengths
from qframework.kernels.attention.variants import (
    FAST_FP16_SUMS,
    QUERY_BLOCK,
    VARIANTS,
    AttentionVariant,
    fits_hopper,
    resolve,
)
from qframework.kernels.runtime.ahead import stood_for
from qframework.kernels.runtime.chip import capability_of, chip_of
from qframework.kernels.runtime.launch import power_of_2

LONG = 2048  # keys from which formats with fewer bits are faster
LONG_MASKED = 8192  # with a mask, which may leave few of them

# On data-center chips FP16 accumulation is no faster, and may overflow. A block of keys loads one scale per warp.
_16_BIT = AttentionVariant(8, "per_block", "fp16", "fp32").spec
_FP8 = AttentionVariant(8, "per_warp", "fp8", "fp32").spec


def choose_variant(q: Tensor, k: Tensor, v: Tensor, keys: int, plain: bool, masked: bool = False) -> str:
    """The name or spec for these queries, keys and values.

    FP8 products need compute capability 8.9 and are faster for long sequences only. INT4 is emulated and never fastest.

    On Hopper, quantizing Q and K takes longer than it saves, except with the integer exponential for long sequences.
    Its kernel (``hopper/specialized.py``) computes ``plain`` calls only: dense, without bias or log-sum-exp. Biases are
    added to logits of unquantized Q and K. FP32 operands are quantized on every chip.

    Args:
        q: ``(B, H, N, D)``; it may be packed, as K and V, if the call is not plain.
        k: ``(B, Hkv, Nk, D)``.
        v: ``(B, Hkv, Nk, Dv)``.
        keys: the number of keys of the longest sequence.
        plain: whether the call is plain, see above.
        masked: whether it has a bool mask.
    """
    capability = capability_of(q.device)
    if capability is None:
        return _16_BIT
    if capability == (9, 0) and q.dtype.itemsize == 2:
        integer = VARIANTS["integer_exp"]
        shortest = min(q.shape[2], keys)
        long = plain and shortest >= (LONG_MASKED if masked else 0) and _integer_is_faster(shortest, q.shape[3])
        if long and not masked and hopper_dense.fits(q, k, v, q.dtype):  # which needs fewer blocks to be at its best
            long = q.shape[0] * q.shape[1] * shortest // QUERY_BLOCK >= _MANY_BLOCKS
        fast = long and specialized.fits(q, k, v, integer, q.dtype, capability, masked)
        return (integer if fast else VARIANTS["unquantized"]).spec
    if keys < LONG:
        return _16_BIT
    if capability in FAST_FP16_SUMS and capability >= (8, 9):
        return "sage2pp_int8"  # FP16 accumulation doubles the rate of FP8 there
    return _FP8 if capability >= (9, 0) else _16_BIT


def choose_packed_variant(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, causal: bool) -> str:
    """:func:`choose_variant` for packed queries, keys and values ``(total, H, channels)``.

    On Hopper the integer exponential takes sequences as long as those of dense calls for which it is chosen, if its
    pass over all tokens pays. The mean number of keys of a query, known on the device alone, is at least that of the
    longest sequence beside equal others.
    """
    if capability_of(q.device) == (9, 0) and q.dtype.itemsize == 2 and 0 < q.shape[2] <= 128:
        integer = VARIANTS["integer_exp"]
        (total, heads), sequences = q.shape[:2], max(lengths.q_starts.numel() - 1, 1)
        longest = min(lengths.longest_q, lengths.longest_k, total)
        rest = (total - longest) / max(sequences - 1, 1)
        keys = (longest**2 + (total - longest) * rest) / max(total, 1) / (2 if causal else 1)
        least = _LONG_PACKED if q.shape[2] > 64 else _NARROW_PACKED
        long = longest >= _LONG_FASTER and keys >= least and total >= _MEAN_PACKED * sequences
        many = heads * total // QUERY_BLOCK >= _MANY_BLOCKS
        if long and many and hopper_packed.fits_packed(q, k, v, integer, lengths):
            return integer.spec
    return choose_variant(q, k, v, lengths.longest_k, plain=False)


Masking = Literal["none", "causal", "bool", "float", "factors"]
"""What is added to the logits; ``"factors"`` are relative positions, which PyTorch adds as one mask."""

_MAX_FUSED = 256  # channels of PyTorch's fused kernels
_SMALL = 320  # keys up to which small programs with a mask or relative positions were timed
_SMALL_CHANNELS = 80  # the same for channels
_WINDOW = 64  # tokens up to which the general kernel, too, is faster than cuDNN with a mask or bias
_MASKED = 384  # tokens from which Hopper's kernel with a bool mask is ahead; in between it depends on the mask
_BIASED = 1024  # tokens from which the kernel is ahead with a float mask; below it depends on heads and on the mask
_LONG_FASTER = 4096  # tokens from which the integer exponential is faster than cuDNN, with or without causality
_LONG_WIDE = 8192  # the same for heads of more than 192 channels
_SLICED = 1024  # tokens from which heads of 136 to 160 channels are faster unquantized; causal ones were timed at 4,096
_LONG_PACKED = 2048  # keys of a query, on average, from which it is faster for packed sequences,
_NARROW_PACKED = 1280  # the same with up to 64 channels,
_MEAN_PACKED = 1024  # if they have so many tokens on average, in case the longest is given too long
_MANY_BLOCKS = 1024  # blocks of queries, as in 32 heads of 4,096 tokens; with 12 heads the result varied
_MANY_LOGITS = 2**25  # logits of a call from which the GPU takes longer than the host, about 50 us
_LONG_GRADIENT = 2048  # tokens from which the gradient "mixed" was timed,
_KEYS_FOR_A_BYTE = 2.2  # and keys of a query that save as much time as a byte of its pass takes; measured: 1.3 to 2.0
_CAUSAL = 512  # tokens from which hopper/dense.py is faster than cuDNN under causality
_WIDE_CAUSAL = 1024  # the same for heads of 120 and 128 channels
_WHOLE = 512  # tokens from which it is faster at whole blocks of 128 keys,
_WHOLE_BLOCKS = 768  # with so many blocks of queries
_FLASH = 1024  # tokens up to which flash attention is faster, where cuDNN is switched off
_PADDED = 512  # tokens from which PyTorch is faster though it pads the channels to a multiple of 8


class Hopper(NamedTuple):
    """What the choice depends on beside the call."""

    processors: int
    cudnn: bool  # whether PyTorch may use cuDNN, which it prefers


def hopper_of(device: torch.device) -> Hopper | None:
    """The chip, None if it is not Hopper, on which only PyTorch's 16-bit attention keeps up with INT8."""
    device = stood_for(device)
    if device.type != "cuda" or chip_of(device)[0] != (9, 0):
        return None
    return Hopper(chip_of(device)[1], torch.backends.cuda.cudnn_sdp_enabled())


def pytorch_is_faster(
    query: Tensor,
    keys: int,
    values: int,
    masking: Masking,
    chip: Hopper | None,
    gradients: bool = False,
    no_kernel: bool = False,
) -> bool:
    """Whether PyTorch has a kernel for this that is faster than all accurate variants.

    On a CPU that is so for all but relative positions in factors: variants run as their reference there. On Hopper it
    was measured in float16 on an H100 (docs/attention-hopper.md). False on other chips. Reads metadata alone.

    Relative positions are PyTorch's where only the general kernel computes them, which takes longer than PyTorch with
    their sum as a mask.

    Args:
        query: ``(B, H, N, D)``; on a GPU False for other numbers of dimensions.
        keys: the number of keys.
        values: channels of V.
        masking: see :data:`Masking`.
        chip: :func:`hopper_of` the device.
        gradients: whether gradients are needed, which the variants compute with PyTorch's kernels in any case. Those
            with a float mask are left to the variants, whose gradients are right for rows of the lowest float.
        no_kernel: whether logits are capped, or beside sinks, which no kernel of PyTorch's attention does. Written out
            in plain torch, the logits pass through memory several times, so that on a GPU this is never chosen.
    """
    if no_kernel:
        return query.device.type == "cpu"
    if gradients and masking in ("float", "factors"):
        return False
    if chip is None and masking == "factors":
        return False
    if chip is None:
        return query.device.type == "cpu"
    if query.ndim != 4 or query.dtype.itemsize != 2:
        return False
    batch, heads, queries, channels = query.shape
    shortest, longest = min(queries, keys), max(queries, keys)
    unquantized, sizes = VARIANTS["unquantized"], (batch, heads, queries, keys, channels, values)
    if channels != values or channels > _MAX_FUSED:
        return False
    if channels % 8:  # no fused kernel of PyTorch's takes a mask then
        return masking in ("none", "causal") and (gradients or shortest >= _PADDED)
    if gradients:
        return True
    if masking in ("none", "causal"):
        blocks = batch * heads * shortest // QUERY_BLOCK
        if _integer_is_faster(shortest, channels) and fits_hopper(channels) and blocks >= _MANY_BLOCKS:
            return False
        sliced = 128 < channels <= 160 and shortest >= (_SLICED if masking == "none" else _LONG_FASTER)
        if sliced and specialized.takes(*sizes, unquantized, False, chip.processors):
            return False
        if _dense_is_faster(batch * heads, queries, keys, channels, masking == "causal"):
            return False
        return chip.cudnn or longest <= _FLASH or channels > 128
    if masking == "factors":
        return not takes_factors(batch * heads, queries, keys, channels, values, chip)
    if _small(keys, channels) and hopper_dense.takes(queries, keys, channels, values, 2):
        return False
    if longest <= _WINDOW:
        return not chip.cudnn or channels not in (32, 64)  # other heads do not fill a tile of the general kernel
    if masking == "bool" and shortest >= _MASKED and hopper_dense.takes_mask(*sizes, chip.processors):
        return False
    if shortest >= (_MASKED if masking == "bool" else _BIASED):
        added = specialized.NOTHING if masking == "bool" else specialized.Added("tile", 2)
        if specialized.takes(*sizes, unquantized, masking == "bool", chip.processors, added):
            return False
    return chip.cudnn


def gradient_in_pytorch_is_faster(query: Tensor, key: Tensor, value: Tensor, causal: bool, chip: Hopper | None) -> bool:
    """Whether PyTorch's attention, forward and backward, is faster than the gradient ``"mixed"`` beside ``"auto"``.

    On Hopper both have cuDNN's backward pass. The integer exponential's forward pass saves time for each key of a
    query, and the pass before it, which also rounds Q and K for the backward pass, costs time for each byte. False on
    other chips and on a CPU. Reads metadata alone.

    Args:
        query: ``(B, H, N, D)``; False for other numbers of dimensions.
        key: ``(B, Hkv, Nk, D)``.
        value: ``(B, Hkv, Nk, Dv)``.
        causal: whether a query sees the keys up to its own place only.
        chip: :func:`hopper_of` the device.
    """
    if chip is None or query.ndim != 4 or query.dtype.itemsize != 2 or query.shape[3] != value.shape[3]:
        return False
    (batch, heads, queries, channels), (key_heads, keys) = query.shape, key.shape[1:3]
    if not chip.cudnn or channels > 128 or channels % 8 or (causal and queries != keys):
        return True
    shortest, integer = min(queries, keys), VARIANTS["integer_exp"]
    many = batch * heads * shortest // QUERY_BLOCK >= _MANY_BLOCKS and shortest >= _LONG_GRADIENT
    sizes = (batch, heads, queries, keys, channels, channels)
    if not many or not specialized.takes(*sizes, integer, False, chip.processors):
        return True
    share = key_heads * keys / (heads * queries)  # of a query in what keys cost: read, rounded in 16 bit and in 8
    cast = 0 if query.dtype == torch.bfloat16 else 4
    passed = channels * (5 + share * (5 + cast))
    return keys / (2 if causal else 1) < _KEYS_FOR_A_BYTE * passed


def caps_logits(
    query: Tensor, keys: int, values: int, masking: Masking, chip: Hopper, return_lse: bool = False
) -> bool:
    """Whether Hopper's kernel computes a call in 16 bit with a soft cap on its logits.

    Args:
        query: ``(B, H, N, D)``; False for other numbers of dimensions.
        keys: the number of keys.
        values: channels of V.
        masking: see :data:`Masking`.
        chip: :func:`hopper_of` the device.
        return_lse: whether the log-sum-exp is needed, which the kernel does not have of logits with numbers added.
    """
    if query.ndim != 4 or query.dtype.itemsize != 2 or masking == "factors" or (return_lse and masking == "float"):
        return False
    (batch, heads, queries, channels), masked = query.shape, masking == "bool"
    added = specialized.Added("tile", 2) if masking == "float" else specialized.NOTHING
    sizes = (batch, heads, queries, keys, channels, values)
    return specialized.takes(*sizes, VARIANTS["unquantized"], masked, chip.processors, added, capped=True)


Reading = Literal["nothing", "mask", "seen"]
"""What a kernel needs of a bool mask beside the mask itself: nothing, its blocks, or also the keys that are seen."""


def reads_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    variant: str,
    chip: Hopper,
    row: bool = False,
    softcap: bool = False,
    return_lse: bool = False,
) -> Reading:
    """What Hopper's kernel needs of the bool mask of such a dense call.

    From sizes and dtypes alone: strides may rule out the kernel that is expected here.

    Args:
        query: ``(B, H, N, D)``.
        key: ``(B, Hkv, Nk, D)``.
        value: ``(B, Hkv, Nk, Dv)``.
        variant: a name, a spec or ``"auto"``.
        chip: :func:`hopper_of` the device.
        row: whether the mask is the same for all queries, and the call not causal.
        softcap: whether logits are capped.
        return_lse: whether the log-sum-exp is needed, beside which the exponential is exact.
    """
    (batch, heads, queries, channels), keys, values = query.shape, key.shape[2], value.shape[3]
    if variant == "auto" and query.dtype.itemsize != 2:
        return "nothing"
    named = [resolve("unquantized" if variant == "auto" else variant)]
    if return_lse:
        named = [replace(named[0], exponential="exact")]
    elif variant == "auto" and min(queries, keys) >= LONG_MASKED and not softcap:
        named.append(VARIANTS["integer_exp"])
    sizes = (batch, heads, queries, keys, channels, values)
    taken = [
        x
        for x in named
        if specialized.supports(query, value, x) and specialized.takes(*sizes, x, True, chip.processors, capped=softcap)
    ]
    if return_lse:
        taken = [x for x in taken if specialized.has_lse(x, Bias())]
    if softcap:  # Hopper's other kernels cap nothing
        return "mask" if taken else "nothing"
    if taken and taken[-1] != VARIANTS["unquantized"]:
        return "mask" if return_lse else "seen"  # then no pass prepares the keys that are seen
    streams = named[0] == VARIANTS["unquantized"] and query.dtype == value.dtype and query.dtype.itemsize == 2
    if streams and hopper_dense.takes_mask(*sizes, chip.processors, row):
        return "mask"
    reads_itself = not return_lse and hopper_dense.takes(queries, keys, channels, values, 1)
    return "mask" if taken and not reads_itself else "nothing"


def takes_factors(heads: int, queries: int, keys: int, channels: int, values: int, chip: Hopper) -> bool:
    """Whether one of Hopper's kernels computes relative positions in 16 bit, of an image that is about a square.

    Args:
        heads: of Q, in all sequences of a batch.
        queries: of a head.
        keys: of a head.
        channels: of a head in Q and K.
        values: of a head in V.
        chip: :func:`hopper_of` the device.
    """
    side = math.isqrt(keys)
    call = (1, heads, queries, keys, channels, values, VARIANTS["unquantized"], False, chip.processors)
    if side <= specialized.MOST_COLUMNS and specialized.takes(*call, specialized.Added("factors", 2, side)):
        return True
    columns = max(power_of_2(2 * side), 32)
    return keys <= _SMALL and hopper_dense.takes(queries, keys, channels, values, 0, columns)


def few_positions(heads: int, queries: int, keys: int, channels: int, values: int, chip: Hopper) -> bool:
    """Whether a call with relative positions has too few queries for Hopper's kernels; arguments as the function above.

    Many queries go to the general kernel where Hopper's do not compute them: their logits should not pass memory.
    """
    many = specialized.enough_tiles(heads, queries, chip.processors, few=True)
    return not many and not takes_factors(heads, queries, keys, channels, values, chip)


def _small(keys: int, channels: int) -> bool:
    """Whether hopper/dense.py was timed with so many keys and channels and a mask: 1.17 to 3.4 times as fast."""
    return keys <= _SMALL and channels <= _SMALL_CHANNELS


def _integer_is_faster(shortest: int, channels: int) -> bool:
    """Whether the integer exponential is faster than cuDNN. With 129 to 192 channels long sequences were not timed."""
    return shortest >= _LONG_FASTER if channels <= 128 else shortest >= _LONG_WIDE and channels > 192


def _dense_is_faster(heads: int, queries: int, keys: int, channels: int, causal: bool) -> bool:
    """Whether hopper/dense.py computes a call without a mask that takes longer than its launch, and is ahead of cuDNN.

    cuDNN computes whole blocks of 128 keys. Where a quarter of the last one or more is empty, hopper/dense.py was 1.03
    to 2.3 times as fast in float16, and elsewhere about as fast with few tokens.

    Args:
        heads: of Q, in all sequences of a batch.
        queries: of a head.
        keys: of a head.
        channels: of a head.
        causal: which halves the logits.
    """
    logits, shortest = heads * queries * keys, min(queries, keys)
    if causal and channels in hopper_dense.WIDE and channels % 8 == 0:
        blocks = heads * shortest // QUERY_BLOCK
        return shortest >= _WIDE_CAUSAL and queries <= hopper_dense.WIDE_QUERIES and blocks >= _MANY_BLOCKS
    if channels > hopper_dense_plan.MAX_CHANNELS or channels % 8 or logits < _MANY_LOGITS * (2 if causal else 1):
        return False
    if causal:
        return shortest >= _CAUSAL
    pieces = hopper_dense_plan.split(keys)
    # Channels are padded to multiples of 16: 40 were 0.94 times as fast as cuDNN with 4,096 tokens.
    many = heads * shortest // QUERY_BLOCK >= _WHOLE_BLOCKS and shortest >= _WHOLE and channels % 16 == 0
    return many or pieces.first + pieces.second < hopper_dense.BLOCK_N
