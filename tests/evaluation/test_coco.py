"""COCO annotations: masks, limits, and error messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sam_helpers import annotation, run_lengths, square, write_coco

from qframework.errors import FileFormatError, QFrameworkError
from qframework.evaluation.coco import describe, read_instances

IMAGE = {"id": 1, "file_name": "a.png", "height": 6, "width": 8}
BOX = [1, 1, 4, 4]
MASK = np.zeros((6, 8), dtype=bool)
MASK[1:5, 1:5] = True


def write(path: Path, *annotations: dict[str, Any], images: Any = (IMAGE,)) -> Path:
    path.write_text(json.dumps({"images": list(images), "annotations": list(annotations)}))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "instances.json"


def compressed() -> dict[str, Any]:
    """Run lengths as text."""
    from pycocotools import mask

    encoded = mask.encode(np.asfortranarray(MASK.astype(np.uint8)))
    return {"counts": encoded["counts"].decode(), "size": list(encoded["size"])}


@pytest.mark.parametrize(
    "segmentation", [square(1, 1, 4), run_lengths(MASK), compressed()], ids=["polygon", "rle", "text"]
)
def test_every_form_of_a_mask_gives_the_same_pixels(file: Path, segmentation: Any) -> None:
    (image,) = read_instances(write(file, annotation(1, 1, segmentation, BOX)))
    assert (image.file_name, image.height, image.width) == ("a.png", 6, 8)
    assert image.boxes.tolist() == [[1, 1, 5, 5]]
    torch.testing.assert_close(image.masks(), torch.from_numpy(MASK).unsqueeze(0))


def test_an_object_of_several_polygons_is_one_mask(file: Path) -> None:
    (image,) = read_instances(write(file, annotation(1, 1, [*square(0, 0, 2), *square(4, 4, 2)], BOX)))
    assert image.masks().shape == (1, 6, 8)
    assert int(image.masks().sum()) == 2 * 4


def test_crowds_and_images_without_objects_are_left_out(file: Path) -> None:
    images = [IMAGE, {**IMAGE, "id": 2, "file_name": "b.png"}, {**IMAGE, "id": 0, "file_name": "c.png"}]
    crowd, first, second = (annotation(n, i, square(1, 1, 4), BOX) for n, i in ((1, 2), (2, 1), (3, 0)))
    found = read_instances(write(file, {**crowd, "iscrowd": 1}, first, second, images=images))
    assert [image.file_name for image in found] == ["c.png", "a.png"]  # by their ids, whatever the file's order


def test_a_limit_spreads_over_all_images(tmp_path: Path) -> None:
    _, path = write_coco(tmp_path, images=5)
    assert [image.file_name for image in read_instances(path, limit=2)] == ["0.png", "2.png"]
    assert len(read_instances(path, limit=99)) == 5
    with pytest.raises(QFrameworkError, match="limit must be None or a positive number of images, got 0"):
        read_instances(path, limit=0)


def test_the_description_follows_the_annotations(file: Path) -> None:
    first = describe(read_instances(write(file, annotation(1, 1, square(1, 1, 4), BOX))))
    moved = describe(read_instances(write(file, annotation(1, 1, square(1, 1, 3), BOX))))
    assert (first["images"], first["masks"]) == (1, 1)
    assert first["sha256"] != moved["sha256"]


GOOD = annotation(7, 1, square(1, 1, 4), BOX)
BAD = {
    "unknown image": (
        {**GOOD, "image_id": 9},
        "annotation 7 must refer to one of the 1 images in the file, got image_id 9",
    ),
    "no box": (
        {**GOOD, "bbox": None},
        "annotation 7: bbox must be x, y, width and height, the last two positive, got None",
    ),
    "empty box": ({**GOOD, "bbox": [1, 1, 0, 4]}, "the last two positive"),
    "infinite box": ({**GOOD, "bbox": [1, 1, float("inf"), 4]}, "annotation 7: bbox must be"),
    "no mask": ({**GOOD, "segmentation": []}, "annotation 7: segmentation must be"),
    "polygon of two points": ({**GOOD, "segmentation": [[1, 1, 4, 4]]}, "polygons of at least three points"),
    "odd polygon": ({**GOOD, "segmentation": [[1, 1, 4, 4, 5, 5, 6]]}, "polygons of at least three points"),
    "run lengths without size": ({**GOOD, "segmentation": {"counts": [48]}}, "'counts' and 'size'"),
}


@pytest.mark.parametrize(("bad", "message"), BAD.values(), ids=BAD)
def test_bad_annotations_are_refused(file: Path, bad: dict[str, Any], message: str) -> None:
    with pytest.raises(FileFormatError, match=message) as error:
        read_instances(write(file, bad))
    assert str(file) in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"images": [{}], "annotations": []}', "\xff"])
def test_other_files_are_refused(file: Path, text: str) -> None:
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(FileFormatError, match="must be COCO instances"):
        read_instances(file)


def test_an_image_without_a_size_is_refused(file: Path) -> None:
    with pytest.raises(FileFormatError, match="image 1 must have a file_name, a height and a width"):
        read_instances(write(file, GOOD, images=[{"id": 1, "file_name": "a.png"}]))


def test_a_file_without_objects_is_refused(file: Path) -> None:
    with pytest.raises(QFrameworkError, match="an object other than a crowd, got none of 1"):
        read_instances(write(file, {**GOOD, "iscrowd": 1}))


def test_a_mask_of_another_size_is_refused(file: Path) -> None:
    (image,) = read_instances(write(file, annotation(3, 1, run_lengths(MASK[:, :7]), BOX)))
    with pytest.raises(FileFormatError, match=r"annotation 3 of a.png: mask must have shape \(6, 8\), got \(6, 7\)"):
        image.masks()


def test_run_lengths_that_cannot_be_decoded_are_refused(file: Path) -> None:
    (image,) = read_instances(write(file, annotation(3, 1, {"counts": [{}], "size": [6, 8]}, BOX)))
    with pytest.raises(FileFormatError, match=r"annotation 3 of a.png: segmentation cannot be decoded"):
        image.masks()
