"""Rows that become INT8 are read once, whatever their order; every other choice is Inductor's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._inductor.choices import InductorChoices
from torch._inductor.virtualized import V

from qframework.compat import inductor
from qframework.compat.inductor import Choices


def features(rows, *dtypes):
    nodes = [SimpleNamespace(node=SimpleNamespace(get_dtype=lambda dtype=dtype: dtype)) for dtype in dtypes]
    return SimpleNamespace(reduction_numel=rows, scheduler_nodes=lambda: (*nodes, SimpleNamespace(node=None)))


@pytest.fixture
def inductor_says(monkeypatch):
    def say(answer):
        choose = staticmethod(lambda features, cooperative: answer)
        monkeypatch.setattr(InductorChoices, "should_use_persistent_reduction", choose)

    sizes = SimpleNamespace(statically_known_leq=lambda size, most: isinstance(size, int) and size <= most)
    with V.set_graph_handler(SimpleNamespace(sizevars=sizes)):
        yield say


@pytest.mark.parametrize(
    ("case", "cooperative", "once"),
    [
        (features(128, torch.float32, torch.int8), False, True),
        (features(1024, torch.int8), False, True),
        (features(1025, torch.int8), False, False),
        (features("s0", torch.int8), False, False),  # an unknown size
        (features(128, torch.float16), False, False),
        (features(128, torch.int8), True, False),
    ],
)
def test_short_rows_of_int8_are_read_once(inductor_says, case, cooperative, once):
    inductor_says(False)
    assert Choices.should_use_persistent_reduction(case, cooperative) is once
    inductor_says(True)
    assert Choices.should_use_persistent_reduction(case, cooperative) is True


def test_graphs_are_compiled_with_these_choices_and_others_are_not(monkeypatch):
    seen = []
    real = inductor._compiler.compile_fx

    def compile_fx(*arguments, **named):
        seen.append(type(V.choices))
        return real(*arguments, **named)

    monkeypatch.setattr(inductor._compiler, "compile_fx", compile_fx)
    torch._dynamo.reset()
    torch.compile(torch.nn.Linear(8, 8), backend="qframework", options={"linear": "int8_dynamic"})(torch.randn(2, 8))
    assert set(seen) == {Choices}
    assert type(V.choices) is InductorChoices


def test_packages_are_compiled_with_these_choices(monkeypatch):
    seen = []
    monkeypatch.setattr(
        torch._inductor, "aoti_compile_and_package", lambda *arguments, **named: seen.append(type(V.choices))
    )
    inductor.compile_package(None, "model.pt2", {}, {})
    assert seen == [Choices]
    assert type(V.choices) is InductorChoices
