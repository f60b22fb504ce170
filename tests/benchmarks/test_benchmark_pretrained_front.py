"""benchmarks.pretrained_front: all steps on a tiny model, times that stand for a GPU's, files of other steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import pretrained_front
from benchmarks.pretrained_front import StoredTimer, call_name, read, wanted_whole
from qframework.errors import FileFormatError
from qframework.tuning.layers import AttentionOperands, LinearOperands, TensorShape


def shape(*sizes: int) -> TensorShape:
    return TensorShape(sizes, torch.float16)


LINEAR = LinearOperands(shape(64, 257, 384), shape(1152, 384), None)
ATTENTION = AttentionOperands(shape(64, 6, 257, 64), shape(64, 6, 257, 64), shape(64, 6, 257, 64))


def test_stored_times_are_those_of_the_batch() -> None:
    stored = {
        "batch": 64,
        "milliseconds": {"linear 257 x 1152 x 384": {"static": 0.8}, "attention 6 x 257 x 64": {"float": 0.4}},
        "float_images_per_second": 1e4,
    }
    timer = StoredTimer(stored, 8)
    assert call_name(LINEAR) == "linear 257 x 1152 x 384"
    assert timer.layer(LINEAR, "static") == pytest.approx(0.1)
    assert timer.layer(ATTENTION, "float") == pytest.approx(0.05)
    assert timer.model(None) == 1e4
    with pytest.raises(FileFormatError, match="must hold 'linear 257 x 1152 x 384' as 'dynamic', got none"):
        timer.layer(LINEAR, "dynamic")


def test_all_steps_on_a_tiny_model(tmp_path: Path) -> None:
    path = tmp_path / "front.json"
    assert pretrained_front.main(["--smoke", "--output", str(path)]) == 0
    document = read(path, "search")
    trials = document["trials"]
    by_name = {trial["configuration"]: trial for trial in trials if trial["configuration"]}
    assert {"static", "static + attention", "dynamic"} <= set(by_name)
    layers = by_name["static + attention"]["layers"]
    assert layers == {"linear static": 8, "attention static": 2}
    for trial in trials:  # none of the front is dominated
        beaten = [
            other
            for other in trials
            if other["estimated_images_per_second"] > trial["estimated_images_per_second"]
            and other["correspondences"] >= trial["correspondences"]
        ]
        assert not (trial["front"] and beaten)
    assert {"float", *wanted_whole(document)} == set(document["images_per_second"])
    with pytest.raises(FileFormatError, match=r"must be a file of `benchmarks.pretrained_front times`"):
        read(path, "times")
    assert json.loads(path.read_text())["smoke"]
