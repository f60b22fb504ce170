"""Small models of transformers whose attention caps its logits."""

from __future__ import annotations

from typing import Any

import torch
from attention_models import randomize
from torch import nn

CAP = 2.0  # so low that small models feel it
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 50, "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": CAP, "sliding_window": 4, "use_cache": False}  # fmt: skip
VIDEO = {"image_size": 16, "tubelet_size": [1, 8, 8], "num_frames": 4, "num_spatial_layers": 1,
         "num_temporal_layers": 1, "attn_logit_softcapping": CAP}  # fmt: skip
PADDED = torch.tensor([[1] * 9, [0] * 4 + [1] * 5])


def model_of(family: str, implementation: str = "eager") -> tuple[nn.Module, dict[str, Any], Any, int]:
    """A model with random weights, its inputs, which of its results count, and its attentions with a cap."""
    import transformers

    torch.manual_seed(0)
    ids = torch.randint(1, 50, (2, 9))
    text = {"input_ids": ids, "attention_mask": PADDED}
    if family == "T5Gemma":
        part = {**TEXT, "attn_implementation": implementation}
        config = transformers.T5GemmaConfig(encoder=part, decoder=part, attn_implementation=implementation)
        config.vocab_size = 50
        model = transformers.T5GemmaModel(config)
        inputs = {**text, "decoder_input_ids": ids, "use_cache": False}
        return randomize(model), inputs, torch.ones(2, 9, dtype=torch.bool), 6
    if family == "VideoPrismVision":
        config = transformers.VideoPrismVisionConfig(**SIZES, **VIDEO, attn_implementation=implementation)
        model, count = transformers.VideoPrismVisionModel(config), 2
        return randomize(model), {"pixel_values_videos": torch.randn(1, 4, 3, 16, 16)}, ..., count
    config = getattr(transformers, f"{family}Config")(**TEXT, attn_implementation=implementation)
    return randomize(getattr(transformers, f"{family}Model")(config)), text, PADDED.bool(), 2


FAMILIES = ["Gemma2", "VaultGemma", "T5Gemma", "VideoPrismVision"]
