"""Launches on the device of the operands, and past Triton from the second call on."""

from __future__ import annotations

import gc
import re
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from qframework import kernels
from qframework.compat import missing
from qframework.kernels.runtime import launch as _launch
from qframework.kernels.runtime.launch import Relaunch, launch, warm_up
from qframework.kernels.runtime.operator import on_its_device
from qframework.kernels.runtime.replay import replayed


@pytest.mark.parametrize("index", [0, 1])
def test_the_operands_device_is_the_current_one(monkeypatch, index):
    current = [0]

    class Guard:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            current.append(self.device.index)

        def __exit__(self, *_):
            current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", Guard)
    x = SimpleNamespace(device=torch.device("cuda", index))
    assert on_its_device("operator", lambda x, y: (current[-1], y))(x, y=3) == (index, 3)
    assert current == [0]


class Recording:
    """A kernel of two arguments and two constants that records its calls, compiled or not."""

    arg_names = ("x", "n", "BLOCK", "FLAG")

    def __init__(self):
        self.through, self.past = [], []

    def __getitem__(self, grid):
        def first(*arguments, **constants):
            self.through.append((grid, arguments, constants))
            return Compiled(self.past)

        return first


class Descriptor:
    """Stands for Triton's tensor descriptor."""

    def __init__(self, base, block_shape):
        self.base, self.shape, self.strides, self.block_shape = base, list(base.shape), [1], block_shape


class Compiled:
    def __init__(self, past):
        self.past = past

    def __getitem__(self, grid):
        return lambda *arguments: self.past.append((grid, arguments))


@pytest.fixture
def on_cuda(monkeypatch):
    """Tensors of the CPU pass for tensors of CUDA device 0."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(_launch, "_compiled", {})


class Group(NamedTuple):
    """A tuple of arguments, as kernels take them."""

    data: torch.Tensor | None
    stride: int
    more: tuple[float, torch.Tensor | None] = (1.0, None)


def test_equal_calls_go_past_triton_with_their_own_values(on_cuda):
    kernel, x, y = Recording(), torch.zeros(8), torch.ones(8)
    launch(kernel, (4,))(x, 32, FLAG=True, BLOCK=64, num_warps=4)
    launch(kernel, (5, 2))(y, 48, FLAG=True, BLOCK=64, num_warps=4)
    assert len(kernel.through) == 1
    ((grid, (tensor, *rest)),) = kernel.past
    assert (grid, tensor is y, rest) == ((5, 2, 1), True, [48, 64, True])


def test_products_are_fused_with_sums_whatever_the_default_of_triton_is(on_cuda):
    """The kernels compiled ahead get the same options in the same order: Triton tells kernels apart by them."""
    kernel = Recording()
    kernel.warmup = lambda *arguments, grid, **constants: constants
    launch(kernel, (4,))(torch.zeros(8), 32, FLAG=True, BLOCK=64, num_warps=4)
    ahead = warm_up(kernel, (4,))(torch.zeros(8), 32, FLAG=True, BLOCK=64, num_warps=4)
    ((_, _, launched),) = kernel.through
    assert launched["enable_fp_fusion"] is True
    assert list(ahead.items()) == list(launched.items())


def test_replays_go_past_triton(on_cuda):
    kernel = Recording()

    def implementation(x, n):
        out = torch.empty(3)
        launch(kernel, (4,))(x, n, BLOCK=64, FLAG=True, num_warps=4)
        return out

    run = replayed(implementation)
    tensors = [torch.zeros(8) for _ in range(5)]
    results = [run(x, 32) for x in tensors]
    assert len(kernel.through) == 1
    assert [(grid, rest) for grid, (_, *rest) in kernel.past] == [((4, 1, 1), [32, 64, True])] * 4
    assert all(arguments[0] is x for (_, arguments), x in zip(kernel.past, tensors[1:], strict=True))
    assert len({x.data_ptr() for x in results}) == 5


@pytest.mark.parametrize(
    ("arguments", "constants"),
    [
        ((torch.zeros(9)[1:], 32), {}),  # begins at a multiple of 4 bytes only
        ((torch.zeros(8, dtype=torch.float64), 32), {}),
        ((torch.zeros(8), 33), {}),
        ((torch.zeros(8), 1), {}),
        ((torch.zeros(8), 2**40), {}),
        ((torch.zeros(8), 32.0), {}),
        ((Descriptor(torch.zeros(8), [4, 8]), 32), {}),
        ((torch.zeros(8), 32), {"BLOCK": 128}),
        ((torch.zeros(8), 32), {"num_warps": 8}),
        ((Group(torch.zeros(8), 16), 32), {}),
    ],
    ids=["unaligned", "dtype", "odd", "one", "64 bit", "float", "descriptor", "constant", "option", "group"],
)
def test_what_triton_specializes_on_goes_through_it(on_cuda, arguments, constants):
    kernel = Recording()
    usual = {"BLOCK": 64, "FLAG": True, "num_warps": 4}
    launch(kernel, (4,))(torch.zeros(8), 32, **usual)
    launch(kernel, (4,))(*arguments, **usual | constants)
    assert len(kernel.through) == 2
    assert kernel.past == []


def test_descriptors_are_told_apart_by_what_is_compiled_in(on_cuda):
    kernel = Recording()
    for x, block in ((torch.zeros(8), [4]), (torch.ones(16), [4]), (torch.zeros(8), [2]), (torch.zeros(8).half(), [4])):
        launch(kernel, (4,))(Descriptor(x, block), 32, BLOCK=64, FLAG=True)
    assert len(kernel.through) == 3
    assert [arguments[0].base.shape for _, arguments in kernel.past] == [(16,)]


def test_groups_are_told_apart_by_what_is_compiled_in(on_cuda):
    kernel, x, y = Recording(), torch.zeros(8), torch.ones(16)
    usual = Group(x, 16)
    same = [Group(y, 32), Group(x, 48, (2.0, None))]
    others = [
        Group(None, 16),
        Group(x.half(), 16),
        Group(torch.zeros(9)[1:], 16),
        Group(x, 17),
        Group(x, 1),
        Group(x, 2**40),
        Group(x, 16, (1.0, y)),
        Group(x, 16, (1.0, y.half())),
    ]
    for group in (usual, *same, *others):
        launch(kernel, (4,))(x, group, BLOCK=64, FLAG=True)
    assert [arguments[1] for _, arguments, _ in kernel.through] == [usual, *others]
    assert [arguments[1] for _, arguments in kernel.past] == same


def test_a_kernel_whose_first_argument_is_a_group_goes_past_triton(on_cuda):
    kernel = Recording()
    for x in (torch.zeros(8), torch.ones(8)):
        launch(kernel, (4,))(Group(x, 16), 32, BLOCK=64, FLAG=True)
    assert len(kernel.through) == len(kernel.past) == 1


def test_interpreted_kernels_are_called_as_they_are():
    kernel = Recording()
    for _ in range(2):
        launch(kernel, (4,))(torch.zeros(8), 32, BLOCK=64, FLAG=True)
    assert len(kernel.through) == 2


def test_every_operator_guards_its_device():
    """Nothing registers a CUDA implementation any other way."""
    root = Path(kernels.__file__).parent
    direct = [path for path in root.rglob("*.py") if re.search(r'impl\(.*"CUDA"', path.read_text())]
    assert direct == [root / "runtime" / "operator.py"]


# Launches at known addresses -----------------------------------------------------------------------------------------

triton = pytest.importorskip("triton")


class OnTriton:
    """A compiled kernel with Triton's own launcher, without a GPU: ``launched`` has what would reach the driver."""

    function, packed_metadata, backend = 7, (4, 1, 0), "cuda"

    def __init__(self, signature, meta, monkeypatch, **sizes):
        from triton.backends.nvidia import driver

        self.launched, self.filled = [], []
        monkeypatch.setattr(triton.runtime.driver, "_active", self)
        run = self.run = object.__new__(driver.CudaLauncher)
        defaults = {"launch_cooperative_grid": False, "launch_pdl": True, "num_ctas": 1, "gsan_enabled": False}
        scratch = {f"{kind}_scratch_{what}": 0 for kind in ("global", "profile") for what in ("size", "align")}
        annotations = {"arg_annotations": (), "kernel_signature": b""}
        run.__dict__ |= defaults | scratch | annotations | sizes
        run.launch = driver.wrap_handle_tensordesc(lambda *values: self.launched.append(values), signature, meta)
        self.utils = SimpleNamespace(fill_tma_descriptor=self.fill, fill_tma_descriptor_tiled=self.fill)
        self.stream = 100

    def fill(self, address, *rest):
        self.filled.append(address)
        return "map", address

    def get_current_device(self):
        return 0

    def get_current_target(self):
        return SimpleNamespace(backend=self.backend)

    def get_current_stream(self, device):
        return self.stream

    def __getitem__(self, grid):
        def run(*arguments):
            self.run(*grid, self.stream, self.function, self.packed_metadata, None, None, None, *arguments)

        return run

    def reached(self):
        """What reached the driver in each launch, flat, with addresses for tensors."""

        def flat(value):
            if isinstance(value, tuple | list):
                return [x for each in value for x in flat(each)]
            return [value.data_ptr() if isinstance(value, torch.Tensor) else value]

        return [flat(values) for values in self.launched]


META = {"swizzle": 3, "elem_size": 1, "elem_type": 1, "block_size": [8, 16], "fp4_padded": False}
SIGNATURE = {"x": "*i8", "a": "tensordesc<i8[8, 16]>", "n": "i32"}


def operands(value):
    x, a = torch.full((8,), value, dtype=torch.int8), torch.zeros(8, 16, dtype=torch.int8)
    return x, triton_descriptor(a), 32


def triton_descriptor(a):
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(a, list(a.shape), list(a.stride()), [8, 16])


def test_a_bound_launch_is_tritons_launch_on_the_present_stream(monkeypatch):
    compiled = OnTriton(SIGNATURE, [META], monkeypatch)
    again, first = Relaunch(compiled, (4,)), operands(1)
    bound = again.bind(first)
    assert compiled.launched == []
    for stream in (100, 200):
        compiled.stream = stream
        again(*first)
        bound()
    expected, found, *other = compiled.reached()
    assert found == expected
    assert other[0] == other[1]
    assert 200 in other[0]
    assert 200 not in found
    assert len(compiled.filled) == 3  # once for the bound launches, once for each of Triton's


def test_a_bound_launch_keeps_no_tensor(monkeypatch):
    compiled = OnTriton(SIGNATURE, [META], monkeypatch)
    first = operands(1)
    kept = [weakref.ref(first[0]), weakref.ref(first[1].base)]
    bound = Relaunch(compiled, (4,)).bind(first)
    del first
    gc.collect()
    assert [each() for each in kept] == [None, None]
    bound()
    assert len(compiled.launched) == 1


@pytest.mark.parametrize("size", ["global_scratch_size", "profile_scratch_size"])
def test_kernels_with_scratch_memory_go_through_triton(monkeypatch, size):
    compiled = OnTriton(SIGNATURE, [META], monkeypatch, **{size: 64})
    assert Relaunch(compiled, (4,)).bind(operands(1)) is None
    assert compiled.launched == []


def test_other_vendors_chips_go_through_triton(monkeypatch):
    compiled = OnTriton(SIGNATURE, [META], monkeypatch)
    compiled.backend = "hip"
    assert Relaunch(compiled, (4,)).bind(operands(1)) is None
    assert compiled.launched == []


def test_a_launcher_with_other_parameters_is_counted_and_goes_through_triton(monkeypatch):
    monkeypatch.setattr(missing, "replaced", Counter())
    compiled = OnTriton(SIGNATURE, [META], monkeypatch)
    monkeypatch.setattr(type(compiled.run), "__call__", lambda self, grid, stream: None)
    assert Relaunch(compiled, (4,)).bind(operands(1)) is None
    assert missing.replaced["triton.backends.nvidia.driver.CudaLauncher"] == 1


def test_an_unknown_launcher_is_counted_and_goes_through_triton(monkeypatch):
    monkeypatch.setattr(missing, "replaced", Counter())
    compiled = OnTriton(SIGNATURE, [META], monkeypatch)
    through = compiled.run.launch
    compiled.run.launch = lambda *values: through(*values)
    assert Relaunch(compiled, (4,)).bind(operands(1)) is None
    assert missing.replaced["triton.backends.nvidia.driver.CudaLauncher"] == 1


def test_replays_are_bound_to_the_addresses_of_earlier_calls(on_cuda, monkeypatch):
    compiled = OnTriton(SIGNATURE, [META], monkeypatch)
    kernel = Through(compiled)

    def implementation(x, a):
        launch(kernel, (4,))(x, triton_descriptor(a), x.numel())

    run = replayed(implementation)
    sets = [operands(value) for value in (1, 2)]
    for _ in range(6):
        for x, a, _n in sets:
            run(x, a.base)
    reached = compiled.reached()
    assert len(reached) == 12
    for index, (x, a, _n) in enumerate(sets):
        assert all(x.data_ptr() in each and ("map", a.base.data_ptr()) not in each for each in reached[index::2])
        assert all(a.base.data_ptr() in each for each in reached[index::2])
    filled = len(compiled.filled)
    for x, a, _n in sets:
        run(x, a.base)
    assert len(compiled.filled) == filled  # no map is built any more
    triton.knobs.runtime.launch_enter_hook.add(print)
    try:
        run(sets[0][0], sets[0][1].base)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(print)
    assert len(compiled.filled) == filled + 1  # where a profiler listens, Triton launches


class Through:
    """A kernel whose first launch goes through ``OnTriton`` as well."""

    arg_names = ("x", "a", "n")

    def __init__(self, compiled):
        self.compiled = compiled

    def __getitem__(self, grid):
        def first(*arguments, **constants):
            self.compiled[(*grid, 1, 1)[:3]](*arguments)
            return self.compiled

        return first
