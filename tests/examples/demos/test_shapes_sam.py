"""The small SAM: architecture, seeded training, and measurement."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import train_sam_shapes
from transformers import SamModel, SamProcessor

from demos import shapes, shapes_sam
from qframework.errors import QFrameworkError
from qframework.evaluation.metric import task_counts, task_figures
from qframework.evaluation.tasks import BoxSegmentation

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # pycocotools 2.0.11 with NumPy 2

TINY = shapes_sam.SamTrainingConfig(
    image_size=64, embed_dim=16, depth=2, num_heads=2, global_blocks=(1,), decoder_dim=16, images=6, epochs=1, boxes=2,
    batch_size=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> SamModel:
    return shapes_sam.train(TINY, show_progress=False)


@pytest.fixture(scope="module")
def scenes() -> list[shapes.Scene]:
    return list(shapes.scenes(5, size=TINY.image_size))


def pixel_values(scenes: Iterable[shapes.Scene]) -> torch.Tensor:
    return shapes_sam.normalize(torch.stack([torch.from_numpy(scene.image).permute(2, 0, 1) for scene in scenes]))


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_the_encoder_is_built_like_the_real_one() -> None:
    """Windows that the grid is no multiple of, global attention last, relative positions."""
    config = shapes_sam.SamTrainingConfig()
    layers = shapes_sam.build_model(config).vision_encoder.layers
    assert [layer.window_size for layer in layers] == [5, 0, 5, 0]
    assert config.image_size // config.patch_size % config.window_size != 0
    grid = config.image_size // config.patch_size
    assert [len(layer.attn.rel_pos_h) for layer in layers] == [9, 2 * grid - 1] * 2


def test_the_untrained_model_depends_on_its_image() -> None:
    """transformers' own start, 1e-10, would give the same embedding everywhere."""
    torch.manual_seed(0)
    model = shapes_sam.build_model(TINY)
    with torch.no_grad():
        first, second = model.get_image_embeddings(pixel_values(shapes.scenes(2, size=64)))
    assert (first - second).abs().mean() > 0.1
    assert first.std(dim=(1, 2)).mean() > 0.1


def test_the_seed_decides_the_weights(model: SamModel) -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    assert same_weights(model, shapes_sam.train(TINY, show_progress=False))
    assert torch.equal(torch.rand(1), expected)  # the caller's generator is left alone
    assert not same_weights(model, shapes_sam.train(replace(TINY, seed=1), show_progress=False))
    assert not model.training


def test_training_learns() -> None:
    config = replace(TINY, images=4, batch_size=4, epochs=60, boxes=4, learning_rate=3e-3)
    torch.manual_seed(0)
    batch = next(shapes_sam._TrainingSet(config, lambda: None).epoch())
    losses = [
        float(shapes_sam._loss(m, batch).detach())
        for m in (untrained(config), shapes_sam.train(config, show_progress=False))
    ]
    assert losses[1] < 0.8 * losses[0]


def untrained(config: shapes_sam.SamTrainingConfig) -> SamModel:
    torch.manual_seed(config.seed)
    return shapes_sam.build_model(config)


def test_boxes_follow_mirroring_and_transposition() -> None:
    torch.manual_seed(0)
    data = shapes_sam._TrainingSet(TINY, lambda: None)
    masks = torch.zeros(1, 1, 32, 32)
    masks[..., 3:10, 20:31] = 1
    images = masks.repeat_interleave(2, -1).repeat_interleave(2, -2)[:, 0:1].expand(1, 3, 64, 64)
    seen = set()
    for _ in range(50):
        moved = data._moved(shapes_sam.Batch(images, torch.tensor([[[40.0, 6.0, 62.0, 20.0]]]), masks))
        left, top, right, bottom = (int(side) for side in moved.boxes.flatten())
        expected = torch.zeros(64, 64)
        expected[top:bottom, left:right] = 1
        assert torch.equal(moved.pixel_values[0, 0], expected)
        assert torch.equal(moved.masks[0, 0], expected[::2, ::2])
        seen.add((left, top))
    assert len(seen) == 8


def test_noisy_boxes_stay_near_and_inside() -> None:
    torch.manual_seed(0)
    boxes = torch.tensor([10.0, 20.0, 50.0, 64.0]).expand(1000, 1, 4)
    off = shapes_sam._shaken(boxes, 64) - boxes
    # 5 percent of 40 and 44 pixels; the standard deviation of 1000 draws is off by 1 / sqrt(2000), 2.2 percent
    assert off[..., :2].std(dim=0).flatten().tolist() == pytest.approx([2.0, 2.2], rel=0.1)
    assert shapes_sam._shaken(boxes, 64).max() <= 64


def test_every_epoch_shows_every_image_once() -> None:
    torch.manual_seed(0)
    sizes = [len(batch.boxes) for batch in shapes_sam._TrainingSet(replace(TINY, batch_size=4), lambda: None).epoch()]
    assert sizes == [4, 2]


def test_transformers_reads_the_model(model: SamModel, scenes: list[shapes.Scene], tmp_path: Path) -> None:
    shapes_sam.save_pretrained(model, tmp_path)
    again = SamModel.from_pretrained(tmp_path)
    assert same_weights(again, model)
    processor = SamProcessor.from_pretrained(tmp_path)
    boxes = [[list(map(float, shape.box)) for shape in scenes[0].shapes]]
    inputs = processor(images=[scenes[0].image], input_boxes=boxes, return_tensors="pt")
    # Both are a few roundings of values below 3 away from exact: 2^-21 each.
    assert torch.allclose(inputs["pixel_values"], pixel_values(scenes[:1]), atol=2.0**-20, rtol=0)
    assert inputs["input_boxes"][0].tolist() == boxes[0]


def test_the_checkpoint_is_used(model: SamModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sam.safetensors"
    assert same_weights(shapes_sam.load_or_train(path, TINY, show_progress=False), model)
    monkeypatch.setattr(shapes_sam, "train", None)
    assert same_weights(shapes_sam.load_or_train(path, TINY), model)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> BoxSegmentation:
    folder = tmp_path_factory.mktemp("shapes")
    return shapes_sam.box_segmentation(folder, TINY, images=5, calibration_images=3, show_progress=False)


def test_the_task_holds_both_splits_at_the_models_size(task: BoxSegmentation, scenes: list[shapes.Scene]) -> None:
    (held_out,) = task.batches([0])
    assert torch.allclose(held_out.pixel_values, pixel_values(scenes), atol=2.0**-20, rtol=0)
    (calibration,) = task.calibration()
    train = list(shapes.scenes(3, "train", size=64))
    assert torch.allclose(calibration, pixel_values(train), atol=2.0**-20, rtol=0)


def test_the_task_measures_every_object(task: BoxSegmentation, scenes: list[shapes.Scene]) -> None:
    counts = task_counts(task, task.module)
    assert counts["images"] == 5
    assert counts["masks"] == sum(len(scene.shapes) for scene in scenes)
    assert 0 < task_figures(task, task.module)["miou"] < 100
    with torch.no_grad():
        other = task_counts(task, lambda images: -task.module(images))
    assert other["iou_units"] != counts["iou_units"]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(QFrameworkError, match="image_size must be a multiple of patch_size 8, got 100"):
        shapes_sam.SamTrainingConfig(image_size=100)


def test_the_command_prints_the_mean_iou(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = train_sam_shapes.box_segmentation
    monkeypatch.setattr(
        train_sam_shapes,
        "box_segmentation",
        lambda folder, **settings: original(folder, TINY, calibration_images=2, show_progress=False, **settings),
    )
    train_sam_shapes.main(["--folder", str(tmp_path), "--images", "3"])
    assert re.match(r"mean IoU [\d.]+ % on 3 held-out images", capsys.readouterr().out)
    assert {path.name for path in tmp_path.iterdir()} == {"sam.safetensors", "model", "held_out", "calibration"}
