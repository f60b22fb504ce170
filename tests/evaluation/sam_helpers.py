"""A tiny SamModel with random weights, and COCO annotations of a few drawn images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn

SIZE, PATCH, CHANNELS = 64, 8, 16


def save_tiny_sam(folder: Path) -> str:
    """A SamModel with windows, global attention and relative positions, as ``from_pretrained`` reads it."""
    from transformers import SamConfig, SamMaskDecoderConfig, SamModel, SamPromptEncoderConfig, SamVisionConfig

    sizes = {"image_size": SIZE, "patch_size": PATCH}
    vision = SamVisionConfig(
        **sizes, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, mlp_dim=64, window_size=4,
        global_attn_indexes=[1], output_channels=CHANNELS, num_pos_feats=CHANNELS // 2,
    )  # fmt: skip
    prompt = SamPromptEncoderConfig(**sizes, hidden_size=CHANNELS, mask_input_channels=4)
    decoder = SamMaskDecoderConfig(
        hidden_size=CHANNELS, mlp_dim=32, num_attention_heads=2, iou_head_hidden_dim=CHANNELS
    )
    model = SamModel(SamConfig(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder))
    randomize(model)
    model.save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Weights that let every layer matter: transformers starts SAM's at 1e-10."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)


def tiny_timm_encoder(**changes: Any) -> nn.Module:
    from timm.models.vision_transformer_sam import VisionTransformerSAM

    settings: dict[str, Any] = {
        "img_size": SIZE, "patch_size": PATCH, "embed_dim": 32, "depth": 2, "num_heads": 2, "neck_chans": CHANNELS,
        "window_size": 4, "global_attn_indexes": (1,), "num_classes": 0,
    }  # fmt: skip
    model = VisionTransformerSAM(**settings | changes).eval()
    randomize(model)
    return model


def square(left: int, top: int, side: int) -> list[list[float]]:
    """A polygon."""
    right, bottom = left + side, top + side
    return [[left, top, right, top, right, bottom, left, bottom]]


def run_lengths(mask: np.ndarray) -> dict[str, Any]:
    """COCO's run lengths as numbers: of zeros and ones in turn, column by column, zeros first."""
    flat = np.concatenate([[0], mask.T.ravel().astype(int), [2]])
    changes = np.flatnonzero(np.diff(flat) != 0)
    if mask.T.ravel()[0] == 0:
        changes = changes[1:] if changes[0] == 0 else changes
    counts = np.diff(np.concatenate([[0], changes]))
    return {"counts": counts.tolist(), "size": list(mask.shape)}


def annotation(number: int, image: int, segmentation: Any, box: list[float], **more: Any) -> dict[str, Any]:
    return {"id": number, "image_id": image, "category_id": 1, "bbox": box, "segmentation": segmentation, **more}


def write_coco(root: Path, images: int = 5, **changes: Any) -> tuple[Path, Path]:
    """A folder of pictures of 40 x 60 pixels with two squares each, the second one as run lengths."""
    folder = root / "images"
    folder.mkdir(parents=True)
    document: dict[str, Any] = {"images": [], "annotations": [], "categories": [{"id": 1, "name": "square"}]}
    for number in range(images):
        picture = Image.new("RGB", (60, 40), (20 * number, 80, 120))
        ImageDraw.Draw(picture).rectangle((5 + number, 5, 15 + number, 15), (250, 200, 0))
        picture.save(folder / f"{number}.png")
        document["images"].append({"id": 10 + number, "file_name": f"{number}.png", "height": 40, "width": 60})
        mask = np.zeros((40, 60), dtype=bool)
        mask[20:30, 30:45] = True
        document["annotations"] += [
            annotation(2 * number + 1, 10 + number, square(5 + number, 5, 10), [5 + number, 5, 10, 10]),
            annotation(2 * number + 2, 10 + number, run_lengths(mask), [30, 20, 15, 10]),
        ]
    path = root / "instances.json"
    path.write_text(json.dumps(document | changes))
    return folder, path
