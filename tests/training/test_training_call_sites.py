"""Compiled INT8 training calls implementations at their places in generated code, not operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from training_models import MODELS, inputs, loss_of

from qframework.compat import call_sites
from qframework.kernels.runtime import call_site as runtime
from qframework.kernels.runtime.operator import OPERATORS
from qframework.training import convert_to_int8_training


def step(name: str) -> tuple[Tensor, ...]:
    """The loss and the gradients of a compiled model."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = convert_to_int8_training(MODELS[name]().eval())
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(torch.compile(model), inputs(name))
    return loss, *torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.full) for name in ("vit", "gpt2"))])
def test_sites_pass_what_implementations_accept(name: str, monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    """The same bits as through the dispatcher, which converts arguments."""
    called: list[str] = []

    def site(operator: str) -> Any:
        called.append(operator)
        return OPERATORS[operator].cpu

    # Graphs are compiled twice, each kernel in C++ once.
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        expected = step(name)
        assert not called
        monkeypatch.setattr(call_sites, "DEVICES", ("cpu",))
        monkeypatch.setattr(runtime, "call_site", site)
        found = step(name)
    assert {"block_linear", "block_quantize", "block_dequantize"} <= set(called)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
