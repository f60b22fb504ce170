"""The models of ``benchmarks.training_models``: of timm and transformers, with random weights and without dropout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_VOCABULARY = 8192
Build = Callable[[int | None], nn.Module]  # of so many blocks, or as many as the model has


@dataclass(frozen=True)
class Subject:
    """A model to train, and how many inputs a step takes."""

    build: Build
    batch: int
    tokens: int = 0  # of a language model; 0: images of 224 x 224

    def inputs(self, device: str, smoke: bool) -> tuple[Tensor, Tensor]:
        """A batch and its labels."""
        batch = 2 if smoke else self.batch
        if self.tokens:
            x = torch.randint(0, _VOCABULARY, (batch, 16 if smoke else self.tokens), device=device)
            return x, x
        return torch.randn(batch, 3, 224, 224, device=device), torch.randint(0, 1000, (batch,), device=device)


def _gpt2(width: int, layers: int, heads: int) -> Build:
    def build(depth: int | None) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        others = {"use_cache": False, "bos_token_id": None, "eos_token_id": None}
        sizes = {"n_embd": width, "n_layer": depth or layers, "n_head": heads, "vocab_size": _VOCABULARY}
        return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, **others))

    return build


def llama(width: int, inner: int, layers: int) -> Build:
    """Llama with as many heads of keys as of queries, 128 channels each."""
    heads = width // 128
    sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads}
    return _configured("LlamaForCausalLM", hidden_size=width, intermediate_size=inner, use_cache=False, **sizes)


def _configured(name: str, **sizes: Any) -> Build:
    """A class of transformers with a vocabulary of its own; ``sizes`` are those of its configuration."""

    def build(depth: int | None) -> nn.Module:
        import transformers

        of_depth = {} if depth is None else {"num_hidden_layers": depth}
        made = getattr(transformers, name)
        config = made.config_class(**{**sizes, **of_depth, **_TOKENS})
        if config.get_text_config().pad_token_id is not None:
            config.pad_token_id = 0
        return made(config)

    return build


_TOKENS: dict[str, Any] = {"vocab_size": _VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _timm(name: str, **options: Any) -> Build:
    def build(depth: int | None) -> nn.Module:
        import timm

        of_depth = {} if depth is None else {"depth": depth}
        return timm.create_model(name, **{**options, **of_depth})

    return build


def _heads(heads: int, kv_heads: int, channels: int) -> dict[str, int]:
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": channels}


_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "deit_small": Subject(_timm("deit_small_patch16_224"), 128),
    "vit_base": Subject(_timm("vit_base_patch16_224"), 64),
    "vit_large": Subject(_timm("vit_large_patch16_224"), 64),
    "vit_huge": Subject(_timm("vit_huge_patch14_224"), 48),
    "gpt2_medium": Subject(_gpt2(1024, 24, 16), 8, 1024),
    "gpt2_large": Subject(_gpt2(1280, 36, 20), 8, 1024),
    "gpt2_1536": Subject(_gpt2(1536, 24, 12), 8, 1024),
    "llama_1024": Subject(llama(1024, 2816, 24), 4, 2048),
    "llama_1536": Subject(llama(1536, 4096, 16), 4, 2048),
    "llama_2048": Subject(llama(2048, 5632, 16), 4, 2048),
    "llama_3072": Subject(llama(3072, 8192, 8), 4, 2048),
    "llama_4096": Subject(llama(4096, 11008, 4), 4, 2048),
    "dinov2_large": Subject(_timm("vit_large_patch14_dinov2", img_size=224, num_classes=1000), 64),
    "bert_large": Subject(_configured("BertForMaskedLM", hidden_size=1024, intermediate_size=4096,
                                      num_hidden_layers=24, num_attention_heads=16, **_NO_DROPOUT), 16, 512),
    "olmo2_1b": Subject(_configured("Olmo2ForCausalLM", hidden_size=2048, intermediate_size=8192, use_cache=False,
                                    num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=16), 4, 2048),
    "pythia_1.4b": Subject(_configured("GPTNeoXForCausalLM", hidden_size=2048, intermediate_size=8192,
                                       num_hidden_layers=24, num_attention_heads=16, use_cache=False), 4, 2048),
    "qwen3_1.7b": Subject(_configured("Qwen3ForCausalLM", hidden_size=2048, intermediate_size=6144,
                                      num_hidden_layers=28, use_cache=False, **_heads(16, 8, 128)), 4, 2048),
    "gemma2_2b": Subject(_configured("Gemma2ForCausalLM", hidden_size=2304, intermediate_size=9216,
                                     num_hidden_layers=26, use_cache=False, **_heads(8, 4, 256)), 4, 2048),
    "phi3_mini": Subject(_configured("Phi3ForCausalLM", hidden_size=3072, intermediate_size=8192, use_cache=False,
                                     num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32), 4, 2048),
    "mistral_7b": Subject(_configured("MistralForCausalLM", hidden_size=4096, intermediate_size=14336,
                                      num_hidden_layers=32, use_cache=False, **_heads(32, 8, 128)), 4, 2048),
}  # fmt: skip
SMOKE = {"gpt2_medium": Subject(_gpt2(64, 1, 2), 2, 16)}
