"""Each layer quantized alone: SQNR, metric, table and plot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tuning_models import NAMES, images, transformer

from qframework import numerics
from qframework.errors import QFrameworkError, UnsupportedError
from qframework.numerics import sqnr_db
from qframework.quantizer import Recipe
from qframework.tuning.assignment import OBSERVERS, Meanings
from qframework.tuning.journal import Journal
from qframework.tuning.layer_sensitivity import Sensitivity, _choices, sensitivity
from qframework.tuning.layers import Layer


def closeness(model, batch):
    """100 for the model's own outputs, and lower with their distance."""
    expected = model(batch)

    def metric(module) -> float:
        error = (module(batch) - expected).double().square().sum() / expected.double().square().sum()
        return 100 * (1 - float(error))

    return metric


@pytest.fixture
def batch():
    return images(16)


def measured(model, batch, **arguments) -> Sensitivity:
    with torch.no_grad():
        return sensitivity(model, batch, closeness(model, batch), [batch], **arguments)


@pytest.mark.parametrize("spelled_out", [False, True])
def test_every_linear_and_attention_has_a_row(spelled_out: bool, batch) -> None:
    result = measured(transformer(spelled_out=spelled_out), batch)
    assert [(row.kind, row.layer) for row in result.rows] == NAMES
    assert {row.choice for row in result.rows} == {"static"}
    # in eager mode and exported, the float model computes the same but for the order of sums
    assert result.baseline == pytest.approx(100, abs=1e-6)
    for row in result.rows:
        assert row.drop == result.baseline - row.metric
        # the metric is the error of the output, and so is this SQNR
        assert row.output_sqnr_db == pytest.approx(-10 * torch.tensor(row.drop / 100).log10().item(), abs=0.1)
        assert 25 < row.sqnr_db < 65
        assert row.drop > 0


def test_the_sqnr_of_a_layer_matches_its_formula(batch) -> None:
    model = transformer()
    row = measured(model, batch, attention=()).rows[0]
    assert row.layer == "attn.qkv"
    scale = numerics.dynamic_scale(batch, "per_tensor")
    x = numerics.dequantize(numerics.quantize(batch, scale), scale)
    w_int8, w_scale = numerics.quantize_weight(model.attn.qkv.weight.detach())
    w = numerics.dequantize(w_int8, w_scale.unsqueeze(-1))
    with torch.no_grad():
        expected = sqnr_db(model.attn.qkv(batch), torch.nn.functional.linear(x, w, model.attn.qkv.bias))
    # sums in float32 in another order
    assert row.sqnr_db == pytest.approx(expected, abs=1e-3)


def test_the_layer_after_an_outlier_is_the_worst(batch) -> None:
    result = measured(transformer(outlier=200.0), batch, linear=("static", "dynamic"))
    assert (result.worst()[0].layer, result.worst()[0].choice) == ("fc1", "static")
    drops = {(row.layer, row.choice): row.drop for row in result.rows}
    # a scale for each token is not touched by another token's outlier: 200 times finer for all others
    assert drops["fc1", "dynamic"] < drops["fc1", "static"] / 100


def test_choices_are_tried_where_they_exist(batch) -> None:
    rows = measured(transformer(), batch, linear=("dynamic",), attention=("static", "sage_b", "sage2_int8")).rows
    assert {row.choice for row in rows if row.kind == "linear"} == {"dynamic"}
    assert [row.choice for row in rows if row.kind == "attention"] == ["static", "sage_b", "sage2_int8"]
    assert not measured(transformer(), batch, linear=(), attention=()).rows


def test_observers_are_tried_where_a_layer_can_be_static(batch) -> None:
    observers = Meanings(observers=OBSERVERS)
    choices = ("static", "static mse", "sage_b")
    rows = measured(transformer(), batch, meanings=observers, linear=("static mse",), attention=choices).rows
    assert {row.choice for row in rows if row.kind == "linear"} == {"static mse"}
    assert [row.choice for row in rows if row.kind == "attention"] == list(choices)
    assert _choices(Layer("attention", "attn", static=False), (), choices) == ["sage_b"]


def test_equal_runs_give_identical_files_and_an_interrupted_run_resumes(batch, tmp_path: Path) -> None:
    model = transformer()
    measured(model, batch).save(tmp_path / "whole.json")
    path, calls = tmp_path / "journal.jsonl", []
    real = closeness(model, batch)

    def breaks(module) -> float:
        calls.append(module)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(module)

    with torch.no_grad():
        with pytest.raises(KeyboardInterrupt):
            sensitivity(model, batch, breaks, [batch], journal=Journal(path))
        result = sensitivity(model, batch, breaks, [batch], journal=Journal(path))
    result.save(tmp_path / "resumed.json")
    assert (tmp_path / "resumed.json").read_bytes() == (tmp_path / "whole.json").read_bytes()
    assert len(calls) == 1 + 1 + len(NAMES)  # float and each layer once, and the call that was interrupted


def test_table_and_plot(batch, tmp_path: Path) -> None:
    result = measured(transformer(), batch, linear=("static", "dynamic"))
    assert result.table().row_count == len(result.rows) == 2 * 5 + 1
    result.plot(tmp_path / "plots" / "a.png")
    result.plot(tmp_path / "b.png")
    drawn = (tmp_path / "b.png").read_bytes()
    assert drawn.startswith(b"\x89PNG")
    assert drawn == (tmp_path / "plots" / "a.png").read_bytes()
    json.loads(json.dumps(result.to_dict(), allow_nan=False))


def test_bad_metrics_calibration_and_choices_are_refused(batch) -> None:
    model = transformer()
    with pytest.raises(QFrameworkError, match=r"metric must return a finite number, .* got nan"):
        sensitivity(model, batch, lambda module: float("nan"), [batch])
    with pytest.raises(QFrameworkError, match="calibration must be a list or a DataLoader"):
        sensitivity(model, batch, lambda module: 0.0, iter([batch]))
    with pytest.raises(UnsupportedError, match="a linear must be one of float, static, dynamic, got 'int4'"):
        measured(model, batch, linear=("int4",))


def test_a_recipe_applies_to_every_layer_including_dynamic_ones(batch) -> None:
    seen = []

    class Steps(Recipe):
        def before_prepare(self, exported, quantizer, data):
            (rule,) = [rule for rule in quantizer.rules if rule.config.linear is not None]
            seen.append((rule.selector, len(list(data))))
            return {}

        def after_calibrate(self, prepared, data):
            seen.append(("after", len(list(data))))

    model = transformer()
    with torch.no_grad():
        metric = closeness(model, batch)
        sensitivity(model, batch, metric, [batch, batch], linear=["dynamic"], attention=[], recipe=Steps(), batches=1)
    linears = [name for kind, name in NAMES if kind == "linear"]
    assert seen == [step for name in linears for step in ((name, 1), ("after", 1))]
