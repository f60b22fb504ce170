"""Blocks that INT8 is not expected to make faster: left in 16 bits unless they are asked for, and in the report."""

from __future__ import annotations

import itertools
from typing import Literal

import pytest
import torch
from model_state import everything
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


def test_only_wide_blocks_are_converted(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Between blocks in INT8 and in 16 bits everything is float; the others train as before."""
    monkeypatch.setattr(plan, "FASTER_FROM", 128)
    model, x = Pyramid(64, 128, 128), torch.randn(2, 40, 64)
    expected = model(x)
    convert_to_int8_training(model)
    report = conversion_report(model)
    assert "Pyramid: 1 modules stay in float, too narrow to be faster in INT8, 64 of 128 channels" in caplog.text
    assert report.blocks == ("blocks.1", "blocks.2")
    assert [row.name for row in report.kept if "narrow" in row.reason] == ["blocks.0"]
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


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_narrow_blocks_does_not_change(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Not even a hook; the log and the report say so, and it can still be restored and converted."""
    model, x = MODELS[name]().eval(), inputs(name)
    expected, before = loss_of(model, x), everything(model)
    assert convert_to_int8_training(model) is model
    report = conversion_report(model)
    assert (report.blocks, report.converted, len(report.kept)) == ((), (), 2)
    sizes = f"32 of {plan.FASTER_FROM_MANY if name == 'llama' else plan.FASTER_FROM} channels"
    assert f"2 modules stay in float, too narrow to be faster in INT8, {sizes}; skip_slower=False" in caplog.text
    assert "0 modules in 0 blocks" in str(report)
    assert f"kept, too narrow to be faster in INT8, {sizes}" in str(report)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert torch.equal(loss_of(model, x), expected)
    assert everything(restore_float(model)) == before
    assert conversion_report(convert_to_int8_training(model, skip_slower=False)).blocks


def test_narrow_blocks_are_converted_on_request() -> None:
    model = convert_to_int8_training(vit(), skip_slower=False)
    assert conversion_report(model).narrow == ("blocks.0", "blocks.1")
    assert "2 blocks too narrow to be faster in INT8: blocks.0, ..." in str(conversion_report(model))


def test_wide_blocks_are_not_reported() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Block(plan.FASTER_FROM, 8))
    report = conversion_report(convert_to_int8_training(model))
    assert report.narrow == ()
    assert report.blocks == ("0",)
    assert "narrow" not in str(report)


def test_blocks_with_queries_keys_and_values_apart_must_be_wider() -> None:
    """As in BERT: its six linears launch more kernels than the host of some machines keeps up with."""
    from transformers import BertConfig, BertModel

    for width, count in ((1024, 0), (2048, 2)):
        sizes = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": 2, "vocab_size": 9}
        with torch.device("meta"):
            model = BertModel(BertConfig(**sizes, num_attention_heads=16))
        assert len(conversion_report(convert_to_int8_training(model)).blocks) == count


def test_gated_mlps_must_be_wider() -> None:
    """As in Llama; a block of their widths without is converted."""
    with torch.device("meta"):
        narrow, wide = (llama(hidden_size=width, intermediate_size=2 * width) for width in (1536, 2048))
    assert conversion_report(convert_to_int8_training(narrow)).blocks == ()
    assert len(conversion_report(convert_to_int8_training(wide)).blocks) == 2


@pytest.mark.parametrize("mode", ["per_token", "per_tensor"])
def test_baselines_convert_every_width(mode: Literal["per_token", "per_tensor"]) -> None:
    report = conversion_report(convert_to_int8_training(llama(), mode=mode))
    assert len(report.blocks) == 2
    assert report.narrow == ()


def test_a_conversion_that_has_nothing_to_do_but_for_its_width_is_no_error() -> None:
    report = conversion_report(convert_to_int8_training(gpt2(), keep_float=["transformer.h.0"]))
    assert [row.name for row in report.kept] == ["transformer.h.0", "transformer.h.1"]
    with pytest.raises(UnsupportedError, match=r"blocks must have modules to convert, got none; .* keep_float"):
        convert_to_int8_training(gpt2(), keep_float=["transformer.h.*"])


def test_small_linears_beside_do_not_count() -> None:
    """As the two that compute the biases of positions in Swin V2's attention."""
    from timm.models.swin_transformer_v2 import SwinTransformerV2

    with torch.device("meta"):
        model = SwinTransformerV2(img_size=64, embed_dim=1024, depths=(1,), num_heads=(16,), window_size=4)
    (block,) = plan.blocks_of(model)
    assert len(plan._linear_shapes(block)) == 6
    assert not plan.has_many_linears(block)
