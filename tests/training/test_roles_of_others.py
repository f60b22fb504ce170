"""Normalizations, LayerScale and DropPath of transformers, whose classes and parameters have other names."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from training_models import inputs, vit

from qframework.training import conversion_report, convert_to_int8_training, restore_float
from qframework.training.norm import Int8LayerNorm, Int8RMSNorm
from qframework.training.roles import role_of
from qframework.training.scale import Int8DropPath, Int8LayerScale


def t5() -> nn.Module:
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    return T5LayerNorm(32)


def cohere() -> nn.Module:
    from transformers.models.cohere.modeling_cohere import CohereLayerNorm

    return CohereLayerNorm(32)


def gemma() -> nn.Module:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    return GemmaRMSNorm(32)


def dinov2() -> nn.Module:
    from transformers import Dinov2Config
    from transformers.models.dinov2.modeling_dinov2 import Dinov2LayerScale

    return Dinov2LayerScale(Dinov2Config(hidden_size=32, layerscale_value=0.5))


@pytest.mark.parametrize(
    ("make", "kind"),
    [(t5, Int8RMSNorm), (cohere, Int8LayerNorm), (gemma, Int8RMSNorm), (dinov2, Int8LayerScale)],
)
def test_it_computes_the_same_in_int8(make: Callable[[], nn.Module], kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, module = vit(), make()
    with torch.no_grad():
        next(module.parameters()).add_(0.3 * torch.randn(32))
    exact = copy.deepcopy(module)
    setattr(model.blocks[0], "ls1" if make is dinov2 else "norm1", module)
    convert_to_int8_training(model)
    assert isinstance(module, kind)
    x, towards = torch.randn(2, 17, 32), torch.randn(2, 17, 32)
    results = []
    for each in (exact, module):
        given = x.clone().requires_grad_()
        y = each(given)
        y = y.dequantize() if each is module else y
        (y * towards).sum().backward()
        results.append((y.detach(), given.grad, next(each.parameters()).grad))
    for wanted, got in zip(*results, strict=True):
        assert 0 < float((got - wanted).norm() / wanted.norm()) < 0.02
    restore_float(model)
    assert torch.equal(module(x), exact(x))


def olmo() -> nn.Module:
    from transformers.models.olmo.modeling_olmo import OlmoLayerNorm

    return OlmoLayerNorm(32)


def gemma4() -> nn.Module:
    from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

    return Gemma4RMSNorm(32, with_scale=False)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: nn.LayerNorm(32, elementwise_affine=False), Int8LayerNorm),
        (gemma4, Int8RMSNorm),
        (lambda: nn.RMSNorm(32, elementwise_affine=False), Int8RMSNorm),
    ],
)
def test_normalizations_without_a_weight(make: Callable[[], nn.Module], kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, module = vit(), make()
    before = copy.deepcopy(module)
    model.blocks[0].norm1 = module
    convert_to_int8_training(model)
    assert isinstance(module, kind)
    assert kind.__name__ in repr(module)
    x, towards = torch.randn(2, 17, 32), torch.randn(2, 17, 32)
    results = []
    for each in (before, module):
        given = x.clone().requires_grad_()
        y = each(given)
        y = y.dequantize() if each is module else y
        (y * towards).sum().backward()
        results.append((y.detach(), given.grad))
    for wanted, got in zip(*results, strict=True):
        assert 0 < float((got - wanted).norm() / wanted.norm()) < 0.02
    restore_float(model)
    assert torch.equal(module(x), before(x))
    assert vars(module).keys() == vars(before).keys()


def test_a_normalization_that_hides_its_epsilon_stays_in_float() -> None:
    model = vit()
    model.blocks[0].norm1 = olmo()
    convert_to_int8_training(model)
    assert [row.reason for row in conversion_report(model).kept if row.name == "blocks.0.norm1"] == [
        "it computes LayerNorm of large inputs, but not of small ones: its epsilon is not known"
    ]
    assert model(inputs("vit")).isfinite().all()


def test_drop_path_of_another_name() -> None:
    from transformers.models.beit.modeling_beit import BeitDropPath

    model = vit()
    model.blocks[0].drop_path1 = BeitDropPath(0.5)
    convert_to_int8_training(model)
    assert isinstance(model.blocks[0].drop_path1, Int8DropPath)
    assert "blocks.0.drop_path1" in {row.name for row in conversion_report(model).converted}
    assert model(inputs("vit")).isfinite().all()


class ChannelsLayerNorm(nn.Module):
    """Over the second dimension, which is the last one of a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(32)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.transpose(1, -1), (32,), self.weight, None, self.eps).transpose(1, -1)


class TokensLayerNorm(nn.Module):
    """Over the tokens, without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.transpose(1, 2), x.shape[1:2], eps=self.eps).transpose(1, 2)


class GroupLayerNorm(nn.GroupNorm):
    """Equals LayerNorm for matrices only."""


class CountingLayerNorm(nn.Module):
    """Writes to a buffer at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(32)), 1e-6
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.layer_norm(x, (32,), self.weight, None, self.eps)


def test_what_only_resembles_a_normalization() -> None:
    counting = CountingLayerNorm()
    assert role_of(GroupLayerNorm(1, 32)) is None
    assert role_of(ChannelsLayerNorm()) is None
    assert role_of(TokensLayerNorm()) is None
    assert role_of(nn.LayerNorm((2, 32), elementwise_affine=False)) is None
    assert role_of(GroupLayerNorm(1, 32, affine=False)) is None
    assert role_of(counting) is None
    assert counting.calls == 0
