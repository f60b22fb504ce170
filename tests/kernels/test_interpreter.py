"""The faster parts of the interpreter give exactly what Triton's own give."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import interpreter
import pytest
import torch
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterOptions, ReduceOps

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


@triton.jit
def _sums(x_ptr, y_ptr, sum_ptr, product_ptr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    x, y = tl.load(x_ptr + places), tl.load(y_ptr + places)
    tl.store(sum_ptr + places, x + y)
    tl.store(product_ptr + places, x * y)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.float16, torch.float32])
def test_sums_and_products_are_those_of_triton(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of integers that overflow too: Triton drops what it finds about them, and it would still be asked for it."""
    x, y = (torch.randint(-100, 101, (64,)).mul(2**24 if dtype == torch.int32 else 1).to(dtype) for _ in range(2))

    def results() -> list[torch.Tensor]:
        both = [torch.empty_like(x) for _ in range(2)]
        _sums[(1,)](x, y, *both, SIZE=64)
        return both

    ours = results()
    monkeypatch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", interpreter.CHECK_OF_TRITON)
    monkeypatch.setattr(triton_interpreter, "_get_np_dtype", interpreter.DTYPE_OF_TRITON)
    monkeypatch.setattr(tl.block_type, "__init__", interpreter.TYPE_OF_TRITON)
    monkeypatch.setattr(tl.tensor, "__init__", interpreter.TENSOR_OF_TRITON)
    assert all(map(torch.equal, ours, results()))
    assert torch.equal(ours[0], x + y)
    assert not InterpreterOptions().debug
    checked = []
    monkeypatch.setattr(interpreter, "CHECK_OF_TRITON", lambda *given: checked.append(given))
    for debug in (False, True):
        semantic = SimpleNamespace(builder=SimpleNamespace(options=SimpleNamespace(debug=debug)))
        interpreter.check_of_overflow(semantic, x, y, None)
        assert len(checked) == debug


@pytest.mark.parametrize("shape", [[4, 8], [tl.constexpr(4), 8], tl.tuple([4, 8])], ids=str)
@pytest.mark.parametrize("element", [tl.float16, tl.pointer_type(tl.int8)], ids=str)
def test_types_and_tensors_are_those_of_triton(element: Any, shape: Any) -> None:
    """The first and the second of a shape."""
    wanted = object.__new__(tl.block_type)
    interpreter.TYPE_OF_TRITON(wanted, element, shape)
    whole = object.__new__(tl.tensor)
    interpreter.TENSOR_OF_TRITON(whole, "handle", wanted)
    for _ in range(2):
        found = tl.block_type(element, shape)
        assert found == wanted
        assert (found.name, found.numel) == (wanted.name, wanted.numel)
        tensor = tl.tensor("handle", found)
        assert vars(tensor).keys() == vars(whole).keys()
        assert [size.value for size in tensor.shape] == [size.value for size in whole.shape] == [4, 8]
        assert (tensor.handle, tensor.numel.value, tensor.dtype, tensor.type) == ("handle", 32, element, wanted)
    assert len(tl.tensor("handle", element).shape) == 0


@triton.jit
def _first_rows(x_ptr, out_ptr, kept, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    for row in range(4):
        mask = (row < kept) & (places < SIZE)
        tl.store(out_ptr + row * SIZE + places, tl.load(x_ptr + row * SIZE + places, mask=mask, other=0.0))
        tl.store(out_ptr + row * SIZE + places, -1.0, mask=row < kept - 1)


def test_conditions_of_scalars_are_masks() -> None:
    """Alone and with those of a block; what they compare is int32, which Triton 3.9 refuses."""
    x = torch.rand(4, 8)
    out = torch.empty_like(x)
    _first_rows[(1,)](x, out, 2, SIZE=8)
    assert torch.equal(out, torch.stack([-torch.ones(8), x[1], torch.zeros(8), torch.zeros(8)]))
    condition = triton_interpreter.TensorHandle(torch.tensor([True]).numpy(), tl.int32)
    block = triton_interpreter.InterpreterBuilder().create_splat(tl.block_type(tl.int1, [2, 4]), condition)
    assert (block.data.dtype, block.data.tolist()) == (bool, [[True] * 4] * 2)
