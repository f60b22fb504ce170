"""Queries, keys and values of attention layers in models with trained weights, captured while they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from benchmarks import pretrained_models
from benchmarks.pretrained_data import crops, docstrings

_SEED = 2_000_000


class Operands(NamedTuple):
    """What one attention layer reads: ``(B, H, N, D)`` float16 each."""

    layer: str
    query: Tensor
    key: Tensor
    value: Tensor


class _Capture(TorchFunctionMode):
    """Keeps the operands of every ``scaled_dot_product_attention``; none may be masked."""

    def __init__(self) -> None:
        super().__init__()
        self.operands: list[tuple[Tensor, Tensor, Tensor]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is F.scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value"), args, strict=False)) | dict(given)
            self.operands.append((named["query"].half(), named["key"].half(), named["value"].half()))
        return func(*args, **given)


@torch.no_grad()
def captured(name: str, model: Callable[..., Any], *inputs: Tensor, **named: Tensor) -> list[Operands]:
    """The operands of each attention of ``model``, in the order it runs."""
    with _Capture() as capture:
        model(*inputs, **named)
    return [Operands(f"{name}, layer {i}", *operands) for i, operands in enumerate(capture.operands)]


def pretrained_layers(examples: int) -> Iterator[Operands]:
    """All layers of DINOv2 ViT-S/14 on crops and of all-MiniLM-L6-v2 on docstrings of at least 128 tokens.

    Raises:
        QFrameworkError: the packages that hold the weights are not installed.
    """
    vision = pretrained_models.dinov2()
    images = crops(examples, _SEED, vision.model, pretrained_models.IMAGE_SIZE).images
    yield from captured("DINOv2 ViT-S/14", vision, images)
    encoded = pretrained_models.tokenized(docstrings(512, _SEED).texts, pretrained_models.minilm_folder())
    full = encoded["attention_mask"].bool().all(1)  # so that no layer has a mask
    batch = {key: value[full][:examples] for key, value in encoded.items()}
    yield from captured("all-MiniLM-L6-v2", pretrained_models.minilm(), **batch)


def random_layers(tokens: int, seed: int = 0) -> Iterator[Operands]:
    """Two layers of random operands, for smoke runs; Q and K have a bias for each channel."""
    generator = torch.Generator().manual_seed(seed)
    for index in range(2):
        query, key, value = (torch.randn(1, 2, tokens, 32, generator=generator) for _ in range(3))
        query, key = (x + 4 * torch.randn(1, 2, 1, 32, generator=generator) for x in (query, key))
        yield Operands(f"random, layer {index}", query.half(), key.half(), value.half())
