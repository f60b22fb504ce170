"""A segmentation set in COCO format made from a seed: textured shapes over photographs that come with scikit-image.

Image ``i`` of a split is the same whatever the number of images. Training and held-out images share no photograph,
neither as background nor as texture. ``examples/write_shapes.py`` writes such a set.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from demos.shape_outlines import OUTLINES, Outline
from qframework.errors import QFrameworkError
from qframework.files import atomic_write, write_json

Split = Literal["train", "held_out"]
PHOTOGRAPHS: Mapping[Split, tuple[str, ...]] = {
    "train": (
        "astronaut", "camera", "coffee", "rocket", "hubble_deep_field", "immunohistochemistry", "coins", "brick",
        "gravel",
    ),
    "held_out": ("chelsea", "clock", "moon", "grass"),
}  # fmt: skip
CATEGORIES = tuple(OUTLINES)
MIN_VISIBLE = 0.7  # of a shape's area
MIN_AREA = 0.004  # of the image's
MIN_CONTRAST = 32  # of the mean colour, in steps of 255, to what a shape covers
_TRIES = 30

Image = NDArray[np.uint8]
"""(H, W, 3)."""
Mask = NDArray[np.bool_]
"""(H, W)."""


@dataclass(frozen=True)
class Shape:
    """One object: its category (an index into CATEGORIES), what of it is seen, and where all of it would be."""

    category: int
    mask: Mask
    outline: Outline
    is_whole: bool

    def segmentation(self) -> list[list[float]] | dict[str, Any]:
        """As COCO keeps it: a polygon where one says everything, else the run lengths of the mask."""
        if self.is_whole and self.outline.hole is None:
            return [self.outline.outer.round(2).ravel().tolist()]
        return run_lengths(self.mask)

    @property
    def box(self) -> tuple[int, int, int, int]:
        """Left, top, right and bottom of the mask in pixels; right and bottom lie behind the last ones."""
        rows, columns = np.flatnonzero(self.mask.any(axis=1)), np.flatnonzero(self.mask.any(axis=0))
        return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


@dataclass(frozen=True)
class Scene:
    """A picture and its shapes."""

    image: Image
    shapes: tuple[Shape, ...]


def make_scene(index: int, split: Split = "held_out", *, size: int = 128, seed: int = 0) -> Scene:
    """Image ``index`` of a split: two to five shapes over a part of a photograph.

    Every shape stands out from what it covers, and is mostly visible.

    Raises:
        QFrameworkError: the split is unknown, or ``size`` is too small for shapes or too large for the photographs.
        ModuleNotFoundError: scikit-image or pycocotools is not installed (``pip install '.[segmentation]'``).
    """
    if split not in get_args(Split) or not 32 <= size <= 256:
        raise QFrameworkError(
            f"make_scene: split must be one of {', '.join(get_args(Split))} and size 32 to 256 pixels, got {split!r} "
            f"and {size}"
        )
    generator = np.random.default_rng([seed, get_args(Split).index(split), index])
    image = _part_of_a_photograph(generator, split, size)
    shapes: list[Shape] = []
    wanted = int(generator.integers(2, 6))
    for _ in range(_TRIES):
        if len(shapes) == wanted:
            break
        image, shapes = _with_another(image, shapes, generator, split)
    noise = generator.normal(0.0, 4.0, image.shape)
    return Scene(np.clip(np.rint(image + noise), 0, 255).astype(np.uint8), tuple(shapes))


def scenes(count: int, split: Split = "held_out", *, size: int = 128, seed: int = 0) -> Iterator[Scene]:
    """The first ``count`` images of a split; see make_scene."""
    return (make_scene(index, split, size=size, seed=seed) for index in range(count))


def _with_another(
    image: NDArray[np.float64], shapes: list[Shape], generator: np.random.Generator, split: Split
) -> tuple[NDArray[np.float64], list[Shape]]:
    """Add a shape on top, unless it would hide too much or not stand out."""
    size = len(image)
    category = int(generator.integers(len(CATEGORIES)))
    radius = generator.uniform(0.15, 0.32) * size
    center = generator.uniform(0.6 * radius, size - 0.6 * radius, 2)
    outline = OUTLINES[CATEGORIES[category]](generator).placed(center, radius, generator.uniform(0.0, 2 * np.pi))
    drawn = rasterize(outline, size)
    texture = _tinted(_part_of_a_photograph(generator, split, size), generator)
    if drawn.sum() < MIN_AREA * size * size or not _stands_out(texture, image, drawn):
        return image, shapes
    covered = [_covered(shape, drawn) for shape in shapes]
    if any(shape is None for shape in covered):
        return image, shapes
    below = [shape for shape in covered if shape is not None]
    # Masks end at the border of the picture. Polygons may exceed it, since pycocotools clips them.
    return np.where(drawn[..., None], texture, image), [*below, Shape(category, drawn, outline, True)]


def _covered(shape: Shape, above: Mask) -> Shape | None:
    """The visible part of a shape with another above it; None if too little remains."""
    if not (shape.mask & above).any():
        return shape
    mask = shape.mask & ~above
    whole = rasterize(shape.outline, len(mask)).sum()
    if mask.sum() < max(MIN_VISIBLE * whole, MIN_AREA * mask.size):
        return None
    return Shape(shape.category, mask, shape.outline, False)


def _stands_out(texture: NDArray[np.float64], image: NDArray[np.float64], mask: Mask) -> bool:
    return bool(np.abs(texture[mask].mean(axis=0) - image[mask].mean(axis=0)).max() >= MIN_CONTRAST)


def _tinted(texture: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.float64]:
    """Another colour and contrast, the same pattern."""
    contrast = generator.uniform(0.3, 0.9)
    colour = generator.uniform(30.0, 225.0, 3)
    return np.clip(colour + contrast * (texture - texture.mean(axis=(0, 1))), 0.0, 255.0)


def _part_of_a_photograph(generator: np.random.Generator, split: Split, size: int) -> NDArray[np.float64]:
    """``(size, size, 3)``: a random square of a random photograph, shrunk by a whole factor, mirrored or not."""
    names = PHOTOGRAPHS[split]
    name = names[int(generator.integers(len(names)))]
    largest = min(_photograph(name, 1).shape[:2]) // size
    photograph = _photograph(name, int(generator.integers(1, largest + 1)))
    top, left = (int(generator.integers(0, side - size + 1)) for side in photograph.shape[:2])
    square = photograph[top : top + size, left : left + size].astype(np.float64)
    return square[:, ::-1] if generator.integers(2) else square


@functools.cache
def _photograph(name: str, shrink: int) -> Image:
    """``(H // shrink, W // shrink, 3)``: means of squares of pixels, rounded."""
    import skimage.data

    pixels = np.asarray(getattr(skimage.data, name)())
    colours = np.repeat(pixels[..., None], 3, axis=2) if pixels.ndim == 2 else pixels
    height, width = (side // shrink for side in colours.shape[:2])
    squares = colours[: height * shrink, : width * shrink].reshape(height, shrink, width, shrink, 3)
    return np.rint(squares.mean(axis=(1, 3))).astype(np.uint8)


# COCO -----------------------------------------------------------------------------------------------------------------


def rasterize(outline: Outline, size: int) -> Mask:
    """The pixels inside an outline as pycocotools counts them, so that a picture and its polygons agree."""
    mask = _rasterize(outline.outer, size)
    return mask if outline.hole is None else mask & ~_rasterize(outline.hole, size)


def _rasterize(points: NDArray[np.float64], size: int) -> Mask:
    from pycocotools import mask as coco_mask

    # Rounded as Shape.segmentation rounds them.
    return coco_mask.decode(coco_mask.frPyObjects([points.round(2).ravel().tolist()], size, size))[..., 0].astype(bool)


def run_lengths(mask: Mask) -> dict[str, Any]:
    """COCO's uncompressed RLE: column by column, the lengths of runs of zeros and ones in turn, zeros first."""
    flat = mask.ravel(order="F")
    changes = np.flatnonzero(np.diff(flat)) + 1
    counts = np.diff(np.concatenate([[0], changes, [flat.size]])).tolist()
    return {"size": list(mask.shape), "counts": [0, *counts] if flat[0] else counts}


def write_coco(folder: str | Path, count: int, split: Split = "held_out", *, size: int = 128, seed: int = 0) -> Path:
    """Write ``count`` images as PNG and their annotations; returns the path of ``instances.json``.

    The same arguments give the same bytes. Files of the same names are replaced.

    Args:
        folder: made if need be; gets ``instances.json`` and the folder ``images``.
        count: of images.
        split: ``"train"`` or ``"held_out"``; they share no photograph.
        size: height and width in pixels, 32 to 256.
        seed: another one makes another set.

    Raises:
        QFrameworkError: see make_scene.
    """
    from PIL import Image as PillowImage

    folder = Path(folder)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for index, scene in enumerate(scenes(count, split, size=size, seed=seed)):
        name = f"{index:06d}.png"
        with atomic_write(folder / "images" / name) as file:
            PillowImage.fromarray(scene.image).save(file, format="PNG")
        images.append({"id": index + 1, "file_name": name, "height": size, "width": size})
        annotations += [_annotation(shape, index + 1) for shape in scene.shapes]
    for identifier, annotation in enumerate(annotations, start=1):
        annotation["id"] = identifier
    categories = [{"id": identifier, "name": name} for identifier, name in enumerate(CATEGORIES, start=1)]
    info = {"description": "Textured shapes over scikit-image's photographs", "split": split, "seed": seed}
    document = {"info": info, "images": images, "annotations": annotations, "categories": categories}
    path = folder / "instances.json"
    write_json(path, document, indent=None)
    return path


def _annotation(shape: Shape, image_id: int) -> dict[str, Any]:
    left, top, right, bottom = shape.box
    return {
        "image_id": image_id,
        "category_id": shape.category + 1,
        "segmentation": shape.segmentation(),
        "bbox": [left, top, right - left, bottom - top],
        "area": int(shape.mask.sum()),
        "iscrowd": 0,
    }
