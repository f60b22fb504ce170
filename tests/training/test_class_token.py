"""Vision transformers with a class token, as timm initializes them, train with the default block size.

Only the class token's output reaches the loss. The gradients of patches are therefore far smaller than its own, and so
is an untrained class token (standard deviation 1e-6) than patches: no token may share a scale with another.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qframework.training import conversion_report, convert_to_int8_training, restore_float

WIDTHS = {80: 4, 128: 2, 192: 3, 200: 4, 320: 5}  # with the number of heads; only 128 is a whole number of blocks
IMAGES, CLASSES = 8, 10


def vit(width: int) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    shape = {"img_size": 64, "patch_size": 8, "depth": 4, "num_heads": WIDTHS[width], "num_classes": CLASSES}
    return VisionTransformer(embed_dim=width, **shape)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images, labels = torch.randn(IMAGES, 3, 64, 64, generator=generator), torch.arange(IMAGES) % CLASSES
    model.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def cosine(first: Tensor, second: Tensor) -> float:
    return float(F.cosine_similarity(first.double().flatten(), second.double().flatten(), dim=0))


@pytest.mark.parametrize("width", WIDTHS)
def test_gradients_with_the_default_blocks_point_where_those_of_float_do(width: int) -> None:
    """A relative error e means a cosine of 1 - e^2 / 2. Eight linears and eight additions round by about 0.01 each,
    independently: 0.04 or 0.9992; a layer whose gradient nearly cancels has a larger one."""
    model = vit(width)
    expected = gradients(model)
    found = gradients(convert_to_int8_training(model))
    cosines = {name: cosine(found[name], expected[name]) for name in expected}
    assert conversion_report(model).block_size == (1, 128)
    assert cosines["patch_embed.proj.weight"] > 0.998
    assert min(cosines.values()) > 0.97, min(cosines.items(), key=lambda item: item[1])


def test_blocks_of_many_tokens_lose_the_patches() -> None:
    """Why the paper's blocks are not the default."""
    model = vit(192)
    expected = gradients(model)["patch_embed.proj.weight"]

    def with_blocks(block_size: object) -> float:
        found = gradients(convert_to_int8_training(model, block_size))["patch_embed.proj.weight"]
        restore_float(model)
        return cosine(found, expected)

    assert with_blocks("jetfire") < 0.9
    assert with_blocks(128) < 0.5
