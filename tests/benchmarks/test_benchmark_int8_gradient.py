"""The benchmark of gradients in 8 bit checks before it times."""

from __future__ import annotations

import json

from benchmarks import int8_gradient


def test_int8_gradient_smoke(tmp_path):
    output = tmp_path / "out.json"
    assert int8_gradient.main(["--smoke", "--device", "cpu", "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert len(rows) == 4
    for row in rows:
        for provider in ("math", *int8_gradient.GRADIENTS):
            assert row[provider]["p50_ms"] > 0
            assert row[provider]["error"] <= int8_gradient.MOST[provider]
        assert row["int8"]["error"] > row["mixed_operator"]["error"] > row["math"]["error"]


def test_wrong_gradients_are_not_timed(monkeypatch):
    monkeypatch.setitem(int8_gradient.MOST, "int8", 1e-6)
    row = int8_gradient.measure(int8_gradient.Case(1, 2, 1, 32, 32, False), "cpu", ("mixed", "int8"))
    assert row["int8"].startswith("wrong: an error of ")
    assert row["mixed"]["p50_ms"] > 0
