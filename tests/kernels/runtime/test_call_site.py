"""Calls at one place of generated code: repeated for any addresses, and never with the steps of another kind."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from qframework.kernels.runtime import call_site as module
from qframework.kernels.runtime.call_site import call_site, repeating
from qframework.kernels.runtime.operator import OPERATORS
from qframework.kernels.runtime.replay import replayed


class Counted:
    """``x * factor + y`` as an operator: how often it was called itself, and how often its implementation ran.

    Tensors that do not begin at 16 bytes, and a tensor that is given twice, are computed in other steps, which give one
    and two more.
    """

    def __init__(self) -> None:
        self.calls = self.runs = 0
        self.replayed = replayed(self.implementation)

    def implementation(self, x: Tensor, y: Tensor | None, factor: int) -> Tensor:
        self.runs += 1
        product = torch.mul(x, factor)
        if x.data_ptr() % 16:
            product = torch.add(product, 1)
        if y is None:
            return product
        return torch.add(torch.add(product, 2) if y.data_ptr() == x.data_ptr() else product, y)

    def __call__(self, *args):
        self.calls += 1
        return self.replayed(*args)


@pytest.fixture
def operator():
    return Counted()


@pytest.fixture
def site(operator):
    return repeating(operator, operator.replayed)


def test_from_the_third_call_on_neither_operator_nor_implementation_is_called(operator, site):
    for i in range(6):
        x, y = torch.full((3,), float(i)), torch.ones(3)
        assert site(x, y, 2).tolist() == [2 * i + 1] * 3
    assert (operator.calls, operator.runs) == (0, 2)


def test_other_addresses_of_the_same_kind_are_repeated(operator, site):
    kept = [torch.full((4,), float(i)) for i in range(8)]
    assert [float(site(x, None, 3)[0]) for x in kept] == [3.0 * i for i in range(8)]
    assert operator.runs == 2


def test_another_alignment_is_recorded_anew(operator, site):
    memory = torch.arange(64, dtype=torch.float32)
    for _ in range(3):
        for start in (0, 1):
            x = memory[start : start + 16]
            assert torch.equal(site(x, None, 2), 2 * x + start)
    assert operator.runs == 4  # two of each alignment


def test_a_tensor_given_twice_is_another_kind(operator, site):
    x, y = torch.ones(4), torch.full((4,), 5.0)
    for _ in range(3):
        assert site(x, y, 1).tolist() == [6.0] * 4
        assert site(x, x, 1).tolist() == [4.0] * 4
    assert operator.runs == 4


def test_lists_of_tensors_are_passed_on(operator):
    def total(xs):
        operator.calls += 1
        return sum(xs)

    site = repeating(total, total)
    for i in range(4):
        assert float(site([torch.tensor(float(i)), torch.tensor(1.0)])) == i + 1
    assert operator.calls == 4


def test_lists_of_numbers_are_as_any_other_argument(operator):
    def scaled(x, factors):
        operator.runs += 1
        return torch.mul(x, factors[0] * factors[1])

    run = replayed(scaled)

    def implementation(*args):
        operator.calls += 1
        return run(*args)

    implementation.replays = run.replays
    site = repeating(operator, implementation)
    for i in range(6):
        assert float(site(torch.full((2,), float(i)), [2, 5])[0]) == 10.0 * i
    assert (operator.calls, operator.runs) == (2, 2)


def test_what_cannot_be_replayed_is_called(operator):
    def reads(x):
        operator.calls += 1
        return x * float(x.sum())

    run = replayed(reads)
    site = repeating(run, run)
    for i in range(5):
        assert float(site(torch.full((2,), float(i)))[0]) == 2.0 * i * i
    assert operator.calls == 5


def test_the_profiler_sees_the_operator(operator, site):
    x = torch.ones(3)
    for _ in range(4):
        site(x, None, 2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        site(x, None, 2)
    assert operator.calls == 1


def test_addresses_are_bounded_and_no_tensor_is_kept(operator, site, monkeypatch):
    monkeypatch.setattr(module, "_MAX_ADDRESSES", 4)
    xs = [torch.full((2,), float(i)) for i in range(16)]
    for _ in range(2):
        assert [float(site(x, None, 1)[0]) for x in xs] == list(range(16))
    seen = [weakref.ref(x) for x in xs]
    del xs
    gc.collect()
    assert not any(ref() is not None for ref in seen)


def test_every_operator_with_kernels_for_gpus_has_sites():
    names = [name for name, operator in OPERATORS.items() if operator.replayed is not None]
    assert {"int8_linear", "dynamic_quantize", "sage_attention"} <= set(names)
    assert all(callable(call_site(name)) for name in names)
