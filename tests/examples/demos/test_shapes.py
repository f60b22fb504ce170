"""The segmentation set: seeded images, annotations, and pycocotools."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import write_shapes
from PIL import Image
from pycocotools.coco import COCO

from demos import shapes
from demos.shape_outlines import OUTLINES, Outline
from qframework.errors import QFrameworkError

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # pycocotools 2.0.11 with NumPy 2

SIZE = 64
COUNT = 12


@pytest.fixture(scope="module")
def scenes() -> list[shapes.Scene]:
    return list(shapes.scenes(COUNT, size=SIZE))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes")
    shapes.write_coco(folder, COUNT, size=SIZE)
    return folder


@pytest.fixture(scope="module")
def coco(folder: Path) -> COCO:
    return COCO(folder / "instances.json")


def digest(folder: Path) -> str:
    """Of all files, with their names."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()


def test_the_seed_decides_every_byte(folder: Path, tmp_path: Path) -> None:
    shapes.write_coco(tmp_path / "again", COUNT, size=SIZE)
    shapes.write_coco(tmp_path / "other", COUNT, size=SIZE, seed=1)
    assert digest(folder) == digest(tmp_path / "again") != digest(tmp_path / "other")


def test_an_image_does_not_depend_on_how_many_there_are(scenes: list[shapes.Scene]) -> None:
    assert np.array_equal(shapes.make_scene(5, size=SIZE).image, scenes[5].image)


def test_the_splits_share_no_photograph() -> None:
    assert not set(shapes.PHOTOGRAPHS["train"]) & set(shapes.PHOTOGRAPHS["held_out"])
    train = shapes.make_scene(0, "train", size=SIZE).image
    assert not np.array_equal(train, shapes.make_scene(0, size=SIZE).image)


def test_pycocotools_reads_the_masks_as_drawn(coco: COCO, scenes: list[shapes.Scene]) -> None:
    kinds = set()
    for image_id, scene in enumerate(scenes, start=1):
        annotations = coco.loadAnns(coco.getAnnIds(imgIds=image_id))
        assert len(annotations) == len(scene.shapes)
        for annotation, shape in zip(annotations, scene.shapes, strict=True):
            assert np.array_equal(coco.annToMask(annotation).astype(bool), shape.mask)
            assert annotation["area"] == shape.mask.sum()
            assert coco.loadCats(annotation["category_id"])[0]["name"] == shapes.CATEGORIES[shape.category]
            kinds.add(type(annotation["segmentation"]))
    assert kinds == {list, dict}  # polygons and run lengths


def test_boxes_hold_their_masks_tightly(coco: COCO) -> None:
    for annotation in coco.anns.values():
        left, top, width, height = annotation["bbox"]
        mask = coco.annToMask(annotation)
        inside = mask[top : top + height, left : left + width]
        assert inside.sum() == mask.sum()
        assert all(edge.any() for edge in (inside[0], inside[-1], inside[:, 0], inside[:, -1]))


def test_images_are_what_the_annotations_say(folder: Path, coco: COCO, scenes: list[shapes.Scene]) -> None:
    for entry, scene in zip(coco.imgs.values(), scenes, strict=True):
        with Image.open(folder / "images" / entry["file_name"]) as image:
            assert np.array_equal(np.asarray(image), scene.image)
        assert (entry["height"], entry["width"]) == scene.image.shape[:2]


def test_masks_do_not_overlap_and_are_visible(scenes: list[shapes.Scene]) -> None:
    for scene in scenes:
        assert 1 <= len(scene.shapes) <= 5
        assert sum(shape.mask.astype(int) for shape in scene.shapes).max() == 1
        for shape in scene.shapes:
            whole = shapes.rasterize(shape.outline, SIZE).sum()
            assert shape.mask.sum() >= max(shapes.MIN_VISIBLE * whole, shapes.MIN_AREA * SIZE * SIZE)
            assert shape.is_whole == (shape.mask.sum() == whole)


def test_shapes_fill_little_of_their_boxes(scenes: list[shapes.Scene]) -> None:
    """A box filled in would have this mean IoU; what a trained model is to reach lies far above."""
    fills = []
    for scene in scenes:
        for shape in scene.shapes:
            left, top, right, bottom = shape.box
            fills.append(shape.mask.sum() / ((right - left) * (bottom - top)))
    assert 0.2 < np.mean(fills) < 0.6


@pytest.mark.parametrize("name", OUTLINES)
def test_outlines_are_placed_as_asked(name: str) -> None:
    outline = OUTLINES[name](np.random.default_rng(0))
    assert 0.9 < np.linalg.norm(outline.outer, axis=1).max() < 1.3
    there, radius = np.array([40.0, 20.0]), 10.0
    placed = outline.placed(there, radius, 0.7)
    # A turn keeps lengths: distances from the centre are those of the outline, times the radius.
    assert np.allclose(
        np.linalg.norm(placed.outer - there, axis=1), radius * np.linalg.norm(outline.outer, axis=1), atol=1e-12
    )
    assert 0 < shapes.rasterize(placed, SIZE).sum() < (2.6 * radius) ** 2


def test_a_ring_has_a_hole() -> None:
    ring = OUTLINES["ring"](np.random.default_rng(0)).placed(np.array([32.0, 32.0]), 20.0, 0.0)
    mask, disc = shapes.rasterize(ring, SIZE), shapes.rasterize(Outline(ring.outer), SIZE)
    assert disc[32, 32]
    assert not mask[32, 32]
    assert mask[32, 14]


@pytest.mark.parametrize(
    ("mask", "counts"),
    [([[0, 1], [0, 1]], [2, 2]), ([[1, 0], [1, 1]], [0, 2, 1, 1]), ([[0, 0], [0, 0]], [4]), ([[1, 1], [1, 1]], [0, 4])],
)
def test_run_lengths(mask: list[list[int]], counts: list[int]) -> None:
    assert shapes.run_lengths(np.array(mask, dtype=bool)) == {"size": [2, 2], "counts": counts}


@pytest.mark.parametrize("arguments", [{"split": "test"}, {"size": 31}, {"size": 257}])
def test_unknown_splits_and_sizes_are_refused(arguments: dict) -> None:
    with pytest.raises(QFrameworkError, match="split must be one of train, held_out and size 32 to 256 pixels"):
        shapes.make_scene(0, **arguments)


def test_the_command_writes_the_set(folder: Path, tmp_path: Path) -> None:
    write_shapes.main([str(tmp_path / "set"), "--images", str(COUNT), "--size", str(SIZE)])
    assert digest(tmp_path / "set") == digest(folder)
    assert json.loads((tmp_path / "set" / "instances.json").read_text())["info"]["split"] == "held_out"
