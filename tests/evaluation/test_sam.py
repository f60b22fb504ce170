"""SAM against transformers' own model and processor, and masks on COCO annotations (sam.py, tasks.py)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sam_helpers import CHANNELS, SIZE, save_tiny_sam, square, tiny_timm_encoder, write_coco
from torch import Tensor

from qframework.errors import QFrameworkError
from qframework.evaluation.coco import read_instances
from qframework.evaluation.miou import count_iou
from qframework.evaluation.sam import (
    Picture,
    Sam,
    TimmSamEncoder,
    load_sam,
    load_timm_encoder,
    prepare_picture,
    sam_image_size,
)
from qframework.evaluation.tasks import BoxSegmentation

CPU, FP32 = torch.device("cpu"), torch.float32
BOXES = torch.tensor([[5.0, 5.0, 25.0, 20.0], [0.0, 0.0, 60.0, 40.0], [30.0, 10.0, 50.0, 35.0]])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    return save_tiny_sam(tmp_path_factory.mktemp("sam"))


@pytest.fixture
def sam(checkpoint: str) -> Sam:
    return load_sam(checkpoint)


def picture_of(width: int, height: int) -> Image.Image:
    pixels = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def transformers_masks(checkpoint: str, image: Image.Image, boxes: Tensor) -> Tensor:
    """The documented steps: processor, model, post-processing."""
    from transformers import SamImageProcessor, SamModel, SamProcessor

    size = {"height": SIZE, "width": SIZE}
    processor = SamProcessor(SamImageProcessor(size={"longest_edge": SIZE}, pad_size=size))
    inputs = processor(images=image, input_boxes=[boxes.tolist()], return_tensors="pt")
    inputs["input_boxes"] = inputs["input_boxes"].float()
    with torch.no_grad():
        output = SamModel.from_pretrained(checkpoint).eval()(**inputs, multimask_output=False)
    sizes = inputs["original_sizes"], inputs["reshaped_input_sizes"]
    return processor.image_processor.post_process_masks(output.pred_masks, *sizes)[0][:, 0]


@pytest.mark.parametrize(("width", "height"), [(60, 40), (40, 60), (64, 64), (131, 7)])
def test_masks_match_transformers(sam: Sam, checkpoint: str, width: int, height: int) -> None:
    image = picture_of(width, height)
    boxes = BOXES.clamp(max=min(width, height))
    picture = prepare_picture(sam.processor, image)
    with torch.no_grad():
        (embedding,) = sam.encoder(picture.pixel_values.unsqueeze(0))
    masks, expected = sam.masks(embedding, boxes, picture), transformers_masks(checkpoint, image, boxes)
    assert masks.shape == (3, height, width)
    assert masks.dtype == torch.bool
    assert 0 < int(expected.sum()) < expected.numel()
    # The same but for the rounding of box coordinates, which decides a pixel only where its logit is nearly 0.
    assert int((masks != expected).sum()) <= 0.001 * expected.numel()


def test_many_boxes_give_the_same_masks_as_single_ones(sam: Sam) -> None:
    picture = prepare_picture(sam.processor, picture_of(60, 40))
    embedding = torch.randn(CHANNELS, SIZE // 8, SIZE // 8)
    boxes = BOXES.repeat(15, 1)  # more than are decoded at once
    masks = sam.masks(embedding, boxes, picture)
    assert masks.shape == (45, 40, 60)
    single = sam.masks(embedding, BOXES[1:2], picture)
    assert int((masks[1::3] != single).sum()) <= 0.001 * single.numel() * 15


def test_the_decoder_holds_no_encoder(sam: Sam) -> None:
    encoder = sum(parameter.numel() for parameter in sam.encoder.parameters())
    decoder = sum(parameter.numel() for parameter in sam.decoder.parameters())
    assert encoder > 10_000
    assert not any("vision_encoder" in name for name, _ in sam.decoder.named_parameters())
    assert decoder > 1_000


def test_a_saved_processor_is_used(sam: Sam, checkpoint: str, tmp_path: Path) -> None:
    folder = save_tiny_sam(tmp_path / "sam")
    sam.processor.save_pretrained(folder)
    assert load_sam(folder).image_size == SIZE
    settings = next(path for path in Path(folder).glob("*processor*.json"))
    text = json.loads(settings.read_text())
    text["pad_size"] = {"height": 128, "width": 128}
    settings.write_text(json.dumps(text))
    with pytest.raises(QFrameworkError, match=f"images must be padded to {SIZE} x {SIZE}, got .*128"):
        load_sam(folder)


def test_other_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(QFrameworkError, match="cannot be loaded"):
        load_sam(str(tmp_path))
    with pytest.raises(QFrameworkError, match="cannot be loaded"):
        sam_image_size(str(tmp_path))


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    from transformers import ViTConfig

    ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(QFrameworkError, match="must have the type 'sam', got 'vit'"):
        load_sam(str(tmp_path))


def test_missing_weights_are_refused(checkpoint: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["mask_decoder.iou_token.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QFrameworkError, match=r"lacks 1 of its weights, such as mask_decoder.iou_token.weight"):
        load_sam(str(tmp_path))


# timm's encoders


def test_timms_encoder_replaces_the_models_own(sam: Sam, checkpoint: str) -> None:
    encoder = TimmSamEncoder(tiny_timm_encoder())
    replaced = load_sam(checkpoint, encoder, encoder_name="tiny")
    assert replaced.name == f"{checkpoint} with tiny"
    pixels = torch.randn(2, 3, SIZE, SIZE)
    with torch.no_grad():
        torch.testing.assert_close(replaced.encoder(pixels), encoder.encoder.forward_features(pixels))
        assert replaced.encoder(pixels).shape == sam.encoder(pixels).shape


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"neck_chans": 24}, rf"must give embeddings of shape \({CHANNELS}, 8, 8\), got \(24, 8, 8\)"),
        ({"patch_size": 16}, rf"must give .*, got \({CHANNELS}, 4, 4\)"),
        ({"in_chans": 1}, f"does not take images of {SIZE} x {SIZE}"),
    ],
)
def test_encoders_that_do_not_fit_are_refused(checkpoint: str, changes: dict[str, int], message: str) -> None:
    with pytest.raises(QFrameworkError, match=f"encoder 'tiny' {message}"):
        load_sam(checkpoint, TimmSamEncoder(tiny_timm_encoder(**changes)), encoder_name="tiny")


def test_timms_encoders_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    made = {}

    def create_model(name: str, **settings: object) -> torch.nn.Module:
        made.update(settings, name=name)
        return tiny_timm_encoder()

    monkeypatch.setattr(timm, "create_model", create_model)
    load_timm_encoder("samvit_base_patch16.sa1b", SIZE, pretrained=True)
    assert (made["name"], made["img_size"], made["pretrained"]) == ("samvit_base_patch16.sa1b", SIZE, True)
    with pytest.raises(QFrameworkError, match=r"got 'samvit_bas_patch16'. Did you mean samvit_base_patch16"):
        load_timm_encoder("samvit_bas_patch16", SIZE)
    with pytest.raises(QFrameworkError, match=r"encoder must be one of samvit_base.* got 'vit_base_patch16_224'"):
        load_timm_encoder("vit_base_patch16_224", SIZE)
    with pytest.raises(FileNotFoundError, match=r"none.pth does not exist"):
        load_timm_encoder("samvit_base_patch16", SIZE, tmp_path / "none.pth")


# The task


def test_counts_match_the_masks(sam: Sam, tmp_path: Path) -> None:
    folder, annotations = write_coco(tmp_path, images=3)
    images = read_instances(annotations)
    task = BoxSegmentation(sam, folder, images, batch_size=2)
    assert len(task) == 2
    counts = dict.fromkeys(task.counted, 0)
    with torch.no_grad():
        for batch in task.batches([0, 1]):
            for name, value in task.count(sam.encoder, batch, CPU, FP32).items():
                counts[name] += value
    expected = [one_by_one(sam, folder / image.file_name, image) for image in images]
    assert counts["images"] == 3
    assert counts["masks"] == 6
    for name in ("intersection", "union"):
        # a picture alone in a batch may round otherwise
        assert counts[name] == pytest.approx(sum(count[name] for count in expected), rel=0.01)
    assert 0 < task.figures(counts)["miou"] < 100


def one_by_one(sam: Sam, path: Path, image) -> dict[str, int]:
    picture = prepare_picture(sam.processor, Image.open(path).convert("RGB"))
    with torch.no_grad():
        (embedding,) = sam.encoder(picture.pixel_values.unsqueeze(0))
    return count_iou(sam.masks(embedding, image.boxes, picture), image.masks())


def test_a_perfect_model_has_100_percent(sam: Sam, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, annotations = write_coco(tmp_path, images=2)
    images = read_instances(annotations)
    task = BoxSegmentation(sam, folder, images, batch_size=2)

    def perfect(self: Sam, embedding: Tensor, boxes: Tensor, picture: Picture) -> Tensor:
        (image,) = [image for image in images if torch.equal(image.boxes, boxes)]
        return image.masks()

    monkeypatch.setattr(Sam, "masks", perfect)
    (batch,) = task.batches([0])
    assert task.figures(task.count(sam.encoder, batch, CPU, FP32)) == {"miou": 100.0, "pixel_iou": 100.0}


def test_damaged_pictures_are_skipped_and_reported(sam: Sam, tmp_path: Path) -> None:
    folder, annotations = write_coco(tmp_path, images=5)
    (folder / "0.png").write_bytes(b"")
    (folder / "2.png").unlink()
    Image.new("RGB", (50, 40)).save(folder / "3.png")
    task = BoxSegmentation(sam, folder, read_instances(annotations), read_instances(annotations), batch_size=3)
    batches = list(task.batches([0, 1]))
    assert [[image.file_name for image in batch.images] for batch in batches] == [["1.png"], ["4.png"]]
    assert [tuple(image) for batch in batches for image in batch.damaged] == [
        ("0.png", "the file is empty"),
        ("2.png", "the file does not exist"),
        ("3.png", "must have 40 x 60 pixels as annotated, got 40 x 50"),
    ]
    assert [len(inputs) for inputs in task.calibration()] == [1, 1]
    assert task.example().shape == (2, 3, SIZE, SIZE)  # one picture, twice


def test_a_folder_without_the_images_is_refused(sam: Sam, tmp_path: Path) -> None:
    _, annotations = write_coco(tmp_path)
    with pytest.raises(QFrameworkError, match=r"root must hold annotated images, got .* with none of the 5"):
        BoxSegmentation(sam, tmp_path, read_instances(annotations))


def test_objects_smaller_than_a_pixel_are_counted_apart(sam: Sam, tmp_path: Path) -> None:
    folder, path = write_coco(tmp_path, images=1)
    document = json.loads(path.read_text())
    document["annotations"][0]["segmentation"] = square(5, 5, 0)
    path.write_text(json.dumps(document))
    task = BoxSegmentation(sam, folder, read_instances(path))
    (batch,) = task.batches([0])
    counts = task.count(sam.encoder, batch, CPU, FP32)
    assert (counts["masks"], counts["masks_without_pixels"]) == (1, 1)
    assert not np.isnan(task.figures(counts)["miou"])


def test_the_description_follows_the_weights(sam: Sam, tmp_path: Path) -> None:
    folder, annotations = write_coco(tmp_path, images=1)
    images = read_instances(annotations)
    before = BoxSegmentation(sam, folder, images).describe()
    with torch.no_grad():
        next(sam.decoder.mask_decoder.parameters()).add_(1)
    after = BoxSegmentation(sam, folder, images).describe()
    assert before["weights_sha256"]["encoder"] == after["weights_sha256"]["encoder"]
    assert before["weights_sha256"]["decoder"] != after["weights_sha256"]["decoder"]
