"""SageAttention's tables 10 and 11: smoke runs, refused results, and their sections of the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import paper_adaptive, paper_speeds, report_adaptive, report_papers
from benchmarks.harness import Results
from qframework.attention.adaptive import PAPER_ORDER


def test_adaptive_choice_and_its_section(tmp_path: Path) -> None:
    path = tmp_path / "adaptive.json"
    assert paper_adaptive.main(["--smoke", "--output", str(path)]) == 0
    document = json.loads(path.read_text())
    for found in document["models"].values():
        assert set(found["layers"].values()) <= set(PAPER_ORDER)
        assert sum(found["kernels"].values()) == len(found["layers"]) == 2
        figures = found["figures"]
        assert figures["sage_t"]["sqnr_db"] > figures["sage_vb"]["sqnr_db"] + 10  # P and V in 16 bit
        assert figures["sage_vb"]["sqnr_db"] - 1 <= figures["adaptive"]["sqnr_db"] <= figures["sage_t"]["sqnr_db"]
    assert report_papers.load(tmp_path) == {}  # of a smoke run
    path.write_text(json.dumps({**document, "smoke": False}))
    section = "\n".join(report_adaptive.adaptive_section(report_papers.load(tmp_path)["paper_adaptive"]))
    kept = document["models"]["dinov2"]
    assert f"| DINOv2 ViT-S/14 | sage_t | 2 sage_t | {kept['figures']['sage_t']['sqnr_db']:.1f} |" in section
    assert "0.1835" in section  # the paper's


def test_speeds_and_their_section(tmp_path: Path) -> None:
    path = tmp_path / "speeds.json"
    assert paper_speeds.main(["--smoke", "--device", "cpu", "--output", str(path)]) == 0
    document = json.loads(path.read_text())
    records = {record["provider"]: record for record in document["records"]}
    assert set(records) == set(paper_speeds.PROVIDERS)
    assert all(record["status"] == "ok" for record in records.values())
    assert records["sage_b" + paper_speeds.NOT_SMOOTHED]["relative_l1"] > 1.5 * records["sage_b"]["relative_l1"]
    nothing = "\n".join(report_adaptive.speed_section(None))
    assert "not run on a GPU" in nothing
    assert "| CogVideoX | 327.57 | 327.52 |" in nothing
    one = {"model": "UltraPixel", "provider": "sage_b", "tflops": 123.45}
    section = "\n".join(report_adaptive.speed_section({**document, "records": [one]}))
    assert "| UltraPixel | 325.18 | 324.56 |  | 123.5 |" in section
    assert "not run on a GPU" not in section


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"torch": lambda given: torch.zeros_like(given.query)}
    monkeypatch.setattr(paper_speeds, "PROVIDERS", wrong)
    results = Results("paper_speeds", {})
    paper_speeds.run(results, paper_speeds.SMOKE, "cpu", 0, 1.0)
    (record,) = results.records
    assert record.status == "wrong"
    assert record.p50_ms is None
