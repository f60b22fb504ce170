"""A quantized model in the place of a submodule: the attributes that the code around it reads."""

from __future__ import annotations

import copy
import gc
import types
import weakref

import pytest
import timm
import torch
import transformers
from quantized_models import bert
from torch import Tensor, nn

import qframework
from qframework.conversion.stand_in import PartOfModel
from qframework.errors import UnsupportedError
from qframework.quantizer import dynamic_int8


class Encoder(nn.Module):
    kind = "convolutional"
    _private = 1

    def __init__(self) -> None:
        super().__init__()
        self.img_size, self.sizes, self.config = 8, [4, 2], transformers.ViTConfig(patch_size=4)
        self.conv = nn.Conv2d(3, 16, 4, stride=4)
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Dropout(0.5)])
        self.graph = "a name of GraphModule"
        self.hook = lambda: None
        self.table = {"weight": torch.ones(1)}

    @property
    def dtype(self) -> torch.dtype:
        return self.conv.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.conv.weight.device

    @property
    def grid(self) -> int:
        raise RuntimeError("computed attributes are not read")

    def features(self, x: Tensor) -> Tensor:
        return self.conv(x).flatten(2).mT

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(self.features(x) if x.ndim == 4 else x)
        return x


X = torch.randn(2, 3, 8, 8)


def quantized(model: nn.Module, inputs: object) -> qframework.conversion.quantized_model.QuantizedModel:
    return qframework.quantize(model, inputs, dynamic_int8())


@pytest.mark.parametrize("copied", [False, True])
def test_plain_attributes_of_all_modules(copied) -> None:
    model = Encoder().eval()
    found = quantized(model, (X,))
    found = copy.deepcopy(found) if copied else found
    assert (found.kind, found.img_size, found.sizes, found.dtype) == ("convolutional", 8, [4, 2], torch.float32)
    assert found.sizes is not model.sizes
    assert found.config.patch_size == 4
    assert found.device == torch.device("cpu")
    assert (found.conv.stride, found.conv.kernel_size, found.conv.out_channels) == ((4, 4), (4, 4), 16)
    assert torch.equal(found.conv.weight, model.conv.weight)
    assert (len(found.layers), found.layers[0].in_features, found.layers[-1].p) == (2, 16, 0.5)
    assert [*found.layers] == [found.layers[0], found.layers[1]]
    assert isinstance(found.graph, torch.fx.Graph)
    assert not found.layers[0].training
    for missing in ("grid", "hook", "table", "_private"):
        assert not hasattr(found, missing)
    assert not hasattr(found.layers[0], "weight"), "the weight is in INT8"


def test_the_device_is_that_of_the_model() -> None:
    found = quantized(Encoder().eval(), (X,))
    assert found.to("meta").device == torch.device("meta")


def test_the_float_model_is_released() -> None:
    model = Encoder().eval()
    found, weight = quantized(model, (X,)), weakref.ref(model.layers[0].weight)
    del model
    gc.collect()
    assert found.img_size == 8
    assert weight() is None


def test_parts_and_other_methods_are_not_called() -> None:
    found = quantized(Encoder().eval(), (X,))
    with pytest.raises(
        UnsupportedError, match=r"QuantizedModel: features of Encoder must not be called: .* its forward"
    ):
        found.features(X)
    with pytest.raises(
        UnsupportedError, match=r"QuantizedModel: layers\.0 must not be called: .* this Linear is a part"
    ):
        found.layers[0](X)
    timms = quantized(timm.create_model("test_vit", depth=1).eval(), (torch.randn(2, 3, 160, 160),))
    assert (timms.num_classes, timms.patch_embed.patch_size, timms.pretrained_cfg["num_classes"]) == (
        1000,
        (16, 16),
        1000,
    )
    for method in ("forward_features", "forward_head"):
        with pytest.raises(UnsupportedError, match=f"{method} of VisionTransformer must not be called"):
            getattr(timms, method)(X)


def test_state_and_results_are_those_of_the_graph(tmp_path) -> None:
    found = quantized(Encoder().eval(), (X,))
    assert any(isinstance(module, PartOfModel) for module in found.modules())
    found.save(tmp_path / "model.pt2")
    loaded = qframework.load(tmp_path / "model.pt2")
    assert loaded.state_dict().keys() == found.state_dict().keys()
    expected = found(X)
    assert torch.equal(loaded(X), expected)
    assert torch.equal(copy.deepcopy(found)(X), expected)
    compiled = torch.compile(found, backend="eager", fullgraph=True)
    assert torch.equal(compiled(X), expected)
    assert compiled.conv.stride == (4, 4)


def whisper() -> transformers.WhisperForConditionalGeneration:
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        **{f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in LAYERS.items()},
        d_model=64,
        vocab_size=200,
        num_mel_bins=16,
        max_source_positions=50,
        max_target_positions=30,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        decoder_start_token_id=3,
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    model.generation_config.suppress_tokens = model.generation_config.begin_suppress_tokens = None
    return model


LAYERS = {"layers": 2, "attention_heads": 2, "ffn_dim": 128}


class Empty(nn.Module):
    """As a part of a model of transformers: its device is that of a parameter, and it has none."""

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


class WithoutDevice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.part = nn.Linear(16, 8), Empty()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class WithMapping(WithoutDevice):
    kinds = types.MappingProxyType({"a": 1})

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Identity()


@pytest.mark.parametrize(("kind", "missing"), [(WithoutDevice, "part.device"), (WithMapping, "kinds")])
def test_attributes_that_cannot_be_read_or_copied_are_left_out(kind, missing) -> None:
    found, x = quantized(kind().eval(), (torch.randn(2, 16),)), torch.randn(2, 16)
    *path, name = missing.split(".")
    assert not hasattr(found.get_submodule(".".join(path)), name)
    assert torch.equal(copy.deepcopy(found)(x), found(x))


@torch.no_grad()
def test_whisper_generates_with_a_quantized_encoder() -> None:
    model, sound = whisper(), torch.randn(2, 16, 100)
    expected = model.generate(sound, max_new_tokens=5)
    model.model.encoder = quantized(model.model.encoder, (sound,))
    assert torch.equal(model.generate(sound, max_new_tokens=5), expected)


@torch.no_grad()
def test_t5_generates_with_a_quantized_encoder() -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=100,
        d_model=64,
        d_kv=32,
        d_ff=128,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        eos_token_id=99,
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    inputs = {"input_ids": torch.randint(3, 90, (2, 9)), "attention_mask": torch.ones(2, 9, dtype=torch.int64)}
    model.encoder = quantized(model.encoder, inputs)
    assert model.generate(**inputs, max_new_tokens=5, num_beams=2).shape == (2, 6)
    with pytest.raises(
        TypeError, match="quantized T5Stack is missing the argument 'attention_mask', which the example"
    ):
        model.generate(inputs["input_ids"], max_new_tokens=5)


@torch.no_grad()
def test_bert_with_a_head_around_it() -> None:
    encoder, inputs = bert()
    model = transformers.BertForSequenceClassification(encoder.config).eval()
    expected = model(**inputs).logits
    model.bert = quantized(model.bert, inputs)
    torch.testing.assert_close(model(**inputs).logits, expected, atol=0.01, rtol=0)
    assert not torch.equal(model(**inputs).logits, expected)
    assert model.bert.main_input_name == "input_ids"


@torch.no_grad()
def test_a_vision_tower_of_llava() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.LlavaConfig(
        vision_config={"model_type": "clip_vision_model", "image_size": 32, "patch_size": 8, **sizes},
        text_config={"model_type": "llama", "num_key_value_heads": 2, "vocab_size": 60, **sizes},
        image_token_index=59,
        vision_feature_layer=-2,
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    ids = torch.cat([torch.full((2, 16), 59), torch.randint(50, (2, 4))], 1)
    inputs = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 32, 32)}
    expected = model(**inputs).logits
    example = {"pixel_values": inputs["pixel_values"], "output_hidden_states": True}
    assert model.model.vision_tower(**example).hidden_states is not None
    calls = []
    model.model.vision_tower.register_forward_pre_hook(lambda _, args, kw: calls.append((args, kw)), with_kwargs=True)
    model(**inputs)
    model.model.vision_tower._forward_pre_hooks.clear()
    (((pixels,), named),) = calls
    model.model.vision_tower = quantized(model.model.vision_tower, {"pixel_values": pixels, **named})
    torch.testing.assert_close(model(**inputs).logits, expected, atol=0.01, rtol=0)
