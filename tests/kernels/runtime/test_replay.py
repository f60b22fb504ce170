"""Calls of operators that are recorded once and repeated: the same results, nothing kept, nothing repeated wrongly."""

from __future__ import annotations

import gc
import re
import sys
import threading
import weakref
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from operator_calls import CALLS, effects
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from qframework import kernels
from qframework.kernels.quantize import quantize
from qframework.kernels.runtime import launch as _launch
from qframework.kernels.runtime import replay as _replay
from qframework.kernels.runtime.launch import launch
from qframework.kernels.runtime.operator import OPERATORS
from qframework.kernels.runtime.replay import replayed

# Without a GPU: kernels that are functions ---------------------------------------------------------------------------


class AddTo:
    """A kernel ``out = x + n``, which counts its launches; interpreted, so never compiled."""

    arg_names = ("x", "out", "n")

    def __init__(self):
        self.launches = 0

    def __getitem__(self, grid):
        def run(x, out, n, **constants):
            self.launches += 1
            out.copy_(x.view(out.shape) + n)

        return run


@pytest.fixture
def kernel():
    return AddTo()


@pytest.fixture
def counted(kernel):
    """``out = x + n`` in a kernel, with how often the implementation itself ran."""

    def implementation(x, n=1):
        implementation.runs += 1
        out = torch.empty(x.shape)
        launch(kernel, (1,))(x, out, n)
        return out

    implementation.runs = 0
    return implementation


def test_the_third_call_of_a_kind_is_a_replay(counted, kernel):
    run = replayed(counted)
    results = [run(torch.full((4,), float(i)), 2) for i in range(5)]
    assert [float(result[0]) for result in results] == [2, 3, 4, 5, 6]
    assert len({result.data_ptr() for result in results}) == 5
    assert (counted.runs, kernel.launches) == (2, 5)


class Operands(NamedTuple):
    """A group of a kernel's arguments with a group in it."""

    x: Tensor
    scale: int
    others: tuple[Tensor | None, Tensor, Tensor, int]


class AddScaled(AddTo):
    """A kernel ``out = x * scale + added + n`` whose arguments come in groups."""

    arg_names = ("operands", "sizes")

    def __getitem__(self, grid):
        def run(operands, sizes, **constants):
            assert type(operands) is Operands
            assert type(sizes) is tuple
            self.launches += 1
            none, out, added, n = operands.others
            assert none is None
            # NumPy, like a kernel, is not seen by the recording.
            x, out, added = (t.numpy().reshape(-1) for t in (operands.x, out, added))
            out[:] = x * operands.scale + added + n * sizes[0]

        return run


def test_groups_of_arguments_get_the_tensors_of_the_call():
    kernel = AddScaled()

    def implementation(x, n):
        out = torch.empty(x.shape)
        launch(kernel, (1,))(Operands(x[None], 10, (None, out, x * 100, n)), (1, 2))
        return out

    run = replayed(implementation)
    tensors = [torch.full((4,), float(i)) for i in range(5)]
    kept = weakref.ref(tensors[1])
    results = [run(x, 3) for x in tensors]
    assert all(callable(x) for x in run.replays.values())
    assert [float(result[0]) for result in results] == [3, 113, 223, 333, 443]
    assert len({result.data_ptr() for result in results}) == 5
    assert kernel.launches == 5
    del tensors
    gc.collect()
    assert kept() is None


def kinds():
    x = torch.zeros(8)
    yield (x, 2)
    yield (x.view(2, 4), 2)
    yield (torch.zeros(16)[::2], 2)
    yield (x.double(), 2)
    yield (torch.zeros(9)[1:], 2)  # begins at a multiple of 4 bytes only
    yield (x, 3)
    yield (x, [2])
    yield (x, torch.zeros(8))  # another tensor
    yield (x, x)  # the same


def test_another_kind_is_another_recording():
    seen = []
    run = replayed(lambda *args: seen.append(args))
    for index, arguments in enumerate(kinds()):
        for _ in range(4):
            run(*arguments)
        assert len(seen) == 2 * (index + 1)
    assert len(run.replays) == index + 1


def test_names_of_arguments_are_part_of_the_kind():
    run = replayed(lambda x, a=0, b=0: x + a - b)
    x = torch.zeros(2)
    assert [float(run(x, **{name: 1})[0]) for name in ("a", "a", "a", "b", "b", "b")] == [1, 1, 1, -1, -1, -1]


def test_operations_of_torch_and_views_are_repeated(kernel):
    def implementation(x, y):
        rows = x[:, 1:].transpose(0, 1)  # a view that begins elsewhere
        out = torch.empty(3, 2)
        launch(kernel, (1,))(rows.contiguous(), out, 1)
        out.mul_(y.sum())
        return out.view(6), [out[1:], None, 7]

    run = replayed(implementation)
    for i in range(4):
        whole = torch.randn(3, 4)
        x, y = whole[i % 2 : 2 + i % 2], torch.randn(5)  # x lies elsewhere in its storage each time
        (flat, (part, nothing, seven)), (expected, (rest, *_)) = run(x, y), implementation(x, y)
        assert torch.equal(flat, expected)
        assert torch.equal(part, rest)
        assert part.data_ptr() == flat.data_ptr() + 8  # views of one tensor still
        assert (nothing, seven) == (None, 7)
    assert callable(*run.replays.values())


def bits_of(kernel, launched):
    """``out = the bytes of a bool mask + 1``, with the steps that a replay takes."""

    def implementation(mask):
        out = torch.empty(mask.shape, dtype=torch.uint8)
        launched(kernel, mask.view(torch.uint8), out)
        return out

    return implementation


def test_a_view_of_another_dtype_reaches_an_interpreted_kernel(kernel):
    run = replayed(bits_of(kernel, lambda kernel, x, out: launch(kernel, (1,))(x, out, 1)))
    for i in range(4):
        mask = torch.arange(6) > i
        assert torch.equal(run(mask), mask.to(torch.uint8) + 1)


def test_a_compiled_kernel_takes_the_address_without_the_view(kernel):
    class Compiled:
        """A launch that takes addresses, as of a compiled kernel."""

        def __call__(self, x, out, n):
            seen.append(x.dtype)
            kernel[(1,)](x.view(torch.uint8), out, n)

        def bind(self, arguments):
            return None

    def launched(kernel, x, out):
        Compiled()(x, out, 1)
        if (recorded := _replay.recording()) is not None:
            recorded.launch(Compiled(), (x, out, 1))

    seen: list[torch.dtype] = []
    run = replayed(bits_of(kernel, launched))
    for i in range(4):
        mask = torch.arange(6) > i
        assert torch.equal(run(mask), mask.to(torch.uint8) + 1)
    assert seen == [torch.uint8] * 2 + [torch.bool] * 2  # the replays make no view


def test_a_view_of_an_operand_that_begins_elsewhere_reaches_the_kernel(kernel):
    def implementation(x):
        out = torch.empty(4)
        launch(kernel, (1,))(x[1], out, 0)
        return out

    run = replayed(implementation)
    for i in range(4):
        x = torch.randn(3, 4)
        assert torch.equal(run(x), x[1]), i


def test_random_numbers_are_drawn_each_time():
    run = replayed(lambda x: torch.rand(8) + x)
    drawn = [run(torch.zeros(8)) for _ in range(5)]
    assert callable(*run.replays.values())
    assert not torch.equal(drawn[3], drawn[4])


def test_memory_of_in_place_operations_lasts():
    def implementation(x, total):
        total.add_(x)
        return torch.empty(0)

    run, total = replayed(implementation), torch.zeros(())
    for _ in range(5):
        run(torch.ones(()), total)
    assert float(total) == 5


def test_what_a_replay_does_not_need_is_not_made():
    run = replayed(lambda x: (x.exp(), x + 1)[1])
    for i in range(3):
        assert float(run(torch.full((), float(i)))) == i + 1
    x, exponentials = torch.zeros(()), []

    class Exponentials(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            exponentials.append(func is torch.ops.aten.exp.default)
            return func(*args, **(kwargs or {}))

    with Exponentials():
        run(x)
    assert exponentials == [False]


ELSEWHERE = torch.ones(4)


@pytest.mark.parametrize(
    ("implementation", "reason"),
    [
        (lambda x: x + float(x[0]), "reads values"),
        (lambda x: x + ELSEWHERE, "comes from elsewhere"),
        (lambda x: x[x > 0], "reads values"),
    ],
    ids=["item", "elsewhere", "nonzero"],
)
def test_what_cannot_be_repeated_runs_as_written(implementation, reason):
    run = replayed(implementation)
    for i in range(5):
        x = torch.arange(4.0) - i
        assert torch.equal(run(x), implementation(x))
    (why,) = run.replays.values()
    assert reason in why


def test_errors_leave_nothing_behind(counted):
    def implementation(x, n):
        if implementation.fails:
            raise ValueError("not now")
        return counted(x, n)

    run = replayed(implementation)
    implementation.fails = True
    for _ in range(3):
        with pytest.raises(ValueError, match="not now"):
            run(torch.zeros(2), 1)
    assert _replay.recording() is None
    implementation.fails = False
    for i in range(4):
        assert float(run(torch.full((2,), float(i)), 1)[0]) == i + 1


def test_a_replay_keeps_no_tensor(counted):
    run = replayed(counted)
    tensors = [torch.zeros(2) for _ in range(4)]
    tensors += [run(x, 1) for x in tensors]
    references = [weakref.ref(x) for x in tensors]
    del tensors
    gc.collect()
    assert not [reference for reference in references if reference() is not None]


def test_an_operator_within_has_a_recording_of_its_own(counted):
    inner = replayed(counted)
    with torch.library._scoped_library("qframework_test_replay", "FRAGMENT") as library:
        library.define("inner(Tensor x) -> Tensor")
        library.impl("inner", lambda x: inner(x, 1), "CompositeExplicitAutograd")
        outer = replayed(lambda x: torch.ops.qframework_test_replay.inner(x) * 2)
        for i in range(6):
            assert float(outer(torch.full((2,), float(i)))[0]) == 2 * (i + 1)
    assert callable(*inner.replays.values())
    assert callable(*outer.replays.values())
    assert counted.runs == 2


def test_another_thread_is_not_recorded(kernel):
    def implementation(x):
        out = torch.empty(2)

        def elsewhere():
            launch(kernel, (1,))(torch.zeros(2), torch.empty(2), 1)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        launch(kernel, (1,))(x, out, 1)
        return out

    run = replayed(implementation)
    for i in range(4):
        assert float(run(torch.full((2,), float(i)))[0]) == i + 1
    assert kernel.launches == 2 * 2 + 2


def test_recordings_do_not_grow_for_ever(monkeypatch):
    monkeypatch.setattr(_replay, "_MAX_KINDS", 3)
    run = replayed(lambda x: x + 1)
    for n in range(1, 9):
        for _ in range(3):
            assert run(torch.zeros(n)).shape == (n,)
    assert len(run.replays) <= 3


# Every operator ------------------------------------------------------------------------------------------------------


def test_no_kernel_is_launched_unseen():
    """What goes past ``launch`` would be missing from every replay."""
    sources = [path for path in Path(kernels.__file__).parent.rglob("*.py") if path != Path(_launch.__file__)]
    assert len(sources) > 30
    assert [path.name for path in sources if re.search(r"kernel\w*\[", path.read_text())] == []


def test_every_operator_is_called():
    assert set(CALLS) == {name for name, operator in OPERATORS.items() if operator.replayed is not None}


@pytest.mark.interpreter
@pytest.mark.parametrize("name", CALLS)
def test_replays_of_an_operator_are_its_calls(name, monkeypatch):
    """Bit for bit, with other values in other places; a fresh recording, so that no other test's replay is used."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    monkeypatch.setattr(sys.modules[quantize.__module__], "check_positive_scale", lambda *_: None)  # on CPUs it looks
    implementation = OPERATORS[name].cuda
    run = replayed(implementation)
    torch.manual_seed(0)
    for _ in range(4):
        arguments = tree_map_only(Tensor, lambda x: x.to(device), CALLS[name]())
        for mine, theirs in zip(effects(run, arguments), effects(implementation, arguments), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
            assert mine.stride() == theirs.stride()
    assert callable(*run.replays.values()), run.replays
