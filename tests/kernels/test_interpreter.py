"""The faster parts of the interpreter give exactly what Triton's own give."""

from __future__ import annotations

from typing import Any

import interpreter
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction, ReduceOps

pytestmark = pytest.mark.interpreter


@triton.jit
def _larger_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _rounded_sum(a, b):
    return (a + b).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _last_of_largest(value, index, other_value, other_index):
    takes = (other_value > value) | ((other_value == value) & (other_index > index))
    return tl.where(takes, other_value, value), tl.where(takes, other_index, index)


@triton.jit
def _reductions(x_ptr, rows_ptr, sums_ptr, largest_ptr, places_ptr, all_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + rows[:, None] * COLUMNS + columns[None, :])
    tl.store(rows_ptr + rows, tl.reduce(x, 1, _larger_or_nan))
    sums = tl.reduce(tl.where(x == x, x, 0.0), 0, _rounded_sum, keep_dims=True)
    tl.store(sums_ptr + columns[None, :], sums)
    largest, place = tl.reduce((x, columns[None, :] + tl.zeros([ROWS, COLUMNS], tl.int32)), 1, _last_of_largest)
    tl.store(largest_ptr + rows, largest)
    tl.store(places_ptr + rows, place)
    tl.store(all_ptr, tl.reduce(x, None, _larger_or_nan))


def reductions(x: torch.Tensor) -> list[torch.Tensor]:
    rows, columns = x.shape
    results = [torch.empty(size) for size in (rows, columns, rows)]
    results += [torch.empty(rows, dtype=torch.int32), torch.empty(1)]
    _reductions[(1,)](x, *results, ROWS=rows, COLUMNS=columns)
    return results


def test_reductions_are_those_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that repeat, NaN and infinities, an order that matters, several results, all axes, kept dimensions."""
    x = torch.randn(16, 32).mul(4).round().div(3)
    x[3, 5], x[4, 6], x[5, 7] = torch.nan, torch.inf, -torch.inf
    calls = []

    def counted(reduction: Any, inputs: tuple[Any, ...]) -> list[Any]:
        calls.append(reduction)
        return interpreter.reduce_by_slices(reduction, inputs)

    monkeypatch.setattr(ReduceOps, "generic_reduce", counted)
    ours = reductions(x)
    assert len(calls) == 4
    monkeypatch.setattr(ReduceOps, "generic_reduce", interpreter.REDUCE_OF_TRITON)
    monkeypatch.setattr(InterpretedFunction, "__call__", interpreter.CALL_OF_TRITON)
    tritons = reductions(x)
    for mine, its in zip(ours, tritons, strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=0, equal_nan=True)
    assert ours[0].isnan().sum() == 1
