"""The shortcut to a kind of calls: found for tensors with the same metadata, never for another kind."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from qframework.compat import dispatch
from qframework.kernels.runtime import recognition
from qframework.kernels.runtime.recognition import Shortcut, kind_of
from qframework.kernels.runtime.replay import replayed


def test_a_remembered_call_is_found_with_its_tensors():
    shortcut, x, y = Shortcut(), torch.zeros(4, 6), torch.zeros(3)
    assert shortcut.find((x, "gelu", y, [1, 2])) is None
    shortcut.remember((x, "gelu", y, [1, 2]), "value")
    found, operands = shortcut.find((x, "gelu", y, [1, 2]))
    assert found == "value"
    assert operands[0] is x
    assert operands[1] is y


X = torch.zeros(24)
OTHERS = {
    "shape": (X.view(4, 6),),
    "stride": (X.as_strided((24,), (0,)),),
    "dtype": (X.view(torch.int32),),
    "parameter": (nn.Parameter(X),),
    "gradient": (X.detach().requires_grad_(),),
    "size": (X[:23],),
    "alignment": (torch.zeros(25)[1:],),
}


@pytest.mark.parametrize("name", OTHERS)
def test_tensors_with_other_metadata_are_another_kind(name):
    shortcut = Shortcut()
    shortcut.remember((X, 2), "value")
    assert shortcut.find((X, 2))[0] == "value"
    assert shortcut.find((*OTHERS[name], 2)) is None


@pytest.mark.parametrize("values", [(X, 3), (X, None), (X, X), (X,), (X, 2, None)])
def test_other_arguments_are_another_kind(values):
    shortcut = Shortcut()
    shortcut.remember((X, 2), "value")
    assert shortcut.find(values) is None


def test_one_tensor_twice_is_told_apart_from_two():
    shortcut, y = Shortcut(), X.clone()
    shortcut.remember((X, y), "two")
    assert shortcut.find((X, y))[0] == "two"
    shortcut.remember((X, X), "one")
    assert [shortcut.find(values) for values in ((X, X), (y, y))] == [None] * 2


def test_the_position_of_a_missing_tensor_counts():
    shortcut = Shortcut()
    shortcut.remember((X, None, X), "value")
    assert shortcut.find((X, X, None)) is None


def test_nothing_is_kept_alive():
    shortcut, x = Shortcut(), torch.zeros(5)
    shortcut.remember((x,), "value")
    kept = weakref.ref(x)
    del x
    gc.collect()
    assert kept() is None


def test_a_call_with_other_tensors_of_the_kind_is_found():
    shortcut, y = Shortcut(), X.clone()
    shortcut.remember((X, 2), "value")
    found, operands = shortcut.find((y, 2))
    assert found == "value"
    assert operands[0] is y


def test_the_shortcut_does_not_grow_for_ever(monkeypatch):
    monkeypatch.setattr(recognition, "_MAX_KINDS", 2)
    shortcut = Shortcut()
    for size in range(1, 6):
        shortcut.remember((torch.zeros(size),), size)
    found = [shortcut.find((torch.zeros(size),)) is not None for size in range(1, 6)]
    assert found == [False] * 4 + [True]


@pytest.mark.parametrize("there", [True, False])
def test_replays_give_the_same_with_and_without_the_check_in_c(monkeypatch, there):
    if not there:
        monkeypatch.setattr(dispatch, "_TensorGuards", None)

    def implementation(x, n, y):
        return torch.ops.aten.add.Tensor(torch.ops.aten.mul.Scalar(x, n), y)

    run = replayed(implementation)
    x, y = torch.arange(4.0), torch.ones(4)
    calls = [(x, 2, y), (x, 3, y), (y, 2, x), (x.view(2, 2), 2, y.view(2, 2)), (x[:2], 2, y[2:])] * 5
    for each in calls:
        torch.testing.assert_close(run(*each), implementation(*each), rtol=0, atol=0)
    with torch.inference_mode():
        for each in calls:
            torch.testing.assert_close(run(*each), implementation(*each), rtol=0, atol=0)


def test_kinds_differ_in_everything_that_a_call_may_depend_on():
    x, y = torch.zeros(8), torch.zeros(8)
    calls = [(x, y), (x, x), (x.view(2, 4), y), (x.double(), y), (torch.zeros(9)[1:], y), (x, 1), (x, [1])]
    kinds = {kind_of(values, ())[0] for values in calls}
    assert len(kinds) == len(calls)
