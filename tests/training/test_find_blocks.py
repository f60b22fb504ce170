"""Blocks are found by their structure, also where their parts are not direct children, and attention by its names."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from training_models import inputs, vit

from qframework.errors import UnsupportedError
from qframework.training import conversion_report, convert_to_int8_training, fallbacks
from qframework.training.find_blocks import blocks_below, gives_blocks, is_attention_name

SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.parametrize("name", ["attn", "self_attn", "encoder_attn", "attn2", "self_attention", "EncDecAttention"])
def test_names_of_attention(name: str) -> None:
    assert is_attention_name(name)


@pytest.mark.parametrize("name", ["attn_pool", "attention_norm", "self_attn_layer_norm", "attn_drop", "attns", "mixer"])
def test_other_names(name: str) -> None:
    assert not is_attention_name(name)


def test_normalizations_inside_attention_and_beside_it() -> None:
    """BERT's normalizations follow the output projections in the modules that hold these."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    model = BertModel(BertConfig(**SHAPE), add_pooling_layer=False).eval()
    ids, mask = torch.randint(0, 64, (2, 16)), torch.ones(2, 16)
    mask[1, 10:] = 0
    wanted, wanted_gradient = result_and_gradient(model, ids, mask)
    convert_to_int8_training(model, skip_slower=False)
    fallbacks.clear()
    got, gradient = result_and_gradient(model, ids, mask)
    assert not fallbacks
    assert conversion_report(model).blocks == ("encoder.layer.0", "encoder.layer.1")
    assert sum(row.before == "Linear" for row in conversion_report(model).converted) == 12
    assert 0 < float((got - wanted).norm() / wanted.norm()) < 0.03
    assert float(F.cosine_similarity(wanted_gradient, gradient, 0)) > 0.99


def result_and_gradient(model: nn.Module, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    y = model(*inputs).last_hidden_state
    F.mse_loss(y, torch.ones_like(y)).backward()
    return y.detach(), torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


@pytest.mark.parametrize("output", ["proj", "out_lin", "Wo", "output", "output.dense", "projection", "to_add_out"])
def test_what_attention_returns_is_int8(output: str) -> None:
    assert gives_blocks(f"attention.{output}")
    assert not gives_blocks("attention.self.query")


def test_int8_goes_on_behind_attention_of_blip() -> None:
    """It calls attention's last linear ``projection``: floats came out, and the residual sum was one of floats."""
    from transformers import BlipVisionConfig, BlipVisionModel

    torch.manual_seed(0)
    shape = {name: value for name, value in SHAPE.items() if name != "vocab_size"}
    model = BlipVisionModel(BlipVisionConfig(**shape, image_size=16, patch_size=8))
    convert_to_int8_training(model, skip_slower=False)
    fallbacks.clear()
    model(torch.randn(2, 3, 16, 16)).last_hidden_state.sum().backward()
    assert not fallbacks


def test_sublayers_in_a_list() -> None:
    """T5's blocks hold their sublayers in a list, each of which holds attention or linears."""
    from transformers import T5Config, T5EncoderModel

    model = T5EncoderModel(T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2))
    assert list(blocks_below(model)) == list(model.encoder.block)
    convert_to_int8_training(model, skip_slower=False)
    assert sum(row.before == "Linear" for row in conversion_report(model).converted) == 12
    kept = {row.kind: row.reason for row in conversion_report(model).kept}
    assert kept["Embedding"] == "inside attention, which computes in 16 bits"


def test_experts_are_beside_attention_and_named() -> None:
    """Their activation was converted, and their matrices stayed in float without a word."""
    from transformers import MixtralConfig, MixtralModel

    model = MixtralModel(MixtralConfig(**SHAPE, num_key_value_heads=2, num_local_experts=2))
    assert list(blocks_below(model)) == list(model.layers)
    named = ["layers.*.mlp.gate", "layers.*.mlp.experts"]
    with pytest.raises(UnsupportedError, match=re.escape(f"pass keep_float={named}".replace("'", '"'))):
        convert_to_int8_training(model, skip_slower=False)
    convert_to_int8_training(model, keep_float=named, skip_slower=False)
    assert {row.kind for row in conversion_report(model).kept} == {"MixtralTopKRouter", "MixtralExperts"}
    model(torch.randint(0, 64, (2, 16))).last_hidden_state.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class Experts(nn.Module):
    """Sends each token to the expert that a linear chooses."""

    def __init__(self, router: nn.Module, count: int = 4) -> None:
        super().__init__()
        self.router, self.num_experts = router, count
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        score, chosen = self.router(x).softmax(-1).max(-1, keepdim=True)
        return score * torch.stack([expert(x) for expert in self.experts], -1).gather(-1, index_of(chosen, x))[..., 0]


def index_of(chosen: Tensor, x: Tensor) -> Tensor:
    return chosen[..., None].expand(*x.shape, 1)


class OneLayerRouter(nn.Module):
    """As DBRX's and JetMoE's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize("mode", ["per_block", "per_token"])
@pytest.mark.parametrize("make", [lambda: nn.Linear(32, 4), OneLayerRouter])
def test_routers_stay_in_float(make: Callable[[], nn.Module], mode: Any) -> None:
    torch.manual_seed(0)
    model = vit()
    for block in model.blocks:
        block.mlp = Experts(make())
    convert_to_int8_training(model, mode=mode, skip_slower=False)
    ends = ("mlp.router", "mlp.router.layer")
    routers = [each for name, each in model.named_modules() if name.endswith(ends) and isinstance(each, nn.Linear)]
    assert [type(each) for each in routers] == [nn.Linear, nn.Linear]
    assert sum("chooses experts" in row.reason for row in conversion_report(model).kept) == 2
    assert sum(".experts." in row.name for row in conversion_report(model).converted) == 8
    model(inputs("vit")).sum().backward()
    assert all(float(router.weight.grad.norm()) > 0 for router in routers)


def test_weights_that_are_read_on_another_path() -> None:
    """Bloom calls its linears, and reads slices of their weights only where pretraining_tp asks for it."""
    from transformers import BloomConfig, BloomModel

    model = BloomModel(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2))
    convert_to_int8_training(model, skip_slower=False)
    assert sum(row.before == "Linear" for row in conversion_report(model).converted) == 4
    fallbacks.clear()
    model(torch.randint(0, 64, (2, 16))).last_hidden_state.sum().backward()
    assert not fallbacks


def test_cross_attention_gets_floats() -> None:
    """BART calls it encoder_attn: queries, keys and values were rounded to INT8."""
    from transformers import BartConfig, BartModel

    torch.manual_seed(0)
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes = {"vocab_size": 64, "d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    model = convert_to_int8_training(BartModel(BartConfig(**sizes, **layers)).eval(), skip_slower=False)
    told = {row.name: row.after for row in conversion_report(model).converted}
    parts = {part: told[f"decoder.layers.0.encoder_attn.{part}"] for part in ("q_proj", "k_proj", "v_proj", "out_proj")}
    assert parts.pop("out_proj") == "Int8Linear (block out)"
    assert set(parts.values()) == {"Int8Linear (float out)"}
    fallbacks.clear()
    model(
        torch.randint(3, 64, (2, 16)), decoder_input_ids=torch.randint(3, 64, (2, 8))
    ).last_hidden_state.sum().backward()
    assert not fallbacks


class Attending(nn.Module):
    """Layers without linears beside attention, and a projection outside of them."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attn = nn.LayerNorm(32), nn.Sequential(nn.Linear(32, 32))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.attn(self.norm(x))

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.projection = nn.Sequential(self.Layer(), self.Layer()), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(self.layers(x))


def test_a_model_around_layers_is_no_block() -> None:
    model = nn.Module()
    model.backbone = Attending()
    with pytest.raises(UnsupportedError, match=r"without\. Name its blocks in blocks="):
        convert_to_int8_training(model)


def test_the_error_suggests_blocks() -> None:
    from timm.models.mlp_mixer import MlpMixer

    model = nn.Sequential(MlpMixer(img_size=32, embed_dim=32, num_blocks=2, num_classes=5))
    with pytest.raises(UnsupportedError, match=r'Name its blocks in blocks=, perhaps \["\*\.blocks\.\*"\]$'):
        convert_to_int8_training(model)
    convert_to_int8_training(model, blocks=["*.blocks.*"], skip_slower=False)
    assert conversion_report(model).blocks == ("0.blocks.0", "0.blocks.1")
