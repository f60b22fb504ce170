"""The operators that are timed for each choice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qframework.quantizer.layer_costs import costs_on
from qframework.tuning.layer_times import milliseconds, zero_point_milliseconds
from qframework.tuning.layers import AttentionOperands, LinearOperands, TensorShape

FLOAT = torch.float32


def shape(*sizes: int, dtype: torch.dtype = FLOAT) -> TensorShape:
    return TensorShape(sizes, dtype)


LINEAR = LinearOperands(shape(4, 6, 16), shape(32, 16), shape(32))


ATTENTION = AttentionOperands(*[shape(2, 2, 6, 8)] * 3)


class Operators(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("operands", "choice", "operators"),
    [
        (LINEAR, "float", ["aten.addmm.default"]),
        (LINEAR, "static", ["qframework.int8_linear.default"]),
        (LINEAR, "dynamic", ["qframework.dynamic_quantize.alone", "qframework.int8_linear.default"]),
        (ATTENTION, "static", ["qframework.mixed_attention.default"]),
        (ATTENTION, "sage_b", ["qframework.sage_attention.default"]),
    ],
)
def test_the_operators_that_the_backend_launches_are_timed(operands, choice, operators) -> None:
    with Operators() as mode:
        assert milliseconds(operands, choice, "cpu", repeats=1) > 0
    ours = [name for name in mode.seen if name in operators]
    # two calls to warm up, one for the number of repeats, three at least that count
    assert ours == operators * 6
    assert not [name for name in mode.seen if name.startswith("qframework") and name not in operators]


@pytest.mark.parametrize("choice", ["float", "static", "sage_b"])
@pytest.mark.parametrize(
    "bias",
    [
        {"mask": shape(2, 1, 6, 6)},
        {"mask": shape(6, 6, dtype=torch.bool)},
        {"rel_h": shape(2, 2, 6, 2), "rel_w": shape(2, 2, 6, 3)},
        {"is_causal": True},
        {"softcap": 5.0},
    ],
    ids=["float mask", "bool mask", "relative positions", "causal", "soft cap"],
)
def test_attention_is_timed_with_its_bias(bias, choice) -> None:
    assert milliseconds(AttentionOperands(*[shape(2, 2, 6, 8)] * 3, **bias), choice, "cpu", repeats=1) > 0


def test_float_attention_with_a_soft_cap_is_timed_with_it() -> None:
    with Operators() as mode:
        milliseconds(replace(ATTENTION, softcap=5.0), "float", "cpu", repeats=1)
    assert "aten.tanh.default" in mode.seen


def test_an_observer_changes_nothing_in_what_is_timed() -> None:
    for operands in (LINEAR, ATTENTION):
        seen = []
        for choice in ("static", "static mse"):
            with Operators() as mode:
                milliseconds(operands, choice, "cpu", repeats=1)
            seen.append(set(mode.seen))
        assert seen[0] == seen[1]


def test_a_zero_point_is_priced_for_each_value_of_the_input() -> None:
    small, large = (LinearOperands(shape(2, rows, 384), shape(1536, 384), None) for rows in (100, 300))
    price = zero_point_milliseconds(small, "cuda")
    assert price == pytest.approx(1e3 * costs_on("cuda", torch.float32).zero_point(200, 384))
    assert price > 0
    assert zero_point_milliseconds(large, "cuda") == pytest.approx(3 * price)
    assert zero_point_milliseconds(large, "cpu") == 0  # the product adds it in registers


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("operands", "choice"),
    [(o, c) for o, cs in ((LINEAR, ("static", "dynamic")), (ATTENTION, ("static", "sage_b"))) for c in ("float", *cs)],
)
def test_times_on_a_gpu_exclude_launch_overhead(operands, choice) -> None:
    # tensors this small take microseconds; launched one by one from Python they would take tens of them
    assert 0 < milliseconds(operands, choice, "cuda") < 0.1
