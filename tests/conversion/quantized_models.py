"""Models that the tests of this folder quantize."""

from __future__ import annotations

import timm
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from qframework.conversion import QuantizedLinear


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.fc2(F.gelu(self.fc1(x))))


def vit() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return timm.create_model("test_vit", depth=2).eval(), torch.randn(2, 3, 160, 160)


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, 6:] = 0
    return transformers.BertModel(config).eval(), {"input_ids": torch.randint(64, (2, 9)), "attention_mask": mask}


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config).eval(), {"input_ids": torch.randint(64, (2, 9))}


def quantized(model: nn.Module) -> set[str]:
    """The names of a model's layers in INT8."""
    return {name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
