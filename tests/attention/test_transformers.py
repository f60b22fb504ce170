"""transformers.py and transformers_sam.py: tiny random models against the same models with SDPA."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_helpers import Operators, assert_within, exact_attention, expected_error
from torch import Tensor

pytest.importorskip("transformers")

import transformers
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    SamConfig,
    SamHQConfig,
    SamHQMaskDecoderConfig,
    SamHQModel,
    SamHQVisionConfig,
    SamMaskDecoderConfig,
    SamModel,
    SamPromptEncoderConfig,
    SamVisionConfig,
    T5Config,
    T5Model,
    ViTConfig,
    ViTModel,
)

from qframework.attention import fallbacks
from qframework.attention.transformers import attention_function, register
from qframework.errors import UnsupportedError

TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register()
    fallbacks.clear()
    yield
    assert not fallbacks, "a fallback that no test expects"
    fallbacks.clear()


def pair(model_type: Any, config: Any, name: str = "qframework") -> tuple[Any, Any]:
    """The same random weights twice: with our attention and with PyTorch's."""
    config._attn_implementation = "sdpa"
    reference = model_type(config).eval()
    for parameter in reference.parameters():  # initialised to 0.02, attention would hardly matter
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.6 / parameter.shape[-1] ** 0.5)
    config = type(config)(**config.to_dict())
    config._attn_implementation = name
    model = model_type(config).eval()
    model.load_state_dict(reference.state_dict())
    return model, reference


def assert_near(actual: Tensor, expected: Tensor, relative: float = 0.03) -> None:
    """Different, so that quantized attention ran, but within the noise of 8 bits in two layers."""
    error = (actual - expected).norm() / expected.norm()
    assert 0 < error < relative


# Encoders -------------------------------------------------------------------------------------------------------------


def vit() -> ViTConfig:
    return ViTConfig(**TINY, image_size=32, patch_size=8)


@torch.no_grad()
def test_vit() -> None:
    model, reference = pair(ViTModel, vit())
    pixels = torch.randn(2, 3, 32, 32)
    with Operators() as operators:
        actual = model(pixels).last_hidden_state
    assert operators.count() == 2
    assert_near(actual, reference(pixels).last_hidden_state)


@pytest.mark.usefixtures("fresh_dynamo")
@torch.no_grad()
def test_vit_compiled_without_a_break() -> None:
    model, _ = pair(ViTModel, vit())
    pixels = torch.randn(2, 3, 32, 32)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(pixels).last_hidden_state, model(pixels).last_hidden_state, rtol=0, atol=1e-5)


def test_vit_trains() -> None:
    """Weights before the last attention get the gradient of exact attention, near the one at exact activations."""
    model, reference = pair(ViTModel, vit())
    pixels = torch.randn(2, 3, 32, 32)
    found, weight = [], torch.randn(2, 17, 64)
    for m in (model.train(), reference.train()):
        (m(pixels).last_hidden_state * weight).sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None]))
    assert found[0].shape == found[1].shape
    assert_near(*found)


@torch.no_grad()
def test_dropout_in_training_is_pytorchs_and_counted() -> None:
    model, reference = pair(ViTModel, ViTConfig(**TINY, image_size=32, patch_size=8, attention_probs_dropout_prob=0.3))
    pixels = torch.randn(2, 3, 32, 32)
    outputs = []
    for m in (model.train(), reference.train()):
        torch.manual_seed(1)
        outputs.append(m(pixels).last_hidden_state)
    assert torch.equal(*outputs)
    assert fallbacks == {"dropout": 2}
    fallbacks.clear()


@torch.no_grad()
def test_bert_with_padding() -> None:
    model, reference = pair(BertModel, BertConfig(**TINY, vocab_size=50))
    tokens = torch.randint(0, 50, (2, 20))
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, 12:] = 0
    actual = model(tokens, mask).last_hidden_state
    expected = reference(tokens, mask).last_hidden_state
    assert_near(actual[mask.bool()], expected[mask.bool()])
    alone = model(tokens[1:, :12]).last_hidden_state  # padding affects the scales only
    assert_near(actual[1:, :12], alone)


@torch.no_grad()
def test_t5_has_its_position_bias() -> None:
    model, reference = pair(T5Model, T5Config(d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, vocab_size=50))
    tokens = torch.randint(0, 50, (2, 20))
    with Operators() as operators:
        actual = model(tokens, decoder_input_ids=tokens[:, :7]).last_hidden_state
    assert operators.count() == 6
    assert_near(actual, reference(tokens, decoder_input_ids=tokens[:, :7]).last_hidden_state, 0.08)


# SAM ------------------------------------------------------------------------------------------------------------------


def sam(**changes: Any) -> SamConfig:
    """8 x 8 patches; one layer sees them all, the other windows of 3 x 3, padded to 9 x 9."""
    vision = SamVisionConfig(
        **TINY, image_size=64, patch_size=8, output_channels=32, window_size=3, global_attn_indexes=[1], mlp_dim=96,
        num_pos_feats=16, **changes,
    )  # fmt: skip
    prompt = SamPromptEncoderConfig(hidden_size=32, image_size=64, patch_size=8, mask_input_channels=4)
    decoder = SamMaskDecoderConfig(
        hidden_size=32, mlp_dim=48, num_attention_heads=4, iou_head_hidden_dim=32, num_hidden_layers=2
    )
    return SamConfig(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder)


@torch.no_grad()
@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("batch", [1, 2])
def test_sam(batch: int, relative: bool) -> None:
    model, reference = pair(SamModel, sam(use_rel_pos=relative))
    inputs = {"pixel_values": torch.randn(batch, 3, 64, 64), "input_points": 64 * torch.rand(batch, 1, 2, 2)}
    with Operators() as operators:
        actual = model(**inputs)
    expected = reference(**inputs)
    assert operators.count() == 2 + 2 * 3 + 1  # encoder; two-way blocks of three; the last one
    assert_near(
        model.vision_encoder(inputs["pixel_values"])[0], reference.vision_encoder(inputs["pixel_values"])[0], 0.05
    )
    assert_near(actual.pred_masks, expected.pred_masks, 0.2)


@torch.no_grad()
def test_sam_never_builds_the_n_by_n_bias() -> None:
    """64 tokens, 4 heads: nothing of 64 x 64 goes into the operator or comes out of any other."""
    model, _ = pair(SamModel, sam())

    class Largest(Operators):
        largest = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = super().__torch_dispatch__(func, types, args, kwargs)
            if isinstance(out, Tensor) and out.shape[-2:] == (64, 64):
                self.largest = max(self.largest, out.numel())
            return out

    with Largest() as operators:
        model.vision_encoder(torch.randn(1, 3, 64, 64))
    assert operators.count() == 2
    assert operators.largest < 4 * 64 * 64


@torch.no_grad()
def test_sam_hq() -> None:
    parts = sam()
    vision, prompt = SamHQVisionConfig(**parts.vision_config.to_dict()), parts.prompt_encoder_config
    decoder = SamHQMaskDecoderConfig(**parts.mask_decoder_config.to_dict(), vit_dim=64)
    config = SamHQConfig(vision_config=vision, prompt_encoder_config=prompt.to_dict(), mask_decoder_config=decoder)
    model, reference = pair(SamHQModel, config)
    pixels = torch.randn(1, 3, 64, 64)
    assert_near(model.vision_encoder(pixels)[0], reference.vision_encoder(pixels)[0], 0.05)


@pytest.mark.usefixtures("fresh_dynamo")
@torch.no_grad()
def test_sam_compiled_without_a_break() -> None:
    model, _ = pair(SamModel, sam())
    pixels = torch.randn(1, 3, 64, 64)
    compiled = torch.compile(model.vision_encoder, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(pixels)[0], model.vision_encoder(pixels)[0], rtol=0, atol=1e-4)


def test_sam_gives_gradients_to_its_relative_positions() -> None:
    model, reference = pair(SamModel, sam())
    pixels = torch.randn(1, 3, 64, 64)
    found, weight = [], torch.randn(1, 32, 8, 8)
    for m in (model, reference):
        (m.vision_encoder(pixels)[0] * weight).sum().backward()
        found.append(torch.cat([p.grad.flatten() for name, p in m.named_parameters() if "rel_pos" in name]))
    assert_near(*found, 0.08)


def test_sam_in_float64_falls_back() -> None:
    model, reference = (m.double() for m in pair(SamModel, sam()))
    pixels = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(model.vision_encoder(pixels)[0], reference.vision_encoder(pixels)[0])
    assert fallbacks == {"dtype torch.float64": 2}
    fallbacks.clear()


def test_sam_can_be_pickled() -> None:
    model, _ = pair(SamModel, sam())
    again = pickle.loads(pickle.dumps(model))
    pixels = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(again.vision_encoder(pixels)[0], model.vision_encoder(pixels)[0])


# Decoders -------------------------------------------------------------------------------------------------------------


def llama(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**TINY, num_key_value_heads=2, vocab_size=40, max_position_embeddings=64, **changes)


@torch.no_grad()
def test_llama_with_grouped_heads() -> None:
    model, reference = pair(LlamaForCausalLM, llama())
    tokens = torch.randint(0, 40, (2, 20))
    with Operators() as operators:
        actual = model(tokens).logits
    assert operators.count() == 2
    assert_near(actual, reference(tokens).logits)


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True], ids=["", "left padding"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_llama_generates_with_its_cache(cache: str, padded: bool) -> None:
    """Greedy tokens are the same, and the logits of every step near."""
    model, reference = pair(LlamaForCausalLM, llama())
    tokens = torch.randint(3, 40, (2, 12))
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0 if padded else 1
    settings = {
        "attention_mask": mask, "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0,
        "return_dict_in_generate": True, "output_logits": True, "cache_implementation": cache, "disable_compile": True,
    }  # fmt: skip
    actual, expected = model.generate(tokens, **settings), reference.generate(tokens, **settings)
    assert torch.equal(actual.sequences, expected.sequences)
    assert_near(torch.stack(actual.logits), torch.stack(expected.logits))


@torch.no_grad()
def test_a_cached_step_matches_the_step_without_a_cache() -> None:
    model, _ = pair(LlamaForCausalLM, llama())
    tokens = torch.randint(0, 40, (1, 20))
    cache = model(tokens[:, :15]).past_key_values
    step = model(tokens[:, 15:], past_key_values=cache).logits
    assert_near(step, model(tokens).logits[:, 15:])


def test_the_unused_part_of_a_static_cache_has_no_effect() -> None:
    query, key, value = (torch.randn(1, 2, n, 16) for n in (8, 12, 12))
    expected, _ = attention_function("auto", True)(torch.nn.Module(), query, key[:, :, :8], value[:, :, :8], None)
    key[:, :, 8:] = value[:, :, 8:] = math.nan
    actual, _ = attention_function("auto", True)(torch.nn.Module(), query, key, value, None)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("kind", ["none", "causal", "bool", "float"])
def test_position_bias_with_each_kind_of_mask(kind: str) -> None:
    query, key, value = (torch.randn(1, 2, 8, 16) for _ in range(3))
    bias = 3 * torch.randn(1, 2, 8, 8)
    visible = torch.ones(8, 8, dtype=torch.bool).tril()
    mask = {"bool": visible, "float": torch.zeros(8, 8).masked_fill(~visible, -math.inf)}.get(kind)
    actual, _ = attention_function("auto", True)(
        torch.nn.Module(), query, key, value, mask, is_causal=kind == "causal", position_bias=bias
    )
    exact, _, p = exact_attention(query, key, value, bias if kind == "none" else bias.masked_fill(~visible, -math.inf))
    assert_within(actual.transpose(1, 2), exact, expected_error(query, key, value, p))


# The registration -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_each_variant_can_have_its_own_name() -> None:
    register("qframework_int8_pv", variant="sage_vb", smooth_k=False)
    for kind, config, size in ((ViTModel, vit(), 32), (SamModel, sam(), 64)):
        model, reference = (getattr(m, "vision_encoder", m) for m in pair(kind, config, "qframework_int8_pv"))
        image = torch.randn(1, 3, size, size)
        out = model(image)[0]
        assert_near(out, reference(image)[0], 0.08)
        assert torch.equal(pickle.loads(pickle.dumps(model))(image)[0], out)


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"variant must be .*, got 'sage9'"):
        register("other", variant="sage9")
    assert "other" not in AttentionInterface()


def test_a_loaded_model_can_switch_implementations() -> None:
    _, model = pair(LlamaForCausalLM, llama())
    tokens = torch.randint(0, 40, (1, 20))
    with torch.no_grad():
        expected = model(tokens).logits
        model.set_attn_implementation("qframework")
        assert_near(model(tokens).logits, expected)


def test_nothing_else_is_registered() -> None:
    before = (dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping))
    register()
    after = (dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping))
    assert [sorted(mapping) for mapping in before] == [sorted(mapping) for mapping in after]
    assert {name for name in after[0] if "qframework" in name} >= {"qframework"}


REGISTERED = """
import {first}
import {second}
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.sam.modeling_sam import SAM_VISION_ATTENTION_CLASSES
from transformers.models.sam_hq.modeling_sam_hq import SAM_HQ_VISION_ATTENTION_CLASSES
for table in (AttentionInterface(), AttentionMaskInterface()):
    assert "qframework" in table
for table in (SAM_VISION_ATTENTION_CLASSES, SAM_HQ_VISION_ATTENTION_CLASSES):
    assert "qframework" in table
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        # The next two import modeling_utils too, in the same order.
        pytest.param("transformers.modeling_utils", "qframework", marks=pytest.mark.full),
        pytest.param("qframework", "transformers.modeling_utils", marks=pytest.mark.full),
        ("qframework", "transformers.models.sam.modeling_sam"),
        ("transformers.models.sam_hq.modeling_sam_hq", "qframework"),
    ],
)
def test_registration_does_not_depend_on_the_order_of_imports(first: str, second: str, tmp_path: Path) -> None:
    source = REGISTERED.format(first=first, second=second)
    result = subprocess.run([sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_importing_attention_does_not_import_transformers(tmp_path: Path) -> None:
    source = "import sys, qframework.attention; assert 'transformers' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert transformers.__version__
