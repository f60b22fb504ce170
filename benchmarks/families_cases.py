"""The architectures of ``benchmarks.families``: those of timm and transformers at their sizes, with random weights."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

SEED = 0
DECODING = "decoder, one token behind a context of 1,024"  # a kind
Inputs = tuple[Tensor, ...]
_SMALL = {  # sizes of a transformers configuration in a smoke run, by the names that configurations have
    "hidden_size": 64, "d_model": 64, "intermediate_size": 128, "d_ff": 128, "encoder_ffn_dim": 128,
    "num_hidden_layers": 1, "num_layers": 1, "encoder_layers": 1, "num_attention_heads": 2, "num_heads": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "d_kv": 32,
    "vocab_size": 99, "max_source_positions": 32, "n_embd": 64, "n_layer": 1, "n_head": 2,
    "dim": 64, "hidden_dim": 128, "n_layers": 1, "n_heads": 2, "ffn_dim": 128, "word_embed_proj_dim": 64,
    "num_experts": 4, "num_experts_per_tok": 2, "depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 80, 64],
    "conv_dim": [16] * 7, "num_conv_pos_embeddings": 16, "d_inner": 128, "window_block_indices": [],
}  # fmt: skip
_SMALL_IMAGE, _SMALL_MODEL = 160, "test_vit"
_SMALL_TOKENS = 24
DECODED_CONTEXT, DECODED_BATCH = 1024, 16


@dataclass(frozen=True)
class Family:
    """An architecture: how to build it, what it takes, and a batch for throughput."""

    name: str
    kind: str
    batch: int
    build: Callable[[bool], nn.Module]  # of whether it is a smoke run
    inputs: Callable[[nn.Module, int, bool], Inputs]  # fp32 or int64, of a batch
    in_graphs: bool = False  # CUDA graphs at every batch, not only at batch 1


# timm -----------------------------------------------------------------------------------------------------------------


def _timm(kind: str, name: str, batch: int, **arguments: Any) -> Family:
    return Family(name, kind, batch, functools.partial(_build_timm, name, arguments), _images)


def _build_timm(name: str, arguments: Mapping[str, Any], smoke: bool) -> nn.Module:
    import timm

    return _enlarge_tiny(timm.create_model(_SMALL_MODEL) if smoke else timm.create_model(name, **arguments))


def _enlarge_tiny(model: nn.Module) -> nn.Module:
    """Scale parameters below 1e-3 up to 0.1, and draw matrices of zeros, in place.

    timm initialises some class tokens and layer scales to about 1e-6, where FP16 keeps four bits, and the head of some
    models to zero, which makes every output equal.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            largest = float(parameter.abs().max())
            if 0 < largest < 1e-3:
                parameter.mul_(0.1 / largest)
            elif largest == 0 and parameter.ndim == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model


def _images(model: Any, batch: int, smoke: bool) -> Inputs:
    channels, height, width = model.pretrained_cfg["input_size"]
    if sizes := getattr(getattr(model, "patch_embed", None), "img_size", None):  # where an argument sets it
        height, width = sizes
    size = (_SMALL_IMAGE, _SMALL_IMAGE) if smoke else (height, width)
    return (torch.randn(batch, channels, *size, generator=_generator()),)


# transformers ---------------------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """Token vectors of padded sequences, zero at padding: ``(B, N)`` ids and mask to ``(B, N, C)``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        states: Tensor = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        return states * mask[..., None].to(states.dtype)


class Decoder(nn.Module):
    """Token vectors of whole prompts, without a cache: ``(B, N)`` ids to ``(B, N, C)``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        states: Tensor = self.model(input_ids=ids, use_cache=False).last_hidden_state
        return states


class Context(nn.Module):
    """The cache of a decoder in which all sequences have the same context of random keys and values.

    Each call writes the last token anew, so that calls can be repeated. It has what a layer calls of transformers'
    caches.
    """

    def __init__(self, layers: int, heads: int, channels: int, tokens: int, batch: int) -> None:
        super().__init__()
        self.tokens = tokens
        for name in (f"{kind}_{layer}" for layer in range(layers) for kind in ("keys", "values")):
            self.register_buffer(name, torch.randn(1, heads, tokens + 1, channels).repeat(batch, 1, 1, 1))

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """``(B, H, 1, D)`` of the new token; returns ``(B, H, tokens + 1, D)``."""
        keys, values = (getattr(self, f"{kind}_{layer}")[: len(key)] for kind in ("keys", "values"))
        keys[:, :, self.tokens :].copy_(key)
        values[:, :, self.tokens :].copy_(value)
        return keys, values


class Decoding(nn.Module):
    """Vectors of one token for each sequence behind a context: ``(B, 1)`` ids to ``(B, 1, C)``.

    Calls the layers themselves, without a mask: all tokens are visible, and some versions of transformers make one.
    """

    def __init__(self, model: Any, tokens: int = DECODED_CONTEXT, batch: int = DECODED_BATCH) -> None:
        super().__init__()
        config = model.config
        channels = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        cache = Context(config.num_hidden_layers, config.num_key_value_heads, channels, tokens, batch)
        self.model, self.cache = model, cache
        parameters = inspect.signature(model.layers[0].forward).parameters
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"

    def forward(self, ids: Tensor) -> Tensor:
        model = self.model
        states: Tensor = model.embed_tokens(ids)
        positions = torch.full_like(ids[:1], self.cache.tokens)
        arguments = {
            "attention_mask": None,
            "position_embeddings": model.rotary_emb(states, position_ids=positions),
            "position_ids": positions,
            self.cache_name: self.cache,
        }
        for layer in model.layers:
            states = layer(states, **arguments)
        normed: Tensor = model.norm(states)
        return normed


class Speech(nn.Module):
    """Frames of a spectrogram to vectors: ``(B, mel, frames)`` to ``(B, frames / 2, C)``."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder = model.get_encoder()

    def forward(self, features: Tensor) -> Tensor:
        states: Tensor = self.encoder(features).last_hidden_state
        return states


class Features(nn.Module):
    """The last state of a model that takes one tensor of floats."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.model(x).last_hidden_state
        return states


class Pixels(Features):
    """Images to a map of vectors: ``(B, 3, H, W)`` to ``(B, C, H', W')``."""


class Waveform(Features):
    """Samples of sound to vectors: ``(B, samples)`` to ``(B, frames, C)``."""


def _transformers(
    name: str, kind: str, batch: int, tokens: int, wrapper: type[nn.Module], model: str, config: str, **sizes: Any
) -> Family:
    build = functools.partial(_build_transformers, wrapper, model, config, sizes)
    inputs: dict[type[nn.Module], Callable[[nn.Module, int, bool], Inputs]] = {
        Encoder: functools.partial(_padded, tokens),
        Decoder: functools.partial(_prompts, tokens),
        Decoding: _next_tokens,
        Speech: _spectrograms,
        Pixels: functools.partial(_pixels, tokens),
        Waveform: functools.partial(_samples, tokens),
    }
    return Family(name, kind, batch, build, inputs[wrapper], in_graphs=wrapper is Decoding)


def _build_transformers(
    wrapper: Callable[[nn.Module], nn.Module], model: str, config: str, sizes: Mapping[str, Any], smoke: bool
) -> nn.Module:
    import transformers

    make = getattr(transformers, config)
    if smoke:
        known = make().to_dict()
        tokens = {name: 0 for name, value in known.items() if name.endswith("token_id") and isinstance(value, int)}
        given = {**known, **sizes}
        small = {name: x for name, x in _SMALL.items() if type(given.get(name)) is type(x)}
        if "num_key_value_heads" in small and given["num_key_value_heads"] == given["num_attention_heads"]:
            small["num_key_value_heads"] = small["num_attention_heads"]
        sizes = {**tokens, **sizes, **small}
    return wrapper(spread(getattr(transformers, model)(make(**sizes))))


def spread(model: nn.Module) -> nn.Module:
    """``model`` with matrices of the size that keeps activations, so that attention matters.

    transformers initialises to 0.02 whatever the width.
    """
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.7 / parameter.shape[1] ** 0.5)
    return model


def _ids(model: nn.Module, batch: int, tokens: int) -> Tensor:
    vocabulary = next(module for module in model.modules() if isinstance(module, nn.Embedding)).num_embeddings
    return torch.randint(3, vocabulary, (batch, tokens), generator=_generator())


def _padded(tokens: int, model: nn.Module, batch: int, smoke: bool) -> Inputs:
    """Lengths from half of the tokens to all of them; a single sequence is whole."""
    tokens = _SMALL_TOKENS if smoke else tokens
    lengths = torch.linspace(tokens, tokens // 2, batch).round().long()
    mask = (torch.arange(tokens) < lengths[:, None]).long()
    return _ids(model, batch, tokens), mask


def _prompts(tokens: int, model: nn.Module, batch: int, smoke: bool) -> Inputs:
    return (_ids(model, batch, _SMALL_TOKENS if smoke else tokens),)


def _next_tokens(model: nn.Module, batch: int, smoke: bool) -> Inputs:
    return (_ids(model, batch, 1),)


def _spectrograms(model: Any, batch: int, smoke: bool) -> Inputs:
    config = model.encoder.config
    frames = 2 * config.max_source_positions
    return (torch.randn(batch, config.num_mel_bins, frames, generator=_generator()),)


def _pixels(size: int, model: nn.Module, batch: int, smoke: bool) -> Inputs:
    size = _SMALL_IMAGE if smoke else size
    return (torch.randn(batch, 3, size, size, generator=_generator()),)


def _samples(samples: int, model: nn.Module, batch: int, smoke: bool) -> Inputs:
    return (torch.randn(batch, 400 * _SMALL_TOKENS if smoke else samples, generator=_generator()),)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


_bert = functools.partial(_transformers, kind="text encoder", wrapper=Encoder)
_llm = functools.partial(_transformers, kind="decoder, prefill", wrapper=Decoder, tokens=2048)
_decoding = functools.partial(
    _transformers,
    kind=DECODING,
    wrapper=Decoding,
    batch=DECODED_BATCH,
    tokens=1,
    model="LlamaModel",
    config="LlamaConfig",
)

_FAMILIES = (
    _timm("plain ViT", "vit_small_patch16_224", 256),
    _timm("plain ViT", "vit_base_patch16_224", 256),
    _timm("plain ViT", "deit3_large_patch16_384", 32),
    _timm("plain ViT", "vit_huge_patch14_224", 64),
    _timm("plain ViT", "vit_large_patch14_reg4_dinov2", 64, img_size=224),
    _timm("plain ViT", "vit_base_patch16_dinov3", 64),
    _timm("plain ViT", "vit_base_patch32_clip_224", 512),
    _timm("plain ViT", "vit_so400m_patch14_siglip_224", 64),
    _timm("plain ViT", "eva02_base_patch14_224", 128),
    _timm("plain ViT", "beitv2_base_patch16_224", 128),
    _timm("plain ViT", "cait_s24_224", 64),
    _timm("plain ViT", "xcit_small_12_p16_224", 128),
    _timm("plain ViT", "crossvit_base_240", 64),
    _timm("plain ViT", "vit_base_patch16_rope_reg1_gap_256", 128),
    _timm("plain ViT", "tnt_b_patch16_224", 64),
    _timm("plain ViT", "aimv2_large_patch14_224", 64),
    _timm("plain ViT", "vit_pe_core_base_patch16_224", 128),
    _timm("plain ViT", "beit3_base_patch16_224", 128),
    _timm("plain ViT", "naflexvit_base_patch16_gap", 128),
    _timm("windows", "swin_base_patch4_window7_224", 128),
    _timm("windows", "swinv2_base_window8_256", 64),
    _timm("windows", "samvit_base_patch16", 4),
    _timm("windows", "samvit_large_patch16", 4),
    _timm("windows", "samvit_huge_patch16", 4),
    _timm("windows", "gcvit_base", 64),
    _timm("windows", "twins_svt_base", 64),
    _timm("windows", "nest_base", 64),
    _timm("windows", "swinv2_cr_base_224", 64),
    _timm("hierarchical", "hiera_base_224", 128),
    _timm("hierarchical", "mvitv2_base", 64),
    _timm("hierarchical", "sam2_hiera_base_plus", 4),
    _timm("hierarchical", "pvt_v2_b3", 64),
    _timm("hierarchical", "davit_base", 64),
    _timm("hierarchical", "volo_d2_224", 64),
    _timm("hierarchical", "pit_b_224", 64),
    _timm("hierarchical", "coat_lite_medium", 64),
    _transformers(
        "vitdet_base", "hierarchical", 4, 1024, Pixels, "VitDetModel", "VitDetConfig", image_size=1024,
        window_size=14, window_block_indices=[0, 1, 3, 4, 6, 7, 9, 10], use_relative_position_embeddings=True,
    ),
    _transformers(
        "segformer_b3", "hierarchical", 16, 512, Pixels, "SegformerModel", "SegformerConfig",
        depths=[3, 4, 18, 3], hidden_sizes=[64, 128, 320, 512],
    ),
    _timm("with convolutions", "maxvit_small_tf_224", 64),
    _timm("with convolutions", "coatnet_1_rw_224", 64),
    _timm("with convolutions", "caformer_b36", 32),
    _timm("with convolutions", "tiny_vit_21m_224", 128),
    _timm("with convolutions", "convnext_base", 128),
    _timm("with convolutions", "convnextv2_base", 64),
    _timm("with convolutions", "edgenext_base", 128),
    _timm("with convolutions", "efficientformerv2_l", 128),
    _timm("with convolutions", "vitamin_base_224", 64),
    _timm("with convolutions", "mobilevit_s", 128),
    _timm("with convolutions", "levit_384", 256),
    _timm("with convolutions", "fastvit_sa36", 64),
    _timm("with convolutions", "swiftformer_l3", 128),
    _timm("with convolutions", "efficientvit_b3", 64),
    _timm("with convolutions", "mobilenetv4_hybrid_large", 64),
    _timm("with convolutions", "maxxvit_rmlp_small_rw_256", 64),
    _timm("without attention", "focalnet_base_lrf", 64),
    _timm("without attention", "poolformerv2_m36", 64),
    _timm("without attention", "mixer_b16_224", 128),
    _timm("without attention", "resmlp_24_224", 128),
    _timm("without attention", "gmlp_s16_224", 128),
    _timm("without attention", "mambaout_base", 64),
    _timm("without attention", "inception_next_base", 64),
    _bert("bert_base", batch=64, tokens=128, model="BertModel", config="BertConfig"),
    _bert(
        "bert_large", batch=32, tokens=512, model="BertModel", config="BertConfig",
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
    ),
    _bert("modernbert_base", batch=16, tokens=1024, model="ModernBertModel", config="ModernBertConfig"),
    _bert(
        "t5_base", batch=32, tokens=512, model="T5EncoderModel", config="T5Config",
        d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12,
    ),
    _bert(
        "deberta_v3_base", batch=16, tokens=256, model="DebertaV2Model", config="DebertaV2Config",
        hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072,
        relative_attention=True, position_buckets=256, pos_att_type=["p2c", "c2p"], share_att_key=True,
        norm_rel_ebd="layer_norm", max_relative_positions=-1, position_biased_input=False,
    ),
    _bert("distilbert", batch=64, tokens=256, model="DistilBertModel", config="DistilBertConfig"),
    _bert(
        "albert_base", batch=32, tokens=256, model="AlbertModel", config="AlbertConfig",
        hidden_size=768, num_attention_heads=12, intermediate_size=3072, embedding_size=128,
    ),
    _bert("convbert_base", batch=32, tokens=256, model="ConvBertModel", config="ConvBertConfig"),
    _bert(
        "nystromformer", batch=16, tokens=512, model="NystromformerModel", config="NystromformerConfig",
        max_position_embeddings=514,
    ),
    _bert("mpnet_base", batch=32, tokens=256, model="MPNetModel", config="MPNetConfig"),
    _bert(
        "xlnet_base", batch=16, tokens=512, model="XLNetModel", config="XLNetConfig",
        d_model=768, n_layer=12, n_head=12, d_inner=3072,
    ),
    _bert(
        "esm2_150m", batch=16, tokens=512, model="EsmModel", config="EsmConfig",
        vocab_size=33, pad_token_id=1, mask_token_id=32, hidden_size=640, num_hidden_layers=30, num_attention_heads=20,
        intermediate_size=2560, position_embedding_type="rotary", token_dropout=True,
    ),
    _bert(
        "roformer_base", batch=16, tokens=512, model="RoFormerModel", config="RoFormerConfig", embedding_size=768,
        vocab_size=32000, max_position_embeddings=512,
    ),
    _bert("bigbird_base", batch=4, tokens=2048, model="BigBirdModel", config="BigBirdConfig", vocab_size=32000),
    _transformers(
        "whisper_small", "speech encoder", 8, 1500, Speech, "WhisperModel", "WhisperConfig",
        d_model=768, encoder_layers=12, encoder_attention_heads=12, encoder_ffn_dim=3072, num_mel_bins=80,
    ),
    _transformers("wavlm_base", "speech encoder", 16, 80000, Waveform, "WavLMModel", "WavLMConfig"),
    _transformers("wav2vec2_base", "speech encoder", 16, 80000, Waveform, "Wav2Vec2Model", "Wav2Vec2Config"),
    _llm(
        "llama_1b", batch=4, model="LlamaModel", config="LlamaConfig",
        hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=8192, vocab_size=32000,
    ),
    _llm(
        "qwen3_0.6b", batch=4, model="Qwen3Model", config="Qwen3Config",
        hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        intermediate_size=3072, vocab_size=32000,
    ),
    _llm(
        "gemma_2b", batch=2, model="GemmaModel", config="GemmaConfig",
        hidden_size=2048, num_hidden_layers=18, num_attention_heads=8, num_key_value_heads=1, head_dim=256,
        intermediate_size=16384, vocab_size=32000,
    ),
    _llm(
        "phi3_mini_8_layers", batch=2, model="Phi3Model", config="Phi3Config",
        hidden_size=3072, num_hidden_layers=8, num_attention_heads=32, num_key_value_heads=32, intermediate_size=8192,
        vocab_size=32000, pad_token_id=0,
    ),
    _llm(
        "gemma2_2b_8_layers", batch=2, model="Gemma2Model", config="Gemma2Config",
        hidden_size=2304, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, head_dim=256,
        intermediate_size=9216, vocab_size=32000,
    ),
    _llm(
        "opt_1.3b", batch=2, model="OPTModel", config="OPTConfig", hidden_size=2048, word_embed_proj_dim=2048,
        num_hidden_layers=24, num_attention_heads=32, ffn_dim=8192, vocab_size=32000,
    ),
    _llm(
        "pythia_410m", batch=4, model="GPTNeoXModel", config="GPTNeoXConfig",
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, vocab_size=32000,
    ),
    _llm(
        "bloom_560m", batch=4, model="BloomModel", config="BloomConfig",
        hidden_size=1024, n_layer=24, n_head=16, vocab_size=32000,
    ),
    _llm(
        "olmoe_4_layers", batch=1, model="OlmoeModel", config="OlmoeConfig",
        hidden_size=2048, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=16, intermediate_size=1024,
        num_experts=64, num_experts_per_tok=8, vocab_size=32000,
    ),
    _llm(
        "mistral_7b_4_layers", batch=2, model="MistralModel", config="MistralConfig",
        hidden_size=4096, num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336,
        sliding_window=1024, vocab_size=32000,
    ),
    _llm(
        "gemma3_1b_12_layers", batch=4, model="Gemma3TextModel", config="Gemma3TextConfig",
        hidden_size=1152, num_hidden_layers=12, num_attention_heads=4, num_key_value_heads=1, head_dim=256,
        intermediate_size=6912, sliding_window=512, vocab_size=32000,
    ),
    _llm(
        "falcon_7b_4_layers", batch=2, model="FalconModel", config="FalconConfig",
        hidden_size=4544, num_hidden_layers=4, num_attention_heads=71, vocab_size=32000,
    ),
    _llm(
        "stablelm_1.6b_8_layers", batch=4, model="StableLmModel", config="StableLmConfig",
        hidden_size=2048, num_hidden_layers=8, num_attention_heads=32, num_key_value_heads=32, intermediate_size=5632,
        vocab_size=32000,
    ),
    _llm(
        "deepseek_v2_lite_4_layers", batch=4, model="DeepseekV2Model", config="DeepseekV2Config",
        hidden_size=2048, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=16, intermediate_size=10944,
        first_k_dense_replace=4, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, vocab_size=32000,
    ),
    _llm(
        "phi2_8_layers", batch=2, model="PhiModel", config="PhiConfig",
        hidden_size=2560, num_hidden_layers=8, num_attention_heads=32, intermediate_size=10240, vocab_size=32000,
    ),
    _llm(
        "cohere_command_r7b_2_layers", batch=2, model="Cohere2Model", config="Cohere2Config",
        hidden_size=4096, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336,
        sliding_window=4096, vocab_size=32000,
    ),
    _llm(
        "starcoder2_3b_6_layers", batch=2, model="Starcoder2Model", config="Starcoder2Config",
        hidden_size=3072, num_hidden_layers=6, num_attention_heads=24, num_key_value_heads=2, intermediate_size=12288,
        sliding_window=None, vocab_size=32000,
    ),
    _llm(
        "nemotron_4b_6_layers", batch=2, model="NemotronModel", config="NemotronConfig",
        hidden_size=3072, num_hidden_layers=6, num_attention_heads=24, num_key_value_heads=8, intermediate_size=9216,
        vocab_size=32000,
    ),
    _llm(
        "granite_2b_8_layers", batch=2, model="GraniteModel", config="GraniteConfig",
        hidden_size=2048, num_hidden_layers=8, num_attention_heads=32, num_key_value_heads=8, intermediate_size=8192,
        attention_multiplier=0.015625, embedding_multiplier=12.0, residual_multiplier=0.22, vocab_size=32000,
    ),
    _llm(
        "mpt_1b_8_layers", batch=2, model="MptModel", config="MptConfig",
        d_model=2048, n_heads=16, n_layers=8, vocab_size=32000,
    ),
    _llm(
        "glm4_9b_2_layers", batch=2, model="Glm4Model", config="Glm4Config",
        hidden_size=4096, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=2, intermediate_size=13696,
        vocab_size=32000, pad_token_id=0,
    ),
    _llm("gpt2", batch=8, tokens=1024, model="GPT2Model", config="GPT2Config"),
    _decoding(
        "llama_1b_decoding", hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=8192, vocab_size=32000,
    ),
    _decoding(
        "llama_8b_decoding", hidden_size=4096, num_hidden_layers=8, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=14336, vocab_size=32000,
    ),
)  # fmt: skip
# Their kernels take less time than their launches, so that the host decides unless CUDA graphs launch them.
_BOUND_BY_HOST = ("pvt_v2_b3", "segformer_b3")
FAMILIES = {
    family.name: replace(family, in_graphs=family.in_graphs or family.name in _BOUND_BY_HOST) for family in _FAMILIES
}
SMOKE = ("vit_base_patch16_224", "bert_base", "whisper_small", "llama_1b")
