"""The aims of attention on Hopper: small cases agree with float64 on a CPU, and the page says what is short."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import attention_rows, report_attention_rows
from benchmarks.attention_rows import Case

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these calls are for a CPU")
CASES = [
    Case("static", 2, 2, 2, 37, 16, "static"),
    Case("causal", 2, 4, 2, 150, 16, "causal"),
    Case("masks", 3, 4, 2, 40, 16, "padding"),
    Case("masks", 2, 2, 2, 300, 16, "band"),
    Case("windows", 128, 2, 2, 9, 16, "window bias"),
    Case("factors", 2, 2, 2, 16, 16, "factors"),
    Case("packed", 1, 2, 2, 0, 16, "packed", mix="tiny"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind)
def test_calls_agree_with_float64(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention_rows.MIXES, "tiny", [70, 33])
    torch.manual_seed(0)
    row = attention_rows.measure(case, 0)
    assert not any(why.startswith("wrong") for why in row.get("refused", {}).values())
    assert 0 < row["error"]["packed" if case.mix else "auto"] < 0.03
    if not case.mix:  # the peer gets the same mask
        assert row["error"]["flash"] < 0.001


def test_parts_hold_each_case_once() -> None:
    parts = [case for part in range(3) for case in attention_rows.chosen(f"heads:{part}/3")]
    assert sorted(parts) == sorted(attention_rows.ROWS["heads"])
    assert list(attention_rows.chosen("short,static")) == attention_rows.ROWS["short"] + attention_rows.ROWS["static"]


def test_the_page_says_what_is_short(tmp_path: Path) -> None:
    def row(run: int, case: str, ours: float, cudnn: float) -> dict:
        us = {"auto": ours, "cudnn": cudnn, "flash": 99.0}
        return {"run": run, "row": "short", "case": case, "us": us, "error": {"auto": 0.0003, "cudnn": 0.0002}}

    rows = [row(1, "a", 10, 15), row(1, "b", 10, 12), row(2, "a", 10, 14), row(2, "b", 10, 9)]
    about = {"device": "a GPU", "torch": "2", "commit": "abc", "date": "2026-01-01"}
    (tmp_path / "one.json").write_text(json.dumps({"about": about, "rows": rows}))
    page = report_attention_rows.render(*report_attention_rows.load(tmp_path))
    assert "| 1 | 1.2 | 2 | 0.90 to 1.50, geometric mean 1.23 | short of must in 1 of 2 cases |" in page
    assert "| a | 10.0 | 14.0 | cudnn | 1.50, 1.40 | 0.0003 |" in page
    assert "| b | 10.0 | 9.0 | cudnn | 1.20, 0.90 (short) | 0.0003 |" in page
    assert page.index("| a | 10") < page.index("| b | 10")
    newer = [row(1, "a", 10, 30), row(1, "b", 10, 20)]
    (tmp_path / "one-2.json").write_text(json.dumps({"about": about, "rows": newer}))
    page = report_attention_rows.render(*report_attention_rows.load(tmp_path))
    assert "| a | 10.0 | 30.0 | cudnn | 3.00 | 0.0003 |" in page
    assert "Files: `one-2`: a GPU, torch 2, commit abc, 2026-01-01.\n" in page


def test_operations_of_a_case() -> None:
    assert report_attention_rows.operations("4 x 32/8 x 4,096 x 64") == 4 * 4 * 32 * 4096**2 * 64
    assert report_attention_rows.operations("4 x 32 x 128 x 64, causal") == 2 * 4 * 32 * 128**2 * 64


def test_gradients_left_to_pytorch_are_a_row_of_their_own(tmp_path: Path) -> None:
    def row(tokens: int, error: float, ms: float, key_heads: int = 4) -> dict:
        sizes = {"batch": 2, "heads": 4, "key_heads": key_heads, "tokens": tokens, "channels": 64}
        times = {"cudnn": {"error": 0.0003, "p50_ms": 1.2}, "mixed": {"error": error, "p50_ms": ms}}
        return {"run": 1, **sizes, "causal": tokens > 2000, "order": "heads", "dtype": "float16", **times}

    rows = [row(4096, 0.016, 1.0), row(2048, 0.00031, 1.2, key_heads=2)]
    (tmp_path / "one.json").write_text(json.dumps({"about": {"device": "a GPU"}, "rows": rows}))
    page = report_attention_rows.render(*report_attention_rows.load(tmp_path))
    assert '| gradient `"mixed"`, forward and backward | PyTorch | 1 | 1.3 | 1 | 1.20 to 1.20, ' in page
    assert '| gradient `"mixed"` left to PyTorch, forward and backward | PyTorch | 0.99 |  | 1 | 1.00 to 1.00, ' in page
    assert "| 2 x 4 x 4,096 x 64, causal, heads first | 1000.0 | 1200.0 | cudnn | 1.20 | 0.0160 |" in page
    assert "| 2 x 4/2 x 2,048 x 64, causal, heads first | 1200.0 | 1200.0 | cudnn | 1.00 | 0.0003 |" in page
