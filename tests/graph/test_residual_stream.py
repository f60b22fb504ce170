"""Residual streams: what writes and reads them in models of several families, and what they are refused for."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor, nn

from qframework.graph.residual_stream import Stream, find_residual_streams
from qframework.quantizer.rotate import fold_layer_scales

DIM = 16
X = torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(0))


def streams(model: nn.Module, *inputs: Tensor) -> list[Stream]:
    return find_residual_streams(torch.export.export(model.eval(), inputs or (X,)).module())


class Block(nn.Module):
    def __init__(self, norm: nn.Module | None = None, post: bool = False) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = norm or nn.LayerNorm(DIM), nn.Linear(DIM, 24), nn.Linear(24, DIM)
        self.post = post

    def branch(self, x: Tensor) -> Tensor:
        return self.fc2(torch.nn.functional.gelu(self.fc1(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.branch(x)) if self.post else x + self.branch(self.norm(x))


class Root(nn.Module):
    """An RMSNorm spelled out, as transformers' decoders have it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(DIM) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


def stack(*blocks: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, DIM), *blocks, nn.LayerNorm(DIM), nn.Linear(DIM, 3))


@pytest.mark.parametrize("norm", [nn.LayerNorm(DIM), nn.RMSNorm(DIM), Root()], ids=["layer", "rms", "spelled out"])
def test_pre_norm_blocks_form_one_stream(norm: nn.Module) -> None:
    (found,) = streams(stack(Block(norm), Block()))
    assert found.refusal == ""
    assert (found.size, len(found.writers), len(found.norms), found.linears) == (DIM, 3, 3, [])
    assert (found.entries, found.crossings) == ([], [])
    assert [len(each.linears) for each in found.norms] == [1, 1, 1]
    assert not any(each.crossings for each in found.norms)


@pytest.mark.parametrize(
    ("name", "writers"),
    [
        ("vit_tiny_patch16_224", 2 * 2 + 3),  # proj and fc2, patches, positions, class token
        ("vit_small_patch14_reg4_dinov2", 2 * 2 + 4),  # and registers; LayerScale is folded before
    ],
)
def test_vision_transformers(name: str, writers: int) -> None:
    sizes = {"img_size": 56, "depth": 2, "embed_dim": 24, "num_heads": 2, "init_values": None}
    model = timm.create_model(name, **sizes).eval()
    graph = torch.export.export(model, (torch.randn(2, 3, 56, 56),)).module()
    fold_layer_scales(graph)
    (found,) = find_residual_streams(graph)
    assert found.refusal == ""
    assert found.entries == []
    assert len(found.writers) == writers
    assert len(found.norms) == 5


def test_the_output_of_features_is_a_crossing() -> None:
    (found,) = streams(nn.Sequential(nn.Linear(DIM, DIM), Block(), nn.LayerNorm(DIM)))
    assert [len(each.crossings) for each in found.norms] == [0, 1]


def test_post_norm_blocks_form_streams_that_norms_write() -> None:
    found = streams(nn.Sequential(nn.Linear(DIM, DIM), Block(post=True), Block(post=True), nn.Linear(DIM, 3)))
    assert len(found) == 2
    assert [len(each.entries) for each in found] == [0, 1]
    assert found[0].norms[0].crossings  # the residual sum reads the norm


class Odd(nn.Module):
    """A stream that ``operation`` reads."""

    def __init__(self, operation) -> None:
        super().__init__()
        self.first, self.norm, self.last, self.operation = (
            nn.Linear(DIM, DIM),
            nn.LayerNorm(DIM),
            nn.Linear(DIM, 3),
            operation,
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.norm(x)) + self.operation(x).sum(-1).amax()


@pytest.mark.parametrize(
    "operation",
    [
        torch.relu,
        torch.sin,
        lambda x: x + 1,
        lambda x: x * torch.arange(DIM),
        lambda x: x.flip(-1),
        lambda x: x[..., 1:],
    ],
    ids=["relu", "sin", "number", "channels", "flip", "some channels"],
)
def test_what_treats_channels_differently_is_a_crossing(operation) -> None:
    (found,) = streams(Odd(operation))
    assert len(found.crossings) == 1


@pytest.mark.parametrize(
    "operation",
    [lambda x: x * 2, lambda x: x[:, :1], lambda x: x.mean(1), lambda x: torch.cat([x, x], 1), lambda x: x.flip(1)],
    ids=["factor", "tokens", "mean", "cat", "flip"],
)
def test_what_treats_channels_alike_belongs_to_the_stream(operation) -> None:
    """Only the sum over channels, behind it, is a crossing."""
    (found,) = streams(Odd(operation))
    assert ["sum" in str(user.target) for _, user in found.crossings] == [True]


def test_a_model_without_norms_has_no_stream() -> None:
    assert streams(nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))) == []
