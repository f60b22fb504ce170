"""Numbers that export keeps as tensors become numbers, so that masks built of them are recognized."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import qframework
from qframework import numerics
from qframework.backend.compile import lower
from qframework.backend.options import BackendOptions
from qframework.graph.scalar_constants import LIFTED, write_out_scalars


class Masked(nn.Module):
    """Causal attention whose mask is built of numbers as tensors, as transformers' eager masks are."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.lifted_tensor_of_mine = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        tokens = torch.arange(x.shape[1], device=x.device)
        kept = tokens[None, :] <= tokens[:, None]
        mask = torch.where(kept, torch.tensor(0.0), torch.finfo(x.dtype).min)
        logits = q @ k.transpose(-1, -2) / torch.sqrt(torch.tensor(16)) + mask
        return (logits.softmax(-1) @ v) * self.lifted_tensor_of_mine + torch.tensor([1.0, 2.0]).sum()


def exported():
    torch.manual_seed(0)
    model, x = Masked().eval(), torch.randn(2, 8, 32)
    return model, x, torch.export.export(model, (x,)).module()


def constants(gm):
    """Constants, and the parameter that is named like one, which the graph reads."""
    return {str(node.target) for node in gm.graph.find_nodes(op="get_attr") if str(node.target).startswith(LIFTED)}


def test_numbers_are_written_out_and_nothing_else():
    model, x, gm = exported()
    before = {name: getattr(gm, name) for name in constants(gm)}
    assert sorted(value.ndim for value in before.values()) == [0, 0, 0, 1]
    write_out_scalars(gm)
    gm.recompile()
    left = constants(gm)
    assert sorted(before[name].ndim for name in left) == [0, 1]
    assert "lifted_tensor_of_mine" in left
    assert not any(hasattr(gm, name) for name in before.keys() - left)
    assert torch.equal(gm(x), model(x))


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_mask_of_such_numbers_is_causal():
    model, x, _ = exported()
    quantized, calls = qframework.quantize(model, (x,), "static_int8", [(x,)]), []

    def backend(gm, example_inputs):
        lower(gm, example_inputs, BackendOptions(attention="sage_b"))
        sage = torch.ops.qframework.sage_attention.default
        calls.extend(node.args for node in gm.graph.nodes if node.target is sage)
        return gm.forward

    with torch.no_grad():
        y = torch.compile(quantized, backend=backend)(x)
        assert numerics.sqnr_db(model(x), y) > 25
    ((_, _, _, mask, causal, *_),) = calls
    assert mask is None
    assert causal is True
