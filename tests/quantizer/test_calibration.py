"""calibrate: forms of data, counting, devices, no kept outputs, errors that name batch and layer."""

import gc
import io
import weakref
from collections import UserDict

import pytest
import torch
from quantizer_models import Mlp, exported
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import qframework
from qframework.errors import CalibrationError
from qframework.quantizer import QFrameworkQuantizer, calibrate, dynamic_int8, static_int8
from qframework.quantizer.static_observer import StaticObserver

X = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(0))


class Two(nn.Module):
    """Two inputs, the second optional."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, a, b, gain=None):
        y = self.left(a) + self.right(b)
        return y if gain is None else y * gain


def prepared(model=None, inputs=(X[:2],), kwargs=None, config=None, dynamic=True):
    torch.manual_seed(0)
    batch = torch.export.Dim.AUTO
    shapes = [{0: batch}] * len(inputs) if dynamic and not kwargs else None
    graph = torch.export.export(
        (model or Mlp()).eval(), inputs, kwargs, dynamic_shapes=shapes and tuple(shapes)
    ).module()
    return prepare_pt2e(graph, QFrameworkQuantizer().set_global(config or static_int8()))


def scales(model):
    return [float(module.scale()) for module in model.modules() if isinstance(module, StaticObserver)]


def reference():
    model = prepared()
    model(X)
    return scales(model)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(X)


@pytest.mark.parametrize(
    ("data", "batches"),
    [
        (lambda: [X], 1),
        (lambda: list(X.split(2)), 3),
        (lambda: (x for x in X.split(3)), 2),
        (lambda: [(X[:3], torch.tensor([1, 2, 3])), (X[3:], "labels")], 2),
        (lambda: [[X]], 1),
        (lambda: [{"x": X}], 1),
        (lambda: [{"x": X, "labels": torch.tensor([float("nan")])}], 1),
        (lambda: [UserDict(x=X)], 1),
        (lambda: [({"x": X, "attention_mask": X.bool()}, torch.arange(6))], 1),
        (lambda: [(UserDict(x=X), "labels")], 1),
        (lambda: DataLoader(TensorDataset(X, torch.arange(6)), batch_size=2), 3),
        (lambda: DataLoader(Stream(), batch_size=3), 2),
    ],
    ids=[
        "tensor",
        "list",
        "generator",
        "pairs",
        "lists",
        "mapping",
        "labels",
        "userdict",
        "mapping_and_labels",
        "userdict_and_labels",
        "loader",
        "iterable_loader",
    ],
)
def test_forms_of_data(data, batches):
    model = prepared()
    assert calibrate(model, data()) == batches
    # float32 matrix products of different batch sizes may round differently
    assert scales(model) == pytest.approx(reference(), rel=2**-20)


def test_public_name():
    assert qframework.calibrate is calibrate


def test_number_of_batches():
    model = prepared()
    data = iter(X.split(1))
    assert calibrate(model, data, batches=2) == 2
    assert len(list(data)) == 4, "batches beyond the wanted number were taken"
    assert scales(model)[0] == float(X[:2].abs().max() / 127)


def test_max_batches_is_an_alias():
    model, other = prepared(), prepared()
    assert calibrate(model, X.split(1), max_batches=2) == 2
    calibrate(other, X.split(1), batches=2)
    assert scales(model) == scales(other)
    with pytest.raises(CalibrationError, match=r"batches must be None where max_batches.*got 2 and 3"):
        calibrate(prepared(), [X], batches=2, max_batches=3)
    with pytest.raises(CalibrationError, match=r"batches must be .*, got 0"):
        calibrate(prepared(), [X], max_batches=0)


def test_fewer_batches_than_wanted():
    assert calibrate(prepared(), [X], batches=10) == 1


def test_two_inputs_and_names():
    inputs = (X[:2], 3 * X[:2])
    for batch in (inputs, [*inputs, "labels"], {"b": inputs[1], "a": inputs[0]}):
        model = prepared(Two(), inputs)
        calibrate(model, [batch])
        assert scales(model) == [float(x.abs().max() / 127) for x in inputs]


def test_keyword_inputs():
    model = prepared(Two(), (X[:2], X[:2]), {"gain": torch.ones(1)})
    assert calibrate(model, [{"a": X[:2], "b": X[:2], "gain": torch.ones(1)}]) == 1
    for batch in ((X[:2], X[:2], torch.ones(1)), (X[:2], X[:2], torch.ones(1), "labels")):
        again = prepared(Two(), (X[:2], X[:2]), {"gain": torch.ones(1)})
        calibrate(again, [batch])
        assert scales(again) == scales(model)
    with pytest.raises(CalibrationError, match=r"batch 0: .* mapping with the keys 'a', 'b', 'gain'.*keyword inputs"):
        calibrate(model, [(X[:2], X[:2])])


def test_a_nested_input_keeps_its_own_mapping():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, inputs):
            return self.fc(inputs["inputs"])

    model = prepared(Nested(), ({"inputs": X[:2]},), dynamic=False)
    assert calibrate(model, [({"inputs": X[:2]}, "labels")]) == 1
    assert scales(model) == [float(X[:2].abs().max() / 127)]


def test_forward_replaces_the_rules():
    model, seen = prepared(), []
    calibrate(model, ["anything"], forward=lambda m, batch: (seen.append(batch), m(X)))
    assert seen == ["anything"]
    assert scales(model) == reference()


def test_outputs_are_not_kept():
    alive = []

    class Watched(nn.Module):
        def forward(self, batch):
            alive.append(sum(ref() is not None for ref in references))
            y = batch * 2
            references.append(weakref.ref(y))
            return y

    references: list = []
    watched = Watched()
    calibrate(prepared(), list(X.split(1)), forward=lambda _, batch: watched(batch))
    gc.collect()
    assert alive == [0] * 6


def test_runs_without_gradients():
    seen = []
    calibrate(prepared(), [X.clone().requires_grad_()], forward=lambda m, batch: seen.append(m(batch).requires_grad))
    assert seen == [False]


def test_data_moves_to_the_models_device():
    seen = []
    model = prepared(config=dynamic_int8())
    calibrate(model, [{"x": X}], device="meta", forward=lambda _, batch: seen.append(batch["x"].device.type))
    assert seen == ["meta"]


@pytest.mark.gpu
def test_cuda():
    model = prepared()
    calibrate(model, list(X.split(2)), device="cuda")
    assert scales(model)[0] == reference()[0]
    assert scales(model) == pytest.approx(reference(), rel=1e-2)  # TF32 or not
    assert convert_pt2e(model)(X.cuda()).device.type == "cuda"


def test_dynamic_layers_just_run():
    assert calibrate(prepared(config=dynamic_int8()), [X]) == 1


def test_progress_bar_only_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream, progress, expected in (
        (Terminal(), True, True),
        (Terminal(), False, False),
        (io.StringIO(), True, False),
    ):
        monkeypatch.setattr("sys.stderr", stream)
        calibrate(prepared(), [X], progress=progress)
        assert ("calibrating" in stream.getvalue()) == expected


@pytest.mark.parametrize("data", [[], iter(()), DataLoader(TensorDataset(X[:0]))])
def test_no_data(data):
    with pytest.raises(CalibrationError, match="at least one batch"):
        calibrate(prepared(), data)


@pytest.mark.parametrize("batches", [0, -1, 1.5])
def test_bad_number_of_batches(batches):
    with pytest.raises(CalibrationError, match=f"batches must be .*, got {batches}"):
        calibrate(prepared(), [X], batches=batches)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"image": X}, ["batch 1", "'image'", "'x'"]),
        ((), ["batch 1", "must hold 1 inputs (x), got 0"]),
        (X.double(), ["batch 1", "'x'", "float64", "torch.float32"]),
        (X[:, :3], ["batch 1", "'x'", "(6, 3, 8)", "5, 8)", "dynamic_shapes", "drop_last"]),
        (X[0], ["batch 1", "(5, 8)"]),
    ],
)
def test_batch_that_does_not_fit(batch, words):
    with pytest.raises(CalibrationError) as error:
        calibrate(prepared(), [X, batch])
    for word in words:
        assert word in str(error.value)


def test_last_batch_of_a_static_export():
    with pytest.raises(
        CalibrationError, match=r"batch 1: input 'x' must have shape \(4, 5, 8\), as exported, got \(2, 5, 8\)"
    ):
        calibrate(prepared(inputs=(X[:4],), dynamic=False), X.split(4))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_input(bad):
    x = X.clone()
    x[2, 3, 4] = bad
    with pytest.raises(CalibrationError, match="batch 1: input 'x' must be finite"):
        calibrate(prepared(), [X, x])


def test_minus_infinity_is_caught_where_it_reaches_a_layer():
    x = X.clone()
    x[2, 3, 4] = float("-inf")
    with pytest.raises(CalibrationError, match="batch 0: the activation of layer 'fc1' must be finite"):
        calibrate(prepared(), [x])


@pytest.mark.parametrize("observer", ["minmax", "moving_average", "percentile", "mse", "entropy"])
def test_first_layer_with_a_nonfinite_activation_is_named(observer):
    class Overflows(Mlp):
        def forward(self, x):
            return self.fc2(self.fc1(x) * 3e38)

    with pytest.raises(CalibrationError, match="batch 1: the activation of layer 'fc2' must be finite"):
        calibrate(prepared(Overflows(), config=static_int8(observer=observer)), [0 * X, 1e3 * X])


def test_calibrates_what_torchao_prepared_with_others():
    """Observers of other quantizers run and do not change."""
    from torchao.testing.pt2e._xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config

    other = XNNPACKQuantizer().set_global(get_symmetric_quantization_config())
    model = prepare_pt2e(exported(Mlp(), X), other)
    assert calibrate(model, [X]) == 1
