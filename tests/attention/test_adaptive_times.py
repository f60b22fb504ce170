"""calibrate_attention where variants are timed: what is timed, and how times decide."""

from __future__ import annotations

import pytest
import torch
from test_adaptive import DIM, TOKENS, Attention, Net, choose
from torch import Tensor, nn
from torch.nn import functional as F

from qframework.attention import AttentionChoice, adaptive
from qframework.attention.adaptive import PAPER_ORDER
from qframework.errors import CalibrationError


@pytest.fixture
def data() -> list[Tensor]:
    return [torch.randn(3, TOKENS, DIM) for _ in range(2)]


class FakeClock:
    """Seconds by the name of a variant; keeps what it was asked to time, and runs each call."""

    def __init__(self, **seconds: float) -> None:
        self.seconds, self.asked = seconds, []

    def __call__(self, calls) -> dict[str, float]:
        self.asked.append(list(calls))
        shapes = {call().shape for call in calls.values()}
        assert len(shapes) == 1, "every call computes the same attention"
        return {name: self.seconds[name] for name in calls}


@pytest.fixture
def clock(monkeypatch):
    """Sets the clock that a GPU would have."""

    def use(**seconds: float) -> FakeClock:
        fake = FakeClock(**seconds)
        monkeypatch.setattr(adaptive, "_clock", lambda timed, device: fake)
        return fake

    return use


def test_measured_times_order_the_variants(data: list[Tensor], clock) -> None:
    """Not the list: the paper's first is the slowest here, and its last the fastest but PyTorch's attention."""
    fake = clock(off=2.5, sage_vb=4.0, sage_vt=3.0, sage_b=2.0, sage_t=1.0)
    choice = choose(Net(), data, variants=PAPER_ORDER)
    assert set(choice.values()) == {"sage_t"}
    layer = choice.layers["layers.0"]
    assert list(layer.measurements) == ["sage_t", "sage_b", "off", "sage_vt", "sage_vb"]
    assert layer.measurements["sage_b"].seconds == 2.0
    assert fake.asked == [["off", *PAPER_ORDER]], "calls that are alike are timed once, in all layers and batches"
    assert "us" in str(choice.table(details=True).columns[-2].header)
    assert AttentionChoice.from_dict(choice.to_dict()).to_dict() == choice.to_dict()


def test_pytorch_is_chosen_where_it_is_fastest(data: list[Tensor], clock) -> None:
    clock(off=0.5, sage_vb=1.0, sage_t=1.0)
    assert set(choose(Net(), data, variants=["sage_vb", "sage_t"]).values()) == {"off"}


def test_a_fast_variant_that_is_not_accurate_is_not_chosen(data: list[Tensor], clock) -> None:
    clock(off=3.0, sage_vb=1.0, sage_b=2.0)
    choice = choose(Net(Attention(), Attention(spread=300.0)), data, 0.99995, variants=["sage_b", "sage_vb"])
    assert dict(choice) == {"layers.0": "sage_vb", "layers.1": "sage_b"}


def test_times_are_those_of_all_calls_of_a_layer(clock, monkeypatch) -> None:
    """A variant may be faster for one length and slower for another."""
    fake = clock(off=9.0, sage_b=1.0, sage_t=3.0)
    inner = fake.__call__

    def by_length(calls) -> dict[str, float]:
        long = next(iter(calls.values()))().shape[2] > 20
        return {name: value * (7 if long and name == "sage_b" else 1) for name, value in inner(calls).items()}

    monkeypatch.setattr(adaptive, "_clock", lambda timed, device: by_length)
    choice = choose(Net(Attention()), [torch.randn(2, n, DIM) for n in (8, 30)], variants=["sage_b", "sage_t"])
    assert choice["layers.0"] == "sage_t"
    times = {name: measured.seconds for name, measured in choice.layers["layers.0"].measurements.items()}
    assert times == {"sage_t": 3.0, "sage_b": 4.0, "off": 9.0}


def test_variants_that_do_not_run_have_no_time(clock) -> None:
    class Wide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    fake = clock(off=1.0)
    layer = choose(Wide(), [torch.randn(1, 1, 4, 300)], variants=["sage_b"]).layers["scaled_dot_product_attention"]
    assert fake.asked == [["off"]]
    assert (layer.variant, layer.measurements["sage_b"].seconds) == ("off", None)


def test_candidates_of_a_timed_run_include_those_for_hopper(data: list[Tensor], clock) -> None:
    fake = clock(off=9.0, unquantized=1.0, integer_exp=2.0, **dict.fromkeys(PAPER_ORDER, 3.0))
    assert set(choose(Net(), data).values()) == {"unquantized"}
    assert fake.asked == [["off", *PAPER_ORDER, "unquantized", "integer_exp"]]


def test_masks_of_other_contents_are_timed_apart(clock) -> None:
    fake = clock(off=1.0, sage_b=2.0)
    masks = [torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(diagonal) for diagonal in (0, 0, -3)]
    batches = [(torch.randn(3, TOKENS, DIM), mask) for mask in masks]
    choose(Net(Attention()), batches, variants=["sage_b"], forward=lambda model, batch: model(*batch))
    assert len(fake.asked) == 2


def test_times_need_a_gpu(data: list[Tensor]) -> None:
    with pytest.raises(CalibrationError, match="timed must be None or False where the model runs on a CPU, got True"):
        choose(Net(), data, timed=True)
