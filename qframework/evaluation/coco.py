"""COCO instance annotations: reads and checks images, boxes and masks."""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qframework.arguments import is_count, is_number
from qframework.errors import FileFormatError, QFrameworkError


class Instance(NamedTuple):
    """One object: annotation id, box (left, top, right, bottom, in pixels), and mask in COCO's format."""

    id: int
    box: tuple[float, float, float, float]
    segmentation: list[list[float]] | dict[str, Any]


@dataclass(frozen=True)
class AnnotatedImage:
    """An image file, relative to the image folder, its size in pixels, and its objects."""

    file_name: str
    height: int
    width: int
    instances: tuple[Instance, ...]

    @property
    def boxes(self) -> Tensor:
        """``(K, 4)`` float32: left, top, right, bottom."""
        return torch.tensor([instance.box for instance in self.instances], dtype=torch.float32)

    def masks(self) -> Tensor:
        """``(K, height, width)`` bool; the mask of an object smaller than a pixel may be empty.

        Raises:
            FileFormatError: a segmentation cannot be decoded or has another size than the image.
        """
        return torch.stack([self._mask(instance) for instance in self.instances])

    def _mask(self, instance: Instance) -> Tensor:
        from pycocotools import mask as coco_mask

        name = f"annotation {instance.id} of {self.file_name}"
        try:
            mask = coco_mask.decode(_run_lengths(instance.segmentation, self.height, self.width))
        except Exception as error:  # pycocotools does not document what it raises, plain Exception included
            raise FileFormatError(f"{name}: segmentation cannot be decoded: {error}") from error
        if mask.shape != (self.height, self.width):
            raise FileFormatError(f"{name}: mask must have shape {(self.height, self.width)}, got {mask.shape}")
        return torch.from_numpy(mask).bool()


def _run_lengths(segmentation: Any, height: int, width: int) -> Any:
    """COCO's polygons, run lengths as numbers, or run lengths as text, converted to one compressed encoding."""
    from pycocotools import mask as coco_mask

    if isinstance(segmentation, list):
        return coco_mask.merge(coco_mask.frPyObjects(segmentation, height, width))
    if isinstance(segmentation["counts"], list):
        return coco_mask.frPyObjects(segmentation, *segmentation["size"])
    return segmentation


def read_instances(annotations: Path, limit: int | None = None) -> list[AnnotatedImage]:
    """The images with objects in a COCO instances file, sorted by id; crowd annotations are left out.

    Args:
        annotations: the JSON file.
        limit: maximum number of images, spread evenly over all.

    Raises:
        FileFormatError: the file is not in COCO's format, contradicts itself or has an object without box or mask.
        FileNotFoundError: the file does not exist.
        QFrameworkError: no image has an object, or ``limit`` is not positive.
    """
    if limit is not None and not is_count(limit):
        raise QFrameworkError(f"read_instances: limit must be None or a positive number of images, got {limit}")
    images, objects = _read(annotations)
    by_image: dict[int, list[Instance]] = defaultdict(list)
    for annotation in objects:
        if annotation.get("image_id") not in images:
            raise FileFormatError(
                f"{annotations}: annotation {annotation.get('id')} must refer to one of the {len(images)} images in "
                f"the file, got image_id {annotation.get('image_id')}"
            )
        if not annotation.get("iscrowd"):
            by_image[annotation["image_id"]].append(_instance(annotation, annotations))
    found = [_annotated(images[image], by_image[image], annotations) for image in sorted(by_image)]
    if not found:
        raise QFrameworkError(
            f"{annotations}: at least one image must have an object other than a crowd, got none of {len(images)}"
        )
    count = min(len(found), limit or len(found))
    return [found[place * len(found) // count] for place in range(count)]


def _read(annotations: Path) -> tuple[dict[int, Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
    try:
        document = json.loads(annotations.read_text())
        images, objects = document["images"], document["annotations"]
        return {image["id"]: image for image in images}, [dict(annotation) for annotation in objects]
    except (ValueError, KeyError, TypeError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise FileFormatError(
            f"{annotations} must be COCO instances, JSON with 'images' and 'annotations', got {type(error).__name__}: "
            f"{error}"
        ) from error


def _instance(annotation: Mapping[str, Any], path: Path) -> Instance:
    box, segmentation = annotation.get("bbox"), annotation.get("segmentation")
    name = f"{path}: annotation {annotation.get('id')}"
    if not (isinstance(box, list) and len(box) == 4 and all(_is_finite(side) for side in box) and min(box[2:]) > 0):
        raise FileFormatError(f"{name}: bbox must be x, y, width and height, the last two positive, got {box}")
    if not _is_segmentation(segmentation):
        raise FileFormatError(
            f"{name}: segmentation must be polygons of at least three points, or run lengths with 'counts' and 'size', "
            f"got {str(segmentation)[:60]}"
        )
    x, y, width, height = box
    return Instance(annotation.get("id", -1), (x, y, x + width, y + height), segmentation)  # type: ignore[arg-type]


def _is_finite(value: Any) -> bool:
    return is_number(value) and math.isfinite(value)


def _is_segmentation(value: Any) -> bool:
    """Polygons of four numbers are refused, since pycocotools would read them as boxes."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(p, list) and len(p) >= 6 and len(p) % 2 == 0 for p in value)
    return isinstance(value, dict) and {"counts", "size"} <= value.keys()


def _annotated(image: Mapping[str, Any], instances: Iterable[Instance], path: Path) -> AnnotatedImage:
    try:
        return AnnotatedImage(image["file_name"], int(image["height"]), int(image["width"]), tuple(instances))
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError(
            f"{path}: image {image.get('id')} must have a file_name, a height and a width ({error})"
        ) from error


def describe(images: Sequence[AnnotatedImage]) -> dict[str, Any]:
    """The number of images and masks, and the SHA-256 of all their annotations in order."""
    digest = hashlib.sha256()
    for image in images:
        fields = [image.file_name, image.height, image.width, [list(instance) for instance in image.instances]]
        digest.update(json.dumps(fields, sort_keys=True).encode())
    masks = sum(len(image.instances) for image in images)
    return {"images": len(images), "masks": masks, "sha256": digest.hexdigest()}
