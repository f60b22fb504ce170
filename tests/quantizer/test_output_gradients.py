"""Errors at the output by gradients, compared with runs of the model with one input changed."""

from __future__ import annotations

import pytest
import torch
from quantizer_models import exported
from torch import Tensor, nn

from qframework.errors import CalibrationError
from qframework.graph.nodes import linear_call
from qframework.numerics import scale_from_amax
from qframework.quantizer import QFrameworkQuantizer, output_gradients, static_int8
from qframework.quantizer.activation_choice import choose_activations
from qframework.quantizer.output_error import Parameters, Run, fake_quantized, floats, relative_error
from qframework.quantizer.output_gradients import errors_by_gradients, without_gradients

DIM = 16
QUANTIZER = QFrameworkQuantizer().set_global(static_int8())


class Norms(nn.Module):
    """Two layers of one tensor, which other operations read as well, and one behind a norm of both."""

    def __init__(self, detaches: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = (nn.Linear(DIM, DIM) for _ in range(3))
        self.norm = nn.LayerNorm(DIM)
        self.detaches = detaches

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        y = self.norm(self.first(y) * torch.nn.functional.gelu(self.second(y)) + 3 * y)
        return self.last(y.detach() if self.detaches else y)


class Decisions(Norms):
    """Integers alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).argmax(-1)


def data(seed: int = 0, batches: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(6, 10, DIM, generator=generator) for _ in range(batches)]


def coarse(x: Tensor) -> dict[str, Tensor]:
    """Two scales, relative to the range of tanh."""
    return {str(size): fake_quantized(x, Parameters(scale_from_amax(torch.tensor(size)))) for size in (1.0, 4.0)}


def linears(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [node for node in graph.graph.nodes if linear_call(node) is not None]


def by_runs(graph: torch.fx.GraphModule, group: list[torch.fx.Node], batches: list[Tensor]) -> dict[str, float]:
    run = Run(graph).start([torch.cat(batches)])
    expected = floats(run.finish({}))
    run.advance(group[0])
    calls = [linear_call(node) for node in group]
    return {
        name: relative_error(
            floats(
                run.finish(
                    {
                        node: nn.functional.linear(value, run.value(call.weight), run.value(call.bias))
                        for node, call in zip(group, calls, strict=True)
                    }
                )
            ),
            expected,
        )
        for name, value in coarse(run.value(calls[0].input)).items()
    }


@pytest.mark.parametrize("detaches", [False, True])
@torch.no_grad()
def test_they_are_those_of_runs(monkeypatch, detaches: bool) -> None:
    monkeypatch.setattr(output_gradients, "_PROBES", 400)
    graph = exported(Norms(detaches), data()[0], dynamic_batch=True)
    first, second, last = linears(graph)
    groups = [[first, second], [last]]
    found = errors_by_gradients(graph, data(), [(group, coarse) for group in groups])
    for group, errors in zip(groups, found, strict=True):
        assert errors == pytest.approx(by_runs(graph, group, data()), rel=0.1)


def test_models_of_one_size_are_judged_by_whole_batches(monkeypatch) -> None:
    monkeypatch.setattr(output_gradients, "_PROBES", 2000)
    graph = exported(Norms(), data()[0])
    (*_, last) = linears(graph)
    (errors,) = errors_by_gradients(graph, data(), [([last], coarse)])
    each = [by_runs(graph, [last], [batch]) for batch in data()]
    assert errors == pytest.approx({name: sum(found[name] for found in each) / 2 for name in errors}, rel=0.1)


def test_at_most_so_many_examples_are_read(monkeypatch) -> None:
    monkeypatch.setattr(output_gradients, "_EXAMPLES", 6)
    graph = exported(Norms(), data()[0], dynamic_batch=True)
    (*_, last) = linears(graph)
    one, two = (errors_by_gradients(graph, data()[:count], [([last], coarse)]) for count in (1, 2))
    assert one == two


@pytest.mark.parametrize("reason", ["no output depends", "GiB", "NaN"])
def test_without_gradients_runs_judge(monkeypatch, reason: str) -> None:
    model: nn.Module = Decisions() if "output" in reason else Norms()
    if "GiB" in reason:
        monkeypatch.setattr(output_gradients, "_LARGEST_BYTES", 1)
    if "NaN" in reason:
        monkeypatch.setattr(output_gradients, "_vectors", lambda output, _: torch.full_like(output, float("nan")))
    graph = exported(model, data()[0], dynamic_batch=True)
    before = sum(without_gradients.values())
    assert errors_by_gradients(graph, data(), [(linears(graph)[:2], coarse)]) is None
    assert sum(without_gradients.values()) == before + 1
    assert any(reason in each for each in without_gradients)


def test_a_choice_without_gradients_is_that_with_them(monkeypatch) -> None:
    choose = lambda: choose_activations(  # noqa: E731
        exported(Norms(), data()[0], dynamic_batch=True), QUANTIZER, data(), margins=True, dynamic_share=0.6
    )
    found = choose()
    monkeypatch.setattr(output_gradients, "_LARGEST_BYTES", 1)
    before = sum(without_gradients.values())
    assert choose() == found
    assert sum(without_gradients.values()) > before
    assert "dynamic" in found.values()


def test_data_that_does_not_fit_is_an_error() -> None:
    graph = exported(Norms(), data()[0], dynamic_batch=True)
    with pytest.raises(CalibrationError):
        errors_by_gradients(graph, [torch.zeros(2, 3, DIM + 1)], [(linears(graph)[:1], coarse)])


class Rare(nn.Module):
    """The second layer's outputs count only in examples of large first elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.often, self.rarely = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        marked = (x[:, :1, :1] > 4).to(x.dtype)
        return self.often(x) + 30 * marked * self.rarely(x.clamp(-3, 3).pow(5))


def test_all_batches_judge_where_ranges_have_margins() -> None:
    batches = [each.clamp(-3, 3) for each in data(batches=3)]
    choose = lambda: choose_activations(  # noqa: E731
        exported(Rare(), batches[0], dynamic_batch=True),
        QUANTIZER,
        batches,
        observers=False,
        margins=True,
        dynamic_share=0.5,
    )
    assert choose()["often"] == "dynamic"
    batches[2] = batches[2].clone()
    batches[2][:, 0, 0] = 5.0
    assert choose()["rarely"] == "dynamic"
