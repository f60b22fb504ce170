"""Training tasks: seeded batches and held-out data (training_tasks.py, python_text.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from demos.python_text import even_windows, load_text, random_windows
from demos.training_tasks import DigitsTask, TextTask, _endless_order
from qframework.errors import QFrameworkError
from qframework.evaluation import digits, digits_vit


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Forty files, a number in each; some that do not count."""
    for index in range(40):
        path = tmp_path / f"part{index % 3}" / f"m{index:02}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"x = {index:02}\n" * 8)
    for name in ("tests/a.py", "site-packages/b.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("never")
    return tmp_path


def test_whole_files_are_held_out(sources: Path) -> None:
    text = load_text(str(sources))
    train, validation = (bytes(part.tolist()).decode().split() for part in (text.train, text.validation))
    assert len(set(train) - {"x", "="}) == 38
    assert len(set(validation) - {"x", "="}) == 2
    assert not set(train) & set(validation) - {"x", "="}
    assert "never" not in train + validation


def test_the_digest_covers_the_text(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    first = load_text(str(sources)).digest
    moved = sources.rename(tmp_path_factory.mktemp("moved") / "sources")
    assert load_text(str(moved)).digest == first
    (moved / "part1" / "m01.py").write_text("y")
    load_text.cache_clear()
    assert load_text(str(moved)).digest != first
    limited = load_text(str(moved), 200)
    assert len(limited.train) + len(limited.validation) < 200 * 20


def test_too_few_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(QFrameworkError, match="must hold at least 20 Python files"):
        load_text(str(tmp_path))


def test_the_standard_library_is_there() -> None:
    text = load_text(limit=2_000_000)
    assert len(text.train) > 1_000_000
    assert b"import" in bytes(text.validation.tolist())


def test_windows() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    windows = even_windows(text, 4, 10)
    assert windows[:, 0].tolist() == [0, 30, 60, 90]
    assert torch.equal(windows[-1], torch.arange(90, 100))
    drawn = random_windows(text, 500, 10, torch.Generator().manual_seed(0))
    assert (drawn.diff(dim=1) == 1).all()
    assert (drawn[:, 0].min(), drawn[:, 0].max()) == (0, 90)


@pytest.mark.parametrize("size", [3, 7, 10, 25])
def test_each_pass_uses_every_image_once(size: int) -> None:
    stream = torch.cat([_endless_order(10, 0, step * size, size) for step in range(14)])
    for start in range(0, len(stream) - 9, 10):
        assert sorted(stream[start : start + 10].tolist()) == list(range(10))
    assert not torch.equal(stream[:10], stream[10:20])


def test_a_text_batch_is_the_next_byte_and_comes_from_seed_and_step(sources: Path) -> None:
    task = TextTask(context=12, folder=str(sources))
    inputs, targets = task.batch(0, 3, 5)
    assert inputs.shape == targets.shape == (5, 12)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(task.batch(0, 3, 5)[0], inputs)
    assert not torch.equal(task.batch(0, 4, 5)[0], inputs)
    assert not torch.equal(task.batch(1, 3, 5)[0], inputs)


def test_validation_is_the_mean_over_all_windows(sources: Path) -> None:
    task = TextTask(width=16, depth=1, heads=2, context=8, windows=6, folder=str(sources))
    model = task.build(0).eval()
    windows = even_windows(task.text.validation, 6, 9)
    wanted = torch.nn.functional.cross_entropy(model(windows[:, :-1]).logits.flatten(0, 1), windows[:, 1:].flatten())
    assert task.evaluate(model, 0, torch.device("cpu"))["loss"] == pytest.approx(wanted.item(), rel=1e-5)
    assert len(task.settings["text"]) == 64


def test_digits_are_trained_on_the_training_images_alone() -> None:
    task = DigitsTask(digits_vit.TrainingConfig(embed_dim=24, depth=1))
    images, labels = task.batch(0, 0, 2000)
    assert images.shape == (2000, 1, 8, 8)
    data = digits.load_digits(0)
    assert torch.equal(labels.bincount() > 0, torch.ones(10, dtype=torch.bool))
    held_out = {image.numpy().tobytes() for image in data.held_out.tensors[0]}
    assert not held_out & {image.numpy().tobytes() for image in images}
    model = task.build(0).eval()
    with torch.no_grad():
        right = (model(data.held_out.tensors[0]).argmax(1) == data.held_out.tensors[1]).float().mean()
        assert task.evaluate(model, 0, torch.device("cpu"))["top1"] == pytest.approx(100 * right.item(), rel=1e-5)
