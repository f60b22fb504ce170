"""transformers.py: models whose masks or arguments are out of the ordinary, against the same with eager attention.

The attention is exact, so that all that differs is the order of sums in float32.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_helpers import Operators
from torch import Tensor, nn

from qframework.attention import fallbacks
from qframework.attention.kv_cache import Int8Cache
from qframework.attention.transformers import attention_function, register
from qframework.errors import UnsupportedError
from qframework.numerics import sqnr_db

transformers = pytest.importorskip("transformers")

NAME = "qframework_exact"
TEXT = {"vocab_size": 64, "initializer_range": 0.3, "use_cache": False, "pad_token_id": 0}
DECODER = TEXT | {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SEQUENCES = TEXT | {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
                    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
                    "max_position_embeddings": 64}  # fmt: skip


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register(NAME, variant="unquantized")
    fallbacks.clear()
    yield
    assert not fallbacks, "a fallback that no test expects"


def tokens(length: int = 24) -> Tensor:
    return torch.randint(3, 60, (2, length), generator=torch.Generator().manual_seed(0))


def found(module: str, name: str) -> Any:
    """A class of transformers; the test is skipped where the installed version lacks it."""
    try:
        return getattr(importlib.import_module(f"transformers.models.{module}"), name)
    except (ImportError, AttributeError):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")


def results(model_type: Any, config_type: Any, sizes: dict[str, Any], **inputs: Any) -> tuple[Tensor, Tensor]:
    """Eager's and ours, of the same random weights."""
    outputs: list[Tensor] = []
    state: dict[str, Any] = {}
    for name in ("eager", NAME):
        torch.manual_seed(0)
        model = model_type._from_config(config_type(**sizes), attn_implementation=name).eval()
        state = state or model.state_dict()
        model.load_state_dict(state)
        with torch.no_grad(), Operators() as operators:
            out = model(**inputs)
        outputs.append(out.logits if hasattr(out, "logits") else out.last_hidden_state)
        assert bool(operators.count()) is (name == NAME)
    return outputs[0], outputs[1]


# Selected keys --------------------------------------------------------------------------------------------------------

SPARSE = DECODER | {"num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4,
                    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 16,
                    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1,
                    "index_n_heads": 2, "index_head_dim": 16}  # fmt: skip


@pytest.mark.parametrize(("module", "family"), [("deepseek_v32", "DeepseekV32"), ("glm_moe_dsa", "GlmMoeDsa")])
def test_only_selected_keys_are_seen(module: str, family: str) -> None:
    model, config = found(module, f"{family}Model"), found(module, f"{family}Config")
    ids = tokens()
    wanted, got = results(model, config, SPARSE | {"index_topk": 4}, input_ids=ids)
    assert sqnr_db(wanted, got) > 90
    every, _ = results(model, config, SPARSE | {"index_topk": 64}, input_ids=ids)
    assert sqnr_db(every, wanted) < 20  # else the selection hardly matters


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_selected_keys_are_seen_where_the_mask_lets_them(dtype: torch.dtype) -> None:
    q, k, v = torch.randn(3, 2, 3, 10, 16)
    allowed = torch.ones(10, 10, dtype=torch.bool).tril()[None, None]
    indices = torch.cat([torch.zeros(2, 10, 1, dtype=torch.int32), torch.randint(0, 10, (2, 10, 3)).int()], -1)
    mask = allowed if dtype == torch.bool else torch.zeros(10, 10).masked_fill(~allowed, torch.finfo(dtype).min)
    chosen = (indices[..., None] == torch.arange(10)).any(-2).unsqueeze(1)
    expected = (q @ k.mT / 4).masked_fill(~(chosen & allowed), -torch.inf).softmax(-1) @ v
    attend = attention_function("unquantized", True)
    actual, _ = attend(nn.Module(), q, k, v, mask.expand(2, 1, 10, 10), indices=indices)
    torch.testing.assert_close(actual, expected.transpose(1, 2))
    with pytest.raises(UnsupportedError, match="attention_mask must be given with indices, got None"):
        attend(nn.Module(), q, k, v, None, indices=indices)


def test_arguments_that_no_variant_supports_are_named() -> None:
    q = torch.randn(1, 2, 8, 16)
    attend = attention_function("unquantized", True)
    attend(nn.Module(), q, q, q, None, block_indices=None)
    with pytest.raises(UnsupportedError, match=r"Module: block_indices must be None with .*='qframework'"):
        attend(nn.Module(), q, q, q, None, block_indices=torch.zeros(2))


@pytest.mark.parametrize(
    ("module", "family", "sizes"),
    [
        ("bloom", "Bloom", {"n_layer": 2, "n_head": 4, "hidden_size": 64}),
        ("mpt", "Mpt", {"n_layers": 2, "n_heads": 4, "d_model": 64, "max_seq_len": 64}),
        ("gpt_neox_japanese", "GPTNeoXJapanese", DECODER | {"intermediate_multiple_size": 2}),
        ("longformer", "Longformer", DECODER | {"attention_window": 16}),
    ],
)
@torch.no_grad()
def test_models_that_compute_attention_themselves_keep_their_masks(
    module: str, family: str, sizes: dict[str, Any]
) -> None:
    """They would add a boolean mask to their logits as ones and zeros."""
    model_type, config = found(module, f"{family}Model"), found(module, f"{family}Config")
    mask = torch.ones(2, 24, dtype=torch.int64)
    mask[1, 15:] = 0
    outputs = []
    for name in ("eager", NAME):
        torch.manual_seed(0)
        model = model_type._from_config(config(**TEXT | sizes), attn_implementation=name).eval()
        outputs.append(model(input_ids=tokens(), attention_mask=mask).last_hidden_state[0])
    assert torch.equal(*outputs)
    code = vars(importlib.import_module(model_type.__module__))
    asked = "create_causal_mask" in code or "create_bidirectional_mask" in code  # older versions make masks elsewhere
    assert list(fallbacks) == [f"the models of {family}Config compute attention themselves"] * asked
    fallbacks.clear()


# Sinks ----------------------------------------------------------------------------------------------------------------

SINKS = DECODER | {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8}
FEW_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}


def with_sinks(model: nn.Module) -> nn.Module:
    """Sinks that matter and differ from head to head, where a model keeps one for each."""
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            nn.init.constant_(parameter, 0.0).add_(torch.linspace(-1, 3, parameter.numel()))
    return model


@pytest.mark.parametrize(
    ("module", "family", "more"),
    [
        ("gpt_oss", "GptOss", FEW_EXPERTS),
        ("granite_swa", "GraniteSWA", {}),
        ("inkling2", "Inkling2Text", {"swa_head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2}),
    ],
)
@torch.no_grad()
def test_sinks_of_heads_and_of_tokens(module: str, family: str, more: dict[str, Any]) -> None:
    """Also with the cache that a step reads; in Inkling 2 a layer computes a sink for each token."""
    model_type, config = found(module, f"{family}Model"), found(module, f"{family}Config")
    sizes = {**SINKS, **more, "use_cache": True}
    ids, outputs = tokens(), []
    for name in ("eager", NAME):
        torch.manual_seed(0)
        model = with_sinks(model_type._from_config(config(**sizes), attn_implementation=name).eval())
        whole = model(input_ids=ids).last_hidden_state
        cache = model(input_ids=ids[:, :20]).past_key_values
        outputs.append((whole, model(input_ids=ids[:, 20:], past_key_values=cache).last_hidden_state))
    (wanted, wanted_step), (got, step) = outputs
    assert sqnr_db(wanted, got) > 90
    assert sqnr_db(wanted_step, step) > 90
    assert sqnr_db(wanted[:, 20:], step) > 90


@torch.no_grad()
def test_sinks_beside_an_int8_cache() -> None:
    """A step's weights are beside the sink, and of keys with their mean, which the cache keeps apart."""
    model_type, config = found("granite_swa", "GraniteSWAForCausalLM"), found("granite_swa", "GraniteSWAConfig")
    torch.manual_seed(0)
    sizes = SINKS | {"use_cache": True, "initializer_range": 0.1}  # larger logits amplify what is rounded
    model = with_sinks(model_type._from_config(config(**sizes), attn_implementation=NAME).eval())
    ids = tokens()
    cache = Int8Cache(model.config)
    model(input_ids=ids[:, :20], past_key_values=cache)
    with Operators() as operators:
        step = model(input_ids=ids[:, 20:], past_key_values=cache).logits
    assert operators.count("decode_attention") == 2
    wanted = model(input_ids=ids).logits[:, 20:]
    assert 30 < sqnr_db(wanted, step) < 90


# Masks ----------------------------------------------------------------------------------------------------------------


def test_an_encoder_without_a_flag() -> None:
    """Splinter's attention does not say that it is not causal, and without padding no mask says so."""
    model, config = found("splinter", "SplinterModel"), found("splinter", "SplinterConfig")
    wanted, got = results(model, config, DECODER, input_ids=tokens())
    assert sqnr_db(wanted, got) > 90


@pytest.mark.parametrize(
    ("module", "family", "more"),
    [
        ("bigbird_pegasus", "BigBirdPegasus", {"attention_type": "original_full"}),
        ("nllb_moe", "NllbMoe", {"num_experts": 4}),
    ],
)
def test_a_decoder_without_a_flag(module: str, family: str, more: dict[str, Any]) -> None:
    model, config = found(module, f"{family}Model"), found(module, f"{family}Config")
    wanted, got = results(model, config, SEQUENCES | more, input_ids=tokens(), decoder_input_ids=tokens(9))
    assert sqnr_db(wanted, got) > 90


@pytest.mark.parametrize("family", ["Gemma4", "Gemma4Unified"])
@pytest.mark.parametrize("keep", [0, 3])
def test_queries_dropped_before_layers_that_share_keys(keep: int, family: str) -> None:
    module = family.lower().replace("4u", "4_u")
    model, config = found(module, f"{family}ForCausalLM"), found(module, f"{family}TextConfig")
    sizes = DECODER | {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16,
                       "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 2,
                       "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8,
                       "num_kv_shared_layers": 2}  # fmt: skip
    wanted, got = results(model, config, sizes, input_ids=tokens(), logits_to_keep=keep)
    assert wanted.shape[1] == (keep or 24)
    assert sqnr_db(wanted, got) > 90
