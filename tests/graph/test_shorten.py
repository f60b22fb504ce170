"""Dropout in eval mode and repeated zero points leave a converted graph, and nothing else does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.nn import functional as F

from qframework.graph.rewrites.shorten import erase_unread_results, shorten

_decomposed = torch.ops.quantized_decomposed
X = torch.randn(3, 8)


class Dequantizes(nn.Module):
    """Three INT8 weights; the zero points of the last are others."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(3):
            self.register_buffer(f"weight{i}", torch.randint(-9, 9, (8, 8), dtype=torch.int8))
            self.register_buffer(f"scale{i}", torch.rand(8))
            self.register_buffer(f"zero{i}", torch.full((8,), int(i == 2), dtype=torch.int64))
        self.register_buffer("positions", torch.zeros(8, dtype=torch.int64))
        self.dropout = nn.Dropout(0.5)

    def weight(self, i: int) -> torch.Tensor:
        w, scale, zero = (getattr(self, f"{name}{i}") for name in ("weight", "scale", "zero"))
        return _decomposed.dequantize_per_channel(w, scale, zero, 0, -128, 127, torch.int8)

    def forward(self, x):
        for i in range(3):
            x = self.dropout(F.linear(x, self.weight(i)))
        return F.dropout(x, 0.0, training=True) + self.positions


def test_equal_zero_points_are_one_buffer_and_inactive_dropouts_leave() -> None:
    model = Dequantizes().eval()
    gm = torch.export.export(model, (X,)).module()
    expected = gm(X)
    shorten(gm)
    assert torch.equal(gm(X), expected)
    assert not any("dropout" in str(node.target) for node in gm.graph.nodes)
    kept = {name for name in gm.state_dict() if name.startswith(("zero", "positions"))}
    assert kept == {"zero0", "zero2", "positions"}
    assert set(model.state_dict()) > kept  # the exported model keeps its own


def test_dropout_that_is_active_stays() -> None:
    gm = torch.export.export(Dequantizes().train(), (X,)).module()
    shorten(gm)
    assert sum("dropout" in str(node.target) for node in gm.graph.nodes) == 3


def test_a_zero_point_that_something_else_reads_stays() -> None:
    class Reads(Dequantizes):
        """Adds a zero point, too."""

        def forward(self, x):
            return super().forward(x) + self.zero1

    gm = torch.export.export(Reads().eval(), (X,)).module()
    shorten(gm)
    assert {"zero0", "zero1", "zero2"} <= set(gm.state_dict())


def test_results_that_nothing_reads_leave_and_effects_stay() -> None:
    class Unread(nn.Module):
        def forward(self, x):
            x = x * 2
            x.exp().sum(0)
            x.add_(1)
            torch.rand_like(x)
            return x

    gm = torch.export.export(Unread(), (X,)).module()
    called = {str(node.target) for node in gm.graph.nodes}
    erase_unread_results(gm)
    left = {str(node.target) for node in gm.graph.nodes}
    assert called - left <= {"aten.exp.default", "aten.sum.dim_IntList"}
    assert {"aten.add_.Tensor", "aten.rand_like.default"} & called <= left
    assert "aten.exp.default" not in left
    gm.recompile()
    assert torch.equal(gm(X), X * 2 + 1)


@torch.compiler.allow_in_graph
def counted(x):
    """A view by a function of others, which may do more."""
    return x.view_as(x)


class Views(nn.Module):
    """Makes views that nothing reads, and one that is written."""

    def forward(self, x):
        y = x * 2
        counted(y)
        shape = (y.shape[0], 3, *y.shape[1:])
        y[:, None].broadcast_to(shape)
        y.view(-1)[1:].add_(1)
        F.relu(y[0], True)
        return y


def test_views_that_nothing_reads_leave_dynamos_graphs() -> None:
    graphs = []

    def keep(gm, inputs):
        called = len(gm.graph.nodes)
        erase_unread_results(gm)
        graphs.append((called, gm))
        gm.recompile()
        return gm

    y = torch.compile(Views(), backend=keep)(X)
    ((before, gm),) = graphs
    targets = [getattr(node.target, "__name__", str(node.target)) for node in gm.graph.nodes]
    assert before > len(targets)
    assert "broadcast_to" not in targets
    assert {"add_", "relu", "counted"} <= set(targets)
    assert torch.equal(y, Views()(X))


def test_what_reads_unknown_memory_stays() -> None:
    """Random numbers that nobody reads change those behind them."""
    graph = Graph()
    drawn = graph.call_function(torch.rand_like, (graph.placeholder("x"),))
    with FakeTensorMode() as mode:
        drawn.meta["val"] = mode.from_tensor(X)
    graph.output(None)
    erase_unread_results(GraphModule(nn.Module(), graph))
    assert drawn in graph.nodes


@pytest.mark.parametrize(("method", "leaves"), [("detach", True), ("requires_grad_", False)])
def test_what_changes_a_tensor_itself_stays(method, leaves) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    same = graph.call_method(method, (x,))
    with FakeTensorMode() as mode:
        x.meta["val"] = mode.from_tensor(X)
        same.meta["val"] = x.meta["val"].view_as(x.meta["val"])
    graph.output(x)
    erase_unread_results(GraphModule(nn.Module(), graph))
    assert (same not in graph.nodes) == leaves


class Copies(nn.Module):
    """Writes parts of a result to a tensor, as BigBird does with its weights; ``read`` says what becomes of it."""

    def __init__(self, read):
        super().__init__()
        self.read = read
        self.register_buffer("kept", torch.zeros(4, 4))

    def forward(self, x):
        y = x.softmax(-1)
        copied = self.kept if self.read == "buffer" else x.clone() if self.read == "clone" else torch.zeros(4, 4)
        copied[:2] = y[:2]
        copied.view(2, 2, 4)[:, 1] = y[2:]
        if self.read == "view":
            return y @ x, copied[0]
        if self.read == "value":
            return y @ x + copied
        if self.read == "random":
            copied.uniform_()
        return y @ x


@pytest.mark.parametrize(
    ("read", "stays"),
    [("", False), ("clone", False), ("view", True), ("value", True), ("buffer", True), ("random", True)],
)
def test_memory_that_is_only_written_leaves(read, stays) -> None:
    model, x = Copies(read), torch.randn(4, 4)
    gm = torch.export.export(copy.deepcopy(model), (x,)).module()
    softmax = next(node for node in gm.graph.nodes if "softmax" in node.name)
    assert len(softmax.users) > 1
    erase_unread_results(gm)
    gm.graph.lint()
    gm.recompile()
    assert (len(softmax.users) > 1) == stays
    torch.testing.assert_close(gm(x), model(x), atol=0, rtol=0)
    if read == "buffer":
        assert torch.equal(gm.kept, model.kept)
