"""Attention for Hopper by warps of their own for loads and products: what specialized_kernel.py computes, its launch.

Used for large problems, dense or packed (packed.py), with the log-sum-exp where no number is added to logits;
../triton.py handles all others.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from qframework.errors import QFrameworkError
from qframework.kernels.attention import mask_blocks
from qframework.kernels.attention.hopper.loads import BLOCK_M, BiasKind, Form
from qframework.kernels.attention.hopper.packed_items import ragged
from qframework.kernels.attention.hopper.prepare import can_prepare
from qframework.kernels.attention.hopper.softmax import ROWS
from qframework.kernels.attention.mask_blocks import mask_blocks_triton
from qframework.kernels.attention.operands import (
    Bias,
    QuantizedQK,
    Values,
    last_contiguous,
    p_range,
    query_memory_order,
)
from qframework.kernels.attention.variants import KEY_BLOCK, AttentionVariant, fits_hopper, paired, token_groups
from qframework.kernels.runtime.chip import chip_of
from qframework.kernels.runtime.gluon import HAS_GLUON
from qframework.kernels.runtime.launch import cdiv, launch, power_of_2
from qframework.numerics import FLOAT_DTYPES

_SHARED = 226 * 1024  # bytes of a multiprocessor for tiles; barriers take the last

_CACHE = 20 * 2**20  # bytes of an H100's 50 MiB of L2 cache, whose halves hold copies of each other's

LEAST_COLUMNS, MOST_COLUMNS = 16, 128  # of an image in shared memory

LEAST_TOKENS = 512  # from which a pass that quantizes Q or K pays; ../triton.py quantizes Q within its kernel
LEAST_NARROW = 1024  # from which the kernel is the faster one for up to 32 channels
_FEW_TILES = 4  # with a soft cap or relative positions it is from as many tiles as a fourth of the multiprocessors

if HAS_GLUON:
    from qframework.kernels.attention.hopper.specialized_kernel import kernel
    from qframework.kernels.runtime.gluon import TensorDescriptor, gl


class Added(NamedTuple):
    """What the kernel adds to logits."""

    kind: BiasKind = "none"
    itemsize: int = 0  # bytes of a number
    columns: int = 0  # of the image that relative positions describe

    @property
    def held(self) -> int:
        """Columns in shared memory: a power of two, so that blocks of keys hold whole rows of the image."""
        return max(power_of_2(self.columns), LEAST_COLUMNS) if self.columns else 0

    @property
    def padded(self) -> bool:
        """Whether rows of the image are longer in shared memory than in memory."""
        return self.held > self.columns


NOTHING = Added()


def added_by(bias: Bias, keys: int) -> Added | None:
    """How the kernel reads ``bias``; None if it does not.

    A float mask of any strides, or relative positions in an image of up to 128 columns. Under causality, which compares
    places, rows must not be padded in shared memory: 16, 32, 64 or 128 columns.
    """
    if bias.rel_h is not None and bias.rel_w is not None:
        added = Added("factors", bias.rel_w.element_size(), bias.rel_w.shape[3])
        fits = added.columns <= MOST_COLUMNS and bias.rel_h.shape[3] * added.columns == keys
        same = bias.rel_h.dtype == bias.rel_w.dtype in FLOAT_DTYPES and bias.rel_h.shape[:3] == bias.rel_w.shape[:3]
        return added if fits and same and bias.mask is None and not (bias.causal and added.padded) else None
    if bias.only_bool or bias.mask is None:
        return NOTHING
    if bias.mask.shape[3] != keys or bias.mask.dtype not in FLOAT_DTYPES:
        return None
    rows = bias.mask.shape[2] > 1 and bias.mask.stride(2) > 0
    return Added("tile" if rows else "row", bias.mask.element_size())


def fits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: AttentionVariant,
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
    masked: bool = False,
    added: Added | None = NOTHING,
    stored: bool = False,
    capped: bool = False,
) -> bool:
    """Whether the kernel computes this dense attention, and is faster than the general one.

    Args:
        q: ``(B, H, N, D)`` of any dtype, before or after quantization, as are the others.
        k: ``(B, Hkv, Nk, D)``.
        v: ``(B, Hkv, Nk, Dv)``, as it is multiplied.
        variant: Q and K in INT8 with whole blocks of keys in a group or per thread, or in 16 bit; P and V in 16 bit,
            or beside INT8 in FP8; FP32 sums.
        dtype: of the result.
        capability: CUDA's, None for a CPU.
        masked: whether there is a bool mask.
        added: :func:`added_by` the bias, with Q and K in 16 bit only.
        stored: V is in FP8, ``(B, Hkv, Dv, P)``, its keys :data:`~qframework.kernels.attention.variants.PAIRED`.
        capped: whether logits have a soft cap, with Q and K in 16 bit only.
    """
    integer = variant.exponential == "integer"
    if capability != (9, 0) or added is None or (v.dtype != dtype and not integer and not stored):
        return False
    if stored != (v.dtype == torch.float8_e4m3fn) or (not stored and v.dtype.itemsize != 2):
        return False
    if not supports(q, v, variant):
        return False
    fp8 = variant.pv == "fp8"
    (batch, heads, queries, channels), keys, values = q.shape, k.shape[2], v.shape[2 if stored else 3]
    processors = chip_of(v.device)[1]
    if not takes(batch, heads, queries, keys, channels, values, variant, masked, processors, added, capped):
        return False
    # Others are quantized first.
    read = [q, k] if q.dtype == torch.int8 or not variant.quantizes_qk else []
    read += [v] if stored or not fp8 else []
    return all(addressable(x) for x in read)


def takes(
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    channels: int,
    values: int,
    variant: AttentionVariant,
    masked: bool,
    processors: int,
    added: Added = NOTHING,
    capped: bool = False,
) -> bool:
    """Whether the kernel takes these sizes: it can, and enough of its tiles are at work to be the faster one."""
    least = LEAST_TOKENS if variant.quantizes_qk else KEY_BLOCK
    positions = added.kind == "factors"
    if channels <= 32 and not positions:
        least = LEAST_NARROW
    if masked and channels <= 64:  # the blocks of the mask are an additional pass
        least = max(least, mask_blocks.BLOCK + 1)
    large = enough_tiles(batch * heads, queries, processors, capped or positions) and min(queries, keys) >= least
    if not (HAS_GLUON and large and fits_hopper(channels, variant.qk_bits) and 0 < values <= 256 and values % 8 == 0):
        return False
    if (added.kind != "none" or capped) and variant.quantizes_qk:
        return False
    form = form_of(variant, channels, values, masked, added)
    return added.held <= form.block_n and shared_bytes(form, added) <= _SHARED


def enough_tiles(heads: int, queries: int, processors: int, few: bool) -> bool:
    """Whether ``heads`` of all sequences have tiles of queries for the multiprocessors, with ``few`` for a fourth."""
    return cdiv(queries, BLOCK_M) * heads * (_FEW_TILES if few else 1) >= processors


def supports(q: Tensor, v: Tensor, variant: AttentionVariant) -> bool:
    """Whether the kernel computes the variant for operands of these dtypes."""
    half = variant.accumulator == "fp16" and v.dtype == torch.float16 and variant.pv != "fp8"
    return not (half or variant.smooth_q or variant.smooth_v) and reads(q, v, variant)


def reads(q: Tensor, v: Tensor, variant: AttentionVariant) -> bool:
    """Whether the kernel reads Q and K as the variant has them."""
    if not variant.quantizes_qk:
        return q.dtype == v.dtype and variant.exponential == "exact" and variant.pv == "fp16"
    q_groups, k_groups = (token_groups(variant.granularity, role) for role in ("query", "key"))
    if variant.granularity == "per_thread":
        return variant.qk_bits == 8 and variant.exponential == "exact" and (variant.pv == "fp16" or paired(variant))
    if variant.pv == "fp8":
        return variant.qk_bits == 8 and paired(variant) and k_groups.span % KEY_BLOCK == 0 and q_groups.groups == 1
    if variant.pv != "fp16":
        return False
    single = q_groups.groups == k_groups.groups == 1 and (variant.exponential == "exact" or can_prepare(variant))
    return variant.qk_bits == 8 and single and k_groups.span % KEY_BLOCK == 0


def has_lse(variant: AttentionVariant, bias: Bias) -> bool:
    """Whether the kernel can store the log-sum-exp of such a call, beside what :func:`fits` decides."""
    return variant.pv == "fp16" and bias.only_bool and (variant.exponential == "exact" or bias.mask is None)


def addressable(x: Tensor) -> bool:
    """Whether TMA can address the heads: 16-byte strides, but for dimensions of 1, and a 16-byte start."""
    stepped = [stride for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1]
    strides = all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in stepped)
    return strides and x.stride(3) == 1 and x.data_ptr() % 16 == 0


def describe(x: Tensor, rows: int, channels: int) -> Any:
    """Gluon's descriptor of heads ``(B, H, N, channels)`` or, packed, ``(total, H, channels)``, for ``rows`` tokens."""
    if x.ndim == 3:
        return ragged(x, rows, channels, layout(rows, channels, x.dtype, 5))
    block = [1, 1, rows, channels]
    # Dimensions of 1 may have any stride, TMA needs one.
    strides = [s if n > 1 else 16 for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], block, layout(rows, channels, x.dtype))


def describe_image(x: Tensor, rows: int, channels: int, added: Added) -> Any:
    """As :func:`describe` for ``rows`` tokens of the image of ``added``, whose rows are continued by zeros."""
    (batch, heads, tokens, width), stride = x.shape, x.stride()
    batch_stride, head_stride = (s if n > 1 else 16 for n, s in zip(x.shape[:2], stride[:2], strict=True))
    shape, lines = [batch, heads, tokens // added.columns, added.columns, width], rows // added.held
    strides = [batch_stride, head_stride, added.columns * stride[2], stride[2], 1]
    block = [1, 1, lines, added.held, channels]
    return TensorDescriptor(x, shape, strides, block, layout(added.held, channels, x.dtype, 5, lines))


@functools.cache
def layout(rows: int, channels: int, dtype: torch.dtype, rank: int = 4, lines: int = 1) -> Any:
    """Layout of such a block in shared memory, or of ``lines`` of them."""
    shape = [*[1] * (rank - 3), lines, rows, channels]
    return gl.NVMMASharedLayout.get_default_for(shape, gluon_dtype(dtype))


def gluon_dtype(dtype: torch.dtype) -> Any:
    """Gluon's name of a dtype of torch."""
    return gl.float8e4nv if dtype == torch.float8_e4m3fn else getattr(gl, str(dtype).removeprefix("torch."))


def slices(channels: int, least: int = 16) -> tuple[int, int]:
    """Heads of so many channels as two powers of two, the second of at least ``least``, or one of 32 or more and 0."""
    first = max(1 << (channels.bit_length() - 1), 32)
    rest = max(power_of_2(channels - first), least) if channels > first else 0
    return (2 * first, 0) if rest >= first else (first, rest)


def form_of(
    variant: AttentionVariant, channels: int, values: int, masked: bool, added: Added = NOTHING, packed: bool = False
) -> Form:
    """The kernel's form for heads of so many channels in Q and K, and in V."""
    wider = max(channels, values)
    keys_in, values_in = slices(wider, 32 if variant.quantizes_qk else 16), slices(wider)
    fp8 = variant.pv == "fp8"
    if fp8:
        values_in = (max(power_of_2(wider), 32), 0)
    spans = (token_groups(variant.granularity, role).span for role in ("query", "key"))
    q_span, k_span = spans if variant.quantizes_qk else (0, 0)
    # 128 keys as long as their logits fit registers beside the accumulator, and a bias shared memory.
    most = 64 if added.kind == "tile" and added.itemsize > 2 else 128 if added.kind != "none" else 160
    form = Form(
        *keys_in,
        *values_in,
        block_n=128 if sum(values_in) <= most else 64,
        stages=3 if variant.exponential == "integer" and wider <= 64 and not masked else 2,
        shares_out=False,
        q_span=q_span,
        k_span=k_span,
        integer=variant.exponential == "integer",
        masked=masked,
        bias=added.kind,
        columns=added.held,
        padded=added.padded,
        of_threads=variant.granularity == "per_thread",
        fp8=fp8,
        p_shift=math.log2(p_range(variant)) if fp8 else 0.0,
        packed=packed,
    )
    too_large = shared_bytes(form, added) > _SHARED and not variant.quantizes_qk
    return form._replace(shares_out=True) if too_large else form


def shared_bytes(form: Form, added: Added = NOTHING) -> int:
    """Bytes of shared memory that tiles of this form take, without barriers."""
    operand, value = 1 if form.q_span else 2, 1 if form.fp8 else 2
    d, dv = form.block_d + form.rest_d, form.block_dv + form.rest_dv
    queries = BLOCK_M * d * operand + (0 if form.shares_out else BLOCK_M * dv * 2)
    stage = form.block_n * (d * operand + dv * value)
    bias = {"tile": form.stages * form.block_n, "factors": form.columns}.get(form.bias, 0)
    return queries + form.stages * stage + BLOCK_M * bias * added.itemsize


def attention_hopper(
    qk: QuantizedQK,
    given: Values,
    variant: AttentionVariant,
    logit_scale: float,
    bias: Bias,
    dtype: torch.dtype,
    lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Launch the kernel for operands that :func:`fits` accepts: ``(out, lse)``.

    ``out (B, H, N, Dv)`` is (B, N, H, Dv) in memory. ``bias`` is a mask or relative positions that :func:`added_by`
    reads, causality, both or nothing. ``lse``, for calls of :func:`has_lse`: also its ``(B, H, N)`` float32.
    """
    v, fp8 = given.v, variant.pv == "fp8"
    (batch, heads, tokens, channels), keys, values = qk.q.shape, qk.k.shape[2], given.channels(fp8)
    added = added_by(bias, keys)
    if added is None:
        raise QFrameworkError("attention_hopper: bias must be one that added_by reads. Launch the general kernel")
    masked = bias.mask is not None and added.kind == "none"
    form = form_of(variant, channels, values, masked, added)
    form = form._replace(lse=lse, capped=bias.softcap is not None)
    sums = torch.empty((batch, heads, tokens), dtype=torch.float32, device=v.device) if lse else None
    out = query_memory_order(batch, heads, tokens, values, qk.q, dtype)
    q_scale, k_scale = (out if scale is None else scale for scale in (qk.q_scale, qk.k_scale))
    items = cdiv(tokens, BLOCK_M) * heads * batch
    uneven = bias.causal or masked
    cached = _heads_in_cache(qk.k, v) * (heads // qk.k.shape[1])
    at_once = _divisor(heads * batch, min(cached, 32)) if uneven else 1
    batches_at_once = 1
    queries = slices_of(qk.q, ROWS, form.block_d, form.rest_d)
    tiles_of = functools.partial(slices_of, added=added if added.padded else None)
    biases: tuple[Any, ...] = (out, 0, 0, 0)
    bias_desc = queries[0]
    blocks: tuple[Any, ...] = (out, out, out, 1, 1, 1)
    if masked and bias.mask is not None:
        found = bias.blocks or mask_blocks_triton(bias.mask, tokens, keys, bias.causal)
        blocks = (found.bits, found.order, found.counts, *found.order.shape[:3])
    elif added.kind != "none":
        read = _readable_bias(bias, added)
        blocks = (out, out, out, *read.sizes, 1)
        biases = read.arguments
        bias_desc = read.desc(form) or bias_desc
        at_once, batches_at_once = read.in_flight(batch, heads, at_once, cached)
    launch(kernel, (min(items, chip_of(v.device)[1]),))(
        *queries,
        *tiles_of(qk.k, form.block_n, form.block_d, form.rest_d),
        *([describe(v, form.block_dv, form.block_n)] * 2 if fp8 else tiles_of(v, form.block_n, *form[2:4])),
        *slices_of(out, ROWS, form.block_dv, form.rest_dv),
        bias_desc,
        q_scale,
        k_scale,
        out if qk.k_norm is None else qk.k_norm,
        out if given.scale is None else given.scale,
        out if sums is None else sums,
        q_scale.shape[2],
        k_scale.shape[2],
        logit_scale,
        bias.softcap or 0.0,
        heads,
        heads // qk.k.shape[1],
        tokens,
        keys // added.columns * added.held if added.padded else keys,
        items,
        at_once,
        batches_at_once,
        out,
        *blocks,
        *biases,
        CAUSAL=bias.causal and not masked,
        FORM=form,
        num_warps=4,
    )
    return out, sums


def slices_of(x: Tensor, rows: int, first: int, rest: int, added: Added | None = None) -> tuple[Any, Any]:
    """Descriptors of both slices of channels, of tokens or of the padded image of ``added``."""
    described = describe if added is None else functools.partial(describe_image, added=added)
    desc = described(x, rows, first)
    return desc, described(x, rows, rest) if rest else desc


class _ReadBias(NamedTuple):
    """A bias in memory that the kernel can address."""

    added: Added
    tiled: Tensor | None  # (M, H, N, Nk or columns), read by TMA
    loaded: Tensor | None  # (M, H, 1, Nk) or (M, H, N, lines), read by its pointer

    @property
    def sizes(self) -> tuple[int, int]:
        """Batches and heads; others broadcast."""
        some = self.tiled if self.tiled is not None else self.loaded
        assert some is not None
        return some.shape[0], some.shape[1]

    @property
    def arguments(self) -> tuple[Any, int, int, int]:
        """Pointer and strides of what is read by its pointer, of a row in steps of 8."""
        if self.loaded is None:
            return self.tiled, 0, 0, 0
        step = 8 if self.added.kind == "row" else 1
        batch, head, token = self.loaded.stride()[:3]
        return self.loaded, batch // step, head // step, token

    def desc(self, form: Form) -> Any:
        """Of what TMA reads, or None."""
        if self.tiled is None:
            return None
        return describe(self.tiled, ROWS, form.block_n if self.added.kind == "tile" else form.columns)

    def in_flight(self, batch: int, heads: int, heads_at_once: int, cached: int) -> tuple[int, int]:
        """(heads at once, batches at once), so that a bias that broadcasts is read from memory about once."""
        if self.added.kind != "tile":
            return heads_at_once, 1
        if self.sizes[0] == 1 and batch > 1:
            together = _divisor(batch, cached)
            return together, together
        return (_divisor(heads, cached), 1) if self.sizes[1] == 1 else (heads_at_once, 1)


def _heads_in_cache(k: Tensor, v: Tensor) -> int:
    """How many heads of K and V the L2 cache holds beside what else passes through, at least one."""
    return max(_CACHE // (k.shape[2] * (k.shape[3] * k.element_size() + v.shape[3] * v.element_size())), 1)


def heads_at_once(q: Tensor, k: Tensor, v: Tensor) -> int:
    """How many heads of Q ``(B, H, N, D)`` to compute together, so that the L2 cache holds their K and V."""
    return _divisor(q.shape[0] * q.shape[1], _heads_in_cache(k, v) * (q.shape[1] // k.shape[1]))


def _divisor(count: int, most: int) -> int:
    """The largest power of two up to ``most`` that divides ``count``."""
    return min(count & -count, 1 << (most.bit_length() - 1))


def _readable_bias(bias: Bias, added: Added) -> _ReadBias:
    """The bias of ``added``, copied where TMA or loads of several numbers cannot address it."""
    if bias.rel_h is not None and bias.rel_w is not None:
        height, width = _without_copies(bias.rel_h, bias.rel_w)
        # No query attends to what is beyond a row of the image.
        width = pad(width, (0, added.held - added.columns), value=-math.inf) if added.padded else width
        return _ReadBias(added, _aligned(width), last_contiguous(height))
    assert bias.mask is not None
    (mask,) = _without_copies(bias.mask)
    if added.kind == "row":
        return _ReadBias(added, None, _aligned(mask[:, :, :1]))
    return _ReadBias(added, _aligned(mask), None)


def _without_copies(*given: Tensor) -> list[Tensor]:
    """``(M, H, N, ...)`` with dimensions of 1 for the first two where all are expanded."""
    alike = list(given)
    for dim in range(2):
        if all(x.stride(dim) == 0 for x in alike):
            alike = [x.narrow(dim, 0, 1) for x in alike]
    return alike


def _aligned(x: Tensor) -> Tensor:
    """``x`` with rows that start at multiples of 16 bytes."""
    step = max(16 // x.element_size(), 8)  # rows are read in steps of 8
    strides = all(n == 1 or (s > 0 and s % step == 0) for n, s in zip(x.shape[:3], x.stride()[:3], strict=True))
    if strides and x.stride(3) == 1 and x.data_ptr() % 16 == 0:
        return x
    return x.new_empty((*x.shape[:3], cdiv(x.shape[3], 16) * 16))[..., : x.shape[3]].copy_(x)
