"""Keys and values of one attention layer in INT8 with their scales, for caches of libraries to build on.

K's mean is fixed by the first tokens, the prompt: softmax ignores a constant that all keys of a head lack, and without
it INT8 loses little (SageAttention's smooth K). Every token has a scale for its key and one for its value in each head.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from qframework.compat.dispatch import disabled_torch_function, make_wrapper_subclass
from qframework.compat.pytree import tree_map_only
from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.attention.decode.cache_append import cache_append, dequantized
from qframework.kernels.attention.decode.decode import decode_attention

STEP = 256
"""Tokens by which a store grows."""
MAX_QUERIES = 16
"""More queries than these attend to dequantized keys and values: reading those is then not what takes the time."""


class Int8Store:
    """The last tokens of one layer, quantized; older ones may have been dropped.

    Args:
        max_length: tokens to allocate at once; None grows by :data:`STEP` tokens.
        window: sliding window of the layer, or None. Tokens that no later query sees may be dropped.
    """

    def __init__(self, max_length: int | None = None, window: int | None = None) -> None:
        self.max_length = max_length
        self.window = window
        self.stored = 0
        self.dropped = 0
        self.keeps_past = False  # nothing is dropped before `crop`
        self._cache: tuple[Tensor, Tensor, Tensor] | None = None  # key and value with padded rows, scales
        self._widths = (0, 0)  # channels of keys and values
        self._mean: Tensor | None = None  # (B, Hkv, D) fp32
        self._length: Tensor | None = None  # (2,) int32, see cache_append
        self.dtype = torch.float32  # of the model's keys and values

    @property
    def total(self) -> int:
        """Tokens seen, dropped ones included."""
        return self.dropped + self.stored

    @property
    def bytes(self) -> int:
        """Memory of everything that is kept, in bytes, with room for tokens to come."""
        kept = (*(self._cache or ()), self._mean, self._length)
        return sum(x.numel() * x.element_size() for x in kept if x is not None)

    @property
    def remaining(self) -> int:
        """How many of the stored tokens stay when the next are appended."""
        if self.window is None or self.keeps_past or self.stored < self.window - 1 + _slack(self.window):
            return self.stored
        return self.window - 1

    def append(self, key: Tensor, value: Tensor) -> None:
        """Quantize and keep new tokens, ``key (B, Hkv, N, D)`` and ``value (B, Hkv, N, Dv)`` float."""
        self._drop(self.stored - self.remaining)
        tokens = key.shape[2]
        if self._cache is None:
            self.dtype = key.dtype
            self._widths = (key.shape[3], value.shape[3])
            self._mean = key.float().mean(2) if tokens else key.new_zeros((*key.shape[:2], key.shape[3])).float()
            self._length = torch.zeros(2, dtype=torch.int32, device=key.device)
        elif key.shape[:2] != self._cache[0].shape[:2]:
            expected = tuple(self._cache[0].shape[:2])
            raise QFrameworkError(f"Int8Store: batch and heads of key must be {expected}, got {tuple(key.shape[:2])}")
        if self.stored == 0 and self.window is not None and not self.keeps_past:
            skipped = max(tokens - self.window + 1, 0)  # no later query sees the first tokens of a long prompt
            key, value = key[:, :, skipped:], value[:, :, skipped:]
            self.dropped += skipped
        self._reserve(key, value)
        assert self._cache is not None
        assert self._mean is not None
        assert self._length is not None
        cache_append(key, value, self._mean, self._buffer("key"), self._buffer("value"), self._cache[2], self._length)
        self.stored += key.shape[2]

    def attend(
        self,
        query: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = True,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of ``query (B, H, N, D)`` to all stored tokens, ``(B, H, N, Dv)``; see :func:`decode_attention`.

        ``mask`` has a column for each stored token. The window is applied where there is none.
        """
        assert self._cache is not None
        assert self._length is not None
        window = self.window if mask is None else None
        key, value, scales = self._buffer("key"), self._buffer("value"), self._cache[2]
        options = (mask, is_causal, window, scale, softcap, self._mean, sinks)
        return decode_attention(query, key, value, scales, self._length[:1], *options)

    def _buffer(self, which: Literal["key", "value"]) -> Tensor:
        """``(B, Hkv, capacity, D)`` int8."""
        assert self._cache is not None
        place = 0 if which == "key" else 1
        return self._cache[place][..., : self._widths[place]]

    def floats(self, which: Literal["key", "value"]) -> Tensor:
        """The stored keys or values, dequantized: ``(B, Hkv, stored, D)`` in the model's dtype."""
        assert self._cache is not None
        place = 0 if which == "key" else 1
        values, scale = self._buffer(which)[:, :, : self.stored], self._cache[2][:, :, : self.stored, place]
        return dequantized(values, scale, self._mean if which == "key" else None, self.dtype)

    def tensor(self, which: Literal["key", "value"]) -> StoredTensor:
        """The stored keys or values as a tensor that is dequantized where it is used."""
        buffer = self._buffer(which)
        return StoredTensor(self, which, (*buffer.shape[:2], self.stored, buffer.shape[3]), buffer.device)

    def crop(self, tokens: int) -> None:
        """Remove the last ``tokens``. Raises UnsupportedError where later queries would then see dropped ones."""
        if tokens > self.total:
            raise QFrameworkError(f"Int8Store: tokens must be at most {self.total}, got {tokens}")
        stored = self.stored - tokens
        needed = self.total - tokens if self.window is None else min(self.total - tokens, self.window - 1)
        if stored < needed:
            raise UnsupportedError(
                f"Int8Store: tokens must be at most {self.stored - needed} with a window of {self.window}, since older "
                f"keys were dropped, got {tokens}. Call activate_past_recording() before generating"
            )
        self.stored = stored
        if self._length is not None:
            self._length[0] = stored
        if self.window is not None and self.keeps_past:
            self._drop(max(stored - self.window + 1, 0))

    def select(self, indices: Tensor) -> None:
        """Keep these sequences of the batch, in this order, or repeat them."""
        if self._cache is not None and self._mean is not None:
            key, value, scales = (x.index_select(0, indices.to(x.device)) for x in self._cache)
            self._cache = key, value, scales
            self._mean = self._mean.index_select(0, indices.to(self._mean.device))

    def clear(self) -> None:
        """Forget all tokens and K's mean."""
        self.__init__(self.max_length, self.window)  # type: ignore[misc]

    @property
    def batch(self) -> int | None:
        """Sequences in the store; None before the first tokens."""
        return None if self._cache is None else self._cache[0].shape[0]

    def _reserve(self, key: Tensor, value: Tensor) -> None:
        """Make room for new tokens."""
        needed = self.stored + key.shape[2]
        most = self.max_length if self.window is None else None
        if most is not None and needed > most:
            raise QFrameworkError(f"Int8Store: tokens must be at most max_length, {most}, got {needed}")
        if self._cache is not None and needed <= self._cache[0].shape[2]:
            return
        capacity = -(-needed // STEP) * STEP
        if most is not None:
            capacity = -(-most // 16) * 16
        elif self.window is not None and not self.keeps_past:
            capacity = max(-(-(self.window + _slack(self.window)) // 16) * 16, -(-needed // 16) * 16)
        leading = (*key.shape[:2], capacity)
        rows = [torch.zeros((*leading, _padded(x.shape[3])), dtype=torch.int8, device=x.device) for x in (key, value)]
        buffers = rows[0], rows[1], torch.zeros((*leading, 2), dtype=torch.bfloat16, device=key.device)
        if self._cache is not None:
            for new, old in zip(buffers, self._cache, strict=True):
                new[:, :, : self.stored] = old[:, :, : self.stored]
        self._cache = buffers

    def _drop(self, tokens: int) -> None:
        """Drop the oldest ``tokens``."""
        if tokens <= 0 or self._cache is None or self._length is None:
            return
        for x in self._cache:
            x[:, :, : self.stored - tokens] = x[:, :, tokens : self.stored].clone()
        self.stored -= tokens
        self.dropped += tokens
        self._length[0] = self.stored


def _padded(channels: int) -> int:
    """Bytes of a row, so that each starts where a GPU loads 16 bytes at a time."""
    return -(-channels // 16) * 16


def _slack(window: int) -> int:
    """How many tokens more than a window needs are kept before the oldest are dropped, which moves the others."""
    return max(window // 8, 16)


class StoredTensor(Tensor):
    """Keys or values of a store, ``(B, Hkv, N, D)`` of the model's dtype.

    Any operation dequantizes it and continues with an ordinary tensor; attention of this package reads the store.
    """

    store: Int8Store
    which: Literal["key", "value"]
    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(
        cls, store: Int8Store, which: Literal["key", "value"], shape: tuple[int, ...], device: torch.device
    ) -> StoredTensor:
        self: StoredTensor = make_wrapper_subclass(cls, shape, dtype=store.dtype, device=device)
        self.store, self.which = store, which
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StoredTensor({self.which}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(StoredTensor, lambda x: x.store.floats(x.which), (args, kwargs or {}))
        return func(*args, **kwargs)


def store_of(key: Tensor, value: Tensor) -> Int8Store | None:
    """The store whose keys and values these are, or None."""
    if isinstance(key, StoredTensor) and isinstance(value, StoredTensor) and key.store is value.store:
        return key.store
    return None
