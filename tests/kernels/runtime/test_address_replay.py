"""Replays by the addresses of all tensors: equal to the call itself wherever its tensors lie."""

from __future__ import annotations

import ctypes
import gc
import itertools
import threading
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from qframework import quantize_
from qframework.kernels.runtime import address_replay
from qframework.kernels.runtime.address_replay import AddressRecording, misaligned
from qframework.kernels.runtime.replay import recording
from qframework.quantizer import dynamic_int8


def floats(address: int, n: int) -> Any:
    return (ctypes.c_float * n).from_address(address)


class Pair(NamedTuple):
    x: Tensor
    n: int


class Add:
    """A launch of ``out = pair.x + y + pair.n``, which reads and writes at addresses, as a kernel does."""

    def __init__(self, bindable: bool = True) -> None:
        self.launches = self.binds = 0
        self.bindable = bindable

    def __call__(self, pair: Pair, y: Tensor, out: Tensor) -> None:
        self.at(pair.x.data_ptr(), y.data_ptr(), out.data_ptr(), out.numel(), pair.n)

    def at(self, x: int, y: int, out: int, size: int, n: int) -> None:
        self.launches += 1
        a, b, c = (floats(address, size) for address in (x, y, out))
        for i in range(size):
            c[i] = a[i] + b[i] + n

    def bind(self, arguments: tuple[Any, ...]) -> Any:
        self.binds += 1
        pair, y, out = arguments
        given = pair.x.data_ptr(), y.data_ptr(), out.data_ptr(), out.numel(), pair.n
        return (lambda stream: self.at(*given)) if self.bindable else None


SIZE = 64


def twice(add: Add, x: Tensor, y: Tensor) -> Tensor:
    """``x + y + 1 + y + 2`` in two launches, with a tensor between that a view reads."""
    unused, between, out = torch.empty(7), torch.empty(SIZE), torch.empty(2, SIZE // 2)
    del unused
    for arguments in ((Pair(x, 1), y, between), (Pair(between.view(2, -1), 2), y, out)):
        add(*arguments)
        recorded = recording()
        if recorded is not None:
            recorded.launch(add, arguments)
    return out


def replay_of(add: Add, call: Any = twice) -> Any:
    operands = tensor(1), tensor(2)
    with AddressRecording(operands) as recorded:
        result = call(add, *operands)
    return recorded.finish(result)


def tensor(value: float) -> Tensor:
    return torch.full((SIZE,), float(value))


@pytest.fixture
def recurring(monkeypatch) -> None:
    """An allocator whose addresses recur, as PyTorch's for a GPU."""

    def allocator(like: Tensor) -> Any:
        made = itertools.cycle([torch.empty_like(like) for _ in range(2)])
        return lambda: next(made)

    monkeypatch.setattr(address_replay, "_allocator", allocator)


@pytest.mark.usefixtures("recurring")
def test_a_replay_is_the_call_wherever_its_tensors_lie() -> None:
    add = Add()
    replay = replay_of(add)
    places = [(tensor(0), tensor(0)) for _ in range(3)]
    for i in range(60):
        x, y = places[i % 3]
        x.fill_(i), y.fill_(10 * i)
        result = replay((x, y))
        assert result.shape == (2, SIZE // 2)
        assert torch.equal(result, torch.full_like(result, i + 20 * i + 3))
    assert add.launches == 2 * 61
    assert add.binds == 2 * 6  # each of 3 places of the operands with each of 2 of the results, once


def test_results_that_are_kept_are_not_written_again() -> None:
    replay, x, y = replay_of(Add()), tensor(1), tensor(2)
    kept = [replay((x.fill_(i), y)) for i in range(12)]
    assert [float(each[0, 0]) for each in kept] == [i + 4 + 3 for i in range(12)]


@pytest.mark.usefixtures("recurring")
def test_launches_that_cannot_be_bound_are_launched() -> None:
    add = Add(bindable=False)
    replay, x, y = replay_of(add), tensor(1), tensor(2)
    for i in range(20):
        assert float(replay((x.fill_(i), y))[0, 0]) == i + 4 + 3


@pytest.mark.usefixtures("recurring")
def test_hooks_of_a_profiler_see_every_launch(monkeypatch) -> None:
    add = Add()
    replay, x, y = replay_of(add), tensor(1), tensor(2)
    called: list[Any] = []
    for _ in range(6):
        replay((x, y))
    binds = add.binds
    assert binds
    monkeypatch.setattr(Add, "__call__", lambda self, *given: called.append(given))
    monkeypatch.setattr(address_replay, "launch_hooks_are_set", lambda: True)
    for _ in range(5):
        replay((x, y))
    assert len(called) == 2 * 5
    assert add.binds == binds


def test_other_alignments_have_no_replay() -> None:
    add = Add()
    replay, y = replay_of(add), tensor(2)
    x = torch.ones(SIZE + 1)[1:]
    launches = add.launches
    assert misaligned((y, x))
    assert not misaligned((y, x[3:]))
    assert replay((x, y)) is None
    assert add.launches == launches


def with_an_operation(add: Add, x: Tensor, y: Tensor) -> Tensor:
    return twice(add, x * 2, y)


def of_a_view(add: Add, x: Tensor, y: Tensor) -> Tensor:
    both = torch.stack([y, x])
    return twice(add, both[1], y)


@pytest.mark.parametrize("call", [with_an_operation, of_a_view, lambda add, x, y: (twice(add, x, y), x)])
def test_other_steps_are_repeated_one_by_one(call) -> None:
    add = Add()
    replay = replay_of(add, call)
    for i in range(4):
        x, y = tensor(i), tensor(i + 1)
        found, expected = replay((x, y)), call(add, x, y)
        found, expected = (each[0] if isinstance(each, tuple) else each for each in (found, expected))
        assert torch.equal(found, expected)
    assert replay((torch.ones(SIZE + 1)[1:], y)) is None


def test_addresses_are_bounded_and_no_tensor_is_kept(monkeypatch) -> None:
    monkeypatch.setattr(address_replay, "_MAX_ADDRESSES", 4)
    replay = replay_of(Add())
    (bound,) = [cell.cell_contents for cell in replay.__closure__ if isinstance(cell.cell_contents, dict)]
    tensors = [tensor(i) for i in range(30)]
    results = [replay((x, tensors[0])) for x in tensors]
    assert 0 < len(bound) <= 4
    references = [weakref.ref(x) for x in (*tensors, *results)]
    del tensors, results
    gc.collect()
    assert not [reference for reference in references if reference() is not None]


# Memory between launches ----------------------------------------------------------------------------------------------


@pytest.fixture
def blocks(monkeypatch) -> dict[Any, Any]:
    """What this thread keeps, at first nothing."""
    monkeypatch.setattr(address_replay, "_kept", address_replay._Kept())
    return address_replay._kept.blocks


def test_calls_of_a_stream_share_what_lies_between_launches(blocks, monkeypatch) -> None:
    streams = [0]
    monkeypatch.setattr(address_replay, "_no_stream", lambda: streams[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    replays = [replay_of(Add()) for _ in range(2)]
    kept = []
    for streams[0] in (0, 7, 0, 7):
        for i, replay in enumerate(replays):
            assert float(replay((tensor(i), tensor(2)))[0, 0]) == i + 4 + 3
        kept.append(blocks[torch.device("cpu"), streams[0]][0])
    assert kept[:2] == kept[2:]
    assert len(set(kept)) == len(blocks) == 2


def test_threads_share_nothing(blocks) -> None:
    """One may launch between two launches of another."""
    replay = replay_of(Add())
    replay((tensor(1), tensor(2)))
    other: list[Any] = []

    def run() -> None:
        replay((tensor(1), tensor(2)))
        other.extend(address_replay._kept.blocks.values())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    ((mine, *_),) = blocks.values()
    assert [address for address, *_ in other] != [mine]
    assert len(other) == 1


def test_a_larger_call_replaces_the_memory_and_the_largest_keep_none(blocks, monkeypatch) -> None:
    def large(add: Add, x: Tensor, y: Tensor) -> Tensor:
        between, out = torch.empty(4 * SIZE), torch.empty(SIZE)
        for arguments in ((Pair(x, 1), y, between[:SIZE]), (Pair(between[:SIZE], 2), y, out)):
            add(*arguments)
            recorded = recording()
            if recorded is not None:
                recorded.launch(add, arguments)
        return out

    sizes = []
    for call in (twice, large, twice):
        replay = replay_of(Add(), call)
        assert float(replay((tensor(5), tensor(2))).view(-1)[0]) == 5 + 4 + 3
        sizes.append(next(iter(blocks.values()))[1])
    assert sizes[0] < sizes[1] == sizes[2]
    blocks.clear()
    monkeypatch.setattr(address_replay, "_MAX_KEPT", SIZE)
    replay = replay_of(Add())
    for i in range(5):
        assert float(replay((tensor(i), tensor(2)))[0, 0]) == i + 4 + 3
    assert not blocks


def test_a_captured_stream_has_no_replay(monkeypatch) -> None:
    """What a CUDA graph writes, and when, is not in the order of later calls."""
    monkeypatch.setattr(address_replay, "_no_stream", lambda: 7)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    add = Add()
    replay = replay_of(add)
    launches = add.launches
    assert replay((tensor(1), tensor(2))) is None
    assert add.launches == launches


@pytest.mark.gpu
@torch.no_grad()
def test_layers_on_several_streams_and_in_a_graph() -> None:
    """A graph that runs beside eager calls, and two streams that do."""
    torch.manual_seed(0)
    layers = quantize_(nn.Sequential(*[nn.Linear(512, 512, device="cuda") for _ in range(4)]).half(), dynamic_int8())
    inputs = [torch.randn(512, 512, device="cuda", dtype=torch.float16) for _ in range(2)]
    expected = [layers(x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    graph, static = torch.cuda.CUDAGraph(), inputs[1].clone()
    for _ in range(4):
        layers(static)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = layers(static)
    for _ in range(20):
        found = []
        for stream, x in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                found.append(layers(x))
        with torch.cuda.stream(streams[1]):
            graph.replay()
        found.append(layers(inputs[0]))
        torch.cuda.synchronize()
        for y, wanted in zip([*found, captured], [*expected, expected[0], expected[1]], strict=True):
            assert torch.equal(y, wanted)
