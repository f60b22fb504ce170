"""Saving a quantized mixture of experts of transformers, whose default operator on CPUs a file must not name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qframework
from qframework.errors import UnsupportedError
from qframework.numerics import sqnr_db
from qframework.quantizer import static_int8

transformers = pytest.importorskip("transformers")


class Logits(nn.Module):
    """A tiny Mixtral that returns its logits."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
        config = transformers.MixtralConfig(vocab_size=50, num_hidden_layers=1, **sizes, **experts)
        self.model = transformers.MixtralForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits


def test_the_error_names_the_remedy_and_the_remedy_helps(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, tokens = Logits().eval(), torch.randint(0, 50, (2, 8))
    with pytest.raises(UnsupportedError, match="set_experts_implementation"):
        qframework.quantize(model, tokens, static_int8(), [tokens]).save(tmp_path / "model.pt2")
    model.model.set_experts_implementation("batched_mm")
    quantized = qframework.quantize(model, tokens, static_int8(), [tokens])
    quantized.save(tmp_path / "model.pt2")
    with torch.no_grad():
        out = qframework.load(tmp_path / "model.pt2")(tokens)
        torch.testing.assert_close(out, quantized(tokens))
        assert sqnr_db(model(tokens), out) > 20
