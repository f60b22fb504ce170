"""How ``benchmarks.families`` builds models of timm and transformers with random weights, and their inputs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SEED = 0
DECODING = "decoder, one token behind a context of 1,024"  # a kind
Inputs = tuple[Tensor, ...]
_SMALL = {  # sizes of a transformers configuration in a smoke run, by the names that configurations have
    "hidden_size": 64, "d_model": 64, "intermediate_size": 128, "d_ff": 128, "encoder_ffn_dim": 128,
    "num_hidden_layers": 1, "num_layers": 1, "encoder_layers": 1, "num_attention_heads": 2, "num_heads": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "d_kv": 32,
    "vocab_size": 99, "max_source_positions": 32, "n_embd": 64, "n_layer": 1, "n_head": 2,
    "dim": 64, "hidden_dim": 128, "n_layers": 1, "n_heads": 2, "ffn_dim": 128, "word_embed_proj_dim": 64,
    "num_experts": 4, "num_experts_per_tok": 2, "depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 80, 64],
    "conv_dim": [16] * 7, "num_conv_pos_embeddings": 16, "d_inner": 128, "window_block_indices": [],
}  # fmt: skip
_SMALL_IMAGE, _SMALL_MODEL = 160, "test_vit"
_SMALL_TOKENS = 24
DECODED_CONTEXT, DECODED_BATCH = 1024, 16


@dataclass(frozen=True)
class Family:
    """An architecture: how to build it, what it takes, and a batch for throughput."""

    name: str
    kind: str
    batch: int
    build: Callable[[bool], nn.Module]  # of whether it is a smoke run
    inputs: Callable[[nn.Module, int, bool], Inputs]  # fp32 or int64, of a batch
    in_graphs: bool = False  # CUDA graphs at every batch, not only at batch 1


# timm -----------------------------------------------------------------------------------------------------------------


def of_timm(kind: str, name: str, batch: int, **arguments: Any) -> Family:
    return Family(name, kind, batch, functools.partial(_build_timm, name, arguments), _images)


def _build_timm(name: str, arguments: Mapping[str, Any], smoke: bool) -> nn.Module:
    import timm

    return _enlarge_tiny(timm.create_model(_SMALL_MODEL) if smoke else timm.create_model(name, **arguments))


def _enlarge_tiny(model: nn.Module) -> nn.Module:
    """Scale parameters below 1e-3 up to 0.1, and draw matrices of zeros, in place.

    timm initialises some class tokens and layer scales to about 1e-6, where FP16 keeps four bits, and the head of some
    models to zero, which makes every output equal.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            largest = float(parameter.abs().max())
            if 0 < largest < 1e-3:
                parameter.mul_(0.1 / largest)
            elif largest == 0 and parameter.ndim == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model


def _images(model: Any, batch: int, smoke: bool) -> Inputs:
    channels, height, width = model.pretrained_cfg["input_size"]
    if sizes := getattr(getattr(model, "patch_embed", None), "img_size", None):  # where an argument sets it
        height, width = sizes
    size = (_SMALL_IMAGE, _SMALL_IMAGE) if smoke else (height, width)
    return (torch.randn(batch, channels, *size, generator=_generator()),)


# transformers ---------------------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """Token vectors of padded sequences, zero at padding: ``(B, N)`` ids and mask to ``(B, N, C)``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        states: Tensor = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        return states * mask[..., None].to(states.dtype)


class Decoder(nn.Module):
    """Token vectors of whole prompts, without a cache: ``(B, N)`` ids to ``(B, N, C)``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        states: Tensor = self.model(input_ids=ids, use_cache=False).last_hidden_state
        return states


class Context(nn.Module):
    """The cache of a decoder in which all sequences have the same context of random keys and values.

    Each call writes the last token anew, so that calls can be repeated. It has what a layer calls of transformers'
    caches.
    """

    def __init__(self, layers: int, heads: int, channels: int, tokens: int, batch: int) -> None:
        super().__init__()
        self.tokens = tokens
        for name in (f"{kind}_{layer}" for layer in range(layers) for kind in ("keys", "values")):
            self.register_buffer(name, torch.randn(1, heads, tokens + 1, channels).repeat(batch, 1, 1, 1))

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """``(B, H, 1, D)`` of the new token; returns ``(B, H, tokens + 1, D)``."""
        keys, values = (getattr(self, f"{kind}_{layer}")[: len(key)] for kind in ("keys", "values"))
        keys[:, :, self.tokens :].copy_(key)
        values[:, :, self.tokens :].copy_(value)
        return keys, values


class Decoding(nn.Module):
    """Vectors of one token for each sequence behind a context: ``(B, 1)`` ids to ``(B, 1, C)``.

    Calls the layers themselves, without a mask: all tokens are visible, and some versions of transformers make one.
    """

    def __init__(self, model: Any, tokens: int = DECODED_CONTEXT, batch: int = DECODED_BATCH) -> None:
        super().__init__()
        config = model.config
        channels = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        cache = Context(config.num_hidden_layers, config.num_key_value_heads, channels, tokens, batch)
        self.model, self.cache = model, cache
        parameters = inspect.signature(model.layers[0].forward).parameters
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"

    def forward(self, ids: Tensor) -> Tensor:
        model = self.model
        states: Tensor = model.embed_tokens(ids)
        positions = torch.full_like(ids[:1], self.cache.tokens)
        arguments = {
            "attention_mask": None,
            "position_embeddings": model.rotary_emb(states, position_ids=positions),
            "position_ids": positions,
            self.cache_name: self.cache,
        }
        for layer in model.layers:
            states = layer(states, **arguments)
        normed: Tensor = model.norm(states)
        return normed


class Speech(nn.Module):
    """Frames of a spectrogram to vectors: ``(B, mel, frames)`` to ``(B, frames / 2, C)``."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder = model.get_encoder()

    def forward(self, features: Tensor) -> Tensor:
        states: Tensor = self.encoder(features).last_hidden_state
        return states


class Features(nn.Module):
    """The last state of a model that takes one tensor of floats."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.model(x).last_hidden_state
        return states


class Pixels(Features):
    """Images to a map of vectors: ``(B, 3, H, W)`` to ``(B, C, H', W')``."""


class Waveform(Features):
    """Samples of sound to vectors: ``(B, samples)`` to ``(B, frames, C)``."""


def of_transformers(
    name: str, kind: str, batch: int, tokens: int, wrapper: type[nn.Module], model: str, config: str, **sizes: Any
) -> Family:
    build = functools.partial(_build_transformers, wrapper, model, config, sizes)
    inputs: dict[type[nn.Module], Callable[[nn.Module, int, bool], Inputs]] = {
        Encoder: functools.partial(_padded, tokens),
        Decoder: functools.partial(_prompts, tokens),
        Decoding: _next_tokens,
        Speech: _spectrograms,
        Pixels: functools.partial(_pixels, tokens),
        Waveform: functools.partial(_samples, tokens),
    }
    return Family(name, kind, batch, build, inputs[wrapper], in_graphs=wrapper is Decoding)


def _build_transformers(
    wrapper: Callable[[nn.Module], nn.Module], model: str, config: str, sizes: Mapping[str, Any], smoke: bool
) -> nn.Module:
    import transformers

    make = getattr(transformers, config)
    if smoke:
        known = make().to_dict()
        tokens = {name: 0 for name, value in known.items() if name.endswith("token_id") and isinstance(value, int)}
        given = {**known, **sizes}
        small = {name: x for name, x in _SMALL.items() if type(given.get(name)) is type(x)}
        if "num_key_value_heads" in small and given["num_key_value_heads"] == given["num_attention_heads"]:
            small["num_key_value_heads"] = small["num_attention_heads"]
        sizes = {**tokens, **sizes, **small}
    return wrapper(spread(getattr(transformers, model)(make(**sizes))))


def spread(model: nn.Module) -> nn.Module:
    """``model`` with matrices of the size that keeps activations, so that attention matters.

    transformers initialises to 0.02 whatever the width.
    """
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.7 / parameter.shape[1] ** 0.5)
    return model


def _ids(model: nn.Module, batch: int, tokens: int) -> Tensor:
    vocabulary = next(module for module in model.modules() if isinstance(module, nn.Embedding)).num_embeddings
    return torch.randint(3, vocabulary, (batch, tokens), generator=_generator())


def _padded(tokens: int, model: nn.Module, batch: int, smoke: bool) -> Inputs:
    """Lengths from half of the tokens to all of them; a single sequence is whole."""
    tokens = _SMALL_TOKENS if smoke else tokens
    lengths = torch.linspace(tokens, tokens // 2, batch).round().long()
    mask = (torch.arange(tokens) < lengths[:, None]).long()
    return _ids(model, batch, tokens), mask


def _prompts(tokens: int, model: nn.Module, batch: int, smoke: bool) -> Inputs:
    return (_ids(model, batch, _SMALL_TOKENS if smoke else tokens),)


def _next_tokens(model: nn.Module, batch: int, smoke: bool) -> Inputs:
    return (_ids(model, batch, 1),)


def _spectrograms(model: Any, batch: int, smoke: bool) -> Inputs:
    config = model.encoder.config
    frames = 2 * config.max_source_positions
    return (torch.randn(batch, config.num_mel_bins, frames, generator=_generator()),)


def _pixels(size: int, model: nn.Module, batch: int, smoke: bool) -> Inputs:
    size = _SMALL_IMAGE if smoke else size
    return (torch.randn(batch, 3, size, size, generator=_generator()),)


def _samples(samples: int, model: nn.Module, batch: int, smoke: bool) -> Inputs:
    return (torch.randn(batch, 400 * _SMALL_TOKENS if smoke else samples, generator=_generator()),)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)
