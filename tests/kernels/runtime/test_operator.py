"""operator.py: operators compute the same inside torch.autocast as outside of it."""

from __future__ import annotations

import pytest
import torch
from operator_calls import CALLS, effects
from torch import Tensor

import qframework.training  # noqa: F401  defines operators too
from qframework.errors import UnsupportedError
from qframework.kernels.runtime import operator as operator_module
from qframework.kernels.runtime.operator import LIBRARY


def operator(name):
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.qframework, packet), overload or "default")


@pytest.mark.parametrize("name", CALLS)
def test_autocast_changes_no_bit(name):
    torch.manual_seed(0)
    arguments = CALLS[name]()
    outside = effects(operator(name), arguments)
    with torch.autocast("cpu", torch.bfloat16):
        inside = effects(operator(name), arguments)
    for mine, theirs in zip(inside, outside, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def test_autocast_stays_on_after_an_operator():
    x = torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        torch.ops.qframework.dynamic_quantize(x, "per_token")
        assert (x @ x.t()).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["AutocastCPU", "AutocastCUDA"])
def test_every_operator_is_registered(kind):
    names = {name for name in torch._C._dispatch_get_registrations_for_dispatch_key(kind) if name.startswith("qframe")}
    assert names == set(LIBRARY._op_defs) | {"qframework::dynamic_quantize.alone"}


def test_compiled_whole_under_autocast():
    def model(x: Tensor, w: Tensor) -> Tensor:
        q, scale = torch.ops.qframework.dynamic_quantize(x @ w.t(), "per_token")
        return torch.ops.qframework.dequantize(q, scale, torch.float32)

    x, w = torch.randn(5, 8), torch.randn(6, 8)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = model(x, w)
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x, w), expected)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("inference", [False, True])
def test_nested_tensors_are_refused(layout, inference):
    with torch.inference_mode(inference):
        nested = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)], layout=layout)
        with pytest.raises(UnsupportedError, match="dynamic_quantize: tensors must be dense, got a nested one"):
            torch.ops.qframework.dynamic_quantize(nested, "per_token")
        with pytest.raises(UnsupportedError, match="dynamic_quantize: tensors must be dense, got a nested one"):
            torch.ops.qframework.dynamic_quantize.alone(nested, "per_token")


def test_no_graph_is_captured_inside_of_a_dual_level_that_would_lose_tangents(monkeypatch):
    """As AOTAutograd before PyTorch 2.12 would."""
    monkeypatch.setattr(operator_module, "LOSES_TANGENTS", True)
    fake = operator_module._outside_dual_levels("scale", lambda x: x)
    assert fake(1) == 1
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(
            UnsupportedError,
            match=r"scale: the call must be .*, or a compilation inside of one, .*\. Call the function outside",
        ),
    ):
        fake(1)
