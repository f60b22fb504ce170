"""Which inputs a node writes, for every form in which a call can be captured."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qframework.compat.dispatch import memory_of
from qframework.graph import writes
from qframework.graph.writes import written_between, written_inputs

X, Y, OUT = torch.empty(4, 4), torch.empty(4, 4), torch.empty(4, 4)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(writes, "_places_of_kinds", {})


def graph_of(run, *inputs):
    """The graph that Dynamo captures of a function."""
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(run, backend=backend, fullgraph=True)(*(x.clone() for x in inputs))
    return graphs[0]


def set_first_row(x, y):
    x[0] = 1.0


def names_of_written(gm):
    return {x.name for node in gm.graph.nodes for x in written_inputs(node)}


@pytest.mark.parametrize(
    "write",
    [
        lambda x, y: F.leaky_relu(x, 0.1, True),
        lambda x, y: F.relu6(x, True),
        lambda x, y: F.elu(x, 1.0, True),
        lambda x, y: F.celu(x, 1.0, True),
        lambda x, y: F.selu(x, True),
        lambda x, y: F.silu(x, True),
        lambda x, y: F.mish(x, True),
        lambda x, y: F.rrelu(x, 0.1, 0.3, False, True),
        lambda x, y: F.hardswish(x, True),
        lambda x, y: F.hardsigmoid(x, True),
        lambda x, y: F.hardtanh(x, -1.0, 1.0, True),
        lambda x, y: F.threshold(x, 0.1, 0.2, True),
        lambda x, y: F.dropout(x, 0.5, True, True),
        lambda x, y: nn.LeakyReLU(0.1, True)(x),
        lambda x, y: nn.Hardtanh(inplace=True)(x),
        lambda x, y: nn.init.zeros_(x),
        lambda x, y: operator.iadd(x, y),
        lambda x, y: x.__iadd__(y),
        lambda x, y: x.__ior__(y > 0) if x.dtype == torch.bool else x.__imul__(y),
        set_first_row,
        lambda x, y: torch.add(x, y, out=x),
        lambda x, y: torch.clamp(y, 0, 1, out=x),
        lambda x, y: x.copy_(y),
        lambda x, y: x.index_add_(0, torch.tensor([0]), y[:1]),
        lambda x, y: torch._foreach_mul_([x], 2.0),
        lambda x, y: torch.ops.aten.relu_.default(x),
        lambda x, y: torch.ops.aten.dropout_.default(x, 0.5, True),
        lambda x, y: torch.ops.aten.add.out(y, 1, out=x),
        lambda x, y: torch.fill_(x, 3),
    ],
)
def test_every_form_of_a_write_is_detected(write):
    assert "l_x_" in names_of_written(graph_of(lambda x, y: (write(x, y), x + 1)[1], X, Y))


@pytest.mark.parametrize(
    "read",
    [
        lambda x, y: F.leaky_relu(x, 0.1, False),
        lambda x, y: F.dropout(x, 0.5, False, False),
        lambda x, y: F.layer_norm(x, (4,)),
        lambda x, y: x + y,
        lambda x, y: x.__add__(y),
        lambda x, y: x.view(-1).chunk(2)[0] * 2,
        lambda x, y: F.scaled_dot_product_attention(x[None], y[None], y[None]),
        lambda x, y: torch.einsum("ij,jk->ik", x, y),
        lambda x, y: torch.ops.aten.add.Tensor(x, y),
        lambda x, y: torch.cat([x, y]),
        lambda x, y: torch.ops.aten.dropout_.default(x, 0.5, False),
        lambda x, y: x.sin().detach_(),  # as exported models hold it behind every torch.tensor(...)
        lambda x, y: torch.ops.aten.detach_.default(x.sin()),
    ],
)
def test_operations_that_only_read_write_nothing(read):
    assert not names_of_written(graph_of(read, X, Y))


def in_autocast(x, y):
    with torch.autocast("cpu", torch.bfloat16):
        return x.bfloat16().expand(2, 4, 4) @ y.expand(2, 4, 4)


def behind_an_inner_scope(x, y):
    with torch.autocast("cpu", torch.bfloat16):
        with torch.autocast("cpu", enabled=False):
            x = x + 1
        return x.bfloat16().expand(2, 4, 4) @ y.expand(2, 4, 4)


@pytest.mark.parametrize("read", [in_autocast, behind_an_inner_scope])
def test_calls_are_run_in_their_scope_of_autocast(read):
    """Outside of it a batched product of two dtypes fails, and a call that fails may write anything."""
    assert not names_of_written(graph_of(read, X, Y))


def test_out_is_written_and_its_operands_are_not():
    gm = graph_of(lambda x, y, out: (torch.add(x, y, out=out), out * 2)[1], X, Y, OUT)
    assert names_of_written(gm) == {"l_out_"}


def test_writes_are_detected_with_symbolic_sizes():
    def run(x, y):
        F.leaky_relu(x, 0.1, True)
        return x + 1

    graphs = []
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(run, backend=lambda gm, _: graphs.append(gm) or gm.forward, dynamic=True)(X.clone(), Y)
    assert names_of_written(graphs[0]) == {"l_x_"}


def test_a_write_through_a_view_reaches_only_its_base():
    def run(x, y):
        kept, z = x * 1.0, y * 1.0
        z.view(2, 8)[0].mul_(2)
        return kept + z

    gm = graph_of(run, X, Y)
    kept, z, *_, last = [node for node in gm.graph.nodes if node.op.startswith("call")]
    assert written_between(kept, last, [z]) is not None
    assert written_between(kept, last, [kept]) is None


class InAutocast(nn.Module):
    """A block whose body an exported model holds as a graph of its own."""

    def __init__(self, write):
        super().__init__()
        self.write = write

    def forward(self, x, y):
        x, y = x * 1.0, y + 1.0
        with torch.autocast("cpu", enabled=False):
            z = y.mul_(2.0) if self.write else y * 2.0
            z = z + x
        return z * x


@pytest.mark.parametrize("write", [False, True])
def test_the_body_of_a_block_writes_what_its_operations_write(write):
    gm = torch.export.export(InAutocast(write), (X, Y)).module()
    (scope,) = [node for node in gm.graph.nodes if "wrap_with_autocast" in str(node.target)]
    (y,) = [node for node in gm.graph.nodes if node.target is torch.ops.aten.add.Tensor]
    assert y in scope.args
    assert written_inputs(scope) == ({y} if write else set())


def test_replacing_the_memory_of_a_tensor_is_a_write():
    def run(x, y):
        z = x * 1.0
        z.set_(y * 2.0)
        return z + 1

    assert "z" in names_of_written(graph_of(run, X, Y))


def test_a_write_through_a_subclass_may_reach_anything():
    def run(x, offsets):
        kept = x * 1.0
        nested = torch.nested.nested_tensor_from_jagged(kept, offsets)
        nested.mul_(2)
        return kept + 1

    gm = graph_of(run, X, torch.tensor([0, 1, 4]))
    kept, *_, write, last = [node for node in gm.graph.nodes if node.op.startswith("call")]
    assert write.target == "mul_"
    assert written_between(write, last, [kept]) is write


def test_a_write_through_data_is_detected():
    gm = graph_of(lambda x, y: (x.data.mul_(2), x + y)[1], X, Y)
    placeholder = next(iter(gm.graph.nodes))
    assert written_between(placeholder, gm.graph.output_node(), [placeholder]) is not None


def test_a_call_that_cannot_be_run_on_fake_tensors_may_write_all_its_inputs():
    def opaque(x, y):
        raise RuntimeError("only real tensors")

    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    x.meta["example_value"], y.meta["example_value"] = X, Y
    assert written_inputs(graph.call_function(opaque, (x, y))) == {x, y}


def test_mutations_of_custom_operators_are_read_from_their_schema():
    @torch.library.custom_op("qframework_tests::scale_in_place", mutates_args=("x",))
    def scale_in_place(x: torch.Tensor, y: torch.Tensor) -> None:
        x.mul_(y)

    gm = graph_of(lambda x, y: (torch.ops.qframework_tests.scale_in_place(x, y), x + 1)[1], X, Y)
    assert names_of_written(gm) == {"l_x_"}


def test_a_node_is_run_once_until_its_arguments_change(monkeypatch):
    gm = graph_of(lambda x, y: F.leaky_relu(x, 0.1) + y, X, Y)
    runs = []
    monkeypatch.setattr(writes, "_observed", lambda node: runs.append(node.name) or set())
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    for _ in range(3):
        assert not any(map(written_inputs, nodes))
    assert runs == [node.name for node in nodes]
    nodes[0].args = (nodes[0].args[0], 0.2, True)
    written_inputs(nodes[0])
    assert runs[len(nodes) :] == [nodes[0].name]


def written_by_each_call(gm):
    return [sorted(x.name for x in written_inputs(node)) for node in gm.graph.nodes if node.op.startswith("call")]


def test_calls_of_one_kind_are_run_once(monkeypatch):
    observed, runs = writes._observed, []
    monkeypatch.setattr(writes, "_observed", lambda node: runs.append(node.name) or observed(node))

    def layers(x, y):
        for _ in range(4):
            y = torch.add(F.relu6(x, True), y)
        return y

    gm = graph_of(layers, X, Y)
    wanted = written_by_each_call(gm)
    assert len(wanted) == 8
    assert sum(map(bool, wanted)) == 4
    assert len(runs) == 2


def test_calls_that_differ_are_run_apart():
    def variants(x, y, z):
        torch.add(x, y, out=x)
        torch.add(y, x, out=x)  # the same places, another order
        torch.add(x, y, out=y)
        F.relu6(z, False)
        F.relu6(z, True)
        F.relu6(x, True)
        x.add(y)
        x.add_(y)
        return torch.mul(x, x, out=z)

    gm = graph_of(variants, X, Y, torch.empty(4, 4, dtype=torch.float64))
    names = {node.name: node.name for node in gm.graph.nodes}
    x, y, z = [name for name in names if name.startswith("l_")]
    found = written_by_each_call(gm)
    assert found[0] == found[1] == [x]
    assert found[2] == [y]
    assert found[3] == []
    assert found[4] == [z]
    assert found[5] == [x]
    assert found[6] == []
    assert found[7] == [x]
    assert found[8] == [z]


class Wrapping:
    """Stands for a tensor subclass that names what it wraps."""

    def __init__(self, *held):
        self.names = [str(place) for place in range(len(held))]
        self.__dict__.update(zip(self.names, held, strict=True))

    def __tensor_flatten__(self):
        return self.names, None


@pytest.mark.parametrize("opaque", [False, True])
def test_a_subclass_has_the_memory_of_what_it_wraps(opaque, monkeypatch):
    """Unless it wraps something that is no tensor, which may hold any."""
    monkeypatch.setattr(writes, "is_traceable_wrapper_subclass", lambda x: isinstance(x, Wrapping))
    monkeypatch.setattr(writes, "Tensor", (torch.Tensor, Wrapping))
    inside = Wrapping(Y, "opaque") if opaque else Wrapping(Y)
    expected = None if opaque else {memory_of(X), memory_of(Y)}
    assert writes._memory_of([Wrapping(X[:1], inside)]) == expected
