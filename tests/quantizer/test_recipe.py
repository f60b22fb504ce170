"""Recipes: which steps run, errors, JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from quantizer_models import exported, tiny_vit
from torch import Tensor, nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from qframework.errors import CalibrationError, UnsupportedError
from qframework.numerics import sqnr_db
from qframework.quantizer import QFrameworkQuantizer, Recipe, Smooth, calibrate, static_int8

QUANTIZER = QFrameworkQuantizer().set_global(static_int8())
IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def uneven_vit() -> nn.Module:
    """A few channels of every norm, of the values and after every GELU are much larger than the others."""
    model = tiny_vit()
    for block in model.blocks:
        for norm, linear in ((block.norm1, block.attn.qkv), (block.norm2, block.mlp.fc1)):
            norm.weight[::9] *= 50
            linear.weight[:, ::9] /= 50
        block.attn.qkv.weight[64::9] *= 30
        block.mlp.fc1.weight[::13] *= 10
    return model


@pytest.mark.parametrize(
    "recipe", [Recipe(), Recipe.best(), Recipe.best("cuda"), Recipe(Smooth((0.5,), 7), split_gelu=True, batches=3)]
)
def test_json_round_trip(recipe: Recipe) -> None:
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Recipe(weight_rounding="up"), "Recipe: weight_rounding must be one of 'nearest', 'gptq', got 'up'"),
        (lambda: Recipe(smooth=True), "Recipe: smooth must be a Smooth or None, got True"),
        (lambda: Recipe(bias_correction=1), "Recipe: bias_correction must be True or False, got 1"),
        (lambda: Recipe(device="tpu"), "Recipe: device must be None, 'cpu' or 'cuda', got 'tpu'"),
        (lambda: Recipe.best(["cuda"]), r"Recipe: device must be None, 'cpu' or 'cuda', got \['cuda'\]"),
        (lambda: Recipe(batches=0), "Recipe: batches must be None or a positive integer, got 0"),
        (lambda: Smooth(strengths=(0.5, 1.5)), r"strengths must be at least one number from 0 to 1, got \(0.5, 1.5\)"),
        (lambda: Smooth(strengths=()), r"strengths must be .*, got \(\)"),
        (lambda: Smooth(samples=0), "samples must be a positive integer, got 0"),
        (lambda: Recipe.from_dict({"smoothing": None}), "Recipe: fields must be one of .*, got 'smoothing'"),
    ],
)
def test_unknown_values_are_refused(make, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        make()


@pytest.mark.parametrize("step", ["before_prepare", "after_calibrate"])
def test_an_iterator_is_refused_since_every_step_reads_the_data(step: str) -> None:
    graph, data = exported(tiny_vit(), IMAGES), iter([IMAGES])
    arguments = (graph, QUANTIZER, data) if step == "before_prepare" else (graph, data)
    with pytest.raises(CalibrationError, match=r"iterator .list_iterator., which the first step would use up"):
        getattr(Recipe.best(), step)(*arguments)


def test_a_layer_of_complex_numbers_is_refused_before_it_is_observed() -> None:
    model = nn.Sequential(nn.Linear(16, 16, dtype=torch.complex64)).eval()
    x = torch.randn(4, 16, dtype=torch.complex64)
    with pytest.raises(UnsupportedError, match=r"layer '0': activation must have dtype float32.*got torch.complex64"):
        Recipe.best().before_prepare(exported(model, x), QUANTIZER, [x])


def sqnr_with(recipe: Recipe, model: nn.Module) -> float:
    """SQNR of the converted model against the float model."""
    graph = exported(model, IMAGES)
    recipe.before_prepare(graph, QUANTIZER, [IMAGES])
    prepared = prepare_pt2e(graph, QUANTIZER)
    calibrate(prepared, [IMAGES], progress=False)
    recipe.after_calibrate(prepared, [IMAGES])
    return sqnr_db(model(IMAGES), convert_pt2e(prepared)(IMAGES))


def test_the_best_recipe_restores_the_accuracy_of_uneven_channels() -> None:
    model = uneven_vit()
    assert sqnr_with(Recipe.best(), model) > sqnr_with(Recipe(), model) + 10


def test_every_step_says_what_it_did() -> None:
    graph = exported(uneven_vit(), IMAGES)
    done = replace(Recipe.best(), split_gelu=True, channel_scales=False).before_prepare(graph, QUANTIZER, [IMAGES])
    assert done["split_gelu"] == 2
    assert set(done["smooth"]) >= {"blocks.0.attn.qkv", "blocks.1.mlp.fc1"}
    assert Recipe().before_prepare(graph, QUANTIZER, [IMAGES]) == {}


def test_an_empty_recipe_changes_nothing() -> None:
    graph, model = exported(tiny_vit(), IMAGES), tiny_vit()
    Recipe().before_prepare(graph, QUANTIZER, [IMAGES])
    assert torch.equal(graph(IMAGES), model(IMAGES))


def test_only_as_many_batches_as_asked_for_are_read() -> None:
    read = []

    class Data(list):
        def __iter__(self):
            for index, batch in enumerate(super().__iter__()):
                read.append(index)
                yield batch

    graph = exported(tiny_vit(), IMAGES)
    Recipe(Smooth((0.5,)), batches=2).before_prepare(graph, QUANTIZER, Data([IMAGES] * 5))
    assert read == [0, 1]


class CrossAttention(nn.Module):
    """Attention to another tensor, whose projections are rows of one parameter; channels of that tensor are uneven."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(32)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        with torch.no_grad():
            self.norm.weight[::9] *= 50
            self.attention.in_proj_weight[32:, ::9] /= 50

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        memory = self.norm(memory)
        return self.attention(x, memory, memory, need_weights=False)[0]


def test_linears_that_read_rows_of_a_parameter_are_smoothed() -> None:
    model, generator = CrossAttention().eval(), torch.Generator().manual_seed(1)
    inputs = tuple(torch.randn(4, n, 32, generator=generator) for n in (5, 7))
    expected, errors = model(*inputs), []
    for recipe in (Recipe(), Recipe(smooth=Smooth())):
        graph = exported(model, *inputs)
        done = recipe.before_prepare(graph, QUANTIZER, [inputs])
        prepared = prepare_pt2e(graph, QUANTIZER)
        calibrate(prepared, [inputs], progress=False)
        errors.append(sqnr_db(expected, convert_pt2e(prepared)(*inputs)))
    assert done["smooth"], done
    assert errors[1] > errors[0] + 10, errors
