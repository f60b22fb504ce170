"""Numbers that export keeps as tensors become numbers, so that masks built of them are recognized."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import qframework
from qframework import numerics
from qframework.backend.compile import lower
from qframework.backend.options import BackendOptions
from qframework.graph.nodes import is_assertion
from qframework.graph.rewrites.scalar_constants import use_numbers, write_out_scalars


class Masked(nn.Module):
    """Causal attention whose mask is built of numbers as tensors, as transformers' eager masks are."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.gain = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("lifted_tensor_0", torch.tensor(0.5))  # named as export names its constants

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        tokens = torch.arange(x.shape[1], device=x.device)
        kept = tokens[None, :] <= tokens[:, None]
        mask = torch.where(kept, torch.tensor(0.0), torch.finfo(x.dtype).min)
        logits = q @ k.transpose(-1, -2) / torch.sqrt(torch.tensor(16)) + mask
        return (logits.softmax(-1) @ v) * self.gain * self.lifted_tensor_0 + torch.tensor([1.0, 2.0]).sum()


def exported():
    torch.manual_seed(0)
    model, x = Masked().eval(), torch.randn(2, 8, 32)
    return model, x, torch.export.export(model, (x,)).module()


def scalars(gm):
    """The tensors without dimensions that the graph reads."""
    names = [str(node.target) for node in gm.graph.find_nodes(op="get_attr")]
    return {name: getattr(gm, name) for name in names if hasattr(gm, name) and getattr(gm, name).ndim == 0}


def test_numbers_are_written_out_and_nothing_else():
    model, x, gm = exported()
    before = scalars(gm)
    assert len(before) == 4
    write_out_scalars(gm)
    gm.recompile()
    assert set(scalars(gm)) == {"gain", "lifted_tensor_0"}
    assert not any(hasattr(gm, name) for name in before.keys() - {"gain", "lifted_tensor_0"})
    assert torch.equal(gm(x), model(x))


def test_a_buffer_is_read_at_each_call():
    model, x, _ = exported()
    quantized = qframework.quantize(model, (x,), "static_int8", [(x,)])
    with torch.no_grad():
        for each in (model, quantized):
            each.get_buffer("lifted_tensor_0").fill_(3.0)
        assert numerics.sqnr_db(model(x), quantized(x)) > 25


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


# use_numbers ---------------------------------------------------------------------------------------------------------


def with_numbers(model, *inputs):
    """The graph of a model that Dynamo captured, after ``use_numbers``; results are equal."""
    found = []

    def backend(gm, example_inputs):
        expected = gm(*example_inputs)
        for node in filter(is_assertion, list(gm.graph.nodes)):
            gm.graph.erase_node(node)
        use_numbers(gm)
        gm.graph.lint()
        gm.recompile()
        for ours, wanted in zip(gm(*example_inputs), expected, strict=True):
            assert torch.equal(ours, wanted)
            assert ours.dtype == wanted.dtype
        found.append(gm)
        return gm.forward

    with torch.no_grad():
        torch.compile(model, backend=backend, dynamic=False)(*inputs)
    return found[0]


def calls_of(gm):
    return [node for node in gm.graph.nodes if node.op.startswith("call")]


class Scaled(nn.Module):
    """Logits divided as in DeBERTa."""

    def forward(self, x):
        scale = torch.sqrt(torch.tensor(x.shape[-1], dtype=torch.float) * 3)
        return x / scale.to(dtype=x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("export", [False, True])
def test_arithmetic_reads_numbers(dtype, export):
    x = torch.randn(3, 64, dtype=dtype)
    model = Scaled()
    if export:
        model = torch.export.export(model, (x,)).module()
        write_out_scalars(model)
        model.recompile()
    gm = with_numbers(model, x)
    (divided,) = calls_of(gm)
    assert divided.args[1] == float((torch.tensor(64.0) * 3).sqrt().to(dtype))


class Kept(nn.Module):
    """What is no arithmetic of a floating-point tensor with a number that nothing writes."""

    def forward(self, x):
        written = torch.tensor(1.5)
        written.add_(1)
        larger = x.half() + torch.ones(1)
        return x * written, larger, x.long() * torch.tensor(1.5), torch.maximum(x, torch.tensor(0.5)), torch.tensor(2.0)


def test_other_tensors_stay():
    gm = with_numbers(Kept(), torch.randn(3, 64))
    assert sum(node.target is torch.tensor for node in calls_of(gm)) == 4


VIEWS = {
    "detach": lambda t: t.detach(),
    "to": lambda t: t.to(torch.float32),
    "view": lambda t: t.view(1),
    "several": lambda t: t.detach().view(1)[0],
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_number_that_is_written_through_a_view_stays(view):
    class Written(nn.Module):
        def forward(self, x):
            number = torch.tensor(1.5)
            VIEWS[view](number).add_(1)
            return (x * number,)

    gm = with_numbers(Written(), torch.randn(3, 64))
    assert sum(node.target is torch.tensor for node in calls_of(gm)) == 1


def test_functions_take_no_number_first():
    class First(nn.Module):
        def forward(self, x):
            return torch.sub(torch.tensor(1.5), x), 1.5 * torch.add(x, torch.tensor(2.5)), torch.tensor(2.5) - x

    gm = with_numbers(First(), torch.randn(3, 64))
    assert sum(node.target is torch.tensor for node in calls_of(gm)) == 1
