"""``qframework export-onnx``."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
from cli_runs import run, run_json


def test_a_saved_model_and_its_errors(tmp_path: Path) -> None:
    run_json("quantize", "digits", "--output", "digits.pt2", "--batches", "1")
    result = run_json("export-onnx", "digits.pt2")
    assert result["output"] == "digits.onnx"
    assert result["int8_linears"] == 5
    assert result["left_in_float"] == {}
    assert result["bytes"] == Path("digits.onnx").stat().st_size
    session = onnxruntime.InferenceSession("digits.onnx", providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape[0] == "batch"

    refused = run("export-onnx", "digits.pt2", "--output", "missing/digits.onnx")
    assert refused.exit_code == 2
    assert "--output" in refused.output
    assert run("export-onnx", "digits.pt2", "--opset", "11").exit_code == 2
    run_json("quantize", "digits", "--output", "dynamic.pt2", "--dynamic", "--batches", "1")
    refused = run("export-onnx", "dynamic.pt2")
    assert refused.exit_code == 2
    assert "static INT8 inputs per tensor" in refused.output
    assert not Path("dynamic.onnx").exists()
