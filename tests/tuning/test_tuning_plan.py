"""The plan that ``tune`` writes: JSON and back, calibration, and refusals (tuning/plan.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qframework.errors import FileFormatError, UnsupportedError
from qframework.quantizer import QFrameworkQuantizer, Recipe, dynamic_int8, static_attention, static_int8
from qframework.tuning.plan import Plan


def test_a_plan_survives_a_json_round_trip() -> None:
    quantizer = QFrameworkQuantizer().set_global(static_int8()).set_module_name("head", None)
    kept = Plan(quantizer, {"attention": {"a": "sage_b"}}, Recipe(bias_correction=True))
    read = Plan.from_dict(json.loads(json.dumps(kept.to_dict())))
    assert (read.quantizer.rules, read.options, read.recipe) == (quantizer.rules, kept.options, kept.recipe)


@pytest.mark.parametrize(
    ("config", "recipe", "needed"),
    [
        (static_int8(), None, True),
        (static_attention(), None, True),
        (dynamic_int8(), None, False),
        (None, None, False),
        (dynamic_int8(), Recipe(), True),
    ],
)
def test_calibration_is_needed_for_static_scales_and_recipes(config, recipe, needed) -> None:
    assert Plan(QFrameworkQuantizer().set_global(config), {}, recipe).needs_calibration is needed


RULES = QFrameworkQuantizer().set_global(None).to_dict()


NO_CONFIGURATION = {
    "a text": ("a text", FileFormatError, "is not a plan"),
    "no mapping": ("[]", FileFormatError, "must have a format and a quantizer"),
    "no quantizer": ('{"format": 1}', FileFormatError, "must have a format and a quantizer"),
    "a newer format": (json.dumps({"format": 9, "quantizer": RULES}), FileFormatError, "a format up to 1, got 9"),
    "unknown options": (
        json.dumps({"format": 1, "quantizer": RULES, "options": {"atention": "off"}}), UnsupportedError, "atention"
    ),
    "options of no kind": (
        json.dumps({"format": 1, "quantizer": RULES, "options": 3}), UnsupportedError, "options must be a mapping"
    ),
    "unknown recipe": (
        json.dumps({"format": 1, "quantizer": RULES, "recipe": {"smoth": 1}}), UnsupportedError, "'smoth'"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("content", "error", "message"), NO_CONFIGURATION.values(), ids=NO_CONFIGURATION)
def test_files_that_are_not_plans_are_refused(content, error, message, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(error, match=message):
        Plan.load(tmp_path / "a.json")
