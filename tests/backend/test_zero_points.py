"""Writes to zero points and to constants in scales after a model was compiled."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from lowered_models import Block, converted, example, lowered
from test_fold_channel_scale import Scaled
from test_fold_channel_scale import converted as converted_by_recipe
from torch import Tensor
from torch.fx import GraphModule

from qframework.backend import zero_points as module
from qframework.errors import QFrameworkError
from qframework.numerics import sqnr_db


@pytest.fixture(autouse=True)
def no_grad(fresh_dynamo):
    with torch.no_grad():
        yield


def zero_points(gm: GraphModule) -> list[str]:
    """The names of the buffers that hold weights' zero points."""
    return [name for name, buffer in gm.named_buffers() if buffer.dtype in (torch.int32, torch.int64)]


WRITES = {
    "in place": lambda gm, name: gm.get_buffer(name)[3:4].fill_(5),
    "through .data": lambda gm, name: gm.get_buffer(name).data.add_(5),
    "new memory": lambda gm, name: setattr(gm.get_buffer(name), "data", torch.full_like(gm.get_buffer(name), 5)),
    "new buffer": lambda gm, name: setattr(gm, name, torch.full_like(gm.get_buffer(name), 5)),
    "load_state_dict": lambda gm, name: gm.load_state_dict(
        {name: torch.full_like(gm.get_buffer(name), 5)}, strict=False, assign=True
    ),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_written_zero_point_is_an_error_that_names_the_layer(write):
    x = example()
    gm = converted(Block(), x)
    names = zero_points(gm)
    assert len(names) == 2, "the model keeps its zero points elsewhere"
    compiled = torch.compile(gm, backend="qframework")
    assert sqnr_db(gm(x), compiled(x)) > 40
    WRITES[write](gm, names[0])
    for _ in range(2):  # the first error is not the last
        with pytest.raises(QFrameworkError, match=r"layer 'fc1': zero points must stay 0, .* got 5"):
            compiled(x)
    torch.compiler.reset()
    assert sqnr_db(gm(x), torch.compile(gm, backend="qframework")(x)) > 40


def test_writing_zeros_is_no_error_and_another_model_has_zero_points_of_its_own():
    x = example()
    gm = converted(Block(), x)
    other = copy.deepcopy(gm)
    compiled = torch.compile(gm, backend="qframework")
    compiled(x)
    gm.get_buffer(zero_points(gm)[0]).zero_()
    assert sqnr_db(gm(x), compiled(x)) > 40
    other.get_buffer(zero_points(other)[1]).fill_(-3)
    got = torch.compile(other, backend="qframework")
    with contextlib.suppress(QFrameworkError):  # where Dynamo takes the same code for both
        assert sqnr_db(other(x), got(x)) > 40


def test_a_call_on_a_gpu_reads_values_only_after_a_write(monkeypatch):
    """A stand-in for a CUDA tensor counts how often its values are read."""

    class OnGpu(Tensor):
        device, looks = torch.device("cuda"), 0

        def any(self):
            OnGpu.looks += 1
            return False

    value = torch.zeros(4).as_subclass(OnGpu)
    watched = module.WatchedZeroPoints({0: ("fc", value)})
    for _ in range(3):
        watched.check([value])
    assert OnGpu.looks == 0
    value.zero_()
    for _ in range(3):
        watched.check([value])
    assert OnGpu.looks == 1
    watched.check([torch.zeros(4).as_subclass(OnGpu)])
    assert OnGpu.looks == 2


CONSTANTS = {
    "negative": lambda c: c.mul_(-1),
    "one negative": lambda c: c[3:4].mul_(-1),
    "zero": lambda c: c.zero_(),
    "one zero": lambda c: c[3:4].zero_(),
}


@pytest.mark.parametrize("write", CONSTANTS)
def test_a_folded_constant_of_another_sign_matches_the_product(write):
    """Compiled, and lowered alone, whose operators check their scales on a CPU."""
    x = example()
    gm = converted_by_recipe(Scaled(torch.linspace(0.1, 10, 64)), x)
    alone, compiled = lowered(copy.deepcopy(gm))[0], torch.compile(gm, backend="qframework")
    compiled(x)
    for model in (gm, alone):
        CONSTANTS[write](model.constant)
    for got in (compiled(x), alone(x)):
        assert sqnr_db(gm(x), got) > 45
