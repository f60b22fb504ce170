"""Small models of transformers with random weights, inputs for them, and what they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Dinov2Config,
    Dinov2Model,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    SiglipConfig,
    SiglipModel,
    T5Config,
    T5ForConditionalGeneration,
)

from qframework.conversion import QuantizedLinear

TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}


SHARD = "40KB"


def tokens() -> dict[str, Tensor]:
    """Two sequences; the second is padded."""
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    return {"input_ids": torch.randint(3, 99, (2, 9)), "attention_mask": mask}


def pixels() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


def llama(**changes: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**TINY, vocab_size=99, num_key_value_heads=2, **changes))


def bert() -> BertForSequenceClassification:
    return BertForSequenceClassification(BertConfig(**TINY, vocab_size=99, num_labels=3))


def gpt2() -> GPT2LMHeadModel:
    config = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(**config))


def t5() -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=99, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0)
    )


def mixtral() -> MixtralForCausalLM:
    """Its checkpoint has the experts apart; transformers joins them while it loads. They are no linear layers."""
    sizes = {"num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": 99}
    return MixtralForCausalLM(MixtralConfig(**TINY, **sizes))


def siglip() -> SiglipModel:
    """Its pooling head is an ``nn.MultiheadAttention``, which reads the weight of its linear layer."""
    vision = {**TINY, "image_size": 32, "patch_size": 8}
    return SiglipModel(SiglipConfig(text_config={**TINY, "vocab_size": 99}, vision_config=vision))


def dinov2() -> Dinov2Model:
    sizes = {name: value for name, value in TINY.items() if name != "intermediate_size"}
    return Dinov2Model(Dinov2Config(**sizes, image_size=32, patch_size=8))


MODELS: dict[str, Any] = {
    "llama": (llama, tokens),
    "bert": (bert, tokens),
    "gpt2": (gpt2, tokens),
    "t5": (t5, lambda: {**tokens(), "decoder_input_ids": torch.randint(3, 99, (2, 5))}),
    "mixtral": (mixtral, tokens),
    "siglip": (siglip, lambda: {**pixels(), **tokens()}),
    "dinov2": (dinov2, pixels),
}


def outputs(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    with torch.no_grad():
        found = model(**inputs)
    return [value for value in found.values() if isinstance(value, Tensor) and value.is_floating_point()]


def saved(model: Any, folder: Path, size: str = SHARD) -> Path:
    """``model`` in a folder, in several files, with weights large enough that each layer matters."""
    model.eval().save_pretrained(folder, max_shard_size=size)
    return folder


def layers(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def in_files(folder: Path) -> dict[str, str]:
    """The dtype of each tensor in the safetensors files of a folder."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            found |= {key: opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118
    return found
