"""The benchmark of attention with a soft cap or sinks runs, and would see that one is missing."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import attention_logits


def test_smoke(tmp_path) -> None:
    path = tmp_path / "times.json"
    assert attention_logits.main(["--smoke", "--output", str(path)]) == 0
    records = json.loads(path.read_text())["records"]
    assert [record["masking"] for record in records] == 2 * ["causal", "window", "none"]
    assert [record["sinks"] for record in records] == 3 * [False] + 3 * [True]
    for record in records:
        known = {"blocks known"} & set(record["errors"])  # on a CPU quantized, and not timed for its error
        assert {"eager", "auto", "general kernel"} == set(record["us"]) - known
        assert not record["failed"]
        # On a CPU ``auto`` is a formula whose logits are rounded to bfloat16 as eager ones are, and a cap shrinks them.
        assert record["errors"]["auto"] <= (record["errors"]["eager"] if record["sinks"] else 0.01)
        assert len(known) == (record["masking"] == "window")


def test_only_the_shapes_that_are_asked_for_are_measured(tmp_path) -> None:
    path = tmp_path / "times.json"
    attention_logits.main(["--smoke", "--only", "sinks=True", "--output", str(path)])
    assert {record["sinks"] for record in json.loads(path.read_text())["records"]} == {True}


@pytest.mark.parametrize("what", ["causal", "window", "none"])
def test_a_result_without_the_cap_is_wrong(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = attention_logits.draw(attention_logits.Shape(1, 2, 2, 60, 60, 32), what, torch.device("cpu"))
    operands = [x.float() for x in (case.query, case.key, case.value)]
    tolerance = attention_logits._TOLERANCE["auto"]
    assert attention_logits.error(case, attention_logits.eager(case, *operands)) < tolerance
    monkeypatch.setattr(attention_logits, "_CAP", 1e9)
    wrong = attention_logits.eager(case, *operands)
    monkeypatch.undo()
    assert attention_logits.error(case, wrong) > 2 * tolerance


def test_every_stated_shape_is_measured_once() -> None:
    cases = list(attention_logits._cases(False))
    assert len(set(cases)) == len(cases) == 3 * 22 + 4


@pytest.mark.parametrize("what", ["causal", "window", "none"])
def test_a_result_without_sinks_is_wrong(what: str) -> None:
    shape = attention_logits.Shape(1, 2, 2, 60, 60, 32, True)
    case = attention_logits.draw(shape, what, torch.device("cpu"))
    operands = [x.float() for x in (case.query, case.key, case.value)]
    tolerance = attention_logits._TOLERANCE["auto"]
    assert attention_logits.error(case, attention_logits.eager(case, *operands)) < tolerance
    assert case.sinks is not None
    without = attention_logits.eager(case._replace(sinks=torch.full_like(case.sinks, -1e4)), *operands)
    assert attention_logits.error(case, without) > 2 * tolerance
