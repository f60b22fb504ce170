"""Tasks that a comparison measures: a float module, calibration data, and batches to count on.

There are two: image classification (top-1, top-5) and segmentation with box prompts (mean IoU).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from qframework.errors import QFrameworkError
from qframework.evaluation import coco
from qframework.evaluation.accuracy import label_ranks
from qframework.evaluation.checkpoint import state_digest
from qframework.evaluation.coco import AnnotatedImage
from qframework.evaluation.image_folder import LabelledBatch
from qframework.evaluation.images import DamagedImage, DamagedImageError, read_image
from qframework.evaluation.miou import count_iou, mean_iou
from qframework.evaluation.models import Classifier, LabelledBatches
from qframework.evaluation.sam import Picture, Sam, prepare_picture

Module = Callable[[Tensor], Tensor]


class TaskBatch(Protocol):
    """A batch of a task, and the ``damaged`` images left out of it."""

    @property
    def damaged(self) -> Sequence[DamagedImage]: ...


class Task(Protocol):
    """A module and its data, to be measured under several configurations.

    Attributes:
        module: the float module that is quantized, in eval mode.
        counted: the names of the counts.
    """

    @property
    def module(self) -> nn.Module: ...

    @property
    def counted(self) -> Sequence[str]: ...

    def __len__(self) -> int:
        """Batches to evaluate on."""

    def example(self) -> Tensor:
        """One batch of at least two inputs of the module, float32, on the CPU, to export and time it with."""

    def calibration(self) -> Iterable[Tensor] | None:
        """Batches of inputs that can be iterated over repeatedly; None if there is no calibration data."""

    def batches(self, indices: Sequence[int]) -> Iterator[Any]:
        """The batches of these indices in this order, each a ``TaskBatch``."""

    def count(self, module: Module, batch: Any, device: torch.device, dtype: torch.dtype) -> Mapping[str, int]:
        """Run ``module`` in place of the float one on a batch; returns all of ``counted``."""

    def figures(self, counts: Mapping[str, int]) -> dict[str, float]:
        """The figures of the summed counts, the most important first. Raises QFrameworkError if nothing was counted."""

    def describe(self) -> dict[str, Any]:
        """Everything the figures depend on, JSON-able."""


class Classification:
    """Images and labels: top-1 and top-5 in percent.

    Args:
        classifier: the model and its name.
        data: the batches to count on.
        calibration: batches to calibrate with, or None.

    Raises:
        QFrameworkError: ``data`` is empty.
    """

    counted = ("images", "top1", "top5", "nan")

    def __init__(
        self, classifier: Classifier, data: LabelledBatches, calibration: LabelledBatches | None = None
    ) -> None:
        if not len(data):
            raise QFrameworkError(
                f"Classification: data for model {classifier.name!r} must hold at least one image, got none"
            )
        self.module = classifier.model
        self._name, self._data, self._calibration = classifier.name, data, calibration

    def __len__(self) -> int:
        return len(self._data)

    def example(self) -> Tensor:
        """The first batch that holds an image."""
        return first_batch(images for images, _ in self._data)

    def calibration(self) -> Iterable[Tensor] | None:
        """The images without their labels."""
        return None if self._calibration is None else Mapped(self._calibration, lambda pair: pair[0])

    def batches(self, indices: Sequence[int]) -> Iterator[LabelledBatch]:
        """Images and labels."""
        return self._data.selected(indices)

    def count(self, module: Module, batch: LabelledBatch, device: torch.device, dtype: torch.dtype) -> dict[str, int]:
        """Images, labels ranked first and among the first five, and images with NaN in their logits."""
        if not len(batch.labels):
            return dict.fromkeys(self.counted, 0)
        logits = module(batch.images.to(device, dtype))
        ranks = label_ranks(logits, batch.labels.to(device))
        hits = {"top1": int((ranks < 1).sum()), "top5": int((ranks < 5).sum())}
        return {"images": len(ranks), **hits, "nan": int(logits.isnan().any(dim=1).sum())}

    def figures(self, counts: Mapping[str, int]) -> dict[str, float]:
        """``top1`` and ``top5`` in percent of the undamaged images."""
        if not counts["images"]:
            raise QFrameworkError("Classification: at least one image must be readable, got damaged ones only")
        return {name: 100.0 * counts[name] / counts["images"] for name in ("top1", "top5")}

    def describe(self) -> dict[str, Any]:
        """Model, weights, data and calibration data."""
        calibration = None if self._calibration is None else self._calibration.describe()
        model = {"model": self._name, "weights_sha256": weights_digest(self.module)}
        return {"task": "classification", **model, "data": self._data.describe(), "calibration": calibration}


class PromptedBatch(NamedTuple):
    """Pictures with their annotations."""

    pictures: tuple[Picture, ...]
    images: tuple[AnnotatedImage, ...]
    damaged: tuple[DamagedImage, ...] = ()

    @property
    def pixel_values(self) -> Tensor:
        """``(B, 3, S, S)`` float32."""
        return torch.stack([picture.pixel_values for picture in self.pictures])


class BoxSegmentation:
    """COCO instances prompted by their boxes: mean IoU of the masks in percent. The image encoder is quantized.

    Args:
        sam: the model.
        root: the folder of the images.
        images: their annotations, from ``read_instances``.
        calibration: the same for calibration images, or None.
        calibration_root: the folder of the calibration images; default: ``root``.
        batch_size: images in a batch.
        workers: processes that read images; 0 reads them in this process.

    Raises:
        QFrameworkError: none of the image files exists.
    """

    counted = ("images", "masks", "iou_units", "intersection", "union", "masks_without_pixels")

    def __init__(
        self,
        sam: Sam,
        root: Path,
        images: Sequence[AnnotatedImage],
        calibration: Sequence[AnnotatedImage] | None = None,
        *,
        calibration_root: Path | None = None,
        batch_size: int = 4,
        workers: int = 0,
    ) -> None:
        self.module = sam.encoder
        self._sam = sam
        self._data = _Pictures(sam, root, images, batch_size, workers)
        self._calibration = None
        if calibration is not None:
            self._calibration = _Pictures(sam, calibration_root or root, calibration, batch_size, workers)

    def __len__(self) -> int:
        return len(self._data)

    def example(self) -> Tensor:
        """The first batch that holds a picture."""
        return first_batch(self._data)

    def calibration(self) -> Iterable[Tensor] | None:
        """Inputs of the encoder."""
        return self._calibration

    def batches(self, indices: Sequence[int]) -> Iterator[PromptedBatch]:
        """Pictures and annotations."""
        return self._data.selected(indices)

    def count(self, module: Module, batch: PromptedBatch, device: torch.device, dtype: torch.dtype) -> dict[str, int]:
        """Masks, IoUs and pixels; objects with an empty mask are left out and counted apart."""
        counts = dict.fromkeys(self.counted, 0)
        if not batch.pictures:
            return counts
        embeddings = module(batch.pixel_values.to(device, dtype))
        self._sam.decoder.to(device)
        for embedding, picture, image in zip(embeddings, batch.pictures, batch.images, strict=True):
            for name, value in self._count_image(embedding, picture, image).items():
                counts[name] += value
        return counts

    def _count_image(self, embedding: Tensor, picture: Picture, image: AnnotatedImage) -> dict[str, int]:
        expected = image.masks()
        seen = expected.flatten(1).any(dim=1)
        counts = {"images": 1, "masks_without_pixels": int((~seen).sum())}
        if bool(seen.any()):
            counts |= count_iou(self._sam.masks(embedding, image.boxes[seen], picture), expected[seen])
        return counts

    def figures(self, counts: Mapping[str, int]) -> dict[str, float]:
        """``miou`` and ``pixel_iou``; see ``mean_iou``."""
        return mean_iou(counts)

    def describe(self) -> dict[str, Any]:
        """Model, weights of encoder and decoder, and annotations."""
        weights = {"encoder": weights_digest(self.module), "decoder": weights_digest(self._sam.decoder)}
        calibration = None if self._calibration is None else coco.describe(self._calibration.images)
        data = {"data": coco.describe(self._data.images), "calibration": calibration}
        return {"task": "segmentation", "model": self._sam.name, "weights_sha256": weights, **data}


class _Pictures(Dataset):
    """Annotated images, read and prepared for the encoder; iterating yields the encoder's inputs alone."""

    def __init__(self, sam: Sam, root: Path, images: Sequence[AnnotatedImage], batch_size: int, workers: int) -> None:
        self.images = images
        # Only the processor of the model, since the processes that read images get a copy of it.
        self._processor, self._root, self._batch_size, self._workers = sam.processor, root, batch_size, workers
        if not any((root / image.file_name).is_file() for image in images):
            raise QFrameworkError(
                f"BoxSegmentation: root must hold annotated images, got {str(root)!r} with none of the {len(images)}"
            )

    def __len__(self) -> int:
        return -(-len(self.images) // self._batch_size)

    def __iter__(self) -> Iterator[Tensor]:
        return (batch.pixel_values for batch in self.selected(range(len(self))) if batch.pictures)

    def __getitem__(self, index: int) -> tuple[Picture, AnnotatedImage] | DamagedImage:
        image = self.images[index]
        try:
            pixels = read_image(self._root / image.file_name)
        except DamagedImageError as error:
            return DamagedImage(image.file_name, str(error))
        except FileNotFoundError:
            return DamagedImage(image.file_name, "the file does not exist")
        if (pixels.height, pixels.width) != (image.height, image.width):
            sizes = (
                f"must have {image.height} x {image.width} pixels as annotated, got {pixels.height} x {pixels.width}"
            )
            return DamagedImage(image.file_name, sizes)
        return prepare_picture(self._processor, pixels), image

    def selected(self, indices: Sequence[int]) -> Iterator[PromptedBatch]:
        size = self._batch_size
        sampler = [list(range(len(self.images)))[index * size : (index + 1) * size] for index in indices]
        return iter(DataLoader(self, batch_sampler=sampler, num_workers=self._workers, collate_fn=_collate))


def _collate(items: list[tuple[Picture, AnnotatedImage] | DamagedImage]) -> PromptedBatch:
    whole = [item for item in items if not isinstance(item, DamagedImage)]
    damaged = tuple(item for item in items if isinstance(item, DamagedImage))
    return PromptedBatch(tuple(picture for picture, _ in whole), tuple(image for _, image in whole), damaged)


class Mapped:
    """``function`` of each batch; can be iterated over repeatedly."""

    def __init__(self, batches: Iterable[Any], function: Callable[[Any], Tensor]) -> None:
        self._batches, self._function = batches, function

    def __iter__(self) -> Iterator[Tensor]:
        return map(self._function, self._batches)


def first_batch(batches: Iterable[Tensor]) -> Tensor:
    """The first batch. A single image is repeated, since ``torch.export`` makes a batch of 1 a constant.

    Raises:
        QFrameworkError: there is no batch.
    """
    for images in batches:
        return images if len(images) > 1 else images.repeat(2, *(1 for _ in images.shape[1:]))
    raise QFrameworkError("the data must hold an image that can be read, got none")


def weights_digest(module: nn.Module) -> str:
    """SHA-256 of a module's parameters, buffers and their names."""
    return state_digest(module.state_dict())
