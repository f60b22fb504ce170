"""The benchmark of attention with a soft cap runs, and would see a missing cap."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import attention_softcap


def test_smoke(tmp_path) -> None:
    path = tmp_path / "times.json"
    assert attention_softcap.main(["--smoke", "--output", str(path)]) == 0
    records = json.loads(path.read_text())["records"]
    assert [record["masking"] for record in records] == ["causal", "window", "none"]
    for record in records:
        assert set(record["us"]) == {"eager", "auto", "general kernel"}
        assert not record["failed"]
        assert record["errors"]["auto"] < 0.01
        assert ("blocks known" in record["errors"]) == (record["masking"] == "window")


@pytest.mark.parametrize("what", ["causal", "window", "none"])
def test_a_result_without_the_cap_is_wrong(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = attention_softcap.draw(attention_softcap.Shape(1, 2, 2, 60, 60, 32), what, torch.device("cpu"))
    operands = [x.float() for x in (case.query, case.key, case.value)]
    tolerance = attention_softcap._TOLERANCE["auto"]
    assert attention_softcap.error(case, attention_softcap.eager(case, *operands)) < tolerance
    monkeypatch.setattr(attention_softcap, "_CAP", 1e9)
    wrong = attention_softcap.eager(case, *operands)
    monkeypatch.undo()
    assert attention_softcap.error(case, wrong) > 2 * tolerance


def test_every_stated_shape_is_measured_once() -> None:
    cases = list(attention_softcap._cases(False))
    assert len(set(cases)) == len(cases) == 3 * 13 + 2
