"""COCO instance annotations: images with boxes and masks, checked where they are read."""

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
    """One object: its annotation's id, its box (left, top, right, bottom, in pixels) and its mask as COCO keeps it."""

    id: int
    box: tuple[float, float, float, float]
    segmentation: list[list[float]] | dict[str, Any]


@dataclass(frozen=True)
class AnnotatedImage:
    """One image file, relative to the folder of images, its size in pixels, and the objects on it."""

    file_name: str
    height: int
    width: int
    instances: tuple[Instance, ...]

    @property
    def boxes(self) -> Tensor:
        """``(K, 4)`` float32: left, top, right, bottom."""
        return torch.tensor([instance.box for instance in self.instances], dtype=torch.float32)

    def masks(self) -> Tensor:
        """``(K, height, width)`` bool; one of an object smaller than a pixel may hold none.

        Raises:
            FileFormatError: a segmentation that pycocotools cannot decode, or of another size.
        """
        return torch.stack([self._mask(instance) for instance in self.instances])

    def _mask(self, instance: Instance) -> Tensor:
        from pycocotools import mask as coco_mask

        name = f"annotation {instance.id} of {self.file_name}"
        try:
            mask = coco_mask.decode(_run_lengths(instance.segmentation, self.height, self.width))
        except Exception as error:  # what pycocotools raises is not written down: plain Exception among it
            raise FileFormatError(f"{name}: its segmentation cannot be decoded: {error}") from error
        if mask.shape != (self.height, self.width):
            raise FileFormatError(f"{name}: its mask has size {mask.shape}; accepted: {(self.height, self.width)}")
        return torch.from_numpy(mask).bool()


def _run_lengths(segmentation: Any, height: int, width: int) -> Any:
    """Any of COCO's three forms as one compressed run-length encoding: polygons, run lengths as numbers, or as text."""
    from pycocotools import mask as coco_mask

    if isinstance(segmentation, list):
        return coco_mask.merge(coco_mask.frPyObjects(segmentation, height, width))
    if isinstance(segmentation["counts"], list):
        return coco_mask.frPyObjects(segmentation, *segmentation["size"])
    return segmentation


def read_instances(annotations: Path, limit: int | None = None) -> list[AnnotatedImage]:
    """The images of a COCO instances file that have objects, by their ids; crowds, which are no objects, left out.

    Args:
        annotations: the JSON file.
        limit: only so many images, spread evenly over all.

    Raises:
        FileFormatError: the file is no such file, contradicts itself or has an object without box or mask.
        FileNotFoundError: it is not there.
        QFrameworkError: no image has an object, or ``limit`` is not positive.
    """
    if limit is not None and not is_count(limit):
        raise QFrameworkError(f"limit={limit}; accepted: None or a positive number of images")
    images, objects = _read(annotations)
    by_image: dict[int, list[Instance]] = defaultdict(list)
    for annotation in objects:
        if annotation.get("image_id") not in images:
            raise FileFormatError(
                f"{annotations}: annotation {annotation.get('id')} is of image {annotation.get('image_id')}, which is "
                f"out of range: the file lists {len(images)} images and not this one"
            )
        if not annotation.get("iscrowd"):
            by_image[annotation["image_id"]].append(_instance(annotation, annotations))
    found = [_annotated(images[image], by_image[image], annotations) for image in sorted(by_image)]
    if not found:
        raise QFrameworkError(f"{annotations}: none of its {len(images)} images has an object that is no crowd")
    count = min(len(found), limit or len(found))
    return [found[place * len(found) // count] for place in range(count)]


def _read(annotations: Path) -> tuple[dict[int, Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
    try:
        document = json.loads(annotations.read_text())
        images, objects = document["images"], document["annotations"]
        return {image["id"]: image for image in images}, [dict(annotation) for annotation in objects]
    except (ValueError, KeyError, TypeError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise FileFormatError(
            f"{annotations} is no file of COCO instances ({type(error).__name__}: {error}); accepted: JSON with "
            "'images' and 'annotations'"
        ) from error


def _instance(annotation: Mapping[str, Any], path: Path) -> Instance:
    box, segmentation = annotation.get("bbox"), annotation.get("segmentation")
    name = f"{path}: annotation {annotation.get('id')}"
    if not (isinstance(box, list) and len(box) == 4 and all(_is_finite(side) for side in box) and min(box[2:]) > 0):
        raise FileFormatError(f"{name} has bbox {box}; accepted: x, y, width and height, the last two positive")
    if not _is_segmentation(segmentation):
        raise FileFormatError(
            f"{name} has a segmentation {str(segmentation)[:60]}; accepted: polygons of at least three points, or run "
            "lengths with 'counts' and 'size'"
        )
    x, y, width, height = box
    return Instance(annotation.get("id", -1), (x, y, x + width, y + height), segmentation)  # type: ignore[arg-type]


def _is_finite(value: Any) -> bool:
    return is_number(value) and math.isfinite(value)


def _is_segmentation(value: Any) -> bool:
    """Polygons of four numbers are refused: pycocotools would take them for boxes."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(p, list) and len(p) >= 6 and len(p) % 2 == 0 for p in value)
    return isinstance(value, dict) and {"counts", "size"} <= value.keys()


def _annotated(image: Mapping[str, Any], instances: Iterable[Instance], path: Path) -> AnnotatedImage:
    try:
        return AnnotatedImage(image["file_name"], int(image["height"]), int(image["width"]), tuple(instances))
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError(
            f"{path}: image {image.get('id')} lacks a proper file_name, height or width ({error})"
        ) from error


def describe(images: Sequence[AnnotatedImage]) -> dict[str, Any]:
    """How many images and masks, and the SHA-256 of all of their annotations in the order they are used."""
    digest = hashlib.sha256()
    for image in images:
        fields = [image.file_name, image.height, image.width, [list(instance) for instance in image.instances]]
        digest.update(json.dumps(fields, sort_keys=True).encode())
    masks = sum(len(image.instances) for image in images)
    return {"images": len(images), "masks": masks, "sha256": digest.hexdigest()}
