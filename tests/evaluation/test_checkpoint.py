"""A checkpoint is loaded only for its own configuration, tied weights included."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from qframework.errors import FileFormatError
from qframework.evaluation import checkpoint


@dataclass(frozen=True)
class Config:
    width: int = 3
    blocks: tuple[int, ...] = (1, 2)


class Tied(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.first = nn.Linear(config.width, config.width)
        self.second = nn.Linear(config.width, config.width)
        self.second.weight = self.first.weight


@pytest.fixture
def trained() -> list[Config]:
    return []


def load(path: Path, config: Config, trained: list[Config]) -> Tied:
    def train(wanted: Config) -> Tied:
        trained.append(wanted)
        return Tied(wanted)

    return checkpoint.load_or_train(path, config, Tied, train)


def test_a_saved_model_is_not_trained_again(tmp_path: Path, trained: list[Config]) -> None:
    path = tmp_path / "deep" / "model.safetensors"
    first, again = (load(path, Config(), trained) for _ in range(2))
    assert trained == [Config()]
    assert not first.training
    assert not again.training
    assert torch.equal(first.first.weight, again.first.weight)
    assert torch.equal(first.second.bias, again.second.bias)
    assert again.second.weight is again.first.weight


def test_another_configuration_is_trained_again(
    tmp_path: Path, trained: list[Config], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "model.safetensors"
    load(path, Config(), trained)
    other = Config(blocks=(1,))
    assert load(path, other, trained).first.in_features == 3
    assert trained == [Config(), other]
    assert str(path) in caplog.text


def test_a_fifo_is_refused_without_blocking(tmp_path: Path, trained: list[Config]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(FileFormatError, match="must be a regular file"):
            load(path, Config(), trained)
    assert not trained
