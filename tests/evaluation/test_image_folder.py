"""Folders of images: classes, damaged images and batches (image_folder.py, images.py, models.py)."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from PIL import Image

from qframework.errors import QFrameworkError
from qframework.evaluation.image_folder import FolderBatches, TensorBatches, class_index, folder_samples
from qframework.evaluation.images import DamagedImageError, read_image
from qframework.evaluation.models import images_for


def write_image(path: Path, value: int = 0, mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (6, 4), value if mode == "L" else (value, value, value)).save(path)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Classes a and b: images 0 to 2 and 3 to 4, told apart by their brightness."""
    for value in range(5):
        write_image(tmp_path / "data" / ("a" if value < 3 else "b") / f"{value}.png", value)
    return tmp_path / "data"


def brightness(image: Image.Image) -> torch.Tensor:
    return torch.tensor([float(image.convert("L").getpixel((0, 0)))])


def batches(root: Path, size: int = 2, workers: int = 0) -> FolderBatches:
    return FolderBatches(root, folder_samples(root), brightness, size, workers=workers)


# Batches


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_in_order(root: Path, workers: int) -> None:
    data = batches(root, workers=workers)
    assert len(data) == 3
    seen = [(images.flatten().tolist(), labels.tolist()) for images, labels in data]
    assert seen == [([0, 1], [0, 0]), ([2, 3], [0, 1]), ([4], [1])]


def test_selected_batches_equal_those_of_the_whole_folder(root: Path) -> None:
    chosen = [batch.images.flatten().tolist() for batch in batches(root).selected([2, 0])]
    assert chosen == [[4], [0, 1]]


def test_batches_of_tensors_are_the_same(root: Path) -> None:
    data = TensorBatches(torch.utils.data.TensorDataset(torch.arange(5), torch.arange(5) % 2), 2)
    assert [images.tolist() for images, _ in data] == [[0, 1], [2, 3], [4]]
    assert [batch.labels.tolist() for batch in data.selected([2, 1])] == [[0], [0, 1]]


def test_descriptions_follow_files_and_labels(root: Path) -> None:
    before = batches(root).describe()
    assert before["images"] == 5
    assert batches(root, size=3).describe() == before
    (root / "a" / "0.png").rename(root / "a" / "9.png")
    assert batches(root).describe()["sha256"] != before["sha256"]


# Damaged images


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:50])


DAMAGE = {
    "empty": (lambda path: path.write_bytes(b""), "the file is empty"),
    "a text": (lambda path: path.write_text("no image"), "cannot identify image file the file"),
    "cut off": (cut_off, ""),
    "a broken chunk": (lambda path: path.write_bytes(path.read_bytes()[:30] + b"\0" * 40), ""),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_images_are_skipped_and_reported(root: Path, damage, reason: str) -> None:
    damage(root / "a" / "1.png")
    data = batches(root)
    assert [images.flatten().tolist() for images, _ in data] == [[0], [2, 3], [4]]
    ((path, said),) = data.damaged
    assert path == "a/1.png"
    assert said.startswith(reason)
    assert said
    assert str(root) not in said


def test_a_batch_with_damaged_images_only_is_left_out(root: Path) -> None:
    for name in ("0.png", "1.png"):
        (root / "a" / name).write_bytes(b"")
    data = batches(root)
    assert [len(labels) for _, labels in data] == [2, 1]
    assert len(data.damaged) == 2
    assert [len(batch.labels) for batch in data.selected(range(3))] == [0, 2, 1]
    assert list(data)  # going through again counts anew
    assert len(data.damaged) == 2


def test_a_missing_file_is_an_error_not_a_damaged_image(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_image(tmp_path / "none.png")


def test_an_implausibly_large_image_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)  # twice as many are an error
    with pytest.raises(DamagedImageError, match="exceeds limit"):
        read_image(write_image(tmp_path / "large.png"))


def test_an_unreadable_file_is_an_error_not_a_damaged_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Image, "open", refuse)
    with pytest.raises(PermissionError):
        read_image(tmp_path / "secret.png")


# Classes


def test_one_folder_per_class_maps_to_the_classes_in_order(root: Path) -> None:
    assert class_index(root, 2) is None
    assert [label for _, label in folder_samples(root)] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("classes", [1, 3, 1000])
def test_another_number_of_classes_is_refused(root: Path, classes: int) -> None:
    with pytest.raises(QFrameworkError, match=f"must hold {classes} class folders, one for each class, got 2"):
        class_index(root, classes)


def test_folders_with_imagenet_identifiers_are_recognized(tmp_path: Path) -> None:
    for name in ("n01443537", "n15075141"):  # goldfish, toilet tissue: the second and the last class
        write_image(tmp_path / name / "0.png")
    index = class_index(tmp_path, 1000)
    assert [label for _, label in folder_samples(tmp_path, index)] == [1, 999]


def test_given_class_names_map_folders_to_classes(root: Path) -> None:
    index = class_index(root, 3, ["b", "c", "a"])
    assert [label for _, label in folder_samples(root, index)] == [2, 2, 2, 0, 0]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "b"], "class_names must hold a name for each of the 3 classes, got 2"),
        (["a", "c", "d"], "must name each class folder once, got none for the folders b"),
        (["a", "b", "b"], "must name each class folder once, got one twice"),
    ],
)
def test_names_that_do_not_fit_are_refused(root: Path, names: list[str], message: str) -> None:
    with pytest.raises(QFrameworkError, match=message):
        class_index(root, 3, names)


# images_for

DESCRIPTION = {
    "model": "a timm model",
    "data_config": {"input_size": (3, 4, 4), "interpolation": "nearest", "mean": (0, 0, 0), "std": (1, 1, 1)},
    "classes": 2,
}


def test_images_for_a_folder(root: Path) -> None:
    ((images, labels),) = images_for(DESCRIPTION, str(root), batch_size=8)
    assert images.shape == (5, 3, 4, 4)
    torch.testing.assert_close(images[:, 0, 0, 0] * 255, torch.arange(5.0))
    assert labels.tolist() == [0, 0, 0, 1, 1]


def test_images_for_a_model_of_grey_images(root: Path) -> None:
    grey = {"input_size": (1, 4, 4), "interpolation": "nearest", "mean": (0,), "std": (1,)}
    ((images, _),) = images_for({**DESCRIPTION, "data_config": grey}, str(root), batch_size=8)
    assert images.shape == (5, 1, 4, 4)


def test_a_limit_spreads_over_the_classes(root: Path) -> None:
    ((_, labels),) = images_for(DESCRIPTION, str(root), batch_size=8, limit=2)
    assert labels.tolist() == [0, 0]
    ((_, labels),) = images_for(DESCRIPTION, str(root), batch_size=8, limit=4)
    assert labels.tolist() == [0, 0, 0, 1]
    with pytest.raises(QFrameworkError, match="limit must be None or a positive number of images, got 0"):
        images_for(DESCRIPTION, str(root), batch_size=8, limit=0)


def test_calibration_images_have_a_fixed_order_and_any_classes(root: Path) -> None:
    def order() -> list[float]:
        ((images, _),) = images_for({**DESCRIPTION, "classes": 1000}, str(root), batch_size=8, calibration=True)
        return (255 * images[:, 0, 0, 0]).round().tolist()

    assert sorted(order()) == [0, 1, 2, 3, 4]
    assert order() == order() != [0, 1, 2, 3, 4]


def test_a_class_count_mismatch_is_refused(root: Path) -> None:
    with pytest.raises(QFrameworkError, match="must hold 10 class folders, one for each class, got 2"):
        images_for({**DESCRIPTION, "classes": 10}, str(root), batch_size=8)


def test_descriptions_of_older_files_lack_the_number_of_classes(root: Path) -> None:
    older = {key: value for key, value in DESCRIPTION.items() if key != "classes"}
    assert len(images_for(older, str(root), batch_size=8)) == 1
