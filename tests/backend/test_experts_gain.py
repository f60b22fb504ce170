"""Experts in INT8 by default: beside frozen INT8 linears on Hopper, where they pay by estimate."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from qframework import explain
from qframework.backend import linear_gain
from qframework.backend.compile import fallbacks, lower
from qframework.backend.experts_gain import LEAST_GAIN, NOT_TIMED, ExpertSizes, gain_of_experts
from qframework.backend.options import BackendOptions
from qframework.kernels.linear.grouped import choose_tile

RESULTS = Path(__file__).parents[2] / "benchmarks/results/other"
H200 = 0.84 * 4.8e6  # bytes of memory in a microsecond
FROZEN: dict[str, Any] = {"linear": "int8_dynamic", "freeze_weights": True}


class Gated(nn.Module):
    """Experts whose gate and up projection read the same rows."""

    def __init__(self, channels: int = 1024) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Parameter(torch.full((8, channels, channels), 1 / channels, dtype=torch.bfloat16)) for _ in range(3)
        )

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        gate, up = (F.grouped_mm(x, each.transpose(-2, -1), offs=ends) for each in (self.gate, self.up))
        return F.grouped_mm(F.silu(gate) * up, self.down.transpose(-2, -1), offs=ends)


def inputs(rows: int = 16, channels: int = 1024) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, channels).bfloat16(), torch.linspace(0, rows, 9)[1:].int()


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_gain, "_multiprocessors", lambda device: 132)


@pytest.mark.parametrize(
    ("name", "in_float", "deviation"),
    [("2026-11-30-h200-grouped-linear", 2, 0.1), ("2026-11-30-h200-grouped-linear-2", 0, 0.12)],
    ids=["fitted to", "others"],
)
def test_no_decision_on_what_was_measured_is_slower(name: str, in_float: int, deviation: float) -> None:
    errors, kept = [], 0
    for case in json.loads((RESULTS / f"{name}.json").read_text())["records"]:
        sizes = ExpertSizes(case["tokens"] * case["per_token"], case["experts"], case["outputs"], case["inputs"])
        if "grouped_mm" not in case["us"]:
            continue
        gain = gain_of_experts(sizes, H200)
        int8 = case["us"][f"int8 {tuple(choose_tile(*sizes, (9, 0)))}"] + gain.quantize_us
        measured = case["us"]["grouped_mm"] / int8
        estimated = gain.float_us / (gain.int8_us + gain.quantize_us)
        errors.append(math.log(estimated / measured))
        assert measured > 1 if estimated >= LEAST_GAIN else measured < LEAST_GAIN
        kept += estimated < LEAST_GAIN
    assert (len(errors), kept) == (32, in_float)
    assert math.sqrt(sum(error**2 for error in errors) / 32) < deviation


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("dynamic", [False, True])
def test_experts_that_pay_are_quantized(dynamic: bool) -> None:
    model, (x, ends) = Gated().eval(), inputs()
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        assert [layer.lowered for layer in explain(model, (x, ends), options=FROZEN).layers] == [True] * 3
        off = explain(model, (x, ends), options=FROZEN | {"experts": "off"})
    assert [layer.lowered for layer in off.layers] == [False] * 3


@pytest.mark.usefixtures("on_hopper")
def test_reasons_of_experts_that_do_not_pay() -> None:
    with torch.no_grad():
        layers = explain(Gated(64).eval(), inputs(channels=64), options=FROZEN).layers
    assert len(layers) == 3
    assert all("INT8 would gain less than 10%: by estimate" in layer.reason for layer in layers)
    # The two that read the same rows share their quantization.
    assert "0.7 us for quantizing its input" in layers[0].reason
    assert "1.4 us for quantizing its input" in layers[2].reason


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(("dtype", "lowered"), [(torch.float16, True), (torch.float32, False)], ids=str)
def test_other_dtypes_by_an_operator_of_a_library(dtype: torch.dtype, lowered: bool) -> None:
    """``grouped_mm`` takes bfloat16 alone; float32 was not timed."""
    pytest.importorskip("transformers.integrations.moe")

    class Fallback(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.full((8, 1024, 1024), 1 / 1024, dtype=dtype))

        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            return torch.ops.transformers.grouped_mm_fallback(x, self.up.transpose(-2, -1), ends)

    x, ends = inputs()
    with torch.no_grad():
        (layer,) = explain(Fallback().eval(), (x.to(dtype), ends), options=FROZEN).layers
    assert (layer.lowered, layer.reason) == (lowered, "" if lowered else NOT_TIMED)


@pytest.mark.usefixtures("on_hopper")
def test_what_was_not_timed_stays_in_float() -> None:
    with torch.no_grad():
        layers = explain(Gated(1032).eval(), inputs(channels=1032), options=FROZEN).layers
    assert [layer.reason for layer in layers] == [NOT_TIMED] * 3


@pytest.mark.usefixtures("on_hopper")
def test_gradients_keep_experts_in_float() -> None:
    reports = []

    def backend(gm: GraphModule, example: Any) -> Any:
        reports.extend(lower(gm, example, BackendOptions(**FROZEN)))
        return gm

    torch.compile(Gated(512), backend=backend)(*inputs(channels=512))
    assert [each.reason for each in reports] == ["its gradients are needed. Use torch.no_grad()"] * 3
    assert not any(each.fallback for each in reports)


@pytest.mark.parametrize("options", [FROZEN, {"linear": "int8_dynamic"}, {"freeze_weights": True}, {}], ids=str)
def test_a_default_is_no_fallback(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """On a CPU, or without frozen INT8 linears."""
    model, (x, ends) = Gated(64).eval(), inputs(channels=64)
    fallbacks.clear()
    with torch.no_grad(), caplog.at_level(logging.WARNING, "qframework"):
        layers = explain(model, (x, ends), options=options).layers
        out = torch.compile(model, backend="qframework", options=options)(x, ends)
        torch.testing.assert_close(out, model(x, ends))
    assert [layer.lowered for layer in layers] == [False] * 3
    reason = NOT_TIMED if options == FROZEN else "by a matrix of its own. Pass options="
    assert all(reason in layer.reason for layer in layers)
    assert not [record for record in caplog.records if record.name.startswith("qframework")]
    assert not fallbacks
