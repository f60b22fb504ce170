"""Float weights of a model on a GPU are quantized together at the start of a call, if that is correct."""

from __future__ import annotations

import pytest
import torch
from lowered_models import Block, example
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from qframework import numerics
from qframework.backend import group_weights as module
from qframework.backend.compile import lower
from qframework.backend.group_weights import group_weights
from qframework.backend.lowering import Lowering
from qframework.backend.options import BackendOptions
from qframework.backend.outline_blocks import outline
from qframework.compat.dynamo import recorded_value

_together = torch.ops.qframework.quantize_weights.default
_alone = torch.ops.qframework.dynamic_quantize.default


def on_a_gpu(x):
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")


def grouped(model, x, blocks=False):
    """A lowered graph with weights grouped as on a GPU, and its inputs."""
    found = []

    def keep(gm, inputs):
        lower(gm, inputs, BackendOptions(linear="int8_dynamic"))
        with FakeTensorMode(allow_non_fake_inputs=True):
            for node in gm.graph.nodes:
                node.meta["example_value"] = tree_map_only(torch.Tensor, on_a_gpu, recorded_value(node))
            group_weights(Lowering.of(gm, inputs))
        if blocks:
            outline(gm)
        gm.graph.lint()
        gm.recompile()
        found.append((gm, inputs))
        return gm.forward

    with torch.no_grad():
        torch.compile(model, backend=keep, dynamic=False)(x)
    return found[0]


def count(gm, target):
    return sum(node.target is target for node in gm.graph.nodes)


@pytest.mark.parametrize("blocks", [False, True])
def test_weights_are_quantized_eight_per_launch(blocks, monkeypatch):
    monkeypatch.setattr("qframework.backend.outline_blocks._LEAST_SAVED", 4)
    model, x = nn.Sequential(*(Block() for _ in range(5))).eval(), example()
    gm, inputs = grouped(model, x, blocks)
    assert count(gm, _together) == 2, "ten weights"
    assert count(gm, torch.ops.higher_order.invoke_subgraph) == (5 if blocks else 0)
    with torch.no_grad():
        assert numerics.sqnr_db(model(x), gm(*inputs)[0]) > 30


def test_activations_are_not_grouped():
    gm, _ = grouped(nn.Linear(32, 16).eval(), torch.randn(5, 32))
    assert (count(gm, _together), count(gm, _alone)) == (1, 1)


def test_a_model_that_begins_with_a_linear():
    """Its first operation is the quantization of a weight, which goes."""
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 48)).eval(), example()
    gm, inputs = grouped(model, x)
    assert count(gm, _together) == 1
    with torch.no_grad():
        assert numerics.sqnr_db(model(x), gm(*inputs)[0]) > 30


def test_a_weight_that_forward_writes_is_quantized_where_it_is_read():
    class Written(nn.Linear):
        def forward(self, x):
            self.weight.mul_(2)
            return super().forward(x)

    gm, _ = grouped(nn.Sequential(Written(32, 32), nn.Linear(32, 32)).eval(), example())
    assert [len(node.args[0]) for node in gm.graph.nodes if node.target is _together] == [1]


def test_dtypes_do_not_mix():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32).half()

        def forward(self, x):
            return self.b(self.a(x).half())

    assert count(grouped(Mixed().eval(), example())[0], _together) == 2


def test_weights_of_large_models_are_not_grouped(monkeypatch):
    monkeypatch.setattr(module, "_MOST_BYTES", 32 * 64 * 2 - 1)
    assert count(grouped(Block().eval(), example())[0], _together) == 0


@pytest.mark.gpu
def test_on_a_gpu_weights_are_followed(fresh_dynamo):
    model, x = nn.Sequential(*(Block() for _ in range(5))).eval().cuda().half(), example().cuda().half()
    compiled = torch.compile(model, backend="qframework", options={"linear": "int8_dynamic"})
    with torch.no_grad():
        for _ in range(4):
            assert numerics.sqnr_db(model(x), compiled(x)) > 30
            for weight in model.parameters():
                weight.data.mul_(-1.5)
        with torch.profiler.profile() as profile:
            compiled(x)
    launches = [event.count for event in profile.key_averages() if event.key == "_quantize_weights_kernel"]
    assert launches == [2]
