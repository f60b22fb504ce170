"""The arguments of the attention operators: checks, and conversion to the kernels' four dimensions.

The checks read metadata alone, so that they also run on fake tensors.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.attention.variants import resolve
from qframework.kernels.runtime.checks import check_dtype, check_same_device
from qframework.numerics import FLOAT_DTYPES

MAX_HEAD_DIM = 256


class DenseArguments(Protocol):
    """The arguments that all dense attention operators share."""

    @property
    def query(self) -> Tensor: ...
    @property
    def key(self) -> Tensor: ...
    @property
    def value(self) -> Tensor: ...
    @property
    def attn_mask(self) -> Tensor | None: ...
    @property
    def is_causal(self) -> bool: ...
    @property
    def scale(self) -> float | None: ...
    @property
    def enable_gqa(self) -> bool: ...
    @property
    def rel_h(self) -> Tensor | None: ...
    @property
    def rel_w(self) -> Tensor | None: ...


class SageAttentionArguments(NamedTuple):
    """The arguments of ``qframework::sage_attention``; see :func:`qframework.sage_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    variant: str = "auto"
    smooth_k: bool = True
    return_lse: bool = False
    rel_h: Tensor | None = None
    rel_w: Tensor | None = None
    softcap: float | None = None

    def check(self) -> None:
        """Raise UnsupportedError or QFrameworkError, naming the argument."""
        check_dense(self, "sage_attention", FLOAT_DTYPES)
        check_softcap("sage_attention", self.softcap)
        if self.variant != "auto":
            resolve(self.variant)

    def empty_lse(self) -> Tensor:
        """An uninitialized log-sum-exp; without elements if the caller does not ask for it."""
        return self.query.new_empty(self.query.shape[:-1] if self.return_lse else (0,), dtype=torch.float32)

    def empty_result(self) -> tuple[Tensor, Tensor]:
        """Uninitialized result and log-sum-exp."""
        return empty_result(self.query, self.value, self.query.dtype), self.empty_lse()


class VarlenArguments(NamedTuple):
    """The arguments of ``qframework::sage_attention_varlen``; see :func:`qframework.sage_attention_varlen`."""

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    is_causal: bool = False
    scale: float | None = None
    variant: str = "auto"
    smooth_k: bool = True
    softcap: float | None = None

    def empty_result(self) -> Tensor:
        """The uninitialized result."""
        return self.query.new_empty((*self.query.shape[:-1], self.value.shape[-1]))

    def sequences(self) -> tuple[list[slice], list[slice]]:
        """The tokens of each sequence of queries and of keys. Reading the offsets synchronizes with a GPU."""
        return (
            check_sequences("q", self.cu_seqlens_q, self.query.shape[0], self.max_seqlen_q),
            check_sequences("k", self.cu_seqlens_k, self.key.shape[0], self.max_seqlen_k),
        )

    def check(self) -> None:
        """Raise UnsupportedError or QFrameworkError, naming the argument."""
        query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = self[:7]
        if self.variant != "auto":
            resolve(self.variant)
        name = "sage_attention_varlen"
        check_softcap(name, self.softcap)
        for argument, x in (("query", query), ("key", key), ("value", value)):
            check_dtype(name, argument, x, FLOAT_DTYPES)
            if x.ndim != 3 or x.dtype != query.dtype or not 1 <= x.shape[2] <= MAX_HEAD_DIM:
                raise UnsupportedError(
                    f"{name}: {argument} must have shape (tokens, heads, head dimension up to {MAX_HEAD_DIM}) and "
                    f"query's dtype {query.dtype}, got {tuple(x.shape)} and {x.dtype}"
                )
        if key.shape[:2] != value.shape[:2] or key.shape[2] != query.shape[2] or query.shape[1] % max(key.shape[1], 1):
            raise QFrameworkError(
                f"{name}: query, key and value must have the same head dimension, and key heads that divide the query "
                f"heads, got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
            )
        check_same_device(name, query, key=key, value=value, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        for argument, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            check_dtype(name, argument, starts, (torch.int32,))
            if starts.ndim != 1 or starts.shape != cu_seqlens_q.shape or starts.shape[0] < 2:
                raise QFrameworkError(
                    f"{name}: {argument} must have shape (sequences + 1,), the same for queries and keys, "
                    f"got {tuple(starts.shape)}"
                )
        for argument, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
            if longest < 0:
                raise QFrameworkError(f"{name}: {argument} must be the length of the longest sequence, got {longest}")


class Canonical(NamedTuple):
    """``q (B, H, N, D)``, ``k`` and ``v (B, Hkv, Nk, D)``; the others are 4-D and broadcast where a size is 1."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    rel_h: Tensor | None
    rel_w: Tensor | None


def canonical(x: DenseArguments) -> Canonical:
    """3-D to 5-D arguments in four dimensions, as views where possible."""
    lead = _lead(x.query)  # checked: key and value broadcast to it
    q, k, v = (
        _four(t if _lead(t) == lead else t.expand(*lead, *t.shape[len(lead) :]), lead)
        for t in (x.query, x.key, x.value)
    )
    mask = _four_broadcasting(x.attn_mask, x.query.ndim, lead, periodic=True)
    rel_h, rel_w = (_four_broadcasting(t, x.query.ndim, lead) for t in (x.rel_h, x.rel_w))
    return Canonical(q, k, v, mask, rel_h, rel_w)


def without_repeated_heads(call: Canonical) -> Canonical:
    """A ``call`` whose keys and values are one head, expanded to several, with that head, which kernels read for all.

    TMA addresses no dimension of stride 0, so that the fast kernels would leave them to the general one.
    """
    k, v = call.k, call.v
    repeated = k.shape[1] > 1 and k.stride(1) == 0 and v.stride(1) == 0
    return call._replace(k=k[:, :1], v=v[:, :1]) if repeated else call


def in_four_dimensions(x: Tensor, query: Tensor) -> Tensor:
    """``x (..., H, N, D)`` of a call with ``query``, whose batch dimensions it has, as (B, H, N, D)."""
    return _four(x, _lead(query))


def _lead(x: Tensor) -> torch.Size:
    """The batch dimensions of queries, keys or values."""
    return x.shape[:1] if x.ndim == 3 else x.shape[:-3]


def _four(x: Tensor, lead: torch.Size) -> Tensor:
    if x.ndim == 4:
        return x
    return x.unsqueeze(1) if x.ndim == 3 else x.reshape(math.prod(lead), *x.shape[-3:])


def _four_broadcasting(x: Tensor | None, ndim: int, lead: torch.Size, periodic: bool = False) -> Tensor | None:
    """A mask or relative position of up to ``ndim`` dimensions as (B or 1, H or 1, N or 1, Nk or 1).

    ``periodic`` allows a batch that divides B.
    """
    if x is None:
        return None
    x = x.reshape(*[1] * (ndim - x.ndim), *x.shape)
    if ndim == 3:
        return x.unsqueeze(1)
    if len(lead) == 1:
        return x
    if periodic and x.shape[0] == 1:  # one mask for each window of every image: batch b uses b % windows
        return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])
    if all(size == 1 for size in x.shape[:-3]):
        return x.reshape(1, *x.shape[-3:])
    return x.expand(*lead, *x.shape[-3:]).reshape(math.prod(lead), *x.shape[-3:])


def cast_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A float mask in ``dtype``, where finite numbers stay finite: the lowest float32 must not become -inf."""
    limits = torch.finfo(dtype)
    if limits.max < torch.finfo(mask.dtype).max:
        mask = torch.where(mask.isinf(), mask, mask.clamp(limits.min, limits.max))
    return mask.to(dtype)


def default_scale(query: Tensor, scale: float | None) -> float:
    """``scale``, or 1 / sqrt(D)."""
    return scale if scale is not None else 1.0 / math.sqrt(max(query.shape[-1], 1))


def empty_result(query: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty ``(..., H, N, Dv)`` whose memory order is (..., N, H, Dv)."""
    *lead, heads, tokens, _ = query.shape if query.ndim > 3 else (query.shape[0], 1, *query.shape[1:])
    out = query.new_empty((*lead, tokens, heads, value.shape[-1]), dtype=dtype).transpose(-3, -2)
    return out if query.ndim > 3 else out.squeeze(1)


MAX_SOFTCAP = 2.0**14
"""The kernel's tanh makes a logit wrong by up to ``2**-22`` of the cap, here 0.004."""


def sink_of_row(sinks: Tensor) -> Tensor:
    """Sinks ``(H,)`` or ``(..., H, N)``, so that they broadcast to ``(..., H, N)``."""
    return sinks.unsqueeze(-1) if sinks.ndim == 1 else sinks


def check_softcap(name: str, softcap: float | None) -> None:
    """Raise QFrameworkError unless ``softcap`` is None or a positive number up to ``MAX_SOFTCAP``."""
    number = isinstance(softcap, int | float | torch.SymFloat) and not isinstance(softcap, bool)
    if softcap is not None and not (number and 0 < softcap <= MAX_SOFTCAP):
        raise QFrameworkError(
            f"{name}: softcap must be None or a positive number up to {MAX_SOFTCAP:g}, got {softcap!r}"
        )


def check_dense(call: DenseArguments, name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise UnsupportedError or QFrameworkError for what the kernels cannot do, naming the argument."""
    query, key, value, attn_mask, rel_h, rel_w = (
        *(call.query, call.key, call.value),
        *(call.attn_mask, call.rel_h, call.rel_w),
    )
    for argument, x in (("query", query), ("key", key), ("value", value)):
        check_dtype(name, argument, x, dtypes)
        if x.dtype != query.dtype:
            raise QFrameworkError(f"{name}: {argument} must have query's dtype {query.dtype}, got {x.dtype}")
        if not 3 <= x.ndim <= 5:
            raise UnsupportedError(
                f"{name}: {argument} must have 3 dimensions (B, N, D) to 5 (..., H, N, D), got shape {tuple(x.shape)}"
            )
        if x.ndim != query.ndim:
            raise UnsupportedError(
                f"{name}: {argument} must have as many dimensions as query {tuple(query.shape)}, got {tuple(x.shape)}"
            )
        if not 1 <= x.shape[-1] <= MAX_HEAD_DIM:
            raise UnsupportedError(
                f"{name}: {argument} must have a head dimension from 1 to {MAX_HEAD_DIM}, got {x.shape[-1]}"
            )
    check_same_device(name, query, key=key, value=value, attn_mask=attn_mask, rel_h=rel_h, rel_w=rel_w)
    if key.shape[-1] != query.shape[-1]:
        raise QFrameworkError(f"{name}: key must have query's head dimension {query.shape[-1]}, got {key.shape[-1]}")
    if key.shape[-2] != value.shape[-2]:
        raise QFrameworkError(f"{name}: value must have as many tokens as key, {key.shape[-2]}, got {value.shape[-2]}")
    lead = _lead(query)
    if not _lead(key) == _lead(value) == lead:
        lead = _broadcast(name, "key and value's batch", lead, _lead(key), _lead(value))
    if lead != _lead(query):
        raise QFrameworkError(
            f"{name}: key and value must have query's batch {tuple(_lead(query))}, or 1, got {tuple(lead)}"
        )
    _check_heads(name, query, key, value, call.enable_gqa)
    logits = (*query.shape[:-1], key.shape[-2])
    if attn_mask is not None:
        check_dtype(name, "attn_mask", attn_mask, (torch.bool, *FLOAT_DTYPES))
        _check_broadcast(name, "attn_mask", attn_mask.shape, logits)
    _check_relative(name, rel_h, rel_w, logits)


def _check_heads(name: str, query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    if query.ndim == 3:
        return
    heads, key_heads, value_heads = (x.shape[-3] for x in (query, key, value))
    fits = heads % key_heads == 0 if enable_gqa and key_heads else heads == key_heads
    if key_heads != value_heads or not fits:
        raise QFrameworkError(
            f"{name}: key and value must have {heads} heads as query, or with enable_gqa=True a divisor of {heads}, "
            f"got {key_heads} and {value_heads}"
        )


def _broadcast(name: str, what: str, *shapes: torch.Size) -> torch.Size:
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError:
        shown = ", ".join(str(tuple(shape)) for shape in shapes)
        raise QFrameworkError(f"{name}: {what} dimensions must broadcast, got {shown}") from None


def _check_broadcast(name: str, argument: str, shape: torch.Size, logits: tuple[int, ...]) -> None:
    sizes = logits[len(logits) - len(shape) :]
    if len(shape) > len(logits) or any(a not in (1, b) for a, b in zip(shape, sizes, strict=True)):
        raise QFrameworkError(
            f"{name}: {argument} must have a shape that broadcasts to {tuple(logits)}, got {tuple(shape)}"
        )


def _check_relative(name: str, rel_h: Tensor | None, rel_w: Tensor | None, logits: tuple[int, ...]) -> None:
    if rel_h is None and rel_w is None:
        return
    if rel_h is None or rel_w is None:
        raise QFrameworkError(
            f"{name}: rel_h and rel_w must be given together, got only {'rel_w' if rel_h is None else 'rel_h'}"
        )
    for argument, x in (("rel_h", rel_h), ("rel_w", rel_w)):
        check_dtype(name, argument, x, FLOAT_DTYPES)
        _check_broadcast(name, argument, x.shape, (*logits[:-1], x.shape[-1]))
    if rel_h.shape[-1] * rel_w.shape[-1] != logits[-1]:
        raise QFrameworkError(
            f"{name}: rel_h and rel_w must cover {logits[-1]} keys, got {rel_h.shape[-1]} x {rel_w.shape[-1]}"
        )


def check_sequences(side: str, starts: Tensor, tokens: int, longest: int | None = None) -> list[slice]:
    """The tokens of each packed sequence. Reading ``starts`` synchronizes with a GPU.

    Raises:
        QFrameworkError: ``cu_seqlens_<side>`` does not start at 0, decreases, exceeds ``tokens``, or has a step of more
            than ``longest``.
    """
    name, argument = "sage_attention_varlen", f"cu_seqlens_{side}"
    ends = starts.tolist()
    if ends[0] != 0:
        raise QFrameworkError(f"{name}: {argument}[0] must be 0, got {ends[0]}")
    for i, (start, end) in enumerate(pairwise(ends)):
        if not start <= end <= tokens:
            raise QFrameworkError(f"{name}: {argument}[{i + 1}] must be from {start} to {tokens}, got {end}")
        if longest is not None and end - start > longest:
            raise QFrameworkError(
                f"{name}: sequence {i} of {argument} must have at most max_seqlen_{side}={longest} tokens, "
                f"got {end - start}"
            )
    return [slice(start, end) for start, end in pairwise(ends)]
