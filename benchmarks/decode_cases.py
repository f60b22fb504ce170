"""The cases of the decode benchmark: a cache in FP16 and the same in INT8, copies of each, and providers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import Check, rows_within
from qframework.kernels.attention.decode.cache_append import cache_append
from qframework.kernels.attention.decode.decode import decode_attention

KEY_BIAS = 2.0  # standard deviation over channels; the signal has 1
ROTATED_BYTES = 400 * 2**20  # the copies of a cache together, so that none stays in the L2 cache of 50 MB
MAX_COPIES = 32
CHECKED = 2  # sequences of the batch that are compared with the oracle
FP16_ERROR = 0.01
INT8_ERROR = 0.004  # of the same integers; P is rounded to bf16


@dataclass(frozen=True)
class Shape:
    """Queries ``(batch, heads, queries, head_dim)``, keys ``(batch, kv_heads, keys, head_dim)``."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int

    @property
    def sizes(self) -> list[int]:
        return [self.batch, self.heads, self.kv_heads, self.queries, self.keys, self.head_dim]

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def values(self) -> int:
        """Numbers in K and V together."""
        return 2 * self.batch * self.kv_heads * self.keys * self.head_dim

    @property
    def fp16_bytes(self) -> int:
        return 2 * self.values

    @property
    def int8_bytes(self) -> int:
        """With scales."""
        return self.values + 4 * self.batch * self.kv_heads * self.keys


class Inputs:
    """Seeded inputs of one shape."""

    def __init__(self, shape: Shape, device: str) -> None:
        generator = torch.Generator(device).manual_seed(sum(shape.sizes))

        def normal(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator, device=device, dtype=torch.float16)

        kv = (shape.batch, shape.kv_heads, shape.keys, shape.head_dim)
        self.shape = shape
        self.query = normal(shape.batch, shape.heads, shape.queries, shape.head_dim)
        self.key = normal(*kv) + KEY_BIAS * normal(1, shape.kv_heads, 1, shape.head_dim)
        self.value = normal(*kv)

    @functools.cached_property
    def quantized(self) -> tuple[Tensor, Tensor, Tensor]:
        """K, V and their scales as a cache holds them."""
        shape, device = self.shape, self.key.device
        row = -(-shape.head_dim // 16) * 16  # as Int8Store pads them
        padded = (torch.zeros((*self.key.shape[:3], row), dtype=torch.int8, device=device) for _ in range(2))
        key, value = (x[..., : shape.head_dim] for x in padded)
        scales = torch.zeros((*self.key.shape[:3], 2), dtype=torch.bfloat16, device=device)
        length = torch.zeros(2, dtype=torch.int32, device=device)
        mean = self.key.mean(2, dtype=torch.float32)
        step = max(1, 2**27 // (shape.batch * shape.kv_heads * shape.head_dim))
        for part in range(0, shape.keys, step):
            tokens = slice(part, part + step)
            cache_append(self.key[:, :, tokens], self.value[:, :, tokens], mean, key, value, scales, length)
        return key, value, scales

    @functools.cached_property
    def oracle(self) -> Tensor:
        """Attention of the float operands in FP64, of the first sequences."""
        return attention_fp64(self.query[:CHECKED], self.key[:CHECKED], self.value[:CHECKED])

    @functools.cached_property
    def quantized_oracle(self) -> Tensor:
        """Attention of the quantized keys and values in FP64."""
        key, value, scales = (x[:CHECKED] for x in self.quantized)
        return attention_fp64(self.query[:CHECKED], key, value, scales)


def attention_fp64(query: Tensor, key: Tensor, value: Tensor, scales: Tensor | None = None) -> Tensor:
    """``(B, H, N, D)``, one key head at a time; with ``scales (B, Hkv, Nk, 2)`` of integers."""
    out = torch.empty(query.shape, dtype=torch.float64, device=query.device)
    group = query.shape[1] // key.shape[1]
    for b in range(query.shape[0]):
        for h in range(key.shape[1]):
            k, v = key[b, h].double(), value[b, h].double()
            if scales is not None:
                k, v = k * scales[b, h, :, :1].double(), v * scales[b, h, :, 1:].double()
            q = query[b, h * group : (h + 1) * group].double() / math.sqrt(query.shape[-1])
            out[b, h * group : (h + 1) * group] = (q @ k.mT).softmax(-1) @ v
    return out


@dataclass(frozen=True)
class Case:
    """One provider at one shape: the same call on several copies of the cache, and the check of its result."""

    calls: Sequence[Callable[[], Tensor]]
    check: Check
    dtype: str
    bytes: int


def copies(count: int, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """``tensors`` and ``count - 1`` copies of them elsewhere."""
    return [tensors, *(tuple(_clone(x) for x in tensors) for _ in range(count - 1))]


def _clone(x: Tensor) -> Tensor:
    """A copy of ``x (B, Hkv, Nk, channels)`` with its padding of rows."""
    return x.new_zeros((*x.shape[:3], x.stride(2)))[..., : x.shape[3]].copy_(x)


def number_of_copies(size: int) -> int:
    return max(2, min(MAX_COPIES, -(-ROTATED_BYTES // max(size, 1))))


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def _fp16(attention: Callable[[Shape], Attention]) -> Callable[[Inputs], Case]:
    def case(given: Inputs) -> Case:
        fn, query = attention(given.shape), given.query
        caches = copies(number_of_copies(given.shape.fp16_bytes), given.key, given.value)
        calls = [functools.partial(fn, query, key, value) for key, value in caches]
        return Case(calls, rows_within(lambda: given.oracle, FP16_ERROR), "float16", given.shape.fp16_bytes)

    return case


def _sdpa(backend: SDPBackend, heads: str) -> Callable[[Inputs], Case]:
    """``heads``: how the heads of a group share a key: "gqa" by the argument, "packed" as more queries of one head."""

    def attention(shape: Shape) -> Attention:
        def packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            rows = query.view(shape.batch, shape.kv_heads, shape.group * shape.queries, shape.head_dim)
            with sdpa_kernel([backend]):
                return F.scaled_dot_product_attention(rows, key, value).view(query.shape)

        def grouped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            with sdpa_kernel([backend]):
                return F.scaled_dot_product_attention(query, key, value, enable_gqa=shape.group > 1)

        return packed if heads == "packed" else grouped

    return _fp16(attention)


def _matmul(shape: Shape) -> Attention:
    """Two batched products with a row for each query head of a group."""

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = query.view(shape.batch, shape.kv_heads, shape.group * shape.queries, shape.head_dim)
        logits = torch.matmul(rows * shape.head_dim**-0.5, key.mT)
        return torch.matmul(logits.softmax(-1), value).view(query.shape)

    return attention


def _qframework(given: Inputs) -> Case:
    shape = given.shape
    caches = copies(number_of_copies(shape.int8_bytes), *given.quantized)
    length = torch.full((1,), shape.keys, dtype=torch.int32, device=given.query.device)
    calls = [
        functools.partial(decode_attention, given.query, key, value, scales, length) for key, value, scales in caches
    ]
    return Case(calls, rows_within(lambda: given.quantized_oracle, INT8_ERROR), "int8", shape.int8_bytes)


PROVIDERS: dict[str, Callable[[Inputs], Case]] = {
    "qframework_int8": _qframework,
    "torch_matmul": _fp16(_matmul),
    **{
        f"torch_{name}_{heads}": _sdpa(backend, heads)
        for name, backend in {
            "flash": SDPBackend.FLASH_ATTENTION,
            "cudnn": SDPBackend.CUDNN_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION,
        }.items()
        for heads in ("packed", "gqa")
    },
}
