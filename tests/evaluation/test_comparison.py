"""Comparisons: figures, resuming, tables and errors (comparison.py, comparison_results.py)."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison_helpers import CONFIGURATIONS, EAGER, data, small_task, untimed
from rich.console import Console
from sam_helpers import SIZE, save_tiny_sam, tiny_timm_encoder, write_coco

from qframework.errors import FileFormatError, QFrameworkError
from qframework.evaluation import comparison, weight_bytes
from qframework.evaluation.coco import read_instances
from qframework.evaluation.comparison import Configuration, Settings, compare, standard_configurations
from qframework.evaluation.comparison_results import Results
from qframework.evaluation.image_folder import LabelledBatch, TensorBatches
from qframework.evaluation.images import DamagedImage
from qframework.evaluation.models import Classifier
from qframework.evaluation.sam import TimmSamEncoder, load_sam
from qframework.evaluation.tasks import BoxSegmentation, Classification
from qframework.quantizer import QuantizationConfig, Recipe, static_attention


def results_of(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


# Figures


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    """The result of an uninterrupted comparison."""
    return untimed(compare(small_task(), CONFIGURATIONS, EAGER).to_json())


def test_counts_are_those_of_the_model() -> None:
    task = small_task()
    row = compare(task, {"FP32": Configuration()}, EAGER).rows["FP32"]
    images, labels = data(230, seed=2).tensors
    with torch.no_grad():
        ranked = task.module(images).argsort(dim=1, descending=True)
    hits = ranked == labels.unsqueeze(1)
    assert row.counts == {
        "images": 230,
        "top1": int(hits[:, :1].sum()),
        "top5": int(hits[:, :5].sum()),
        "nan": 0,
    }
    assert row.figures == {"top1": 100 * row.counts["top1"] / 230, "top5": 100 * row.counts["top5"] / 230}
    assert (row.linears, row.lowered_linears, row.lowered_attentions) == (2, 0, 0)
    assert row.weight_bytes == weight_bytes(task.module)
    assert row.images_per_second > 0


def test_configurations_give_different_and_repeatable_figures(whole: dict[str, Any]) -> None:
    first = untimed(compare(small_task(), CONFIGURATIONS, EAGER).to_json())
    assert json.dumps(first) == json.dumps(whole)
    counts = [tuple(row["counts"].values()) for row in first["rows"]]
    assert len(set(counts)) == 3  # else the test could not see one measured for another
    assert [row["lowered_linears"] for row in first["rows"]] == [0, 2, 2]
    fp32, int8, _ = (row["weight_bytes"] for row in first["rows"])
    assert int8 < 0.5 * fp32


def test_the_float_model_is_not_changed() -> None:
    task = small_task()
    before = {name: tensor.clone() for name, tensor in task.module.state_dict().items()}
    compare(task, {"recipe": replace(CONFIGURATIONS["INT8"], recipe=Recipe.best())}, EAGER)
    for name, tensor in task.module.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    configurations = {"float": Configuration(), "INT8": CONFIGURATIONS["INT8"]}
    task = small_task()
    rows = compare(task, configurations, replace(EAGER, dtype=dtype)).rows
    assert rows["float"].weight_bytes == weight_bytes(task.module) / 2
    assert rows["INT8"].counts["nan"] == 0
    assert next(task.module.parameters()).dtype == torch.float32


@pytest.mark.slow
def test_compiled_rows_match_eager_ones_up_to_rounding(fresh_dynamo: None) -> None:
    """A model that separates its classes, so that rounding does not change any label."""
    task = small_task(images=40, batch_size=12)
    eager = compare(task, CONFIGURATIONS, EAGER).rows
    compiled = compare(task, CONFIGURATIONS, replace(EAGER, compiled=True)).rows
    for name, row in compiled.items():
        assert row.lowered_linears == eager[name].lowered_linears
        assert abs(row.counts["top1"] - eager[name].counts["top1"]) <= 1


def test_standard_configurations() -> None:
    names = list(standard_configurations())
    assert names[:5] == ["FP32", "INT8", "INT8 + attention", "INT8-D", "INT8-D + attention"]
    assert names[5:] == ["INT8 (best recipe)", "INT8 + attention (best recipe)"]
    assert next(iter(standard_configurations(torch.bfloat16))) == "BF16"
    needing = [name for name, each in standard_configurations().items() if each.needs_calibration]
    assert needing == [names[1], names[2], names[5], names[6]]
    assert Configuration(QuantizationConfig(None, static_attention())).needs_calibration
    with pytest.raises(QFrameworkError, match=r"dtype must be one of torch.float32, .*, got torch.float64"):
        standard_configurations(torch.float64)


# Interruptions


class InterruptedError_(Exception):
    """Simulates the end of a process."""


class Interrupted(Classification):
    """Ends after the given number of batches."""

    def __init__(self, task: Classification, batches: int) -> None:
        self.__dict__.update(task.__dict__)
        self.left = batches

    def count(self, *arguments: Any) -> dict[str, int]:
        if self.left == 0:
            raise InterruptedError_
        self.left -= 1
        return super().count(*arguments)


@pytest.mark.parametrize("batches", [0, 20, 23 + 16])
def test_an_interrupted_comparison_resumes(tmp_path: Path, batches: int, whole: dict[str, Any]) -> None:
    path = tmp_path / "parts.json"
    with pytest.raises(InterruptedError_):
        compare(Interrupted(small_task(), batches), CONFIGURATIONS, EAGER, results=Results.open(path))
    assert path.exists() == (batches >= 16)  # kept after every 16 batches
    seen = Interrupted(small_task(), 1000)
    compare(seen, CONFIGURATIONS, EAGER, results=Results.open(path))
    assert untimed(results_of(path)) == whole
    kept = 23 * (batches // 23) + 16 * (batches % 23 // 16)
    assert 1000 - seen.left == 3 * 23 - kept  # nothing was measured twice


def test_a_finished_comparison_measures_nothing(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    compare(small_task(), CONFIGURATIONS, EAGER, results=Results.open(path))
    before = path.read_text()
    results = compare(Interrupted(small_task(), 0), CONFIGURATIONS, EAGER, results=Results.open(path))
    assert [row.configuration for row in results.ordered] == list(CONFIGURATIONS)
    assert path.read_text() == before


def test_new_and_changed_configurations_are_measured_and_others_kept(tmp_path: Path, whole: dict[str, Any]) -> None:
    path = tmp_path / "results.json"
    first = {"FP32": CONFIGURATIONS["FP32"], "INT8": CONFIGURATIONS["INT8-D"]}
    compare(small_task(), first, EAGER, results=Results.open(path))
    task = Interrupted(small_task(), 2 * 23)  # two rows, FP32 is kept
    compare(task, CONFIGURATIONS, EAGER, results=Results.open(path))
    assert untimed(results_of(path)) == whole


@pytest.mark.parametrize(
    ("other", "settings", "key"),
    [
        ({"images": 220}, EAGER, "data"),
        ({"seed": 5}, EAGER, "weights_sha256"),
        ({}, replace(EAGER, dtype=torch.bfloat16), "dtype"),
        ({"calibrated": False}, EAGER, "calibration"),
    ],
)
def test_results_of_another_comparison_are_refused(
    tmp_path: Path, other: dict[str, Any], settings: Settings, key: str
) -> None:
    path = tmp_path / "results.json"
    dynamic = {"INT8-D": CONFIGURATIONS["INT8-D"]}
    compare(small_task(), dynamic, EAGER, results=Results.open(path))
    with pytest.raises(QFrameworkError, match=rf"holds another comparison \({key} .*Choose another file"):
        compare(small_task(**other), dynamic, settings, results=Results.open(path))
    compare(small_task(**other), dynamic, settings, results=Results.open(path, restart=True))
    assert len(results_of(path)["rows"]) == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 99}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=re.escape(str(path))):
        Results.open(path)


# Bad input


def test_an_empty_set_is_refused() -> None:
    with pytest.raises(QFrameworkError, match="data for model 'patches' must hold at least one image, got none"):
        small_task(images=0)


def test_labels_out_of_range_are_refused() -> None:
    task = small_task()
    task._data._labels[200] = 12
    with pytest.raises(QFrameworkError, match="labels must be 0 to 9, the classes of the model, got 12"):
        compare(task, {"FP32": Configuration()}, EAGER)


def test_static_scales_without_calibration_data_are_refused_at_once() -> None:
    task = Interrupted(small_task(calibrated=False), 0)
    with pytest.raises(QFrameworkError, match="must have calibration images for configuration 'INT8', got none"):
        compare(task, CONFIGURATIONS, EAGER)


class Damaged(TensorBatches):
    """Every batch lacks its first image."""

    def selected(self, indices: Any) -> Any:
        for index, batch in zip(indices, super().selected(indices), strict=True):
            damaged = DamagedImage(f"{index}.png", "the file is empty")
            yield LabelledBatch(batch.images[1:], batch.labels[1:], (damaged,))


def test_damaged_images_are_counted_and_reported(tmp_path: Path) -> None:
    model = small_task().module
    results = compare(
        Classification(Classifier("patches", model, {}), Damaged(data(230, seed=2), 10)),
        {"FP32": Configuration()},
        EAGER,
        results=Results.open(tmp_path / "results.json"),
    )
    row = results.rows["FP32"]
    assert row.counts["images"] == 230 - 23
    assert sorted(row.damaged) == sorted([f"{index}.png", "the file is empty"] for index in range(23))
    assert "23 damaged images skipped: 0.png (the file is empty); 1.png" in results.markdown()
    assert results_of(tmp_path / "results.json")["rows"][0]["damaged"] == row.damaged


def test_a_data_set_of_damaged_images_is_refused() -> None:
    task = Classification(Classifier("patches", small_task().module, {}), Damaged(data(2, seed=2), 1))
    with pytest.raises(QFrameworkError, match="at least one image must be readable, got damaged ones only"):
        compare(task, {"FP32": Configuration()}, EAGER)


# Tables


def test_tables_show_every_row() -> None:
    results = compare(small_task(), CONFIGURATIONS, EAGER)
    console = Console(file=io.StringIO(), width=140)
    console.print(results.table())
    shown, page = console.file.getvalue(), results.markdown()
    for name, row in results.rows.items():
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
        assert f"| {row.figures['top1']:.2f} | {row.figures['top5']:.2f} |" in line
        assert line.endswith(f"| {row.lowered_linears}/2 | 0 |")
        assert name in shown
        assert f"{row.figures['top1']:.2f}" in shown
    assert "230 images" in page
    assert "INT8 is simulated in float" in page


# Segmentation


def encoder_task(tmp_path: Path, timms: bool) -> BoxSegmentation:
    encoder = TimmSamEncoder(tiny_timm_encoder()) if timms else None
    sam = load_sam(save_tiny_sam(tmp_path / "sam"), encoder, encoder_name="tiny" if timms else "")
    folder, annotations = write_coco(tmp_path / "coco", images=3)
    images = read_instances(annotations)
    return BoxSegmentation(sam, folder, images, images[:2], batch_size=2)


@pytest.mark.parametrize("timms", [False, True], ids=["transformers", "timm"])
def test_segmentation_with_linears_and_attention_quantized(tmp_path: Path, timms: bool) -> None:
    task = encoder_task(tmp_path, timms)
    names = ["FP32", "INT8-D + attention" if timms else "INT8 + attention"]
    rows = compare(task, {name: standard_configurations()[name] for name in names}, EAGER).rows
    fp32, int8 = (rows[name] for name in names)
    assert [row.counts["masks"] for row in rows.values()] == [6, 6]
    assert (int8.lowered_linears, int8.lowered_attentions) == (8, 2)
    # random weights, the same masks but for quantization: far from another model's, not equal to float's
    assert fp32.figures["miou"] > 1
    assert int8.figures["miou"] == pytest.approx(fp32.figures["miou"], rel=0.2)
    assert int8.counts != fp32.counts
    assert task.example().shape == (2, 3, SIZE, SIZE)


def test_processes_that_made_different_models_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two:
        rank, size, is_first = 0, 2, True

        def gather(self, items: list[str]) -> list[str]:
            return [*items, "another"]

    with pytest.raises(QFrameworkError, match="must make the same model from a configuration"):
        comparison._Bench(small_task(), EAGER, Two(), Results())._module(CONFIGURATIONS["INT8"])
