"""``from_pretrained(quantization_config=QFrameworkConfig())`` on models from a folder, without a network."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers
from transformers import (
    AutoModel,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers_models import MODELS, TINY, bert, gpt2, in_files, layers, llama, outputs, saved, tokens

from qframework import QFrameworkConfig, quantize_
from qframework.conversion import QuantizedLinear, fallbacks
from qframework.errors import FileFormatError, UnsupportedError
from qframework.integrations.transformers import QFrameworkHfQuantizer, as_pretrained
from qframework.quantizer import ActivationConfig, LinearConfig, WeightConfig, dynamic_int8, qattn_paper, static_int8

# Loading and saving ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("build", "inputs"), MODELS.values(), ids=MODELS)
def test_a_loaded_model_is_that_of_quantize_(build: Any, inputs: Any, tmp_path: Path) -> None:
    """To the bit, after quantization while loading and after saving and loading the quantized model."""
    model, batch = build(), inputs()
    folder = saved(model, tmp_path / "float")
    assert len(list(folder.glob("*.safetensors"))) > 1
    loaded = type(model).from_pretrained(folder, quantization_config=QFrameworkConfig())
    in_float = loaded.config.quantization_config.modules_to_not_convert
    quantize_(model, dynamic_int8(), filter_fn=lambda module, name: name not in in_float)
    assert layers(loaded) == layers(model)
    assert len(layers(loaded)) >= 8

    expected = outputs(model, batch)
    assert len(expected) >= 1
    again = type(model).from_pretrained(saved(loaded, tmp_path / "int8"))
    assert again.config.quantization_config == loaded.config.quantization_config
    assert layers(again) == layers(loaded)
    for each in (loaded, again):
        assert not any(tensor.is_meta for tensor in (*each.parameters(), *each.buffers()))
        for actual, value in zip(outputs(each, batch), expected, strict=True):
            torch.testing.assert_close(actual, value, rtol=0, atol=0)


@pytest.mark.parametrize(("build", "inputs"), MODELS.values(), ids=MODELS)
def test_files_of_a_quantized_model_hold_int8_weights_alone(build: Any, inputs: Any, tmp_path: Path) -> None:
    model = build()
    loaded = type(model).from_pretrained(saved(model, tmp_path / "float"), quantization_config=QFrameworkConfig())
    dtypes = in_files(saved(loaded, tmp_path / "int8"))
    quantized = {key.removesuffix("_int8") for key in dtypes if key.endswith(".weight_int8")}
    assert len(quantized) == len(layers(loaded))  # the names may be those of an older version of transformers
    for name in quantized:
        assert dtypes[f"{name}_int8"] == "I8"
        assert dtypes[f"{name}_scale"] == "F32"
        assert name not in dtypes
    described = json.loads((tmp_path / "int8" / "config.json").read_text())["quantization_config"]
    assert described["quant_method"] == "qframework"
    assert QFrameworkConfig.from_dict(described) == loaded.config.quantization_config


def test_each_float_weight_is_freed_before_the_next_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(llama(), tmp_path)
    seen: list[Any] = []
    replace = QFrameworkHfQuantizer.replace

    def observed(quantizer: Any, name: str, weight: Tensor) -> None:
        assert not weight.is_meta
        assert all(reference() is None for reference in seen), "an earlier weight is alive in float"
        seen.append(weakref.ref(weight))
        replace(quantizer, name, weight)

    monkeypatch.setattr(QFrameworkHfQuantizer, "replace", observed)
    model = LlamaForCausalLM.from_pretrained(folder, quantization_config=QFrameworkConfig())
    assert len(seen) == len(layers(model)) == 14
    del model
    assert all(reference() is None for reference in seen)


def test_a_quantized_checkpoint_is_loaded_without_float_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = LlamaForCausalLM.from_pretrained(saved(llama(), tmp_path / "f"), quantization_config=QFrameworkConfig())
    folder = saved(loaded, tmp_path / "q")
    monkeypatch.setattr(QFrameworkHfQuantizer, "replace", lambda *arguments: pytest.fail("a weight was quantized"))
    model = LlamaForCausalLM.from_pretrained(folder)
    assert {p.shape for p in model.parameters() if p.ndim == 2} == {(99, 64)}  # the embeddings


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    folder, batch = saved(bert(), tmp_path / "float"), tokens()
    model = BertForSequenceClassification.from_pretrained(folder, dtype=dtype, quantization_config=QFrameworkConfig())
    again = BertForSequenceClassification.from_pretrained(saved(model, tmp_path / "int8"), dtype=dtype)
    for each in (model, again):
        layer = each.bert.encoder.layer[0].output.dense
        assert (layer.dtype, layer.bias.dtype, layer.weight_scale.dtype) == (dtype, dtype, torch.float32)
        assert outputs(each, batch)[0].dtype == dtype
    torch.testing.assert_close(outputs(model, batch), outputs(again, batch), rtol=0, atol=0)


def test_device_map(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    folder, batch = saved(llama(), tmp_path / "float"), tokens()
    model = LlamaForCausalLM.from_pretrained(folder, device_map="cpu", quantization_config=QFrameworkConfig())
    again = LlamaForCausalLM.from_pretrained(saved(model, tmp_path / "int8"), device_map={"": "cpu"})
    torch.testing.assert_close(outputs(model, batch), outputs(again, batch), rtol=0, atol=0)


FRESH = """
import sys
import {first}
import {second}
from transformers import AutoModel
from qframework.conversion import QuantizedLinear
model = AutoModel.from_pretrained(sys.argv[1])
assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == 14
"""


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("qframework", "transformers"), ("transformers", "qframework")])
def test_a_new_process_loads_a_quantized_model(first: str, second: str, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(saved(llama(), tmp_path / "f"), quantization_config=QFrameworkConfig())
    folder = saved(model, tmp_path / "q")
    command = [sys.executable, "-c", FRESH.format(first=first, second=second), str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


# Layers that stay in float --------------------------------------------------------------------------------------------


def test_output_embeddings_and_the_last_layer_stay_in_float(tmp_path: Path) -> None:
    for model, name in ((llama(), "lm_head"), (bert(), "classifier"), (gpt2(), "lm_head")):
        folder = saved(model, tmp_path / name)
        loaded = type(model).from_pretrained(folder, quantization_config=QFrameworkConfig())
        assert loaded.config.quantization_config.modules_to_not_convert == [name]


@pytest.mark.parametrize(
    ("names", "in_float"),
    [
        ([], []),
        (["lm_head"], ["lm_head"]),
        (["layers.1.mlp"], [f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")]),
        (("o_proj", "lm_head"), ["model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj", "lm_head"]),
    ],
)
def test_modules_to_not_convert(names: Any, in_float: list[str], tmp_path: Path) -> None:
    folder, batch = saved(llama(), tmp_path / "float"), tokens()
    config = QFrameworkConfig(modules_to_not_convert=names)
    model = LlamaForCausalLM.from_pretrained(folder, quantization_config=config)
    assert model.config.quantization_config.modules_to_not_convert == in_float
    assert len(layers(model)) == 15 - len(in_float)
    again = LlamaForCausalLM.from_pretrained(saved(model, tmp_path / "int8"))
    assert layers(again) == layers(model)
    torch.testing.assert_close(outputs(model, batch), outputs(again, batch), rtol=0, atol=0)


def test_tied_weights_stay_in_float_and_tied(tmp_path: Path) -> None:
    folder = saved(llama(tie_word_embeddings=True), tmp_path / "float")
    config = QFrameworkConfig(modules_to_not_convert=[])
    model = LlamaForCausalLM.from_pretrained(folder, quantization_config=config)
    again = LlamaForCausalLM.from_pretrained(saved(model, tmp_path / "int8"))
    for each in (model, again):
        assert each.lm_head.weight is each.model.embed_tokens.weight
        assert type(each.lm_head) is nn.Linear
        assert len(layers(each)) == 14


@pytest.mark.parametrize("head_first", [True, False])
def test_models_with_and_without_a_head_read_each_others_files(head_first: bool, tmp_path: Path) -> None:
    first, second = (
        (BertForSequenceClassification, BertModel) if head_first else (BertModel, BertForSequenceClassification)
    )
    config = BertConfig(**TINY, vocab_size=99)
    quantized = first.from_pretrained(saved(first(config), tmp_path / "f"), quantization_config=QFrameworkConfig())
    other = second.from_pretrained(saved(quantized, tmp_path / "q"))
    batch = tokens()
    base, other_base = (getattr(each, "bert", each) for each in (quantized, other))
    assert layers(base) == layers(other_base)
    torch.testing.assert_close(outputs(base, batch), outputs(other_base, batch), rtol=0, atol=0)
    if not head_first:
        assert type(other.classifier) is nn.Linear
        assert not other.classifier.weight.isnan().any()


def without(folder: Path, layer: str) -> None:
    """Remove a layer's tensors from a checkpoint of one file."""
    file = folder / "model.safetensors"
    kept = {key: value for key, value in load_file(file).items() if not key.startswith(f"{layer}.")}
    save_file(kept, file, metadata={"format": "pt"})


@pytest.mark.parametrize("quantized", [True, False])
def test_layers_that_a_checkpoint_lacks_are_initialized(quantized: bool, tmp_path: Path) -> None:
    """As transformers initializes them, weights with a standard deviation of 0.02, but in INT8."""
    config = QFrameworkConfig()
    folder = saved(bert(), tmp_path / "float", "1GB")
    if quantized:
        model = BertForSequenceClassification.from_pretrained(folder, quantization_config=config)
        folder, config = saved(model, tmp_path / "int8", "1GB"), None  # type: ignore[assignment]
    missing = "bert.encoder.layer.0.intermediate.dense"
    without(folder, missing)
    layer = BertForSequenceClassification.from_pretrained(folder, quantization_config=config).get_submodule(missing)
    assert isinstance(layer, QuantizedLinear)
    assert 0.018 < layer.weight.std() < 0.022
    assert layer.bias is not None
    assert not layer.bias.any()


# Generation, pipelines, attention -------------------------------------------------------------------------------------


def quantized_llama(folder: Path, **arguments: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(saved(llama(), folder), quantization_config=QFrameworkConfig(), **arguments)


def generate(model: Any, prompt: Tensor, **arguments: Any) -> Tensor:
    return model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0, **arguments)  # type: ignore[no-any-return]


def test_generate_with_a_static_cache(tmp_path: Path) -> None:
    model, prompt = quantized_llama(tmp_path), torch.randint(3, 99, (2, 5))
    expected = generate(model, prompt, use_cache=False)
    torch.testing.assert_close(generate(model, prompt, cache_implementation="static"), expected)
    torch.testing.assert_close(generate(model, prompt), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_generate_with_a_static_cache_compiled(tmp_path: Path) -> None:
    model, prompt = quantized_llama(tmp_path), torch.randint(3, 99, (2, 5))
    expected = generate(model, prompt)
    model.forward = torch.compile(model.forward, backend="qframework", fullgraph=True)
    torch.testing.assert_close(generate(model, prompt, cache_implementation="static"), expected)


def test_quantized_layers_with_quantized_attention(tmp_path: Path) -> None:
    folder, batch = saved(llama(), tmp_path), tokens()
    exact = LlamaForCausalLM.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(
        folder, quantization_config=QFrameworkConfig(), attn_implementation="qframework"
    )
    assert model.config._attn_implementation == "qframework"
    expected = outputs(exact, batch)[0][batch["attention_mask"].bool()]
    actual = outputs(model, batch)[0][batch["attention_mask"].bool()]
    assert 0 < (actual - expected).norm() / expected.norm() < 0.03


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *"abcdefgh"])}
    built = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=built, pad_token="[PAD]", unk_token="[UNK]")


def test_a_pipeline(tmp_path: Path) -> None:
    folder, texts = saved(bert(), tmp_path), ["a b c", "d e f g h a b"]
    tokenizer().save_pretrained(folder)
    run = transformers.pipeline(
        "text-classification", model=str(folder), model_kwargs={"quantization_config": QFrameworkConfig()}, batch_size=2
    )
    assert len(layers(run.model)) == 13
    exact = transformers.pipeline("text-classification", model=str(folder))
    for actual, expected in zip(run(texts), exact(texts), strict=True):
        assert actual["label"] == expected["label"]
        assert 0 < abs(actual["score"] - expected["score"]) < 0.02


# Static scales --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("marked", [False, True])
def test_static_scales_are_saved_and_loaded(tmp_path: Path, marked: bool) -> None:
    model, batch = bert().eval(), tokens()
    quantize_(model, static_int8(), [batch])
    if marked:
        as_pretrained(model, QFrameworkConfig(static_int8()))
    loaded = BertForSequenceClassification.from_pretrained(saved(model, tmp_path))
    assert layers(loaded) == layers(model)
    assert loaded.bert.pooler.dense.input_scale is not None
    torch.testing.assert_close(outputs(loaded, batch), outputs(model, batch), rtol=0, atol=0)


def test_a_model_quantized_in_place_is_saved_and_loaded(tmp_path: Path) -> None:
    """In two steps of one configuration, beside a float model with the same configuration object."""
    model, batch = bert().eval(), tokens()
    other = BertForSequenceClassification(model.config)
    quantize_(model, dynamic_int8(), filter_fn=lambda module, name: "layer.0" in name)
    quantize_(model, dynamic_int8(), filter_fn=lambda module, name: "classifier" not in name)
    assert model.config is model.bert.config is not other.config
    assert getattr(other.config, "quantization_config", None) is None
    loaded = BertForSequenceClassification.from_pretrained(saved(model, tmp_path / "int8"))
    assert layers(loaded) == layers(model)
    assert isinstance(loaded.classifier, torch.nn.Linear)
    torch.testing.assert_close(outputs(loaded, batch), outputs(model, batch), rtol=0, atol=0)
    again = BertForSequenceClassification.from_pretrained(saved(other, tmp_path / "float"))
    torch.testing.assert_close(outputs(again.eval(), batch), outputs(other.eval(), batch))


def test_static_scales_per_token_are_not_described(caplog: pytest.LogCaptureFixture) -> None:
    """The model is quantized all the same."""
    fallbacks.clear()
    model, batch = bert().eval(), tokens()
    quantize_(model, LinearConfig(ActivationConfig(granularity="per_token"), WeightConfig()), [batch])
    assert layers(model)
    assert "from_pretrained will not read" in caplog.text
    assert getattr(model.config, "quantization_config", None) is None


def test_two_configurations_in_one_model_are_not_described(caplog: pytest.LogCaptureFixture) -> None:
    fallbacks.clear()
    model, batch = bert().eval(), tokens()
    quantize_(model, dynamic_int8(), filter_fn=lambda module, name: "layer.0" in name)
    quantize_(model, static_int8(), [batch])
    assert list(fallbacks.values()) == [1]
    assert "from_pretrained will not read what save_pretrained writes of BertForSequence" in caplog.text


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (lambda: bert(), QFrameworkConfig(), r"model must have been quantized by quantize_, got a Bert\w+ in float"),
        (lambda: quantize_(bert(), dynamic_int8()), QFrameworkConfig(static_int8()), "got a static per-tensor .*layer"),
        (lambda: quantize_(bert(), dynamic_int8()), dynamic_int8(), "must be a QFrameworkConfig, got LinearConfig"),
    ],
)
def test_as_pretrained_refuses(model: Any, config: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        as_pretrained(model(), config)


# Configurations and errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("linear", [dynamic_int8(), dynamic_int8("per_tensor", "per_tensor"), static_int8(), None])
@pytest.mark.parametrize("names", [None, [], ["lm_head", "model.layers.0"]])
def test_a_configuration_survives_json(linear: Any, names: Any) -> None:
    config = QFrameworkConfig(linear, names)
    again = QFrameworkConfig.from_dict(json.loads(config.to_json_string()))
    assert again == config
    assert again.linear == (linear or dynamic_int8())
    assert again != QFrameworkConfig(linear, ["another"])
    assert dict(config) == config.to_dict()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"linear": "int8"}, "linear must be a LinearConfig such as dynamic_int8.*got 'int8' of type str"),
        ({"linear": {"bits": 8}}, "fields must be .* got 'bits'"),
        ({"linear": qattn_paper()}, "linear must have output='consumer', got 'always'"),
        ({"linear": static_int8("per_token")}, "static one per tensor, got a static one per_token"),
        ({"linear": static_int8(symmetric=False)}, "linear must have a symmetric activation"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be None or a list of names.*'lm_head'"),
        ({"modules_to_not_convert": [3]}, "modules_to_not_convert must hold names such as 'lm_head', got 3"),
        ({"modules_to_not_convert": [""]}, "modules_to_not_convert must hold names such as 'lm_head', got ''"),
        ({"quant_method": "gptq"}, "quant_method must be 'qframework', got 'gptq'"),
        ({"bits": 8}, "fields must be 'linear' or 'modules_to_not_convert', got 'bits'"),
    ],
)
def test_wrong_fields(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        QFrameworkConfig(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"quantization_config": QFrameworkConfig(static_int8())}, "must have a dynamic activation.*quantize_"),
        (
            {"quantization_config": QFrameworkConfig(modules_to_not_convert=["lm_heat"])},
            "modules_to_not_convert of quantization_config must name modules of LlamaForCausalLM, got 'lm_heat'",
        ),
        (
            {"quantization_config": QFrameworkConfig(modules_to_not_convert=["model", "lm_head"])},
            "needs a model with linear layers .* got none in LlamaForCausalLM",
        ),
    ],
)
def test_models_and_configurations_that_do_not_fit(arguments: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=message):
        LlamaForCausalLM.from_pretrained(saved(llama(), tmp_path), **arguments)


def test_layers_cannot_go_to_disk() -> None:
    quantizer = QFrameworkHfQuantizer(QFrameworkConfig(), pre_quantized=False)
    with pytest.raises(UnsupportedError, match="device_map must map to GPUs and 'cpu' for quantized models"):
        quantizer.validate_environment(device_map={"model.layers.0": "cpu", "lm_head": "disk"})


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    folder = saved(quantized_llama(tmp_path / "f"), tmp_path / "q", "1GB")
    (folder / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(FileFormatError, match=r"model\.safetensors must be a safetensors file"):
        AutoModel.from_pretrained(folder)


def test_weights_that_are_not_finite_name_the_layer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers collects errors of single tensors in a report, and then raises its own."""
    model = llama()
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(RuntimeError, match="conversion of the weights"):
        LlamaForCausalLM.from_pretrained(saved(model, tmp_path), quantization_config=QFrameworkConfig())
    assert "layer 'model.layers.0.mlp.up_proj': the weight must be finite" in caplog.text
