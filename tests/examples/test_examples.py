"""The example scripts on local data and checkpoints: rows, files, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from example_scripts import example
from PIL import Image

EAGER = ("--eager", "--quiet", "--repeats", "1")
CLASSES = ("n01440764", "n01443537")  # of ImageNet


def names(path: Path) -> list[str]:
    return [row["configuration"] for row in json.loads(path.read_text())["rows"]]


# imagenet_timm


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import timm

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "test_vit.pth"
    torch.save(timm.create_model("test_vit").state_dict(), path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for label in CLASSES:
        (tmp_path / "val" / label).mkdir(parents=True)
        for index in range(3):
            pixels = torch.randint(0, 256, (40, 50, 3), dtype=torch.uint8).numpy()
            Image.fromarray(pixels).save(tmp_path / "val" / label / f"{index}.png")
    return tmp_path / "val"


def test_imagenet_timm(folder: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / CLASSES[1] / "2.png").write_bytes(b"")
    output = tmp_path / "results" / "vit.json"
    arguments = ["test_vit", "--checkpoint", str(checkpoint), "--data", str(folder), "--calibration", str(folder)]
    chosen = ["--configurations", "INT8-D + attention,FP32", "--batch-size", "2", "--output", str(output)]
    assert example("imagenet_timm").main([*arguments, *chosen, *EAGER]) == 0
    assert names(output) == ["FP32", "INT8-D + attention"]  # in their own order
    row = json.loads(output.read_text())["rows"][1]
    assert row["counts"]["images"] == 5
    assert row["damaged"] == [[f"{CLASSES[1]}/2.png", "the file is empty"]]
    assert row["lowered_attentions"] > 0
    assert "INT8-D + attention" in capsys.readouterr().out
    assert "1 damaged images skipped" in output.with_suffix(".md").read_text()


def test_imagenet_timm_smoke_on_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qframework.evaluation import digits_vit

    config = digits_vit.TrainingConfig(embed_dim=24, depth=1, epochs=1)
    load_or_train = digits_vit.load_or_train
    monkeypatch.setattr(digits_vit, "load_or_train", lambda path: load_or_train(path, config, show_progress=False))
    monkeypatch.chdir(tmp_path)
    assert example("imagenet_timm").main(["--smoke", "--quiet", "--output", "digits.json"]) == 0
    rows = json.loads(Path("digits.json").read_text())["rows"]
    assert [row["counts"]["images"] for row in rows] == [64, 64]
    assert [row["lowered_linears"] for row in rows] == [0, 5]


BAD_INPUT = {
    "random weights": (["test_vit"], "would have random weights. Pass --pretrained or --checkpoint FILE"),
    "unknown model": (
        ["vit_bas_patch16_224", "--pretrained", "--data", "none"],
        "got 'vit_bas_patch16_224'. Did you mean",
    ),
    "unknown row": (["--configurations", "INT4"], "--configurations must be chosen from FP32, INT8, INT8 + attention"),
    "no such device": (["--device", "gpu0"], "must be 'cpu', 'cuda' or 'cuda:<index>', got 'gpu0'"),
    "data of another model": (["digits", "--data", "none"], "data 'none' does not fit model 'digits'"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert example("imagenet_timm").main([*arguments, *EAGER]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_bad_folders_are_refused(
    tmp_path: Path, folder: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(*arguments: str) -> str:
        weights = ["test_vit", "--checkpoint", str(checkpoint)]
        assert example("imagenet_timm").main([*weights, *arguments, *EAGER]) == 2
        return capsys.readouterr().err

    assert "must be 'digits' or a folder of class folders" in error("--data", str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    assert "must hold one folder of images per class" in error("--data", str(tmp_path / "empty"))
    assert "must have calibration images" in error("--data", str(folder))
    (folder / "a class of my own").mkdir()
    (folder / CLASSES[0] / "0.png").rename(folder / "a class of my own" / "0.png")
    assert "must hold 1000 class folders, one for each class, got 3" in error("--data", str(folder))


# coco_sam


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's own segmentation set: another writer of COCO's format than the tests' own."""
    from demos.shapes import write_coco

    root = tmp_path_factory.mktemp("shapes")
    write_coco(root, 4, size=64)
    return root


@pytest.fixture(scope="module")
def sam(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from demos.shapes_sam import SamTrainingConfig, build_model, save_pretrained

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("sam")
    config = SamTrainingConfig(image_size=64, embed_dim=32, depth=2, global_blocks=(1,), decoder_dim=16)
    save_pretrained(build_model(config), folder)
    return folder


def coco_arguments(shapes: Path) -> list[str]:
    return ["--images", str(shapes / "images"), "--annotations", str(shapes / "instances.json")]


def test_coco_sam_smoke(shapes: Path, sam: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "sam.json"
    calibration = ["--calibration-annotations", str(shapes / "instances.json")]
    arguments = [str(sam), *coco_arguments(shapes), *calibration, "--smoke", "--quiet", "--output", str(output)]
    assert example("coco_sam").main(arguments) == 0
    annotated = len(json.loads((shapes / "instances.json").read_text())["annotations"])
    rows = json.loads(output.read_text())["rows"]
    assert [row["counts"]["images"] for row in rows] == [4, 4]
    assert [row["counts"]["masks"] for row in rows] == [annotated, annotated]
    assert [row["lowered_attentions"] for row in rows] == [0, 2]
    assert "mIoU" in capsys.readouterr().out


def test_coco_sam_refuses_bad_input(
    shapes: Path, sam: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(model: Path, *arguments: str) -> str:
        assert example("coco_sam").main([str(model), *coco_arguments(shapes), *arguments, *EAGER]) == 2
        return capsys.readouterr().err

    assert "must have calibration images" in error(sam)
    assert "encoder must be one of samvit" in error(sam, "--encoder", "vit_tiny")
    assert "--encoder-checkpoint must be given with --encoder NAME" in error(sam, "--encoder-checkpoint", "weights.pth")
    assert "cannot be loaded" in error(tmp_path / "none")
    assert "none.json" in error(sam, "--annotations", str(tmp_path / "none.json"))
    assert "with none of the 4" in error(sam, "--images", str(tmp_path))
