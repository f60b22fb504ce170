"""A module's repeated calls without the dispatcher: only where it would do nothing but call the kernels."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from qframework import quantize_
from qframework.compat import dispatch
from qframework.kernels.linear.int8_linear import INT8_LINEAR
from qframework.kernels.quantize import DYNAMIC_QUANTIZE, QUANTIZE
from qframework.kernels.runtime import direct as _direct
from qframework.kernels.runtime.direct import DirectCalls
from qframework.quantizer import dynamic_int8, static_int8


class Scaled:
    """``x * weight + n`` through ``DirectCalls``, with counts of how it was computed."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.calls, self.counts = weight, DirectCalls(), {"dispatched": 0, "direct": 0, "replayed": 0}

    def __call__(self, x: torch.Tensor, n: int = 0) -> torch.Tensor:
        operands = x, self.weight
        y = self.calls.repeat(operands, n)
        if y is not None:
            self.counts["replayed"] += 1
            return y

        def compute(kind: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            self.counts[kind] += 1
            return x * weight + n

        return self.calls.run(operands, n, partial(compute, "dispatched"), partial(compute, "direct"))


@pytest.fixture
def scaled() -> Scaled:
    """Recorded for calls with ``torch.ones(4)``."""
    made = Scaled(torch.full((4,), 3.0))
    for _ in range(2):
        made(torch.ones(4))
    return made


def test_the_third_call_of_a_kind_is_a_replay() -> None:
    made = Scaled(torch.full((4,), 3.0))
    for i in range(5):
        made.weight = torch.full((4,), float(i))  # as after loading a state dict
        assert made(torch.full((4,), 2.0)).tolist() == [2.0 * i] * 4
    assert made.counts == {"dispatched": 1, "direct": 1, "replayed": 3}
    assert [float(made(torch.ones(4), n)[0]) for n in (0, 7, 7, 7, 8)] == [4, 11, 11, 11, 12]


class SeenOperations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


class SeenFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


STATES = {
    "dispatch mode": SeenOperations,
    "function mode": SeenFunctions,
    "autocast": lambda: torch.autocast("cpu"),
    "forward-mode derivatives": forward_ad.dual_level,
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_the_dispatcher_is_not_passed_by_where_it_has_something_to_do(state, scaled) -> None:
    fresh = Scaled(torch.full((4,), 3.0))
    with state():
        for _ in range(4):
            assert scaled(torch.ones(4)).tolist() == [3.0] * 4
            assert fresh(torch.ones(4)).tolist() == [3.0] * 4
    assert scaled.counts == {"dispatched": 5, "direct": 1, "replayed": 0}
    assert fresh.counts == {"dispatched": 4, "direct": 0, "replayed": 0}
    assert scaled(torch.ones(4)).tolist() == [3.0] * 4
    assert scaled.counts["replayed"] == 1


def test_a_fake_mode_sees_calls_with_real_tensors(scaled) -> None:
    x = torch.ones(4)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(scaled(x), FakeTensor)
    assert scaled.counts["replayed"] == 0


def test_modes_see_all_operations_of_a_call_that_was_recorded(scaled) -> None:
    with SeenOperations() as mode:
        scaled(torch.ones(4))
    assert "mul.Tensor" in mode.seen


TRANSFORMS = {
    "vmap": lambda call: torch.func.vmap(lambda _: call(torch.ones(4)))(torch.zeros(2)),
    "vmap of the input": lambda call: torch.func.vmap(call)(torch.ones(2, 4)),
    "grad": lambda call: torch.func.grad(lambda x: call(x).sum())(torch.ones(4)),
    "jvp": lambda call: torch.func.jvp(call, (torch.ones(4),), (torch.ones(4),)),
    "functionalize": lambda call: torch.func.functionalize(call)(torch.ones(4)),
    "make_fx": lambda call: make_fx(call)(torch.ones(4)),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_and_tracing_are_not_passed_by(transform, scaled) -> None:
    for _ in range(3):
        transform(scaled)
    assert scaled.counts["replayed"] == 0
    assert scaled.counts["direct"] == 1


def test_a_traced_call_has_all_operations(scaled) -> None:
    targets = {node.target for node in make_fx(scaled)(torch.ones(4)).graph.nodes}
    assert torch.ops.aten.mul.Tensor in targets


def test_gradients_are_left_to_autograd() -> None:
    made, x = Scaled(nn.Parameter(torch.full((4,), 3.0))), torch.ones(4)
    for _ in range(4):
        assert made(x).requires_grad
    with torch.no_grad():
        for _ in range(4):
            assert not made(x).requires_grad
    with torch.inference_mode():
        for _ in range(4):
            assert made(torch.ones(4)).is_inference()
    assert made(x).requires_grad
    assert made.counts == {"dispatched": 5 + 1 + 1, "direct": 2, "replayed": 2 + 2}


X = torch.ones(24)
OTHERS = {
    "shape": X.view(4, 6),
    "stride": torch.ones(8)[::2],
    "dtype": torch.ones(4, dtype=torch.float64),
    "parameter": nn.Parameter(torch.ones(4), requires_grad=False),
    "inference": torch.inference_mode()(torch.ones)(4),
    "alignment": torch.ones(5)[1:],
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_tensors_are_another_kind(name, scaled) -> None:
    x = OTHERS[name]
    scaled.weight = torch.full(x.shape[-1:], 3.0)
    for _ in range(2):
        assert torch.equal(scaled(x), x * 3)
    assert scaled.counts["replayed"] == 0
    assert torch.equal(scaled(x), x * 3)
    assert scaled.counts["replayed"] == (name != "alignment")


def test_a_mode_without_gradients_for_the_same_tensors_is_another_kind(scaled) -> None:
    x = torch.ones(4)
    with torch.inference_mode():
        for _ in range(3):
            scaled(x)
    assert scaled.counts["replayed"] == 1


def test_tensor_subclasses_see_every_call() -> None:
    class Seen(torch.Tensor):
        functions: list[str] = []  # noqa: RUF012

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.functions.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs)

    made = Scaled(torch.full((4,), 3.0).as_subclass(Seen))
    for _ in range(4):
        made(torch.ones(4))
    assert made.counts == {"dispatched": 4, "direct": 0, "replayed": 0}
    assert Seen.functions.count("mul") == 4


def test_what_cannot_be_recorded_goes_through_the_dispatcher() -> None:
    calls, counts, elsewhere = DirectCalls(), [], torch.ones(4)
    x = torch.ones(4)
    for _ in range(5):
        assert calls.repeat((x,), None) is None
        y = calls.run((x,), None, lambda x: counts.append("dispatched") or x + elsewhere, lambda x: x + elsewhere)
        assert y.tolist() == [2.0] * 4
    assert counts == ["dispatched"] * 4


def test_errors_are_those_of_the_dispatched_call(scaled) -> None:
    for _ in range(4):
        with pytest.raises(RuntimeError, match="size of tensor"):
            scaled(torch.ones(5))


def test_copies_and_pickles_are_empty(scaled) -> None:
    for made in (copy.copy(scaled.calls), copy.deepcopy(scaled.calls), pickle.loads(pickle.dumps(scaled.calls))):
        assert isinstance(made, DirectCalls)
        assert made.repeat((torch.ones(4), scaled.weight), 0) is None
    assert scaled.calls.repeat((torch.ones(4), scaled.weight), 0) is not None


def test_no_tensor_is_kept() -> None:
    made = Scaled(torch.full((4,), 3.0))
    tensors = [torch.ones(4) for _ in range(3)]
    tensors += [made(x) for x in tensors]
    references = [weakref.ref(x) for x in tensors]
    del tensors
    gc.collect()
    assert not [reference for reference in references if reference() is not None]


def test_kinds_do_not_grow_for_ever(monkeypatch) -> None:
    monkeypatch.setattr(_direct, "_MAX_KINDS", 3)
    made = Scaled(torch.full((1,), 3.0))
    for n in range(1, 12):
        for _ in range(3):
            assert made(torch.ones(n)).shape == (n,)
    assert len(made.calls._seen) <= 3
    assert sum(map(len, made.calls._known.values())) <= 3


def test_without_the_private_names_nothing_is_passed_by(monkeypatch) -> None:
    made = Scaled(torch.full((4,), 3.0))
    monkeypatch.setattr(dispatch, "_included", None)
    for _ in range(4):
        made(torch.ones(4))
    assert made.counts == {"dispatched": 4, "direct": 0, "replayed": 0}


@pytest.mark.interpreter
@pytest.mark.parametrize(("rows", "bias"), [(3, True), (70, False)])
@pytest.mark.parametrize(
    "config", [static_int8(), dynamic_int8(), dynamic_int8("per_tensor")], ids=["static", "dynamic", "one scale"]
)
@torch.no_grad()
def test_a_quantized_linear_is_its_two_operators(config, rows, bias) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def inputs() -> torch.Tensor:
        return torch.randn(2, rows, 48, device=device, dtype=torch.float16)

    model = nn.Sequential(nn.Linear(48, 32, bias=bias)).eval().to(device, torch.float16)
    layer = quantize_(model, config, None if config.activation.dynamic else [inputs()])[0]
    others = copy.deepcopy(layer.state_dict())
    for i in range(6):
        x = inputs()
        if i == 4:  # other weights in other places
            layer.load_state_dict({name: (each * 0.5).to(each.dtype) for name, each in others.items()}, assign=True)
        if layer.input_scale is None:
            q, scale = DYNAMIC_QUANTIZE.cuda(x, layer.activation)
        else:
            q, scale = QUANTIZE.cuda(x, layer.input_scale), layer.input_scale
        weights = layer.weight_int8, layer.weight_scale, layer.bias
        expected = INT8_LINEAR.cuda(q, scale, *weights, "none", None, None, x.dtype)
        y = layer._eager(x)
        if i:  # the first call goes through the dispatcher, and on a CPU to the CPU's implementation
            assert torch.equal(y, expected), i
    (known,) = layer._direct._known.values()
    assert len(known) == 1


@torch.no_grad()
def test_the_bias_of_a_quantized_linear_may_be_no_parameter_of_it() -> None:
    """Of nn.DataParallel's replicas it is a plain attribute; pruning computes it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(8, 48, device=device)
    layer = quantize_(nn.Sequential(nn.Linear(48, 32)).eval().to(device), dynamic_int8())[0]
    replica = layer._replicate_for_data_parallel()
    replica.bias = layer.bias.detach().clone()
    pruned = prune.identity(copy.deepcopy(layer), "bias")
    expected = layer._dispatched(x)
    for each in (replica, pruned):
        assert torch.equal(each._eager(x), expected)
