"""Small models of diffusers with random weights, and inputs for them."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from torch import Tensor, nn

ONE_TEXT = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}


def noise(*shape: int) -> Tensor:
    return torch.randn(shape)


def _dit() -> Any:
    return diffusers.DiTTransformer2DModel(
        **ONE_TEXT, in_channels=4, sample_size=8, patch_size=2, num_embeds_ada_norm=9
    )


def _pixart() -> Any:
    sizes = {"cross_attention_dim": 32, "caption_channels": 24, "sample_size": 8, "patch_size": 2}
    return diffusers.PixArtTransformer2DModel(**ONE_TEXT, **sizes, in_channels=4, out_channels=8)


def _sd3() -> Any:
    sizes = {"joint_attention_dim": 24, "caption_projection_dim": 32, "pooled_projection_dim": 24, "sample_size": 8}
    return diffusers.SD3Transformer2DModel(**ONE_TEXT, **sizes, in_channels=4, out_channels=4, patch_size=2)


def _flux() -> Any:
    sizes = {"joint_attention_dim": 24, "pooled_projection_dim": 24, "axes_dims_rope": (4, 4, 8), "in_channels": 4}
    return diffusers.FluxTransformer2DModel(**ONE_TEXT, **sizes, num_single_layers=2, patch_size=1)


def _wan() -> Any:
    sizes = {"text_dim": 24, "freq_dim": 32, "ffn_dim": 48, "in_channels": 4, "out_channels": 4}
    return diffusers.WanTransformer3DModel(**ONE_TEXT, **sizes, patch_size=(1, 2, 2), rope_max_seq_len=32)


def _ltx() -> Any:
    sizes = {"cross_attention_dim": 32, "caption_channels": 24, "in_channels": 8, "out_channels": 8}
    return diffusers.LTXVideoTransformer3DModel(**ONE_TEXT, **sizes)


def _cogvideox() -> Any:
    sizes = {"text_embed_dim": 24, "time_embed_dim": 16, "sample_width": 8, "sample_height": 8, "sample_frames": 5}
    return diffusers.CogVideoXTransformer3DModel(**ONE_TEXT, **sizes, in_channels=4, out_channels=4)


def _hunyuan() -> Any:
    sizes = {"text_embed_dim": 24, "pooled_projection_dim": 24, "rope_axes_dim": (4, 4, 8), "in_channels": 4}
    layers = {"num_single_layers": 2, "num_refiner_layers": 1, "guidance_embeds": True}
    return diffusers.HunyuanVideoTransformer3DModel(**ONE_TEXT, **sizes, **layers, out_channels=4)


def _sana() -> Any:
    cross = {"num_cross_attention_heads": 2, "cross_attention_head_dim": 16, "cross_attention_dim": 32}
    sizes = {"caption_channels": 24, "in_channels": 4, "out_channels": 4, "sample_size": 8, "patch_size": 1}
    return diffusers.SanaTransformer2DModel(**ONE_TEXT, **cross, **sizes)


def _qwen_image() -> Any:
    sizes = {"joint_attention_dim": 24, "axes_dims_rope": (4, 4, 8), "in_channels": 8, "out_channels": 4}
    return diffusers.QwenImageTransformer2DModel(**ONE_TEXT, **sizes, patch_size=1)


def _unet() -> Any:
    blocks = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    sizes = {"block_out_channels": (32, 64), "norm_num_groups": 8, "layers_per_block": 1, "sample_size": 8}
    return diffusers.UNet2DConditionModel(**blocks, **sizes, cross_attention_dim=24, attention_head_dim=16)


def _time() -> dict[str, Tensor]:
    return {"timestep": torch.tensor([3.0, 7.0])}


def _image() -> dict[str, Tensor]:
    return {"hidden_states": noise(2, 4, 8, 8), **_time()}


def _video() -> dict[str, Tensor]:
    return {"hidden_states": noise(2, 4, 3, 8, 8), "encoder_hidden_states": noise(2, 5, 24), **_time()}


def _text_mask() -> Tensor:
    return torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


MODELS: dict[str, tuple[Any, Any]] = {
    "DiT": (_dit, lambda: {**_image(), "class_labels": torch.tensor([1, 5])}),
    "PixArt": (
        _pixart,
        lambda: {
            **_image(),
            "encoder_hidden_states": noise(2, 5, 24),
            "encoder_attention_mask": _text_mask(),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
    ),
    "SD3": (_sd3, lambda: {**_image(), "encoder_hidden_states": noise(2, 5, 24), "pooled_projections": noise(2, 24)}),
    "Flux": (
        _flux,
        lambda: {
            "hidden_states": noise(2, 16, 4),
            "encoder_hidden_states": noise(2, 5, 24),
            "pooled_projections": noise(2, 24),
            "timestep": torch.tensor([0.3, 0.7]),
            "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0)),
            "txt_ids": torch.zeros(5, 3),
        },
    ),
    "Wan": (_wan, _video),
    "LTX": (
        _ltx,
        lambda: {
            "hidden_states": noise(2, 48, 8),
            "encoder_hidden_states": noise(2, 5, 24),
            "encoder_attention_mask": _text_mask(),
            "num_frames": 3,
            "height": 4,
            "width": 4,
            **_time(),
        },
    ),
    "CogVideoX": (
        _cogvideox,
        lambda: {"hidden_states": noise(2, 2, 4, 8, 8), "encoder_hidden_states": noise(2, 226, 24), **_time()},
    ),
    "HunyuanVideo": (
        _hunyuan,
        lambda: {
            **_video(),
            "encoder_attention_mask": _text_mask(),
            "pooled_projections": noise(2, 24),
            "guidance": torch.tensor([6.0, 6.0]),
        },
    ),
    "Sana": (_sana, lambda: {**_image(), "encoder_hidden_states": noise(2, 5, 24)}),
    "QwenImage": (
        _qwen_image,
        lambda: {
            "hidden_states": noise(2, 16, 8),
            "encoder_hidden_states": noise(2, 5, 24),
            "encoder_hidden_states_mask": torch.ones(2, 5, dtype=torch.long),
            "timestep": torch.tensor([0.3, 0.7]),
            "img_shapes": [[(1, 4, 4)]] * 2,
        },
    ),
    "UNet": (_unet, lambda: {"sample": noise(2, 4, 8, 8), "encoder_hidden_states": noise(2, 5, 24), **_time()}),
}


def cast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """``inputs`` with float tensors in ``dtype``, but for times and positions, which stay in float32."""
    stay = ("timestep", "img_ids", "txt_ids")
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() and name not in stay else value
        for name, value in inputs.items()
    }


def output(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return model(**inputs).sample
