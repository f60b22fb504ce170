"""Outputs that are constants of the code, in ONNX files and packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import qframework
from qframework.errors import UnsupportedError
from qframework.export import load_package
from qframework.quantizer import static_int8

X = torch.randn(4, 16)


class Returning(nn.Module):
    """Returns what ``outputs`` makes of a linear's result."""

    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self.fc, self.outputs = nn.Linear(16, 8), outputs

    def forward(self, x: Tensor) -> Any:
        return self.outputs(self.fc(x))


def quantized(outputs: Any) -> Any:
    torch.manual_seed(0)
    return qframework.quantize(Returning(outputs).eval(), X, static_int8(), [X])


def run(path: Path) -> dict[str, Any]:
    session = onnxruntime.InferenceSession(path)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {session.get_inputs()[0].name: X.numpy()}), strict=True))


def test_numbers_are_tensors_and_none_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = quantized(lambda y: (None, y, 2**60 + 1, {"off": None, "flag": True, "share": 0.1}, y.shape[0]))
    model.to_onnx(tmp_path / "model.onnx")
    found = run(tmp_path / "model.onnx")
    assert [*found] == ["output_1", "output_2", "output_3.flag", "output_3.share", "output_4"]
    with torch.no_grad():
        np.testing.assert_allclose(found.pop("output_1"), model(X)[1].numpy(), atol=1e-5)
    assert {name: (value.dtype.name, value.shape, value.item()) for name, value in found.items()} == {
        "output_2": ("int64", (), 2**60 + 1),
        "output_3.flag": ("bool", (), True),
        "output_3.share": ("float64", (), 0.1),
        "output_4": ("int64", (), 4),
    }
    assert not any("dedup" in record.message for record in caplog.records)


def test_a_package_returns_numbers_as_tensors(tmp_path: Path, fresh_dynamo: None) -> None:
    quantized(lambda y: {"y": y, "share": 0.1, "off": None}).to_package(tmp_path / "model.pt2")
    found = load_package(tmp_path / "model.pt2")(X)
    assert (found["share"].dtype, found["share"].item(), found["off"]) == (torch.float64, 0.1, None)


def test_a_text_is_named(tmp_path: Path) -> None:
    model = quantized(lambda y: {"y": y, "name": "small"})
    for write, file in ((model.to_onnx, "model.onnx"), (model.to_package, "model.pt2")):
        with pytest.raises(
            UnsupportedError, match=r"output 1 of model must be a tensor, a number or None, got 'small'"
        ):
            write(tmp_path / file)
        assert not [*tmp_path.iterdir()]
