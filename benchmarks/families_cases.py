"""The architectures of ``benchmarks.families``, at the sizes of the originals."""

from __future__ import annotations

import functools
from dataclasses import replace

from benchmarks.families_models import (
    DECODED_BATCH,
    DECODING,
    Decoder,
    Decoding,
    Encoder,
    Pixels,
    Speech,
    Waveform,
    of_timm,
    of_transformers,
)

_bert = functools.partial(of_transformers, kind="text encoder", wrapper=Encoder)
_llm = functools.partial(of_transformers, kind="decoder, prefill", wrapper=Decoder, tokens=2048)
_decoding = functools.partial(
    of_transformers,
    kind=DECODING,
    wrapper=Decoding,
    batch=DECODED_BATCH,
    tokens=1,
    model="LlamaModel",
    config="LlamaConfig",
)

_FAMILIES = (
    of_timm("plain ViT", "vit_small_patch16_224", 256),
    of_timm("plain ViT", "vit_base_patch16_224", 256),
    of_timm("plain ViT", "deit3_large_patch16_384", 32),
    of_timm("plain ViT", "vit_huge_patch14_224", 64),
    of_timm("plain ViT", "vit_large_patch14_reg4_dinov2", 64, img_size=224),
    of_timm("plain ViT", "vit_base_patch16_dinov3", 64),
    of_timm("plain ViT", "vit_base_patch32_clip_224", 512),
    of_timm("plain ViT", "vit_so400m_patch14_siglip_224", 64),
    of_timm("plain ViT", "eva02_base_patch14_224", 128),
    of_timm("plain ViT", "beitv2_base_patch16_224", 128),
    of_timm("plain ViT", "cait_s24_224", 64),
    of_timm("plain ViT", "xcit_small_12_p16_224", 128),
    of_timm("plain ViT", "crossvit_base_240", 64),
    of_timm("plain ViT", "vit_base_patch16_rope_reg1_gap_256", 128),
    of_timm("plain ViT", "tnt_b_patch16_224", 64),
    of_timm("plain ViT", "aimv2_large_patch14_224", 64),
    of_timm("plain ViT", "vit_pe_core_base_patch16_224", 128),
    of_timm("plain ViT", "beit3_base_patch16_224", 128),
    of_timm("plain ViT", "naflexvit_base_patch16_gap", 128),
    of_timm("windows", "swin_base_patch4_window7_224", 128),
    of_timm("windows", "swinv2_base_window8_256", 64),
    of_timm("windows", "samvit_base_patch16", 4),
    of_timm("windows", "samvit_large_patch16", 4),
    of_timm("windows", "samvit_huge_patch16", 4),
    of_timm("windows", "gcvit_base", 64),
    of_timm("windows", "twins_svt_base", 64),
    of_timm("windows", "nest_base", 64),
    of_timm("windows", "swinv2_cr_base_224", 64),
    of_timm("hierarchical", "hiera_base_224", 128),
    of_timm("hierarchical", "mvitv2_base", 64),
    of_timm("hierarchical", "sam2_hiera_base_plus", 4),
    of_timm("hierarchical", "pvt_v2_b3", 64),
    of_timm("hierarchical", "davit_base", 64),
    of_timm("hierarchical", "volo_d2_224", 64),
    of_timm("hierarchical", "pit_b_224", 64),
    of_timm("hierarchical", "coat_lite_medium", 64),
    of_transformers(
        "vitdet_base", "hierarchical", 4, 1024, Pixels, "VitDetModel", "VitDetConfig", image_size=1024,
        window_size=14, window_block_indices=[0, 1, 3, 4, 6, 7, 9, 10], use_relative_position_embeddings=True,
    ),
    of_transformers(
        "segformer_b3", "hierarchical", 16, 512, Pixels, "SegformerModel", "SegformerConfig",
        depths=[3, 4, 18, 3], hidden_sizes=[64, 128, 320, 512],
    ),
    of_timm("with convolutions", "maxvit_small_tf_224", 64),
    of_timm("with convolutions", "coatnet_1_rw_224", 64),
    of_timm("with convolutions", "caformer_b36", 32),
    of_timm("with convolutions", "tiny_vit_21m_224", 128),
    of_timm("with convolutions", "convnext_base", 128),
    of_timm("with convolutions", "convnextv2_base", 64),
    of_timm("with convolutions", "edgenext_base", 128),
    of_timm("with convolutions", "efficientformerv2_l", 128),
    of_timm("with convolutions", "vitamin_base_224", 64),
    of_timm("with convolutions", "mobilevit_s", 128),
    of_timm("with convolutions", "levit_384", 256),
    of_timm("with convolutions", "fastvit_sa36", 64),
    of_timm("with convolutions", "swiftformer_l3", 128),
    of_timm("with convolutions", "efficientvit_b3", 64),
    of_timm("with convolutions", "mobilenetv4_hybrid_large", 64),
    of_timm("with convolutions", "maxxvit_rmlp_small_rw_256", 64),
    of_timm("without attention", "focalnet_base_lrf", 64),
    of_timm("without attention", "poolformerv2_m36", 64),
    of_timm("without attention", "mixer_b16_224", 128),
    of_timm("without attention", "resmlp_24_224", 128),
    of_timm("without attention", "gmlp_s16_224", 128),
    of_timm("without attention", "mambaout_base", 64),
    of_timm("without attention", "inception_next_base", 64),
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
    of_transformers(
        "whisper_small", "speech encoder", 8, 1500, Speech, "WhisperModel", "WhisperConfig",
        d_model=768, encoder_layers=12, encoder_attention_heads=12, encoder_ffn_dim=3072, num_mel_bins=80,
    ),
    of_transformers("wavlm_base", "speech encoder", 16, 80000, Waveform, "WavLMModel", "WavLMConfig"),
    of_transformers("wav2vec2_base", "speech encoder", 16, 80000, Waveform, "Wav2Vec2Model", "Wav2Vec2Config"),
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
