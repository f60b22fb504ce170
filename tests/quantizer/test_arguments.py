"""Steps that get an invalid argument say what it must be and what they got."""

import numpy as np
import pytest
import torch
from quantizer_models import Mlp, exported
from torch import nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from qframework import calibrate_attention, explain, save
from qframework.backend.options import parse_options
from qframework.errors import QFrameworkError
from qframework.kernels.attention.variants import AttentionVariant
from qframework.quantizer import (
    QFrameworkQuantizer,
    Recipe,
    Smooth,
    calibrate,
    correct_bias,
    round_weights,
    split_gelu_ranges,
    static_attention,
    static_int8,
)
from qframework.training import conversion_report, convert_to_int8_training, restore_float

X = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(0))


def quantizer():
    return QFrameworkQuantizer().set_global(static_int8())


def prepared():
    return prepare_pt2e(exported(Mlp(), X), quantizer())


def converted():
    model = prepared()
    calibrate(model, [X])
    return convert_pt2e(model)


MODELS = {
    "5 of type int": lambda: 5,
    "None": lambda: None,
    "'vit' of type str": lambda: "vit",
    "of type type": lambda: Mlp,
    "a tensor of shape (6, 5, 8)": lambda: X,
    "a Mlp that was not exported": Mlp,
    "a compiled model": lambda: torch.compile(Mlp()),
    "an ExportedProgram": lambda: torch.export.export(Mlp().eval(), (X,)),
    "a GraphModule that torch.export did not make": lambda: torch.fx.symbolic_trace(Mlp()),
    "an exported model": lambda: exported(Mlp(), X),
    "a prepared model": prepared,
    "a converted model": converted,
}
NO_MODULES = ["5 of type int", "None", "'vit' of type str", "of type type", "a tensor of shape (6, 5, 8)"]
WITH_PREPARED = {
    "calibrate: prepared": lambda model: calibrate(model, [X]),
    "round_weights: prepared": lambda model: round_weights(model, [X]),
    "correct_bias: prepared": lambda model: correct_bias(model, [X]),
    "Recipe.after_calibrate: prepared": lambda model: Recipe().after_calibrate(model, [X]),
}
WITH_EXPORTED = {
    "Recipe.before_prepare: exported": lambda model: Recipe.best().before_prepare(model, quantizer(), [X]),
    "split_gelu_ranges: exported": lambda model: split_gelu_ranges(model, quantizer()),
}
WITH_GRAPH = {
    "annotate": lambda model: quantizer().annotate(model),
    "transform": lambda model: QFrameworkQuantizer().set_global(static_attention()).transform_for_annotation(model),
    "validate": lambda model: quantizer().validate(model),
}
WITH_MODULE = {
    "explain: model": lambda model: explain(model, X),
    "convert_to_int8_training: model": convert_to_int8_training,
    "restore_float: model": restore_float,
    "conversion_report: model": conversion_report,
    "calibrate_attention: model": lambda model: calibrate_attention(model, [X]),
    "save: model": lambda model: save(model, "never.pt2", (X,)),
}


def refused(call, *words):
    with pytest.raises(QFrameworkError) as error:
        call()
    for word in words:
        assert word in str(error.value)
    assert " must " in str(error.value)


@pytest.mark.parametrize("state", [state for state in MODELS if state != "a prepared model"])
@pytest.mark.parametrize("step", WITH_PREPARED)
def test_a_model_that_is_not_prepared(step, state):
    refused(lambda: WITH_PREPARED[step](MODELS[state]()), step, state, "prepare_pt2e(exported, quantizer)")


@pytest.mark.parametrize("state", [state for state in MODELS if state != "an exported model"])
@pytest.mark.parametrize("step", WITH_EXPORTED)
def test_a_model_that_is_not_exported(step, state):
    refused(lambda: WITH_EXPORTED[step](MODELS[state]()), step, state, "torch.export.export(model, inputs).module()")


@pytest.mark.parametrize("state", [*NO_MODULES, "a Mlp that was not exported", "an ExportedProgram"])
@pytest.mark.parametrize("step", WITH_GRAPH)
def test_a_quantizer_refuses_what_is_not_a_graph(step, state):
    refused(lambda: WITH_GRAPH[step](MODELS[state]()), state, "QFrameworkQuantizer: model")


@pytest.mark.parametrize("state", NO_MODULES)
@pytest.mark.parametrize("step", WITH_MODULE)
def test_a_value_that_is_not_a_module(step, state):
    refused(lambda: WITH_MODULE[step](MODELS[state]()), step.partition(":")[0])


def test_explain_of_an_exported_program_names_its_module():
    refused(
        lambda: explain(MODELS["an ExportedProgram"](), X),
        "explain: model must be an nn.Module, got an ExportedProgram",
        ".module()",
    )


def test_a_prepared_model_in_which_nothing_is_quantized_can_be_calibrated():
    model = prepare_pt2e(exported(Mlp(), X), QFrameworkQuantizer().set_module_name("fc1", None))
    assert calibrate(model, [X]) == 1


@pytest.mark.parametrize("wrong", [5, None, "static", nn.Linear(2, 2), static_int8()])
def test_a_value_that_is_not_a_quantizer(wrong):
    refused(
        lambda: Recipe.best().before_prepare(exported(Mlp(), X), wrong, [X]), "quantizer must be a QFrameworkQuantizer"
    )
    refused(lambda: split_gelu_ranges(exported(Mlp(), X), wrong), "quantizer must be a QFrameworkQuantizer")


@pytest.mark.parametrize("wrong", [5, None, "fc1", nn.Linear(2, 2)])
def test_a_value_that_is_not_a_node(wrong):
    refused(lambda: quantizer().config_for(wrong), "config_for: node")


@pytest.mark.parametrize("wrong", [5, None, 0.5, "a"])
def test_values_that_are_not_strengths(wrong):
    refused(lambda: Smooth(strengths=wrong), "Smooth: strengths must be")


FLAGS_FOR_NUMBERS = {
    "Smooth: samples must be a positive integer, got True": lambda: Smooth(samples=True),
    "Smooth: strengths must be at least one number from 0 to 1, got (0.5, True)": lambda: Smooth(strengths=(0.5, True)),
    "Recipe: batches must be None or a positive integer, got True": lambda: Recipe(batches=True),
    "observer 'mse': bins must be an even number from 256 to 1048576, got True": lambda: static_int8(
        observer="mse", bins=True
    ),
    "observer 'percentile': percentile must be a number in (0, 100], got True": lambda: static_int8(
        observer="percentile", percentile=True
    ),
    "averaging_constant must be a number in (0, 1], got True": lambda: static_int8(
        observer="moving_average", averaging_constant=True
    ),
    "batches must be None or a positive integer, got True": lambda: calibrate(prepared(), [X], batches=True),
    "AttentionVariant: qk_bits must be 16, 8 or 4, got True": lambda: AttentionVariant(qk_bits=True),
    "AttentionVariant: smooth_q must be True or False, got 1": lambda: AttentionVariant(smooth_q=1),
    "AttentionVariant: smooth_v must be True or False, got 'yes'": lambda: AttentionVariant(smooth_v="yes"),
    "option 'freeze_weights' must be one of False, True, got 1": lambda: parse_options(None, {"freeze_weights": 1}),
}


@pytest.mark.parametrize("message", FLAGS_FOR_NUMBERS)
def test_bools_are_not_numbers_and_numbers_are_not_bools(message):
    refused(FLAGS_FOR_NUMBERS[message], message)


READERS = {
    "calibrate": lambda data: calibrate(prepared(), data),
    "round_weights": lambda data: round_weights(prepared(), data),
    "Recipe.before_prepare": lambda data: Recipe.best().before_prepare(exported(Mlp(), X), quantizer(), data),
    "Recipe.after_calibrate": lambda data: Recipe.best().after_calibrate(prepared(), data),
    "calibrate_attention": lambda data: calibrate_attention(Mlp(), data),
}


@pytest.mark.parametrize("data", [5, None, "images", {"x": X}, nn.Linear(2, 2), list, torch.tensor(1.0)], ids=repr)
@pytest.mark.parametrize("reader", READERS)
def test_values_that_are_not_batches(reader, data):
    refused(lambda: READERS[reader](data), f"{reader}: data must be ", "DataLoader")


def used_up():
    data = iter([X])
    list(data)
    return data


@pytest.mark.parametrize("reader", ["calibrate", "calibrate_attention"])
def test_an_iterator_that_was_used_up(reader):
    refused(lambda: READERS[reader](used_up()), f"{reader}: data must hold at least", "used up before?")


@pytest.mark.parametrize(
    "batch", [5, None, "image", X.numpy(), np.float32(1), [[X]], object()], ids=lambda b: str(type(b))
)
def test_batches_of_a_wrong_type_are_named(batch):
    refused(lambda: calibrate(prepared(), [X, batch]), "batch 1: input 'x' must be a tensor of shape (6, 5, 8)")


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x, features):
        return self.fc(x) + features["both"][0] + features["both"][1]


@pytest.mark.parametrize("features", [5, X, {"both": [X]}, {"one": [X, X]}, [X, X]], ids=lambda f: str(type(f)))
def test_nested_inputs_of_another_structure(features):
    inputs = (X, {"both": [X, X]})
    model = prepare_pt2e(torch.export.export(Nested().eval(), inputs).module(), quantizer())
    refused(lambda: calibrate(model, [inputs, (X, features)]), "batch 1: input 'features'", "structure")


@pytest.mark.parametrize("device", ["nonsense", "cuda:99", "mps", "xpu", "meta", 1.5])
@pytest.mark.parametrize("reader", ["calibrate", "calibrate_attention"])
def test_devices(reader, device):
    calls = {
        "calibrate": lambda: calibrate(prepared(), [X], device=device),
        "calibrate_attention": lambda: calibrate_attention(Mlp(), [X], device=device),
    }
    refused(calls[reader], reader, str(device).partition(":")[0])


@pytest.mark.parametrize("arguments", [{"forward": 5}, {"batches": True}, {"batches": "2"}])
@pytest.mark.parametrize("reader", ["calibrate", "calibrate_attention"])
def test_other_arguments(reader, arguments):
    calls = {
        "calibrate": lambda: calibrate(prepared(), [X], **arguments),
        "calibrate_attention": lambda: calibrate_attention(Mlp(), [X], **arguments),
    }
    refused(calls[reader], next(iter(arguments)))


@pytest.mark.parametrize("variants", [5, [5], [None], "sage_b", [[]]])
def test_variants_to_measure(variants):
    refused(lambda: calibrate_attention(Mlp(), [X], variants=variants), "variants must be")
