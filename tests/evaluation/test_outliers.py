"""Transplanted outliers: the function, the channels, and the effect on min-max INT8 and a recipe."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor, nn

from qframework import quantize
from qframework.errors import UnsupportedError
from qframework.evaluation.outliers import transplant_outliers
from qframework.numerics import sqnr_db
from qframework.quantizer import QFrameworkQuantizer, Recipe, Smooth, static_int8


def vit(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 10}
    model = timm.create_model("vit_tiny_patch16_224", **sizes).to(dtype).eval()
    return model, torch.randn(4, 3, 32, 32, dtype=dtype)


@torch.no_grad()
def test_outlier_channels_grow_and_the_function_does_not_change() -> None:
    model, images = vit(torch.float64)
    changed = transplant_outliers(model, images, channels=3, factor=64.0, seed=5)
    torch.testing.assert_close(changed(images), model(images), rtol=1e-11, atol=1e-12)
    for name in ("blocks.0.norm1", "blocks.1.norm2", "norm"):
        ratio = changed.get_submodule(name).weight / model.get_submodule(name).weight
        # 1 / 64 is exact, so that both are
        assert sorted(ratio.tolist()) == [1.0] * 29 + [64.0] * 3
    chosen = [(changed.get_submodule(n).weight != model.get_submodule(n).weight) for n in ("blocks.0.norm1", "norm")]
    assert torch.equal(*chosen)


def test_the_seed_determines_the_outliers() -> None:
    model, images = vit()
    weights = [transplant_outliers(model, (images,), seed=seed).blocks[0].norm1.weight.detach() for seed in (1, 1, 2)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    ratio = weights[0][weights[0] != 1]
    assert len(ratio) == 4
    assert bool(((ratio >= 10) & (ratio <= 100)).all())


@torch.no_grad()
def test_outliers_break_min_max_and_smoothing_repairs_it() -> None:
    model, images = vit()
    changed = transplant_outliers(model, images, factor=100.0)
    quantizer = QFrameworkQuantizer().set_global(static_int8())
    expected = model(images)
    clean = sqnr_db(expected, quantize(model, images, quantizer, [images])(images))
    broken = sqnr_db(expected, quantize(changed, images, quantizer, [images])(images))
    recipe = Recipe(smooth=Smooth())
    mended = sqnr_db(expected, quantize(changed, images, quantizer, [images], recipe=recipe)(images))
    assert broken < clean - 10
    assert mended > clean - 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"channels": 33}, "channels must be 1 to 32, got 33"),
        ({"channels": 0}, "channels must be 1 to 32, got 0"),
        ({"factor": 0.0}, "factor must be a positive number or a rising pair, got 0.0"),
        ({"factor": (100.0, 10.0)}, r"factor must be .*, got \(100.0, 10.0\)"),
    ],
)
def test_bad_arguments_are_refused(arguments, message: str) -> None:
    model, images = vit()
    with pytest.raises(UnsupportedError, match=message):
        transplant_outliers(model, images, **arguments)


def test_a_model_without_norms_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="must have a norm that feeds only linears, got Linear"):
        transplant_outliers(nn.Linear(4, 4), torch.zeros(2, 4))
