"""``quantize`` (one_call.py, exported.py, quantized_model.py)."""

from __future__ import annotations

import copy

import pytest
import torch
from quantized_models import MLP, bert, vit
from torch import nn

import qframework
from qframework import numerics, quantize
from qframework.conversion.one_call import QuantizedModel
from qframework.errors import CalibrationError, QFrameworkError, UnsupportedError
from qframework.quantizer import QFrameworkQuantizer, Recipe, dynamic_int8, static_int8
from qframework.serialization import read_metadata
from qframework.training import convert_to_int8_training


def lowered(model: QuantizedModel) -> set[str]:
    return {layer.name for layer in model.explain().layers if layer.lowered and layer.kind == "linear"}


@pytest.mark.parametrize(
    "config", [static_int8(), static_int8("per_token"), dynamic_int8(), "static_int8", "dynamic_int8"]
)
def test_any_batch_size(config) -> None:
    model, x = MLP().eval(), torch.randn(64, 5, 16)  # scales per position need more than a few examples
    quantized = quantize(model, x, config, [x])
    assert isinstance(quantized, QuantizedModel)
    for size in (7, 1):
        other = torch.randn(size, 5, 16)
        assert numerics.sqnr_db(model(other), quantized(other)) > 25
    assert lowered(quantized) == {"fc1", "fc2"}


@pytest.mark.parametrize("in_place", [False, True])
def test_modules_in_training_mode_are_named(in_place, caplog) -> None:
    """``model.eval()`` before a head was added, or Monte Carlo dropout: dropout acts, which is told."""
    x = torch.randn(64, 16)
    model = nn.Sequential(MLP(), nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4)), nn.Dropout()).eval()
    model[1].train()
    if in_place:
        qframework.quantize_(model, static_int8(), [x])
    else:
        quantize(model, x, static_int8(), [x])
    assert "quantize" in caplog.text
    assert "has modules in training mode" in caplog.text
    assert "as in training: '1' (Sequential). Call model.eval()" in caplog.text  # neither '1.0' nor '2'
    caplog.clear()
    quantize(MLP().eval(), x, static_int8(), [x])
    assert "training mode" not in caplog.text


@pytest.mark.parametrize(("config", "hidden"), [(static_int8(), True), (dynamic_int8(), False)])
def test_nan_in_an_input(config, hidden) -> None:
    """As docs/concepts.md says: a static scale hides it."""
    x = torch.randn(8, 16)
    quantized = quantize(MLP().eval(), x, config, [x])
    x[3, 5] = float("nan")
    finite = quantized(x).isfinite().all(-1)
    assert finite[3].item() is hidden
    assert finite.sum().item() == (8 if hidden else 7)


def test_quantized_under_autocast() -> None:
    """The result runs with and without autocast, in the dtype of each."""
    model, x = nn.Sequential(MLP(), nn.Linear(4, 4)).eval(), torch.randn(64, 16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        quantized = quantize(model, x, static_int8(), [x], skip=["1"])
        assert torch.is_autocast_enabled("cpu")
        assert quantized(x).dtype == torch.bfloat16
        assert numerics.sqnr_db(model(x), quantized(x)) > 25
    outside = quantized(x)
    assert outside.dtype == torch.float32
    assert numerics.sqnr_db(model(x), outside) > 25


def test_fixed_shapes() -> None:
    x = torch.randn(1, 16)
    quantized = quantize(MLP().eval(), x, dynamic_int8(), dynamic_shapes=None)
    assert quantized(x).shape == (1, 4)
    with pytest.raises(UnsupportedError, match=r"first dimension of at least 2, got 1.*dynamic_shapes=None"):
        quantize(MLP().eval(), x, dynamic_int8())


def test_an_example_that_is_a_slice(tmp_path) -> None:
    """Only its shape and dtype matter, not its strides."""
    model, x = MLP().eval(), torch.randn(6, 5, 16)
    quantized = quantize(model, x[:, 0], static_int8(), [x[:, 0]])
    quantized.save(tmp_path / "sliced.pt2")
    for each in (quantized, qframework.load(tmp_path / "sliced.pt2")):
        for other in (x[:4, 1], x[:, 1].contiguous(), torch.randn(16, 3).t()):
            assert numerics.sqnr_db(model(other), each(other)) > 20


class TokenBias(MLP):
    """Scores between tokens plus a mask of all tokens against all, which has no batch."""

    def forward(self, x, mask):
        return super().forward((x @ x.mT + mask).softmax(-1) @ x)


def test_as_many_tokens_as_sequences(tmp_path, caplog) -> None:
    """The first dimension of the mask has the size of the batch by chance."""
    model, x, mask = TokenBias().eval(), torch.randn(5, 5, 16), torch.randn(5, 5)
    with caplog.at_level("WARNING"):
        quantized = quantize(model, (x, mask), static_int8(), [(x, mask)])
    assert "first dimension of input 'mask' is fixed to 5" in caplog.text
    assert "input 'x'" not in caplog.text
    quantized.save(tmp_path / "masked.pt2")
    loaded = qframework.load(tmp_path / "masked.pt2")
    other = torch.randn(7, 5, 16)
    with torch.no_grad():
        assert numerics.sqnr_db(model(other, mask), quantized(other, mask)) > 20
        assert torch.equal(loaded(other, mask), quantized(other, mask))


class ManyInputs(MLP):
    """Takes any number of inputs."""

    def forward(self, *inputs):
        return super().forward(torch.stack(inputs).sum(0))


class NamedInputs(MLP):
    """Takes inputs of any name."""

    def forward(self, x, **others):
        return super().forward(x + torch.stack(list(others.values())).sum(0))


@pytest.mark.parametrize("model", [ManyInputs(), NamedInputs()], ids=["args", "kwargs"])
def test_inputs_that_the_signature_does_not_name(tmp_path, model) -> None:
    """``torch.export`` takes the shapes of ``*args`` and ``**kwargs`` nested, and checked the latter by wrong names."""

    def batch(size):
        names = {name: torch.randn(size, 16) for name in ("x", "y", "z")}
        return names if isinstance(model, NamedInputs) else tuple(names.values())

    def call(module, inputs):
        return module(**inputs) if isinstance(inputs, dict) else module(*inputs)

    example, other = batch(8), batch(5)
    quantized = quantize(model.eval(), example, static_int8(), [example])
    quantized.save(tmp_path / "model.pt2")
    with torch.no_grad():
        assert numerics.sqnr_db(call(model, example), call(quantized, example)) > 25
        assert torch.equal(call(qframework.load(tmp_path / "model.pt2"), other), call(quantized, other))


def test_a_timm_model_saved_and_loaded(tmp_path) -> None:
    model, images = vit()
    before = copy.deepcopy(model.state_dict())
    quantized = quantize(model, (images,), static_int8(), [(images, torch.zeros(2))])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        assert numerics.sqnr_db(model(images), quantized(images)) > 20
        quantized.save(tmp_path / "vit.pt2", {"note": 1})
        assert torch.equal(qframework.load(tmp_path / "vit.pt2")(images[:1]), quantized(images[:1]))
    config = read_metadata(tmp_path / "vit.pt2")["config"]
    assert config["note"] == 1
    assert QFrameworkQuantizer.from_dict(config["quantizer"]).needs_calibration
    assert "head" not in lowered(quantized)


def test_keyword_inputs_with_a_mask(tmp_path) -> None:
    model, batch = bert()
    quantized = quantize(model, batch, static_int8(), [batch])
    longer = {name: value.repeat(2, 1) for name, value in batch.items()}
    with torch.no_grad():
        expected, found = model(**longer), quantized(**longer)
        assert numerics.sqnr_db(expected.last_hidden_state, found["last_hidden_state"]) > 20
    assert len(lowered(quantized)) == 13


def test_keyword_inputs_saved_and_loaded(tmp_path) -> None:
    class Named(MLP):
        def forward(self, *, left, right):
            return super().forward(left + right)

    batch = {"left": torch.randn(2, 16), "right": torch.randn(2, 16)}
    quantized = quantize(Named().eval(), batch, dynamic_int8())
    quantized.save(tmp_path / "named.pt2")
    assert torch.equal(qframework.load(tmp_path / "named.pt2")(**batch), quantized(**batch))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x, mask=None, shift=None):
        x = self.fc(x if mask is None else x * mask)
        return x if shift is None else x + shift


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_value_for_an_input_that_was_none_is_an_error(tmp_path) -> None:
    x, mask = torch.randn(4, 16), torch.rand(16) > 0.5
    quantized = quantize(Masked().eval(), (x, None, mask), dynamic_int8())
    quantized.save(tmp_path / "masked.pt2")
    loaded = qframework.load(tmp_path / "masked.pt2")
    qframework.save(loaded, tmp_path / "again.pt2", (x, None, mask))
    again = qframework.load(tmp_path / "again.pt2")
    compiled = torch.compile(quantized, backend="qframework")
    for model in (quantized, copy.deepcopy(quantized), loaded, again, compiled):
        with torch.no_grad():
            torch.testing.assert_close(model(x, None, mask), quantized(x, None, mask))
            with pytest.raises(UnsupportedError, match=r"input 'mask' must be None, as in the example"):
                model(x, mask, mask)
    assert lowered(quantized) == {"fc"}


def test_what_a_module_has() -> None:
    x = torch.randn(4, 16)
    quantized = quantize(MLP().eval(), x, dynamic_int8())
    assert quantized.eval() is quantized
    assert not quantized.training
    with pytest.raises(UnsupportedError, match=r"mode must be False, got True"):
        quantized.train()
    copied = copy.deepcopy(quantized)
    assert lowered(copied) == lowered(quantized)
    for tensor in copied.state_dict().values():
        tensor.zero_()
    assert quantized(x).abs().sum() > 0
    copied.load_state_dict(quantized.state_dict())
    assert torch.equal(copied(x), quantized(x))
    with torch.no_grad():
        compiled = torch.compile(quantized, backend="qframework")
        assert numerics.sqnr_db(quantized(x), compiled(x)) > 60
    assert {layer.name for layer in compiled.explain().layers if layer.lowered} == {"fc1", "fc2"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_dtype_of_a_quantized_model_is_fixed(dtype) -> None:
    x = torch.randn(4, 16, dtype=dtype)
    quantized = quantize(MLP().eval().to(dtype), x, dynamic_int8())
    expected = quantized(x)
    for changed in (lambda: quantized.double(), lambda: quantized.to("cpu", torch.bfloat16), lambda: quantized.half()):
        with pytest.raises(UnsupportedError, match=r"QuantizedModel: dtype must stay as .*, torch\.float\d\d, got"):
            changed()
    assert torch.equal(quantized.to("cpu")(x), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert numerics.sqnr_db(expected.float(), quantized(x).float()) > 25


def test_torch_save_of_the_whole_model_names_save(tmp_path) -> None:
    x = torch.randn(4, 16)
    quantized = quantize(MLP().eval(), x, dynamic_int8())
    with pytest.raises(UnsupportedError, match=r"model\.save\(path\)"):
        torch.save(quantized, tmp_path / "model.pt")
    torch.save(quantized.state_dict(), tmp_path / "state.pt")
    copied = copy.deepcopy(quantized)
    for tensor in copied.state_dict().values():
        tensor.zero_()
    copied.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(copied(x), quantized(x))


def test_skip() -> None:
    x = torch.randn(4, 16)
    assert lowered(quantize(MLP().eval(), x, dynamic_int8(), skip=())) == {"fc1", "fc2", "head"}
    assert lowered(quantize(MLP().eval(), x, dynamic_int8(), skip=("fc*",))) == {"head"}
    assert lowered(quantize(nn.Sequential(nn.Linear(16, 4)).eval(), x, dynamic_int8())) == {"0"}
    with pytest.raises(UnsupportedError, match="pattern 'heads' must match a module"):
        quantize(MLP().eval(), x, dynamic_int8(), skip=("heads",))


def test_a_model_in_which_nothing_is_quantized_is_logged(caplog) -> None:
    """Its only linear layer is the head, as in PoolFormer."""
    model, x = nn.Sequential(), torch.randn(4, 16)
    model.add_module("head", nn.Linear(16, 4))
    before = qframework.conversion.fallbacks["nothing in the model is quantized"]
    report = quantize(model.eval(), x, dynamic_int8()).explain()
    assert "no layer of the Sequential is quantized" in caplog.text
    assert "skip=('head',) leaves them out" in caplog.text
    assert "qframework.quantize with a skip= that does not name the layer" in str(report.layers[0].reason)
    quantize(model, x, dynamic_int8(), skip=())
    assert qframework.conversion.fallbacks["nothing in the model is quantized"] == before + 1


def test_layers_under_autocast_are_logged(caplog) -> None:
    """Exports keep the scope as an operator with a graph of its own."""

    class Scope(MLP):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x)

    reason = "linear layers in a higher-order operator"
    before = qframework.conversion.fallbacks[reason]
    quantize(Scope().eval(), torch.randn(4, 16), dynamic_int8(), skip=())
    assert qframework.conversion.fallbacks[reason] == before + 1
    assert "'fc1' stay in float (3 in all)" in caplog.text
    assert "torch.autocast" in caplog.text
    assert "is quantized, so the result computes in float" not in caplog.text


def test_layers_inside_no_grad_are_reached(caplog) -> None:
    """As the indexers of DeepSeek types: the export holds them in a higher-order operator, the quantizer inlines it."""

    class Scope(MLP):
        @torch.no_grad()
        def chosen(self, x):
            return self.fc1(x).relu()

        def forward(self, x):
            return self.head(self.fc2(self.chosen(x)))

    quantized = quantize(Scope().eval(), torch.randn(4, 16), dynamic_int8(), skip=())
    assert lowered(quantized) == {"fc1", "fc2", "head"}
    assert "stay in float" not in caplog.text


class Rotated(nn.Module):
    """Replaces a part of the queries of joined tokens in place, as CogView4 and CogVideoX rotate those of images."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, text, image):
        query = self.query(torch.cat([text, image], 1))
        query[:, 3:] = query[:, 3:].flip(-1)
        return self.out(query)


@pytest.mark.parametrize("weight", ["per_channel", "per_tensor"])
def test_weights_of_values_that_are_written_are_kept_in_int8(weight, tmp_path) -> None:
    model, inputs = Rotated().eval(), (torch.randn(2, 3, 16), torch.randn(2, 5, 16))
    quantized = quantize(model, inputs, static_int8(weight=weight), [inputs])
    assert lowered(quantized) == {"query", "out"}
    matrices = [tensor for tensor in quantized.state_dict().values() if tensor.ndim == 2]
    assert [tensor.dtype for tensor in matrices] == [torch.int8] * 2
    assert numerics.sqnr_db(model(*inputs), quantized(*inputs)) > 30
    quantized.save(tmp_path / "rotated.pt2")
    assert torch.equal(qframework.load(tmp_path / "rotated.pt2")(*inputs), quantized(*inputs))


def test_a_quantizer_keeps_its_rules() -> None:
    x = torch.randn(4, 16)
    quantizer = QFrameworkQuantizer().set_global(dynamic_int8())
    assert lowered(quantize(MLP().eval(), x, quantizer)) == {"fc1", "fc2", "head"}
    assert lowered(quantize(MLP().eval(), x, quantizer, skip=("fc1",))) == {"fc2", "head"}
    assert len(quantizer.rules) == 1


def test_at_most_the_given_number_of_batches() -> None:
    taken = []

    def batches():
        for index in range(5):
            taken.append(index)
            yield torch.randn(4, 16)

    quantize(MLP().eval(), torch.randn(4, 16), static_int8(), batches(), batches=2)
    assert taken == [0, 1]


@pytest.mark.parametrize("recipe", [None, "best"])
def test_data_is_needed_for_static_scales_and_recipes(recipe) -> None:
    config = dynamic_int8() if recipe else static_int8()
    with pytest.raises(CalibrationError, match=r"quantize: calibration_data must hold batches .* got None"):
        quantize(MLP().eval(), torch.randn(4, 16), config, recipe=recipe)


def test_a_recipe_needs_data_that_can_be_read_again() -> None:
    data = iter([torch.randn(4, 16)])
    with pytest.raises(CalibrationError, match=r"must be a list or a DataLoader, got list_iterator"):
        quantize(MLP().eval(), torch.randn(4, 16), static_int8(), data, recipe=Recipe())


def test_the_steps_of_a_recipe_around_calibration() -> None:
    images, seen = [torch.randn(4, 16), torch.randn(4, 16)], []

    class Steps(Recipe):
        def before_prepare(self, exported, quantizer, data):
            seen.append(("before", len(list(data)), any("activation_post" in n for n, _ in exported.named_modules())))
            return {}

        def after_calibrate(self, prepared, data):
            seen.append(("after", len(list(data)), any("activation_post" in n for n, _ in prepared.named_modules())))

    quantize(MLP().eval(), images[0], static_int8(), images, recipe=Steps(), batches=1)
    assert seen == [("before", 1, False), ("after", 1, True)]


def _in_training():
    return MLP().train()


def _trained_in_int8():
    return convert_to_int8_training(vit()[0], skip_slower=False).eval()


def _offloaded():
    return pytest.importorskip("accelerate").cpu_offload(MLP().eval(), torch.device("cpu"))


def _with_a_layer(name):
    model = MLP().eval()
    setattr(model, name, nn.Linear(16, 16))
    return model


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (_in_training, {}, r"model must be in eval mode"),
        (_offloaded, {}, r"model must hold its weights, got one that loads them at each call, in 'fc1', as"),
        (lambda: _with_a_layer("explain"), {}, r"with the name of a method of QuantizedModel, got 'explain'. Rename"),
        (
            lambda: _with_a_layer("save"),
            {},
            r"with the name of a method of QuantizedModel, got 'save'. Rename it",
        ),
        (
            MLP,
            {"example_inputs": torch.nested.nested_tensor([torch.ones(2, 16), torch.ones(3, 16)])},
            r"example_inputs must hold dense tensors, got a nested one",
        ),
        (lambda: torch.compile(MLP().eval()), {}, r"model must not be compiled"),
        (
            _trained_in_int8,
            {},
            r"got a VisionTransformer that convert_to_int8_training converted",
        ),
        (
            lambda: quantize(MLP().eval(), torch.randn(4, 16), dynamic_int8()),
            {},
            r"model must be a float model, got a QuantizedModel, which is quantized already",
        ),
        (lambda: "vit", {}, r"model must be an nn.Module, got 'vit'"),
        (MLP, {"config": "int4"}, r"config must be a configuration such as static_int8\(\), one of 'static_int8', "),
        (MLP, {"recipe": "worst"}, r"recipe must be None, a Recipe or 'best', got 'worst'"),
        (MLP, {"skip": "fc1"}, r"quantize: skip must be a list of names, got 'fc1'\. Pass \['fc1'\]"),
        (MLP, {"skip": None}, r"quantize: skip must be a list of names, got None of type NoneType"),
        (MLP, {"example_inputs": None}, r"example_inputs must be a tensor, a tuple of .* got None of type NoneType"),
        (MLP, {"example_inputs": 3, "dynamic_shapes": None}, r"example_inputs must be a tensor, .* got 3 of type int"),
        (MLP, {"example_inputs": [[1.0]]}, r"with at least one tensor, got \[\[1\.0\]\] of type list. Pass a batch as"),
        (
            MLP,
            {"example_inputs": {1: torch.ones(2, 16)}},
            r"example_inputs must have names of inputs as .* got 1 of type",
        ),
        (MLP, {"example_inputs": torch.tensor(1.0)}, r"example_inputs must have .* got a tensor without dimensions\."),
        (
            MLP,
            {"example_inputs": (torch.ones(2, 16), None)},
            r"example_inputs must be what the MLP takes, forward\(x\), got a tensor of shape \(2, 16\), NoneType: too",
        ),
        (
            MLP,
            {"example_inputs": {"y": torch.ones(2, 16)}},
            r"got y=a tensor of shape \(2, 16\): missing a required .*'x'",
        ),
        (
            MLP,
            {"example_inputs": torch.ones(4, 8)},
            r"example_inputs must be inputs that the MLP computes with, but it raises RuntimeError: (addmm: )?mat1 and",
        ),
        (
            MLP,
            {"calibration_data": 3},
            r"quantize: calibration_data must be an iterable of batches, .* got 3 of type int",
        ),
        (
            MLP,
            {"calibration_data": {"x": torch.ones(2)}},
            r"quantize: calibration_data must be an iterable .* of type dict",
        ),
        (MLP, {"batches": 0}, r"batches must be None or a positive integer, got 0"),
        (MLP, {"batches": "3"}, r"batches must be None or a positive integer, got '3'"),
        (MLP, {"dynamic_shapes": "all"}, r"dynamic_shapes must be 'batch', None or as in torch.export.export"),
    ],
)
def test_wrong_arguments(model, arguments, message) -> None:
    module = model()
    if model is MLP:
        module.eval()
    with pytest.raises(QFrameworkError, match=message):
        quantize(module, **{"example_inputs": torch.randn(4, 16), "config": dynamic_int8(), **arguments})


def test_a_model_that_cannot_be_exported() -> None:
    class Fixed(MLP):
        def forward(self, x):
            return super().forward(x.view(4, 16))

    with pytest.raises(QFrameworkError, match=r"torch.export cannot capture the model .* dynamic_shapes=None"):
        quantize(Fixed().eval(), torch.randn(4, 16), dynamic_int8())


def test_a_model_that_depends_on_values() -> None:
    """Fixed shapes would not help, so the error does not advise them."""

    class Branches(MLP):
        def forward(self, x):
            return super().forward(x if x.sum() > 0 else -x)

    message = (
        r"a model whose code depends on the values of its tensors in \".*test_one_call.py\", line \d+, in forward: "
    )
    with pytest.raises(QFrameworkError, match=message) as raised:
        quantize(Branches().eval(), torch.randn(4, 16), dynamic_int8())
    assert "dynamic_shapes" not in str(raised.value)
    assert "quantize_ needs no export" in str(raised.value)


def test_a_failed_export_leaves_the_inputs_unmarked() -> None:
    """``torch.export`` marks axes on the tensors: later compilations may not make a marked axis a constant."""

    class Fixed(MLP):
        def forward(self, x):
            return super().forward(x.view(4, 16))

    images = torch.randn(4, 16)
    with pytest.raises(QFrameworkError, match=r"torch.export cannot capture the model"):
        quantize(Fixed().eval(), images, dynamic_int8())
    torch.compile(Fixed().eval(), backend="eager")(images)


def test_a_language_model_that_returns_a_cache() -> None:
    """The error names the switch, with which the model is captured."""
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    model = MistralForCausalLM(MistralConfig(**sizes, num_key_value_heads=2, vocab_size=50)).eval()
    tokens = {"input_ids": torch.randint(3, 50, (2, 7))}
    with pytest.raises(QFrameworkError, match=r"returns a DynamicCache\. .* set model\.config\.use_cache = False"):
        quantize(model, tokens, dynamic_int8())
    model.config.use_cache = False
    assert quantize(model, tokens, dynamic_int8()).explain().lowered == 8


def test_layers_beside_constants_of_the_code() -> None:
    """An exported ``torch.tensor(...)`` is detached in place, which writes no operand of a layer."""

    class Scaled(MLP):
        def forward(self, x):
            scale = torch.sqrt(torch.tensor(16.0))
            return super().forward(x) / scale + super().forward(x / scale)

    report = quantize(Scaled().eval(), torch.randn(4, 16), dynamic_int8()).explain()
    assert report.lowered == 4  # of 6: the heads stay in float
