"""Batches of a folder with one folder of images per class; damaged images are skipped and reported."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from qframework.errors import QFrameworkError
from qframework.evaluation.images import DamagedImage, DamagedImageError, read_image

Sample = tuple[Path, int]


class LabelledBatch(NamedTuple):
    """Images ``(B, C, H, W)`` with labels ``(B,)`` int64, and the damaged images left out of the batch."""

    images: Tensor
    labels: Tensor
    damaged: tuple[DamagedImage, ...] = ()


class FolderBatches:
    """Batches of ``(images, labels)`` of a folder; can be iterated over repeatedly.

    ``damaged`` lists the images that the last pass skipped. A batch with damaged images only is left out.
    """

    def __init__(
        self,
        root: Path,
        samples: Sequence[Sample],
        transform: Callable[[Any], Tensor],
        batch_size: int,
        *,
        grey: bool = False,
        workers: int = 0,
    ) -> None:
        self._root = root
        self._samples = samples
        self._files = _Files(root, samples, transform, grey)
        self._workers = workers
        self._batches = [list(indices) for indices in _split(range(len(samples)), batch_size)]
        self.damaged: list[DamagedImage] = []

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.damaged = []
        for batch in self.selected(range(len(self))):
            self.damaged += batch.damaged
            if len(batch.labels):
                yield batch.images, batch.labels

    def selected(self, indices: Sequence[int]) -> Iterator[LabelledBatch]:
        """The batches of these indices, in this order; a batch with damaged images only is empty."""
        sampler = [self._batches[index] for index in indices]
        return iter(DataLoader(self._files, batch_sampler=sampler, num_workers=self._workers, collate_fn=_collate))

    def describe(self) -> dict[str, Any]:
        """The number of images, and the SHA-256 of their names, sizes and labels in order."""
        digest = hashlib.sha256()
        for path, label in self._samples:
            digest.update(f"{path.relative_to(self._root).as_posix()} {path.stat().st_size} {label}\n".encode())
        return {"images": len(self._samples), "sha256": digest.hexdigest()}


class TensorBatches:
    """The same for images in memory."""

    def __init__(self, data: TensorDataset, batch_size: int) -> None:
        self._images, self._labels = data.tensors
        self._batches = [slice(indices.start, indices.stop) for indices in _split(range(len(data)), batch_size)]
        self.damaged: list[DamagedImage] = []

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.selected(range(len(self))):
            yield batch.images, batch.labels

    def selected(self, indices: Sequence[int]) -> Iterator[LabelledBatch]:
        """The batches of these indices, in this order."""
        for chosen in (self._batches[index] for index in indices):
            yield LabelledBatch(self._images[chosen], self._labels[chosen])

    def describe(self) -> dict[str, Any]:
        """The number of images, and the SHA-256 of images and labels."""
        digest = hashlib.sha256(self._images.numpy().tobytes())
        digest.update(self._labels.numpy().tobytes())
        return {"images": len(self._labels), "sha256": digest.hexdigest()}


class _Files(Dataset):
    """``(image, label)``, or a DamagedImage."""

    def __init__(self, root: Path, samples: Sequence[Sample], transform: Callable[[Any], Tensor], grey: bool) -> None:
        self._root, self._samples, self._transform, self._grey = root, samples, transform, grey

    def __getitem__(self, index: int) -> tuple[Tensor, int] | DamagedImage:
        path, label = self._samples[index]
        try:
            image = read_image(path, "L" if self._grey else "RGB")
        except DamagedImageError as error:
            return DamagedImage(path.relative_to(self._root).as_posix(), str(error))
        return self._transform(image), label

    def __len__(self) -> int:
        return len(self._samples)


def _collate(items: list[tuple[Tensor, int] | DamagedImage]) -> LabelledBatch:
    damaged = tuple(item for item in items if isinstance(item, DamagedImage))
    whole = [item for item in items if not isinstance(item, DamagedImage)]
    images = torch.stack([image for image, _ in whole]) if whole else torch.empty(0)
    return LabelledBatch(images, torch.tensor([label for _, label in whole], dtype=torch.int64), damaged)


def _split(everything: range, size: int) -> list[range]:
    return [everything[start : start + size] for start in range(0, len(everything), size)]


def folder_samples(root: Path, class_index: Mapping[str, int] | None = None) -> list[Sample]:
    """The images of a folder of class folders with their labels, sorted by class folder and path.

    Args:
        root: the folder. Files with an image extension count, at any depth.
        class_index: the label of each class folder; None numbers them in alphabetical order.

    Raises:
        QFrameworkError: the folder does not exist, has no class folder, or one without images.
    """
    from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

    if not root.is_dir():
        raise QFrameworkError(f"data must be 'digits' or a folder of class folders, got {str(root)!r}")
    try:
        own_index = find_classes(str(root))[1]
        found = make_dataset(str(root), own_index, extensions=IMG_EXTENSIONS)
    except FileNotFoundError as error:  # no class folder, or one without an image
        raise QFrameworkError(f"data must hold one folder of images per class, got {str(root)!r}: {error}") from error
    names = {label: name for name, label in own_index.items()}
    labels = own_index if class_index is None else class_index
    return [(Path(path), labels[names[label]]) for path, label in found]


def check_class_folders(root: Path) -> None:
    """Raise QFrameworkError unless each class folder holds an image; stops at the first image of each.

    Args:
        root: a folder of class folders.
    """
    from torchvision.datasets.folder import IMG_EXTENSIONS

    def holds_image(folder: Path) -> bool:
        found = (name for _, _, names in os.walk(folder, followlinks=True) for name in names)
        return any(name.lower().endswith(IMG_EXTENSIONS) for name in found)

    folders = sorted(entry for entry in root.iterdir() if entry.is_dir())
    empty = [folder.name for folder in folders if not holds_image(folder)]
    if empty or not folders:
        what = f"no image in {', '.join(empty[:5])}" if empty else "no class folder"
        raise QFrameworkError(f"data must hold one folder of images per class, got {str(root)!r}: {what}")


def class_index(root: Path, classes: int | None, class_names: Sequence[str] | None = None) -> dict[str, int] | None:
    """The model's class of each class folder, or None where the alphabetical order of the folders gives it.

    Args:
        root: a folder of class folders.
        classes: number of classes of the model; None if unknown.
        class_names: the folders' names in the order of the model's classes. Without it, folders named after ImageNet's
            WordNet identifiers (``n01440764``) are recognized, so a subset of ImageNet works.

    Raises:
        QFrameworkError: the folders do not match the model's classes.
    """
    folders = sorted(entry.name for entry in root.iterdir() if entry.is_dir()) if root.is_dir() else []
    if class_names is None and classes is not None and folders:
        class_names = _imagenet_names(classes, folders)
    if class_names is not None:
        return _named_index(root, folders, class_names, classes)
    if classes is not None and folders and len(folders) != classes:
        raise QFrameworkError(
            f"data {str(root)!r} must hold {classes} class folders, one for each class, got {len(folders)}. "
            "Name the folders after ImageNet's identifiers (n01440764), or list the model's class folders"
        )
    return None


def _imagenet_names(classes: int, folders: Sequence[str]) -> list[str] | None:
    """The ImageNet identifiers of a model with this many classes, in order, if all folders are among them."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset({"num_classes": classes})
    names = [] if subset is None else ImageNetInfo(subset).label_names()
    return names if names and set(folders) <= set(names) else None


def _named_index(root: Path, folders: Sequence[str], names: Sequence[str], classes: int | None) -> dict[str, int]:
    if classes is not None and len(names) != classes:
        raise QFrameworkError(f"class_names must hold a name for each of the {classes} classes, got {len(names)}")
    index = {name: place for place, name in enumerate(names)}
    unknown = [folder for folder in folders if folder not in index]
    if unknown or len(index) != len(names):
        wrong = f"none for the folders {', '.join(unknown[:5])}" if unknown else "one twice"
        raise QFrameworkError(f"data {str(root)!r}: class_names must name each class folder once, got {wrong}")
    return index
