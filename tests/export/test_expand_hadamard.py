"""A model with Hadamard transforms in ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from onnx_models import Session
from torch import nn

from qframework.compat.torchao import convert_pt2e, prepare_pt2e
from qframework.export import to_onnx
from qframework.numerics import sqnr_db
from qframework.quantizer import QFrameworkQuantizer, calibrate, dynamic_int8, static_int8
from qframework.quantizer.hadamard_inputs import turn_dynamic_inputs


@pytest.mark.filterwarnings("ignore")
def test_onnx_runtime_computes_the_same(tmp_path: Path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 16)).eval()
    data = [torch.randn(2, 5, 32) for _ in range(2)]
    gm = torch.export.export(model, (data[0],)).module()
    quantizer = QFrameworkQuantizer().set_global(static_int8()).set_module_name("2", dynamic_int8())
    assert turn_dynamic_inputs(gm, quantizer, data, chosen={"2": 64}) == {"2": 64}
    prepared = prepare_pt2e(gm, quantizer)
    calibrate(prepared, data)
    quantized = convert_pt2e(prepared)
    report = to_onnx(quantized, tmp_path / "model.onnx", (data[0],))
    assert list(report.left_in_float) == ["2"]
    found = Session(report.path)((data[0],))
    assert sqnr_db(quantized(data[0]), found) > 40
