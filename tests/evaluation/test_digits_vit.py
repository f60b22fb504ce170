"""Training is seeded; checkpoints and the learning rate schedule (digits_vit.py, checkpoint.py, schedule.py)."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qframework.errors import FileFormatError, QFrameworkError
from qframework.evaluation import digits, digits_vit
from qframework.evaluation.accuracy import top1
from qframework.evaluation.schedule import warmup_cosine

TINY = digits_vit.TrainingConfig(embed_dim=12, depth=1, epochs=1, batch_size=256)


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_training_learns() -> None:
    """Far above the 10 % of guessing after seconds; the test of the demo checks the whole training."""
    config = digits_vit.TrainingConfig(embed_dim=48, depth=1, epochs=10, learning_rate=3e-3)
    model = digits_vit.train(config, show_progress=False)
    assert not model.training
    assert top1(model, digits.loader(digits.load_digits().held_out)) > 60


def test_the_seed_decides_the_weights() -> None:
    torch.manual_seed(1)
    first = digits_vit.train(TINY, show_progress=False)
    torch.manual_seed(2)
    assert same_weights(first, digits_vit.train(TINY, show_progress=False))
    assert not same_weights(first, digits_vit.train(replace(TINY, seed=1), show_progress=False))


def test_training_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    digits_vit.train(TINY, show_progress=False)
    assert torch.equal(torch.rand(1), expected)


def test_sizes_differ_and_take_a_seed() -> None:
    configs = [digits_vit.sized(size, seed=3) for size in digits_vit.SIZES]
    assert len(configs) == len(set(configs)) >= 3
    assert {config.seed for config in configs} == {3}
    assert digits_vit.sized("base") == digits_vit.TrainingConfig()
    with pytest.raises(QFrameworkError, match=r"size must be one of small, base, deep, got 'huge'"):
        digits_vit.sized("huge")


def test_shift_moves_whole_images_by_at_most_a_pixel() -> None:
    images = torch.full((200, 1, 8, 8), -1.0)
    images[:, 0, 4, 4] = 1.0
    shifted = digits_vit.shift_by_a_pixel(images)
    assert shifted.shape == images.shape
    _, _, rows, columns = torch.nonzero(shifted == 1.0, as_tuple=True)
    assert set(zip(rows.tolist(), columns.tolist(), strict=True)) == {(r, c) for r in (3, 4, 5) for c in (3, 4, 5)}
    assert len(rows) == 200


def test_shift_fills_with_background() -> None:
    shifted = digits_vit.shift_by_a_pixel(torch.ones(200, 1, 8, 8))
    lost = (shifted == -1).sum(dim=(1, 2, 3))
    # nothing, one row or column of 8, or both, which share a pixel
    assert set(lost.tolist()) == {0, 8, 15}


def test_a_share_of_the_images_is_shifted() -> None:
    torch.manual_seed(0)
    images = torch.randn(900, 1, 8, 8)
    for share, expected in ((0.0, 0.0), (0.5, 4 / 9), (1.0, 8 / 9)):  # one shift of nine moves nothing
        moved = (digits_vit.shift_by_a_pixel(images, share) != images).any(dim=(1, 2, 3)).float().mean().item()
        assert moved == pytest.approx(expected, abs=0.05)


def test_training_restores_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before, during = torch.get_num_threads(), []
    monkeypatch.setattr(digits_vit, "_fit", lambda *_: during.append(torch.get_num_threads()))
    torch.set_num_threads(2)
    try:
        digits_vit.train(TINY)
        assert (during, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "build" / "vit.safetensors"
    digits_vit.load_or_train(path, TINY, show_progress=False)
    return path


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[digits_vit.TrainingConfig]:
    """The configurations trained from here on."""
    calls: list[digits_vit.TrainingConfig] = []
    original = digits_vit.train

    def train(config: digits_vit.TrainingConfig, **kwargs: bool) -> torch.nn.Module:
        calls.append(config)
        return original(config, **kwargs)

    monkeypatch.setattr(digits_vit, "train", train)
    return calls


def test_the_checkpoint_is_used(checkpoint: Path, trained: list[digits_vit.TrainingConfig]) -> None:
    model = digits_vit.load_or_train(checkpoint, TINY)
    assert not trained
    assert not model.training
    assert same_weights(model, digits_vit.train(TINY, show_progress=False))


def test_another_configuration_is_trained_again(
    checkpoint: Path, trained: list[digits_vit.TrainingConfig], caplog: pytest.LogCaptureFixture
) -> None:
    other = replace(TINY, learning_rate=1e-4)
    with caplog.at_level(logging.WARNING):
        digits_vit.load_or_train(checkpoint, other, show_progress=False)
    assert trained == [other]
    assert "0.0001" in caplog.text
    digits_vit.load_or_train(checkpoint, other)
    assert trained == [other]  # the new checkpoint replaced the old one


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def strip_metadata(path: Path) -> None:
    save_file(load_file(path), path)


@pytest.mark.parametrize(
    "write", [truncate, strip_metadata, lambda path: path.write_text("mine"), lambda path: torch.save({"w": 1}, path)]
)
def test_a_foreign_file_is_kept(write, checkpoint: Path, trained: list[digits_vit.TrainingConfig]) -> None:
    write(checkpoint)
    content = checkpoint.read_bytes()
    with pytest.raises(FileFormatError, match=r"^checkpoint: path must be .* left as it is"):
        digits_vit.load_or_train(checkpoint, TINY, show_progress=False)
    assert checkpoint.read_bytes() == content
    assert not trained


def test_damaged_weights_are_trained_again(
    checkpoint: Path, trained: list[digits_vit.TrainingConfig], caplog: pytest.LogCaptureFixture
) -> None:
    flip_a_bit(checkpoint)
    with caplog.at_level(logging.WARNING):
        model = digits_vit.load_or_train(checkpoint, TINY, show_progress=False)
    assert trained == [TINY]
    assert str(checkpoint) in caplog.text
    assert same_weights(model, digits_vit.train(TINY, show_progress=False))


def test_an_empty_file_is_overwritten(checkpoint: Path, trained: list[digits_vit.TrainingConfig]) -> None:
    checkpoint.write_bytes(b"")
    digits_vit.load_or_train(checkpoint, TINY, show_progress=False)
    assert trained == [TINY]
    assert checkpoint.stat().st_size


def test_the_learning_rate_rises_and_falls() -> None:
    factors = [warmup_cosine(step, 100, 0.1) for step in range(101)]
    assert factors[:10] == pytest.approx([0.1 * k for k in range(1, 11)])
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[55] == pytest.approx(0.5)
    assert factors[100] == pytest.approx(0.0)
    assert [warmup_cosine(step, 1, 0.1) for step in range(2)] == [1.0, 1.0]
