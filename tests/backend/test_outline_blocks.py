"""Repeated blocks are compiled once with the same results, and nothing else is outlined."""

from __future__ import annotations

import pytest
import torch
from lowered_models import Block, converted, example, lowered_graph
from outlined_models import outlined_and_whole, outlines
from torch import nn

from qframework.backend import outline_blocks as module
from qframework.backend.outline_blocks import Repeat, longest_repeat, outline
from qframework.compat.operators import ASSERT_METADATA
from qframework.quantizer import dynamic_int8, static_int8

pytestmark = pytest.mark.usefixtures("small_blocks")
_int8_linear = torch.ops.qframework.int8_linear.default
_invoke = torch.ops.higher_order.invoke_subgraph
CONFIGS = {"static": static_int8(), "static per token": static_int8(activation="per_token"), "dynamic": dynamic_int8()}


def blocks(count: int) -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(count))).eval()


def calls(gm, target):
    return [node for node in gm.graph.nodes if node.target is target]


def subgraph(gm):
    (name,) = {str(call.args[0].target) for call in calls(gm, _invoke)}
    return gm.get_submodule(name)


def test_the_longest_repeat_saves_most():
    assert longest_repeat([0, 1, 2, 3]) == Repeat(0, 0, 0)
    assert longest_repeat([9, 1, 2, 1, 2, 1, 2, 8]) == Repeat(1, 2, 3)
    assert longest_repeat([1, 2, 1, 2, 7, 3, 4, 5, 6, 3, 4, 5, 6]) == Repeat(5, 4, 2)
    assert longest_repeat([1, 2, 3, 1, 2, 3, 1, 2]) == Repeat(0, 3, 2)
    assert longest_repeat([]) == Repeat(0, 0, 0)


@pytest.mark.parametrize("config", CONFIGS)
def test_blocks_become_one_subgraph(config):
    x = example()
    gm, inputs = lowered_graph(converted(blocks(5), x, CONFIGS[config]), x)
    assert outlines(gm, inputs) == 5
    assert len(calls(gm, _invoke)) == 5
    assert not calls(gm, _int8_linear)
    assert len(calls(subgraph(gm), _int8_linear)) == 2


def test_every_block_keeps_its_own_weights():
    x = example()
    gm, _ = lowered_graph(converted(blocks(4), x), x)
    outline(gm)
    weights = [
        [arg for arg in call.args[2:] if arg.op == "placeholder" and arg.meta["example_value"].dtype == torch.int8]
        for call in calls(gm, _invoke)
    ]
    assert [len(each) for each in weights] == [2, 2, 2, 2]
    assert len({arg for each in weights for arg in each}) == 8


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("inference", [False, True])
def test_a_compiled_model_computes_the_same(config, inference, monkeypatch):
    x = example()
    model = converted(blocks(4), x, CONFIGS[config])
    with torch.inference_mode() if inference else torch.no_grad():
        counts, ours, wanted = outlined_and_whole(monkeypatch, model, x)
    assert counts == [4]
    assert torch.equal(ours, wanted)


def test_pytorch_traces_a_block_for_its_schema_once(monkeypatch):
    traced = []
    original = type(_invoke).gen_schema

    def gen_schema(self, subgraph, *arguments):
        traced.append(subgraph)
        return original(self, subgraph, *arguments)

    monkeypatch.setattr(type(_invoke), "gen_schema", gen_schema)
    x = example()
    model = converted(blocks(4), x, dynamic_int8())
    with torch.no_grad(), torch.compiler.config.patch(force_disable_caches=True):
        torch.compile(model, backend="qframework")(x)
    assert len(traced) == 1


def test_a_block_that_reads_another_device_stays_inline():
    """A copy between devices ends a CUDA graph, and would be hidden in a subgraph."""
    x = example()
    gm, _ = lowered_graph(converted(Skips(), x), x)
    first = next(node for node in gm.graph.nodes if node.target is _int8_linear)
    value = first.meta["example_value"]
    assert len(first.users) > 2
    first.meta["example_value"] = value.to("meta")
    assert outline(gm) == 0


def float_blocks(x, bias=True):
    """Float blocks, and an INT8 layer behind them."""
    body = blocks(5)
    if not bias:
        for block in body:
            block.fc1.bias = block.fc2.bias = None
    return nn.Sequential(body, converted(nn.Sequential(nn.Linear(32, 8)).eval(), body(x)))


@pytest.mark.parametrize(("behind_floats", "bias", "expected"), [(True, True, 4), (True, False, 0), (False, True, 0)])
def test_blocks_without_an_int8_layer_are_cut_behind_an_opaque_linear(behind_floats, bias, expected):
    """A cut elsewhere would keep Inductor from fusing a norm with what is before it."""
    x = example()
    gm, inputs = lowered_graph(float_blocks(x, bias), x)
    assert calls(gm, _int8_linear)
    assert outlines(gm, inputs, behind_floats=behind_floats) == expected
    assert len(calls(gm, _invoke)) == expected
    for call in calls(gm, _invoke):
        inside = gm.get_submodule(str(call.args[0].target))
        assert [node for node in inside.graph.nodes if node.op.startswith("call")][-1].target is nn.functional.linear


def test_float_blocks_compute_the_same(monkeypatch):
    x = example()
    model = float_blocks(x)
    with torch.no_grad():
        counts, ours, wanted = outlined_and_whole(monkeypatch, model, x)
    assert 4 in counts
    assert torch.equal(ours, wanted)


def test_symbolic_sizes_are_left_whole():
    x = example()
    gm, _ = lowered_graph(converted(blocks(4), x), x, dynamic=True)
    assert outline(gm) == 0
    assert not calls(gm, _invoke)


def test_blocks_of_different_sizes_are_not_merged():
    x = example()
    layers = [Block(dim=32), Block(dim=32), nn.Linear(32, 16), Block(dim=16), Block(dim=16)]
    gm, _ = lowered_graph(converted(nn.Sequential(*layers), x), x)
    assert outline(gm) == 2
    assert len(calls(gm, _int8_linear)) == 5


class Gaps(nn.Module):
    """Values with gaps between their rows."""

    def forward(self, x):
        return torch.cat([x, x + 1], -1)[..., 1 : x.shape[-1] + 1]


@pytest.mark.parametrize(("before", "outlined"), [(nn.LayerNorm(32), 4), (Gaps(), 3)])
def test_only_a_block_whose_input_has_gaps_stays_inline(before, outlined):
    x = example()
    gm, inputs = lowered_graph(converted(nn.Sequential(before, *blocks(4)), x), x)
    assert outlines(gm, inputs) == outlined
    assert len(calls(gm, _int8_linear)) == 2 * (4 - outlined), "of the blocks that stay"


class Stream(nn.Module):
    """Blocks with a residual that their linears do not add, because a view is between, and what all blocks read."""

    def __init__(self, shared) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))
        self.shared = shared

    def forward(self, x):
        shared = self.shared(x)
        for layer in self.layers:
            rows = nn.functional.layer_norm(x * shared, (32,)).flatten(0, 1)
            x = x + layer(rows).unflatten(0, x.shape[:2]).relu()
        return x


SHARED = {
    "computed": (lambda x: x.sigmoid(), 4),
    "permuted": (lambda x: x.sigmoid().transpose(1, 2).contiguous().transpose(1, 2), 4),
    "a slice with gaps": (lambda x: torch.cat([x, x], -1)[..., 16:48], 0),
    "expanded": (lambda x: x.amax(-1, keepdim=True).expand(x.shape), 0),
}


@pytest.mark.parametrize("name", SHARED)
def test_blocks_read_what_the_model_computes_for_all_of_them(name):
    shared, outlined = SHARED[name]
    x = example()
    model = converted(Stream(shared), x)
    gm, inputs = lowered_graph(model, x)
    assert outlines(gm, inputs) == outlined


class Prompts(nn.Module):
    """Every block reads its own part of a tensor that the model computes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))

    def forward(self, x):
        prompts = torch.cat([x[None] * number for number in range(6)]).unbind(0)
        for layer, prompt in zip(self.layers, prompts, strict=True):
            x = layer(nn.functional.layer_norm(x + prompt, x.shape[-1:])).relu()
        return x


@pytest.mark.parametrize(("width", "outlined"), [(32, 5), (33, 0)])
def test_inputs_of_a_block_begin_at_the_same_alignment(width, outlined):
    """Inductor's kernels for a block assume the alignment of the first one's inputs."""
    x = torch.randn(3, 7, width)
    gm, inputs = lowered_graph(converted(Prompts(width), x), x)
    assert outlines(gm, inputs) == outlined


def test_a_compiled_residual_stream_computes_the_same(monkeypatch):
    x = example()
    model = converted(Stream(torch.sigmoid), x)
    with torch.no_grad():
        counts, ours, wanted = outlined_and_whole(monkeypatch, model, x)
    assert counts == [4]
    assert torch.equal(ours, wanted)


class Convolutions(nn.Module):
    """Blocks whose residual stream has channels that come last in memory, as in ConvNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 2, 2)
        self.convolutions = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1, groups=32) for _ in range(5))
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))

    def forward(self, x):
        x = self.stem(x).contiguous(memory_format=torch.channels_last)
        for convolution, layer in zip(self.convolutions, self.layers, strict=True):
            rows = nn.functional.layer_norm(convolution(x).permute(0, 2, 3, 1), (32,))
            x = x + layer(rows).relu().permute(0, 3, 1, 2)
        return x


def test_a_residual_stream_keeps_the_order_of_its_dimensions(monkeypatch):
    x = torch.randn(2, 3, 10, 12)
    model = converted(Convolutions().eval(), x)
    gm, inputs = lowered_graph(model, x)
    assert outlines(gm, inputs) == 4
    leaving = [node for call in calls(gm, _invoke) for node in call.users if node.meta["example_value"].ndim == 4]
    assert {node.meta["example_value"].stride() for node in leaving} >= {(960, 1, 192, 32)}
    torch._dynamo.reset()
    with torch.no_grad():
        counts, ours, wanted = outlined_and_whole(monkeypatch, model, x)
    assert counts == [4]
    assert torch.equal(ours, wanted)
    assert ours.stride() == wanted.stride() == model(x).stride()


class Casts(Stream):
    """Exported, its casts assert what they read."""

    def forward(self, x):
        for layer in self.layers:
            x = layer(nn.functional.layer_norm(x.to(torch.float32), (32,)).to(x.dtype)).relu()
        return x


def test_assertions_of_exports_do_not_keep_blocks_apart(monkeypatch):
    x = example()
    model = converted(Casts(None), x)
    assert any(node.target is ASSERT_METADATA for node in model.graph.nodes)
    with torch.no_grad():
        counts, ours, wanted = outlined_and_whole(monkeypatch, model, x)
    assert counts == [5]
    assert torch.equal(ours, wanted)


class Scores(Stream):
    """Blocks with a sum in place, and divided by a number that is a tensor."""

    def forward(self, x):
        for layer in self.layers:
            score = x.sigmoid() / torch.sqrt(torch.tensor(x.shape[-1] * 2.0)).to(x.dtype)
            score += x
            x = layer(nn.functional.layer_norm(score, (32,))).relu()
        return x


def test_sums_in_place_and_numbers_as_tensors_do_not_keep_blocks_apart(monkeypatch):
    x = example()
    model = converted(Scores(None), x)
    with torch.no_grad():
        counts, ours, wanted = outlined_and_whole(monkeypatch, model, x)
    assert counts == [5]
    assert torch.equal(ours, wanted)


def test_a_view_that_is_read_later_does_not_leave_a_block():
    class Views(Stream):
        def forward(self, x):
            found = []
            for layer in self.layers:
                x = layer(nn.functional.layer_norm(x, (32,))).relu()
                found.append(x.flatten(0, 1))
            return found

    x = example()
    gm, inputs = lowered_graph(converted(Views(None), x), x)
    outlines(gm, inputs)
    for call in calls(gm, _invoke):
        inside = gm.get_submodule(str(call.args[0].target))
        (results,) = (node.args[0] for node in inside.graph.nodes if node.op == "output")
        assert all(result.target is _int8_linear for result in results)


class Taps(nn.Module):
    """A model that returns what every block gave."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks(4)

    def forward(self, x):
        found = []
        for block in self.blocks:
            x = block(x)
            found.append(x)
        return found


def test_values_read_later_are_outputs_of_every_block():
    x = example()
    gm, inputs = lowered_graph(converted(Taps(), x), x)
    assert outlines(gm, inputs) == 4


class Skips(nn.Module):
    """Every block also reads the model's input: blocks are wired alike, and their inputs are more than one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x):
        first = y = self.first(x)
        for layer in self.layers:
            y = nn.functional.layer_norm(layer(y) + first, (32,))
        return y


def test_values_of_earlier_blocks_are_inputs():
    x = example()
    gm, inputs = lowered_graph(converted(Skips(), x), x)
    assert outlines(gm, inputs) == 5


def test_a_small_saving_is_not_worth_it(monkeypatch):
    monkeypatch.setattr(module, "_LEAST_SAVED", 1000)
    x = example()
    gm, _ = lowered_graph(converted(blocks(4), x), x)
    assert outline(gm) == 0


@pytest.mark.parametrize(
    ("target", "arguments", "in_line"),
    [
        (torch.ops.aten.add.Tensor, (1,), False),
        (torch.ops.aten.add_.Tensor, (1,), True),
        (torch.ops.aten.dropout.default, (0.5, True), True),
    ],
)
def test_in_place_writes_and_random_calls_stay_inline(target, arguments, in_line):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    nodes = [graph.call_function(target, (x, *arguments)) for _ in range(2)]
    for node in (x, *nodes):
        node.meta["example_value"] = torch.zeros(2, 3)
    assert (module._kind(nodes[0]) == module._kind(nodes[1])) is not in_line
