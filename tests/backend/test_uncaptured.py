"""Layers in no graph of torch.compile: listed by explain with a reason, logged and counted (uncaptured.py)."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

import qframework
from qframework.backend import fallbacks
from qframework.backend.compile import SKIPPED
from qframework.quantizer import dynamic_int8

OPTIONS = {"linear": "int8_dynamic"}
REASON = "User-inserted graph break."
REMEDY = "Set torch._dynamo.config.allow_rnn=True"
# Since 2.15 Dynamo goes on behind a recurrent layer. Before, it skipped the rest of the function.
ONLY_THE_LAYER = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)


class Skipped(nn.Module):
    """Linears around an attribute that Dynamo cannot compute, so that it skips what follows."""

    def __init__(self, first: bool = False) -> None:
        super().__init__()
        self.embed = nn.Identity() if first else nn.Linear(32, 32)
        self.hidden, self.head = nn.Linear(32, 32), nn.Linear(32, 16)

    @property
    def factor(self) -> float:
        torch._dynamo.graph_break()
        return 0.5

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.embed(x)) if isinstance(self.embed, nn.Linear) else x
        return self.head(torch.relu(self.hidden(x * self.factor)))


class Recurrent(nn.Module):
    """Linears around an LSTM or GRU, which Dynamo does not capture."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM, first: bool = False) -> None:
        super().__init__()
        self.embed = nn.Identity() if first else nn.Linear(32, 32)
        self.rnn = kind(32, 32, batch_first=True)
        self.hidden, self.head = nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.embed(x)) if isinstance(self.embed, nn.Linear) else x
        out, _ = self.rnn(x)
        return self.head(torch.relu(self.hidden(out)))


class Nested(nn.Module):
    """A part that Dynamo does not capture, and layers before and behind it."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.before, self.middle = nn.Linear(32, 32), middle
        self.behind = nn.Sequential(nn.Linear(16, 32), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.middle(self.before(x)))


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    fallbacks.clear()


def example() -> Tensor:
    return torch.randn(2, 5, 32)


def lowered(model: nn.Module) -> dict[str, bool]:
    report = qframework.explain(model.eval(), example(), options=OPTIONS)
    return {layer.name: layer.lowered for layer in report.layers}


def test_a_model_that_is_skipped_as_a_whole() -> None:
    report = qframework.explain(Skipped(first=True).eval(), example(), options=OPTIONS)
    assert [(layer.name, layer.lowered, layer.fallback) for layer in report.layers] == [
        ("hidden", False, True),
        ("head", False, True),
    ]
    assert all("outside of the graphs" in layer.reason for layer in report.layers)
    (note,) = report.notes
    assert note.startswith("torch.compile skips code (")
    assert __file__ in note
    assert REASON in note
    assert "0 of 2 linear layers lowered" in str(report)


def test_a_function_whose_rest_is_skipped() -> None:
    report = qframework.explain(Skipped().eval(), example(), options=OPTIONS)
    assert [layer.lowered for layer in report.layers] == [True, False, False]
    (note,) = report.notes
    assert note.startswith("torch.compile skips code (")
    assert REASON in note


def test_layers_outside_of_the_skipped_part_have_the_names_of_the_model() -> None:
    expected = {"before": True, "behind.0": True, "middle.hidden": False, "middle.head": False}
    assert lowered(Nested(Skipped(first=True))) == expected


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_layer_is_noted(kind: type[nn.RNNBase], first: bool) -> None:
    report = qframework.explain(Recurrent(kind, first).eval(), example(), options=OPTIONS)
    found = {layer.name: (layer.lowered, layer.fallback) for layer in report.layers}
    rest = dict.fromkeys(("hidden", "head"), (True, False) if ONLY_THE_LAYER else (False, True))
    assert found == ({} if first else {"embed": (True, False)}) | rest
    (note,) = report.notes
    assert note.startswith(
        "torch.compile splits its graph" if ONLY_THE_LAYER else "torch.compile skips code (forward, "
    )
    assert __file__ in note or (ONLY_THE_LAYER and first)
    assert REMEDY in note


@torch._dynamo.config.patch(allow_rnn=True)
def test_the_remedy_helps() -> None:
    model = Nested(Recurrent(first=True)).eval()
    report = qframework.explain(model, example(), options=OPTIONS)
    assert report.total == report.lowered == 4
    assert report.notes == ()


def test_other_graph_breaks_are_notes() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.taken, self.other = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.taken(x) if x.sum() < 1e9 else self.other(x)

    report = qframework.explain(Branching().eval(), example(), options=OPTIONS)
    assert {layer.name: layer.lowered for layer in report.layers} == {"taken": True, "other": False}
    (note,) = report.notes
    assert note.startswith("torch.compile splits its graph (forward, ")
    assert "data-dependent branching" in note


def test_excluded_models_have_no_graph() -> None:
    model = nn.Sequential(nn.Linear(32, 32)).eval()
    model.forward = torch.compiler.disable(model.forward)
    report = qframework.explain(model, example(), options=OPTIONS)
    assert [layer.lowered for layer in report.layers] == [False]
    assert report.notes


def test_models_in_one_graph_have_no_notes_and_no_unused_layers() -> None:
    class Unused(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[0](x)

    report = qframework.explain(Unused(nn.Linear(32, 32), nn.Linear(32, 32)).eval(), example(), options=OPTIONS)
    assert [layer.name for layer in report.layers] == ["0"]
    assert report.notes == ()


def test_layers_in_int8_need_no_graph() -> None:
    report = qframework.explain(qframework.quantize_(Nested(Skipped(first=True)).eval(), dynamic_int8()), example())
    assert report.total == report.lowered == 4


def compiled_is_close(model: nn.Module) -> None:
    x = example()
    torch.compile(nn.Linear(8, 8), backend="qframework")(torch.randn(2, 8))  # watches again after reset()
    with torch.no_grad():
        out = torch.compile(model, backend="qframework", options=OPTIONS)(x)
        torch.testing.assert_close(out, model(x), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("first", [True, False])
def test_compiled_models_log_and_count_what_is_skipped(first: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "qframework"):
        compiled_is_close(Skipped(first).eval())
    assert fallbacks == {SKIPPED: 1}
    (message,) = [record.getMessage() for record in caplog.records if "skips code" in record.getMessage()]
    assert REASON in message
    assert "qframework.explain" in message


@pytest.mark.parametrize("first", [True, False])
def test_compiled_models_with_a_recurrent_layer(first: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Linears in float are counted; where only the recurrent layer is outside of the graphs, none is in float."""
    with caplog.at_level(logging.INFO, "qframework"):
        compiled_is_close(Recurrent(first=first).eval())
    messages = [record.getMessage() for record in caplog.records]
    assert fallbacks == ({} if ONLY_THE_LAYER else {SKIPPED: 1})
    assert ("qframework: 2 of 2 linear layers lowered" in messages) == ONLY_THE_LAYER
    assert any(REMEDY in message for message in messages) != ONLY_THE_LAYER


def test_other_backends_and_float_models_log_nothing() -> None:
    model = Skipped(first=True).eval()
    torch.compile(nn.Linear(8, 8), backend="qframework")(torch.randn(2, 8))
    for backend in ("eager", "qframework"):
        with torch.no_grad():
            torch.compile(model, backend=backend)(example())
    assert not fallbacks
