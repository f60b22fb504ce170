"""A cache of keys and values in INT8 for ``generate`` of the transformers library, half the memory of 16 bit::

    from qframework.attention.kv_cache import Int8Cache

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="qframework")
    model.generate(**inputs, cache=Int8Cache(model.config))  # past_key_values= in older versions, such as 5.0

With ``attn_implementation="qframework"`` steps of up to 16 tokens read INT8 keys and values directly. Other
implementations, and steps of more tokens, get them dequantized. A prompt attends to its own keys and values in floating
point, which are then quantized.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qframework.attention.int8_store import Int8Store
from qframework.compat.transformers_cache import Cache, CacheLayerMixin
from qframework.errors import UnsupportedError

_FULL, _SLIDING = "full_attention", "sliding_attention"


class Int8Layer(CacheLayerMixin):
    """One layer of :class:`Int8Cache`, with the interface of transformers' layers.

    Args:
        max_length: tokens to allocate at once; None grows as needed.
        sliding_window: as in the model's configuration, or None.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, max_length: int | None = None, sliding_window: int | None = None) -> None:
        self.store = Int8Store(max_length, sliding_window)
        self.is_initialized = False

    @property
    def is_sliding(self) -> bool:
        """Whether old tokens are dropped."""
        return self.store.window is not None

    @property
    def keys(self) -> Tensor | None:
        """``(B, Hkv, N, D)``, dequantized where it is used."""
        return self.store.tensor("key") if self.is_initialized else None

    @property
    def values(self) -> Tensor | None:
        """``(B, Hkv, N, Dv)``, dequantized where it is used."""
        return self.store.tensor("value") if self.is_initialized else None

    @property
    def batch_size(self) -> int:
        """Sequences in the layer, -1 before the first tokens."""
        return -1 if self.store.batch is None else self.store.batch

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """The store allocates with the first tokens."""
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep new tokens, ``(B, Hkv, N, D)``; returns what they attend to: themselves, or all that is stored."""
        if torch.compiler.is_compiling():
            raise UnsupportedError(
                "Int8Cache: the model must not be compiled, got a call inside torch.compile. Compile with another "
                "cache, or pass disable_compile=True to generate"
            )
        first = self.store.total == 0
        self.lazy_initialization(key_states, value_states)
        self.store.append(key_states, value_states)
        if first:
            return key_states, value_states
        return self.store.tensor("key"), self.store.tensor("value")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that ``query_length`` new tokens attend to, and the position of the first."""
        if isinstance(query_length, Tensor):  # transformers before 5.3 passed positions
            query_length = query_length.shape[0]
        remaining = self.store.remaining
        return remaining + query_length, self.store.total - remaining

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return self.store.total

    def get_max_length(self) -> int:
        """The sliding window or the tokens allocated at once; -1 without a limit."""
        limit = self.store.max_length if self.store.window is None else self.store.window
        return -1 if limit is None else limit

    get_max_cache_shape = get_max_length  # its name in older versions

    def activate_past_recording(self) -> None:
        """Drop nothing before ``crop``, which may then restore what a window has left."""
        self.store.keeps_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens, or keep the first ``tokens_to_remove`` if it is positive."""
        if tokens_to_remove > 0:
            tokens_to_remove = min(tokens_to_remove - self.store.total, 0)
        self.store.crop(-tokens_to_remove)

    def reset(self) -> None:
        """Forget all tokens."""
        self.store.clear()
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take over the sequences that a beam search continues."""
        self.store.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        if self.store.batch is not None:
            self.store.select(torch.arange(self.store.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some sequences."""
        self.store.select(indices if indices.dtype != torch.bool else indices.nonzero()[:, 0])

    def offload(self) -> None:
        """Refused."""
        raise UnsupportedError("Int8Cache: offloading must be off, got a call of offload(). Use DynamicCache")

    prefetch = offload


class Int8Cache(Cache):
    """Keys and values in INT8 with their scales: half the memory of a cache in 16 bit.

    Args:
        config: the model's configuration, whose layers decide about sliding windows.
        max_length: tokens to allocate at once, prompt included. None grows by 256 tokens, copying a layer each time.

    Left padding, beam search, assisted decoding (``crop``) and sliding windows work. Quantization starts after the
    prompt's attention. :func:`~qframework.attention.int8_store.Int8Store` says how.

    Raises:
        UnsupportedError: layers that are neither full nor sliding attention (linear attention, chunks, shared caches);
            a call inside ``torch.compile``.
    """

    def __init__(self, config: Any, max_length: int | None = None) -> None:
        layers = [Int8Layer(max_length, window) for window in _windows(config.get_text_config(decoder=True))]
        super().__init__(layers=layers)

    @property
    def bytes(self) -> int:
        """Memory of all layers in bytes."""
        return sum(layer.store.bytes for layer in self.layers)


def _windows(config: Any) -> list[int | None]:
    """The sliding window of each layer, None for full attention."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = [_FULL if window is None else _SLIDING] * config.num_hidden_layers
        if getattr(config, "attention_chunk_size", None) is not None:
            kinds = ["chunked_attention"]
    if getattr(config, "num_kv_shared_layers", 0):
        kinds = ["layers with a shared cache"]
    if unknown := sorted(set(kinds) - {_FULL, _SLIDING}):
        raise UnsupportedError(
            f"Int8Cache: all layers of the model must be {_FULL} or {_SLIDING}, got {', '.join(unknown)}. Use "
            "DynamicCache"
        )
    return [window if kind == _SLIDING else None for kind in kinds]
