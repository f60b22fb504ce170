"""kv_cache.py: models of transformers that generate with keys and values in INT8, against a cache in float."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_helpers import Operators

pytest.importorskip("transformers")

from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from qframework.attention import fallbacks
from qframework.attention.kv_cache import Int8Cache, Int8Layer
from qframework.attention.transformers import register
from qframework.errors import QFrameworkError, UnsupportedError

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 99,
}
GEMMA2 = {"attn_logit_softcapping": 2.0, "sliding_window": 24, "query_pre_attn_scalar": 32}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 24}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, GEMMA2),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}
# Rounding to 1/254 of a token's largest value is off by 0.5 to 1 percent of normal numbers; two layers add theirs.
ERROR = 0.03


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register()
    yield
    fallbacks.clear()  # on a CPU "auto" leaves the prompt to PyTorch


def make(name: str, implementation: str = "qframework") -> Any:
    config_type, model_type, more = MODELS[name]
    model = model_type(config_type(**SIZES, **more)).eval()
    for parameter in model.parameters():  # initialised to 0.02, attention would hardly matter
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=1 / parameter.shape[-1] ** 0.5)
    model.set_attn_implementation(implementation)
    return model


def words(*shape: int) -> Any:
    return torch.randint(3, 99, shape)


def left_padding() -> Any:
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[0, :9] = 0
    return mask


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "implementation"),
    [(name, each) for name in MODELS for each in ("qframework", "sdpa", "eager") if (name, each) != ("gemma2", "sdpa")],
)
@pytest.mark.parametrize("padded", [False, True])
def test_logits_of_every_step(name, padded, implementation):
    """The prompt's are exact; each step, of one or several tokens, is off by the rounding of K and V."""
    model = make(name, implementation)
    exact, cache = DynamicCache(config=model.config), Int8Cache(model.config)
    mask, errors = left_padding() if padded else None, []
    for count in (60, *[1] * 12, 3, 1, 20, 1):
        tokens = words(2, count)
        if mask is not None and errors:
            mask = torch.cat([mask, mask.new_ones(2, count)], 1)
        expected = model(tokens, attention_mask=mask, past_key_values=exact).logits
        got = model(tokens, attention_mask=mask, past_key_values=cache).logits
        errors.append(float((got - expected).norm() / expected.norm()))
    assert errors[0] == 0
    assert 0 < max(errors[1:]) < ERROR
    assert cache.get_seq_length() == exact.get_seq_length()


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_steps_read_int8_and_prompts_do_not(name):
    model = make(name)
    cache = Int8Cache(model.config)
    with Operators() as operators:
        model(words(1, 30), past_key_values=cache)
    assert not operators.count("decode_attention")
    with Operators() as operators:
        model(words(1, 1), past_key_values=cache)
        model(words(1, 5), past_key_values=cache)
    assert operators.count("decode_attention") == 4
    with Operators() as operators:
        model(words(1, 17), past_key_values=cache)  # attends to dequantized keys
    assert not operators.count("decode_attention")


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_generate(name, options):
    """Most tokens are those of a cache in float: random models have near ties, after which all differ."""
    model = make(name)
    rows = 1 if "prompt_lookup_num_tokens" in options else 2
    inputs = {"input_ids": words(rows, 60), "attention_mask": left_padding()[-rows:]}
    common = {**inputs, **options, "max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**common)
    cache = Int8Cache(model.config)
    got = model.generate(**common, past_key_values=cache)
    width = min(expected.shape[1], got.shape[1])
    assert cache.get_seq_length() >= width - 1
    assert (got[:, :width] == expected[:, :width])[:, 60:64].float().mean() >= 0.75


def test_copies_go_their_own_way():
    """As for prompts that several answers continue; also under inference mode."""
    model = make("llama")
    cache = Int8Cache(model.config)
    with torch.inference_mode():
        model(words(1, 20), past_key_values=cache)
        other, token = copy.deepcopy(cache), words(1, 1)
        logits = model(token, past_key_values=cache).logits
        assert torch.equal(model(token, past_key_values=other).logits, logits)
        model(token, past_key_values=other)
    assert (cache.get_seq_length(), other.get_seq_length()) == (21, 22)


@torch.no_grad()
def test_memory():
    model = make("llama")
    exact, cache = DynamicCache(config=model.config), Int8Cache(model.config, max_length=1008)
    tokens = words(1, 1000)
    model(tokens, past_key_values=exact)
    model(tokens, past_key_values=cache)
    half = sum(x.numel() for layer in exact.layers for x in (layer.keys, layer.values)) * 2
    assert cache.bytes < 0.58 * half  # 32 channels: scales take a sixteenth; 0.52 with 64
    assert SIZES["head_dim"] == 32


def test_cache_bookkeeping():
    layer = Int8Layer()
    assert (layer.keys, layer.batch_size, layer.get_seq_length(), layer.get_max_length()) == (None, -1, 0, -1)
    layer.update(torch.randn(2, 1, 10, 32), torch.randn(2, 1, 10, 32))
    assert layer.keys.shape == (2, 1, 10, 32)
    assert layer.get_mask_sizes(3) == (13, 0)
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([True, False, True, True]))
    assert layer.batch_size == 3
    layer.reorder_cache(torch.tensor([2, 2, 0]))
    layer.crop(-4)
    assert layer.get_seq_length() == 6
    layer.crop(5)  # older versions pass the length to keep
    assert layer.get_seq_length() == 5
    layer.reset()
    assert layer.get_seq_length() == 0
    sliding = Int8Layer(sliding_window=8)
    sliding.update(torch.randn(1, 1, 20, 32), torch.randn(1, 1, 20, 32))
    assert (sliding.is_sliding, sliding.get_mask_sizes(1), sliding.get_max_length()) == (True, (8, 13), 8)


def test_refusals():
    config = LlamaConfig(**SIZES)
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UnsupportedError, match="got linear_attention"):
        Int8Cache(config)
    with pytest.raises(UnsupportedError, match="offloading must be off"):
        Int8Layer().offload()
    layer = Int8Layer(max_length=4)
    with pytest.raises(QFrameworkError, match="at most max_length, 4, got 5"):
        layer.update(torch.randn(1, 1, 5, 32), torch.randn(1, 1, 5, 32))


@pytest.mark.usefixtures("fresh_dynamo")
@torch.no_grad()
def test_compiled_models_are_refused():
    model = make("llama")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="Int8Cache: the model must not be compiled"):
        compiled(words(1, 5), past_key_values=Int8Cache(model.config))
