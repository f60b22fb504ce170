"""The fastest assignment within a budget, and the plan that it is written as."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_layer_sensitivity import closeness
from tuning_models import NAMES, Table, images, transformer

from qframework import quantize
from qframework.backend import explain
from qframework.errors import QFrameworkError, UnsupportedError
from qframework.quantizer import ActivationConfig
from qframework.tuning.assignment import OBSERVERS, Meanings
from qframework.tuning.journal import Journal
from qframework.tuning.mixed_precision import Tuning, tune
from qframework.tuning.plan import Plan


@pytest.fixture
def batch():
    return images(16)


def tuned(model, batch, max_drop: float, metric=None, timer=None, **arguments) -> Tuning:
    arguments = {"variants": ("sage_b", "sage_vb"), "compiled": False, **arguments}
    with torch.no_grad():
        metric = metric or closeness(model, batch)
        return tune(model, batch, metric, [batch], max_drop=max_drop, timer=timer or Table(batch), **arguments)


def test_a_wide_budget_takes_the_fastest_of_each_layer(batch) -> None:
    result = tuned(transformer(), batch, max_drop=50.0)
    assert result.met
    assert dict(result.chosen.assignment) == dict.fromkeys(NAMES, "static")
    # float: 100 ms, of which 60 are its layers'; static 4 ms each
    assert result.float_model.images_per_second == pytest.approx(16 / 0.1)
    assert result.chosen.images_per_second == pytest.approx(16 / (0.1 - 0.06 + 0.024))


def test_speed_estimates_scale_when_layer_times_exceed_the_models(batch) -> None:
    slow = Table(batch, float=100.0, static=50.0)  # 600 ms of 100
    result = tuned(transformer(), batch, max_drop=50.0, timer=slow, variants=())
    assert result.chosen.assignment["linear", "fc1"] == "dynamic"
    # five linears in 6 ms instead of 100, attention in 50
    assert result.chosen.images_per_second == pytest.approx(16 / (0.1 * (5 * 6 + 50) / 600))


def test_a_sensitive_layer_stays_in_float(batch) -> None:
    """An outlier token makes static fc1 lose several points; with a scale for each token, or in float, it does not."""
    result = tuned(transformer(outlier=200.0), batch, max_drop=0.5)
    assert result.met
    assert 0 < result.chosen.drop <= 0.5
    assert result.chosen.assignment["linear", "fc1"] == "dynamic"
    others = {key: choice for key, choice in result.chosen.assignment.items() if key != ("linear", "fc1")}
    assert others == dict.fromkeys(others, "static")


def test_a_slow_variant_is_neither_chosen_nor_measured(batch, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    result = tuned(transformer(), batch, 50.0, timer=Table(batch, static=30.0), journal=Journal(path))
    assert result.chosen.assignment["attention", "attn"] == "sage_b"
    assert result.chosen.assignment["linear", "fc1"] == "dynamic"
    keys = [json.loads(line).get("key", "") for line in path.read_text().splitlines()]
    assert [key for key in keys if key.startswith("noise attention")] == ["noise attention attn sage_b"]


def test_the_choice_was_measured_to_be_within_the_budget(batch) -> None:
    model, journal = transformer(outlier=200.0), Journal()
    for budget in (0.005, 0.02, 0.1):
        result = tuned(model, batch, budget, journal=journal)
        assert result.chosen.drop <= budget
        assert result.chosen.metric == result.baseline - result.chosen.drop
        fitting = [trial for trial in result.trials if trial.drop <= budget]
        assert result.chosen.images_per_second == max(trial.estimated_images_per_second for trial in fitting)


def test_an_impossible_budget_returns_the_nearest_assignment(batch) -> None:
    model = transformer()
    result = tuned(model, batch, max_drop=0.0)
    assert not result.met
    quantized = [trial for trial in result.trials if not trial.assignment.is_float]
    assert result.chosen.drop == min(trial.drop for trial in quantized) > 0
    assert not result.chosen.assignment.is_float
    assert result.to_dict()["met"] is False


def test_float_is_chosen_if_nothing_is_faster(batch) -> None:
    slow = Table(batch, static=11.0, dynamic=12.0, sage_b=13.0)
    result = tuned(transformer(), batch, max_drop=0.0, timer=slow)
    assert result.met
    assert result.chosen == result.float_model
    assert result.chosen.assignment.is_float


def test_an_interrupted_search_resumes_to_an_identical_result(batch, tmp_path: Path) -> None:
    model, path = transformer(outlier=200.0), tmp_path / "journal.jsonl"
    real, calls = closeness(model, batch), []

    def breaks(module) -> float:
        calls.append(module)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(module)

    with pytest.raises(KeyboardInterrupt):
        tuned(model, batch, 0.05, metric=breaks, journal=Journal(path))
    resumed = tuned(model, batch, 0.05, metric=breaks, journal=Journal(path))
    resumed.save(tmp_path / "resumed.json")
    tuned(model, batch, 0.05).save(tmp_path / "whole.json")
    assert (tmp_path / "resumed.json").read_bytes() == (tmp_path / "whole.json").read_bytes()
    # all that was on file was not measured again, times included
    before, timer = len(calls), Table(batch)
    again = tuned(model, batch, 0.05, metric=breaks, timer=timer, journal=Journal(path))
    assert (len(calls), timer.calls) == (before, 0)
    assert again.chosen == resumed.chosen


def test_equal_results_give_identical_plots(batch, tmp_path: Path) -> None:
    result = tuned(transformer(), batch, 0.05)
    result.plot(tmp_path / "a.png")
    result.plot(tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert result.table().row_count == 1 + len(result.measured)


def test_no_trial_dominates_the_front(batch) -> None:
    result = tuned(transformer(outlier=200.0), batch, 0.05)
    front = result.front()
    assert len(front) >= 3
    for one in front:
        assert not [
            other
            for other in result.trials
            if other.drop < one.drop and other.estimated_images_per_second > one.estimated_images_per_second
        ]


@pytest.mark.parametrize("budget", [-0.1, float("nan")])
def test_a_negative_budget_is_refused(budget: float, batch) -> None:
    with pytest.raises(QFrameworkError, match="max_drop must be 0 or more points"):
        tuned(transformer(), batch, budget)


def test_unknown_variants_are_refused_before_anything_runs(batch) -> None:
    timer = Table(batch)
    with pytest.raises(UnsupportedError, match=r"variant must be .*, got 'sage9'"):
        tuned(transformer(), batch, 1.0, timer=timer, variants=("sage_b", "sage9"))
    assert timer.calls == 0


@pytest.mark.slow
def test_the_choice_is_measured_compiled(batch, fresh_dynamo) -> None:
    result = tuned(transformer(), batch, 50.0, compiled=True, timer=None, finalists=1, variants=())
    eager = {trial.assignment: trial for trial in result.trials}
    for each in result.measured:
        # INT8 kernels compute what the converted graph does but for the rounding of ties: a hundredth of the noise
        assert each.drop == pytest.approx(eager[each.assignment].drop, rel=0.05)


def test_the_written_plan_quantizes_a_model(batch, tmp_path: Path) -> None:
    model = transformer(outlier=200.0)
    result = tuned(model, batch, 0.5)
    result.save(tmp_path / "tuned.json")
    plan = Plan.load(tmp_path / "tuned.json")
    assert plan.needs_calibration
    assert plan.options == result.chosen.assignment.options()
    converted = quantize(model, batch, plan.quantizer, [batch])
    assert explain(converted, (batch,)).lowered == 5
    with torch.no_grad():
        # the same program, run once more
        assert closeness(model, batch)(converted) == result.chosen.metric


def test_static_layers_take_the_observer_of_least_noise_at_no_time(batch) -> None:
    """Values that only the calibration data holds widen the range of min-max, and less that of others."""
    model, wide = transformer(), batch.clone()
    wide[0, 0, :2] = 60.0
    observers = {"mse": OBSERVERS["mse"], "half": ActivationConfig("per_tensor", observer="percentile")}

    def search(meanings: Meanings | None) -> Tuning:
        with torch.no_grad():
            metric = closeness(model, batch)
            more = {"variants": (), "compiled": False, "timer": Table(batch), "meanings": meanings}
            return tune(model, batch, metric, [wide, batch], max_drop=90.0, **more)

    plain, found = search(None), search(Meanings(observers=observers))
    assert set(plain.chosen.assignment.values()) == {"static"}
    taken = found.chosen.assignment
    assert set(taken) == set(plain.chosen.assignment)
    assert {"static mse", "static half"} & set(taken.values())
    assert found.chosen.images_per_second == plain.chosen.images_per_second
    assert found.chosen.drop < plain.chosen.drop
    by_choices = {frozenset(trial.assignment.values()): trial for trial in found.trials}
    uniform = [by_choices[frozenset([choice])] for choice in ("static", "static mse", "static half")]
    assert found.chosen.drop <= min(trial.drop for trial in uniform)
    rules = {rule.selector: rule.config for rule in Plan.from_dict(found.to_dict()).quantizer.rules}
    for (kind, name), choice in taken.items():
        observer = {"static": "minmax", "static mse": "mse", "static half": "percentile"}[choice]
        config = rules[name].linear.activation if kind == "linear" else rules[name].attention
        assert config.observer == observer


def test_a_zero_point_costs_what_the_rule_says(batch) -> None:
    class Priced(Table):
        def zero_point(self, operands) -> float:
            return 1.0

    meanings = Meanings(observers={"zero_point": OBSERVERS["zero_point"]})
    timer = Priced(batch)
    result = tuned(transformer(), batch, max_drop=50.0, timer=timer, variants=(), meanings=meanings)
    speeds = {frozenset(t.assignment.values()): t.estimated_images_per_second for t in result.trials}
    # 100 ms without the 60 of the layers, which take 4 each; five linears 1 more with zero points
    assert speeds[frozenset(["static"])] == pytest.approx(16 / (0.1 - 0.06 + 0.024))
    assert speeds[frozenset(["static", "static zero_point"])] == pytest.approx(16 / (0.1 - 0.06 + 0.029))
    assert set(result.chosen.assignment.values()) == {"static"}


def test_zero_points_everywhere_are_measured_whole_whatever_they_are_estimated_to_take(batch) -> None:
    class Slow(Table):
        def zero_point(self, operands) -> float:
            return 30.0  # slower than float

    meanings = Meanings(observers={"zero_point": OBSERVERS["zero_point"]})
    result = tuned(transformer(), batch, max_drop=50.0, timer=Slow(batch), variants=(), meanings=meanings, finalists=1)
    measured = [frozenset(each.assignment.values()) for each in result.measured]
    assert frozenset(["static", "static zero_point"]) in measured
