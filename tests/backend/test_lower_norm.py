"""Which norms of a GPU our own kernels compute: those behind which a quantization is, and those of long rows."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from qframework.backend.lower_norm import lower_norm
from qframework.backend.lowering import Lowering

_ours = torch.ops.qframework
MANY = (8, 1024, 64)


def graph_of(
    shape=MANY,
    *,
    device="cuda",
    dynamic=True,
    written_by=None,
    viewed=None,
    also_read=False,
    zero_point=False,
    write=False,
):
    """A norm of an input, or of the result of ``written_by``, reshaped from ``viewed``, and its quantization."""
    graph = fx.Graph()
    names = ("x", "weight", "bias", "scale", "zero_point")
    x, weight, bias, scale, point = map(graph.placeholder, names)
    with FakeTensorMode():
        x.meta["val"] = torch.empty(shape, device=device, dtype=torch.float16)
        weight.meta["val"] = bias.meta["val"] = torch.empty(shape[-1], device=device, dtype=torch.float16)
        scale.meta["val"] = torch.empty(1, device=device)
        point.meta["val"] = torch.empty(1, device=device, dtype=torch.int32)
    source = x
    if written_by is not None:
        source = graph.call_function(written_by, (x,))
        source.meta["val"] = x.meta["val"]
    if viewed is not None:
        source.meta["val"] = viewed(x.meta["val"])
        source = graph.call_method("reshape", (source, shape))
        source.meta["val"] = x.meta["val"]
    normed = graph.call_function(F.layer_norm, (source, (shape[-1],), weight, bias, 1e-6))
    normed.meta["val"] = x.meta["val"]
    if write:
        graph.call_method("zero_", (x,)).meta["val"] = x.meta["val"]
    if dynamic:
        quantized = graph.call_function(_ours.dynamic_quantize.default, (normed, "per_token"))
    else:
        arguments = (normed, scale, point) if zero_point else (normed, scale)
        quantized = graph.call_function(_ours.quantize.default, arguments)
    graph.output((quantized, normed) if also_read else quantized)
    gm = fx.GraphModule(nn.Module(), graph)
    lower_norm(Lowering.of(gm))
    gm.graph.lint()
    return [node for node in gm.graph.nodes if node.op == "call_function"]


def targets(**case):
    return [node.target for node in graph_of(**case)]


def test_scales_per_token():
    (fused,) = graph_of()
    assert fused.target is _ours.norm_dynamic_quantize.default
    assert [str(each) for each in fused.args] == ["x", "weight", "bias", "1e-06", "True", "0.0"]


def test_a_static_scale():
    (fused,) = graph_of(dynamic=False)
    assert fused.target is _ours.norm_quantize.default
    assert [str(each) for each in fused.args] == ["x", "weight", "bias", "1e-06", "True", "0.0", "scale"]


def test_the_result_of_an_int8_layer():
    assert targets(written_by=_ours.int8_linear.default)[1:] == [_ours.norm_dynamic_quantize.default]


def test_a_view_of_the_result_of_an_int8_layer():
    """Windows of tokens, say."""
    found = targets(written_by=_ours.int8_linear.default, viewed=lambda x: x.view(128, 64, 64))
    assert found[1:] == [_ours.norm_dynamic_quantize.default]


def test_a_copy_that_inductor_makes():
    """It reads the source in the same kernel."""
    found = targets(written_by=_ours.int8_linear.default, viewed=lambda x: x.transpose(0, 1))
    assert _ours.dynamic_quantize.default in found


LEFT = {
    "on the CPU": {"device": "cpu"},
    "few rows": {"shape": (1, 197, 64)},
    "long rows": {"shape": (8, 1024, 9000)},
    "what Inductor computes": {"written_by": torch.relu},  # it reads the operand in the same kernel
    "read by others": {"also_read": True},
    "a zero point": {"dynamic": False, "zero_point": True},
    "an input that is written": {"write": True},
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_inductor(name):
    found = targets(**LEFT[name])
    assert F.layer_norm in found
    assert not {_ours.norm_quantize.default, _ours.norm_dynamic_quantize.default} & set(found)


@pytest.mark.parametrize(
    ("channels", "dynamic", "ours"),
    [(1152, True, True), (1152, False, True), (2048, True, True), (2048, False, False), (2560, True, False)],
)
def test_norms_of_what_inductor_computes(channels, dynamic, ours):
    found = targets(shape=(8, 1024, channels), dynamic=dynamic, written_by=torch.relu)
    assert (F.layer_norm not in found) == ours


@pytest.mark.parametrize(
    ("channels", "dynamic", "ours"), [(1152, True, True), (1152, False, False), (2048, True, False)]
)
def test_rms_norms_of_what_inductor_computes(channels, dynamic, ours):
    def form(x, residual, weight):
        normed = F.rms_norm(torch.relu(x), (channels,), weight, 1e-6)
        if dynamic:
            return _ours.dynamic_quantize.default(normed, "per_token")
        return _ours.quantize.default(normed, residual.flatten()[:1].float())

    found = [node.target for node in lowered(form, (8, 1024, channels))]
    assert (F.rms_norm not in found) == ours


LONG = 1152


class Sandwich(nn.Module):
    """Llama's and Gemma's norms: a norm of what is added to a norm, and one that is read twice."""

    def forward(self, x, residual, weight):
        total = residual + self.norm(x, weight)
        normed = weight * self.root(total.float()).to(x.dtype)
        return total, normed + 1, normed * 2

    def norm(self, x, weight):
        return (self.root(x.float()) * (1.0 + weight.float())).type_as(x)

    def root(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Recorded(fx.Interpreter):
    """Runs a graph and records what its nodes return."""

    def run_node(self, node):
        node.meta["val"] = super().run_node(node)
        return node.meta["val"]


def lowered(form, shape=(8, 1024, LONG), *, device="cuda", grad=False):
    """The calls in the lowered graph of ``form(x, residual, weight)``."""
    gm = fx.symbolic_trace(form if isinstance(form, nn.Module) else Form(form))
    with FakeTensorMode(), torch.set_grad_enabled(grad):
        of = functools.partial(torch.empty, device=device, dtype=torch.float16, requires_grad=grad)
        Recorded(gm).run(of(shape), of(shape), of(shape[-1:]))
        lower_norm(Lowering.of(gm))
    gm.graph.lint()
    return [node for node in gm.graph.nodes if node.op.startswith("call")]


class Form(nn.Module):
    def __init__(self, form) -> None:
        super().__init__()
        self.form = form

    def forward(self, x, residual, weight):
        return self.form(x, residual, weight)


def test_a_norm_with_a_residual_behind():
    nodes = lowered(Sandwich())
    (norm,) = (node for node in nodes if node.target is _ours.norm.default)
    assert [str(each) for each in norm.args] == ["x", "weight", "None", "1e-06", "False", "1.0", "residual"]
    assert [node.target for node in nodes].count(torch.rsqrt) == 1  # of the second, in the same kernel as its readers


LONG_ROWS = {
    "layer norm": lambda x, residual, weight: F.layer_norm(x, (LONG,), weight, None, 1e-5),
    "read twice": lambda x, residual, weight: (y := F.layer_norm(x, (LONG,), weight), y + 1),
    "of a linear": lambda x, residual, weight: F.layer_norm(F.linear(x, residual[0, :LONG]), (LONG,), weight),
    "rms norm and residual": lambda x, residual, weight: residual + F.rms_norm(x, (LONG,), weight),
}


@pytest.mark.parametrize("name", LONG_ROWS)
def test_norms_of_long_rows(name):
    shape = (8, 1152, LONG)
    targets = [node.target for node in lowered(LONG_ROWS[name], shape)]
    assert targets.count(_ours.norm.default) == 1
    assert not {F.layer_norm, F.rms_norm} & set(targets)


OTHERS = {
    "short rows": {"shape": (8, 1024, 1024)},
    "few rows": {"shape": (1, 197, LONG)},
    "too long rows": {"shape": (8, 1024, 9000)},
    "on the CPU": {"device": "cpu"},
    "with gradients": {"grad": True},
}


@pytest.mark.parametrize("name", OTHERS)
def test_float_norms_that_are_left(name):
    channels = OTHERS[name].get("shape", (LONG,))[-1]
    nodes = lowered(lambda x, residual, weight: F.layer_norm(x, (channels,), weight), **OTHERS[name])
    assert [node.target for node in nodes] == [F.layer_norm]


def test_what_inductor_computes_as_fast():
    """A sum and its norm, an RMSNorm alone, and a norm between sums of longer rows."""
    assert F.layer_norm in calls(lambda x, residual, weight: F.layer_norm(x + residual, (LONG,), weight))
    assert F.rms_norm in calls(lambda x, residual, weight: F.rms_norm(x, (LONG,), weight))
    assert F.rms_norm in calls(lambda x, residual, weight: residual + F.rms_norm(x, (2048,), weight), (8, 1024, 2048))


@pytest.mark.parametrize(("channels", "lowered"), [(LONG, True), (2304, True), (4096, False)])
def test_a_residual_between_a_norm_and_one_that_is_quantized(channels, lowered):
    def form(x, residual, weight):
        total = residual + F.rms_norm(x, (channels,), weight)
        return total, _ours.dynamic_quantize.default(F.rms_norm(total, (channels,), weight), "per_token")

    found = calls(form, (8, 1024, channels))
    assert {_ours.norm.default in found, _ours.norm_dynamic_quantize.default in found} == {lowered}


def calls(form, shape=(8, 1024, LONG)):
    return [node.target for node in lowered(form, shape)]


def test_a_residual_that_broadcasts_is_added_by_inductor():
    nodes = lowered(lambda x, residual, weight: F.layer_norm(x, (LONG,), weight) + residual[:1])
    (norm,) = (node for node in nodes if node.target is _ours.norm.default)
    assert norm.args[-1] is None


def test_a_residual_that_is_written_in_between():
    def form(x, residual, weight):
        y = F.layer_norm(x, (LONG,), weight)
        x.zero_()
        return y + residual

    assert _ours.norm.default not in calls(form)


def test_a_weight_that_is_written_behind_its_offset():
    """The operator would read it later, and add the offset to what was written."""

    def form(x, residual, weight):
        shifted = 1.0 + weight
        weight.zero_()
        return _quantized(_root(x * 2) * shifted)

    assert _ours.norm_dynamic_quantize.default not in calls(form)


def test_a_weight_that_the_forward_changes():
    def form(x, residual, weight):
        changed = weight.add_(1.0)
        return _quantized(_root(x * 2) * changed)

    assert "add_" in calls(form)


def _root(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def _quantized(x):
    return _ours.dynamic_quantize.default(x, "per_token")


@pytest.mark.parametrize(("channels", "fused"), [(LONG, True), (2560, False), (1024, False)])
def test_what_inductor_computes_before_a_quantization(channels, fused):
    def form(x, residual, weight):
        return _ours.dynamic_quantize.default(F.rms_norm(x + residual, (channels,), weight), "per_token")

    assert (_ours.norm_dynamic_quantize.default in calls(form, (8, 1024, channels))) == fused
