"""benchmarks.pretrained_front: all steps on a tiny model, times that stand for a GPU's, files of other steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import pretrained_front, report_front
from benchmarks.machine import describe_machine
from benchmarks.pretrained_front_cases import MEANINGS, SMOKE, call_name, digest, read
from benchmarks.pretrained_front_search import StoredTimer, best_of_kernels, kernels_name, thin_front, wanted_whole
from qframework.errors import FileFormatError
from qframework.tuning.assignment import Assignment
from qframework.tuning.layers import AttentionOperands, LinearOperands, TensorShape
from qframework.tuning.results import Trial


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
    assert {f"static + attention, {name}" for name in MEANINGS.observers} <= set(by_name)
    for trial in trials:  # measured on other crops where it is shown
        assert ("held_out" in trial) == bool(trial["configuration"] or trial["front"])
    tuned = [trial for trial in trials if trial["estimated_images_per_second"] is not None]
    for (
        trial
    ) in tuned:  # none of the front is dominated, but by estimates that kernels which are measured whole correct
        beaten = [
            other
            for other in tuned
            if other["estimated_images_per_second"] > trial["estimated_images_per_second"]
            and other["correspondences"] >= trial["correspondences"]
        ]
        if trial["front"] and beaten:
            same = [other["correspondences"] for other in tuned if other["kernels"] == trial["kernels"]]
            assert trial["kernels"] in by_name
            assert trial["correspondences"] == max(same)
    assert {"float", *wanted_whole(document)} == set(document["images_per_second"])
    with pytest.raises(FileFormatError, match=r"must be a file of `benchmarks.pretrained_front times`"):
        read(path, "times")
    assert json.loads(path.read_text())["smoke"]


def assigned(name: str, linear: str, kept: float, front: bool) -> dict[str, Any]:
    """A trial of one linear. ``kept`` is what counts: on crops that nothing was chosen by."""
    assignment = {"linear": {"fc": linear}, "attention": {}}
    layers = {f"linear {linear}": 1}
    return {
        "configuration": name,
        "correspondences": 99.0,
        "held_out": kept,
        "kernels": name or linear,
        "estimated_images_per_second": 1.0,
        "front": front,
        "layers": layers,
        "assignment": assignment,
    }


def test_the_page_compares_what_was_found_with_uniform_configurations(tmp_path: Path) -> None:
    assert report_front.load(tmp_path) is None
    assert report_front.render(None) == ""
    head = {"benchmark": "pretrained_front", "smoke": False, "machine": describe_machine("cpu")}
    trials = [
        assigned("static", "static", 70.0, False),
        assigned("dynamic", "dynamic", 85.0, False),
        assigned("", "float", 80.0, True),
    ]
    trials[2]["kernels"] = "0123456789ab"
    speeds = {"float": 50.0, "static": 100.0, "dynamic": 90.0, "0123456789ab": 120.0}
    search = {"crops": 68, "held_out_crops": 256, "trials": trials}
    steps = {"times": {"batch": 64}, "search": search, "whole": {"images_per_second": speeds}}
    for step, found in steps.items():
        (tmp_path / f"{step}.json").write_text(json.dumps({**head, "step": step, **found}))
    front = report_front.load(tmp_path)
    assert front is not None
    page = report_front.render(front)
    assert "| 1 linear float | found | 120 | 80.0 |\n| static | uniform | 100 | 70.0 |" in page
    assert "one that was found is at least as fast and as accurate: uniform static. For none of these: " in page
    assert "For none of these: uniform dynamic." in page
    (plot,) = report_front.plots(front).values()
    plot.draw(tmp_path / "plot.svg")
    assert plot.mark in (tmp_path / "plot.svg").read_text()


def test_the_line_joins_what_nothing_exceeds() -> None:
    points = [(1.0, 99.0), (0.9, 97.0), (2.0, 90.0), (3.0, 92.0), (4.0, 91.0)]
    assert report_front._best(points) == [(1.0, 99.0), (3.0, 92.0), (4.0, 91.0)]


def test_every_speed_is_saved_before_the_next_case() -> None:
    """A run that is ended from outside keeps what it measured."""
    saved: list[dict[str, float]] = []
    with torch.no_grad():
        found = pretrained_front.whole(SMOKE, "cpu", {}, 10.0, saved.append, turns=3)
    assert [list(speeds) for speeds in saved] == [["float"]] * 3
    assert 0 < found["float"] == saved[-1]["float"]


def test_speeds_are_medians_of_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = iter([10.0, 50.0, 30.0])
    monkeypatch.setattr(pretrained_front, "throughput", lambda *_: next(speeds))
    assert pretrained_front.whole(SMOKE, "cpu", {}, 10.0, turns=3) == {"float": 30.0}


def test_costs_are_those_of_the_same_turn() -> None:
    found = {"static + attention": [100.0, 200.0, 400.0], "float": [80.0, 160.0, 320.0]}
    assert pretrained_front.added_percent(found, "float") == pytest.approx(25.0)
    assert pretrained_front.added_percent(found, "static + attention") == 0.0


def test_speeds_of_an_earlier_run_are_kept_if_it_was_on_the_same_device(tmp_path: Path) -> None:
    path = tmp_path / "whole.json"
    head = {"benchmark": "pretrained_front", "step": "whole", "machine": {"device": "H100"}}
    path.write_text(json.dumps({**head, "images_per_second": {"float": 50.0}}))
    assert pretrained_front.earlier_speeds(path, "H100") == {"float": 50.0}
    with pytest.raises(FileFormatError, match="must hold speeds of H200, got those of H100"):
        pretrained_front.earlier_speeds(path, "H200")


def test_configurations_of_equal_kernels_are_timed_once() -> None:
    trials = [
        assigned("static, mse", "static mse", 80.0, False) | {"kernels": "static"},
        assigned("static", "static", 70.0, False),
        assigned("", "static entropy", 85.0, True) | {"kernels": "static"},
        assigned("", "static zero point", 85.0, True) | {"kernels": "0123"},
        assigned("", "dynamic", 60.0, False) | {"kernels": "4567"},
    ]
    wanted = wanted_whole({"trials": trials})
    assert set(wanted) == {"static", "0123"}
    assert wanted["0123"]["linear", "fc"] == "static zero point"


def test_of_the_front_only_steps_of_a_point_are_kept() -> None:
    points = [(10.0, 80.0), (9.0, 80.4), (8.0, 81.2), (7.0, 79.0), (6.0, 82.1), (5.0, 82.3)]
    trials = [Trial(Assignment({}), kept, 100 - kept, speed) for speed, kept in reversed(points)]
    assert [trial.metric for trial in thin_front(trials)] == [80.0, 81.2, 82.3]


def test_of_the_kernels_of_each_configuration_the_most_accurate_trial_is_shown() -> None:
    """Whatever their speed is estimated to be: ``tune`` measures them whole."""
    drops = {"static": 3.0, "static mse": 2.0, "static zero point": 1.0, "dynamic": 0.5}
    made = {name: Assignment({("linear", "fc"): name}) for name in drops}
    trials = [Trial(made[name], 100.0 - drop, drop, 1.0) for name, drop in drops.items()]
    assert best_of_kernels(trials, [made["static"], made["dynamic"]]) == [trials[3], trials[1]]


def test_kernels_are_named_by_the_first_configuration_that_runs_them() -> None:
    one = {name: Assignment({("linear", "fc"): name}) for name in ("static", "static mse", "static zero point")}
    named = {one["static"]: "uniform", one["static mse"]: "uniform, mse"}
    assert kernels_name(one["static mse"], named) == kernels_name(one["static"], named) == "uniform"
    assert kernels_name(one["static zero point"], named) == digest(
        {"linear": {"fc": "static per_tensor zero_point"}, "attention": {}}
    )


def test_a_configuration_without_a_speed_is_counted(tmp_path: Path) -> None:
    trials = [assigned("static", "static", 70.0, False), assigned("dynamic", "dynamic", 85.0, False)]
    speeds = {"float": 50.0, "static": 100.0}
    front = report_front.Front(
        {"crops": 68, "held_out_crops": 256, "trials": trials}, {"images_per_second": speeds}, 64
    )
    assert [row[0] for row in front.rows()] == ["static", "float"]
    assert report_front._comparison(front).endswith("1 more were not timed.\n")
