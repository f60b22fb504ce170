"""Tiny transformers of the kinds that convert_to_int8_training supports, and their inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, TOKENS, WIDTH = 64, 16, 32


def vit(**options: object) -> nn.Module:
    """A ViT in the proportions of DeiT: class token, four times as wide an MLP."""
    from timm.models.vision_transformer import VisionTransformer

    shape = {"img_size": 16, "patch_size": 4, "in_chans": 1, "num_classes": 5, "depth": 2, "num_heads": 2}
    model = VisionTransformer(**{**shape, "embed_dim": WIDTH, "qkv_bias": True, **options})
    # As after some training: an untrained class token is near zero, and shares its blocks with patches that are not.
    nn.init.normal_(model.pos_embed)
    return model


def gpt2(**options: object) -> nn.Module:
    """transformers' GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"vocab_size": VOCABULARY, "n_positions": TOKENS, "n_embd": WIDTH, "n_layer": 2, "n_head": 2}
    ends = {"bos_token_id": None, "eos_token_id": None, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(**{**shape, **ends, **options}))


def llama(**options: object) -> nn.Module:
    """transformers' Llama with grouped heads; 48 intermediate features fill no whole number of blocks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "bos_token_id": None, "eos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(**{**shape, **heads, "use_cache": False, **options}))


MODELS: dict[str, Callable[..., nn.Module]] = {"vit": vit, "gpt2": gpt2, "llama": llama}


def inputs(name: str, batch: int = 2) -> Tensor:
    """Images or tokens for a model."""
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        return torch.randn(batch, 1, 16, 16, generator=generator)
    return torch.randint(0, VOCABULARY, (batch, TOKENS), generator=generator)


def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    """A model's result as one tensor."""
    out = model(x)
    return out if isinstance(out, Tensor) else out.logits


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Cross entropy with labels that come from each example itself: some class, or the next token."""
    logits = logits_of(model, x).float()
    if x.is_floating_point():
        return F.cross_entropy(logits, (100 * x.flatten(1).sum(1).abs()).long() % logits.shape[-1])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
