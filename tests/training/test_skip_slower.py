"""Blocks that INT8 is not expected to make faster: in the report, and left in 16 bits on request."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from training_models import MODELS, gpt2, inputs, llama, loss_of, vit

from benchmarks.training_block import Block
from qframework.errors import UnsupportedError
from qframework.training import conversion_report, convert_to_int8_training, fallbacks, plan, restore_float


class Pyramid(nn.Module):
    """Blocks of two widths, as in Swin."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, 2) for width in widths)
        self.widen = nn.ModuleList(nn.Identity() if a == b else nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x)
            x = self.widen[i](x) if i < len(self.widen) else x
        return x


@pytest.mark.parametrize("name", MODELS)
def test_the_width_of_a_block_is_that_of_its_residual_stream(name: str) -> None:
    """Whatever the shapes of keys, values and the MLP are; Conv1D has inputs first."""
    model = MODELS[name]()
    blocks = plan._find_blocks(model, None)
    (width,) = {module.weight.shape[0] for module in model.modules() if "norm" in type(module).__name__.lower()}
    assert {plan.width_of(block) for block in blocks} == {width}
    assert plan.width_of(nn.LayerNorm(8)) == 0


def test_only_wide_blocks_are_converted_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between blocks in INT8 and in 16 bits everything is float; the others train as before."""
    monkeypatch.setattr(plan, "FASTER_FROM", 128)
    model, x = Pyramid(64, 128, 128), torch.randn(2, 40, 64)
    expected = model(x)
    convert_to_int8_training(model, skip_slower=True)
    report = conversion_report(model)
    assert report.blocks == ("blocks.1", "blocks.2")
    assert [row.name for row in report.kept if "narrower" in row.reason] == ["blocks.0"]
    assert report.narrow == ()
    fallbacks.clear()
    found = model(x)
    assert type(found) is torch.Tensor
    assert 1e-4 < float(((found - expected).norm() / expected.norm()).detach()) < 0.1
    found.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert fallbacks == {}
    restore_float(model)
    assert torch.equal(model(x), expected)


def test_a_conversion_converts_narrow_blocks_and_reports_them() -> None:
    model = convert_to_int8_training(vit())
    assert conversion_report(model).narrow == ("blocks.0", "blocks.1")
    assert "2 blocks narrower than 1024 channels, for which INT8 was not measured to be faster: blocks.0, ..." in str(
        conversion_report(model)
    )


def test_wide_blocks_are_not_reported() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Block(plan.FASTER_FROM, 8))
    report = conversion_report(convert_to_int8_training(model, skip_slower=True))
    assert report.narrow == ()
    assert report.blocks == ("0",)
    assert "narrower" not in str(report)


def test_baselines_are_not_reported() -> None:
    assert conversion_report(convert_to_int8_training(llama(), mode="per_token")).narrow == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "per_token"}, "mode must be 'per_block' for skip_slower=True, got 'per_token'"),
        ({}, "blocks must have modules to convert, got none; .* stays in float, narrower than 1024 channels"),
    ],
)
def test_errors_of_skip_slower(options: dict[str, str], message: str) -> None:
    model = gpt2()
    with pytest.raises(UnsupportedError, match=message):
        convert_to_int8_training(model, skip_slower=True, **options)  # type: ignore[arg-type]
    loss_of(model, inputs("gpt2")).backward()
