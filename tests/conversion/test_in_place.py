"""``quantize_`` (in_place.py, linear_module.py, input_scales.py)."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from quantized_models import MLP, bert, gpt2, quantized, vit
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import qframework
from qframework import conversion, numerics, quantize_
from qframework.attention import model_inputs
from qframework.conversion import QuantizedLinear
from qframework.conversion.linear_module import quantized_weight
from qframework.errors import CalibrationError, QFrameworkError, UnsupportedError
from qframework.quantizer import WeightConfig, dynamic_int8, qattn_paper, static_attention, static_int8
from qframework.quantizer.observers import WeightObserver


@pytest.fixture(autouse=True)
def _no_fallbacks():
    conversion.fallbacks.clear()


def expected_linear(x, layer: QuantizedLinear, scale) -> torch.Tensor:
    """The layer by its definition: the quantized input in float32, all else in float64."""
    q = (x.float() * (1 / scale)).round().clamp(-127, 127).double()
    y = q @ layer.weight_int8.double().t() * scale.double() * layer.weight_scale.double()
    return y if layer.bias is None else y + layer.bias.double()


CONFIGS = {
    "dynamic": dynamic_int8(),
    "dynamic per tensor": dynamic_int8("per_tensor", "per_tensor"),
    "static": static_int8(),
    "static per token": static_int8("per_token"),
    "static by percentile": static_int8(observer="percentile", percentile=99.99),
    "static by entropy, weights per tensor": static_int8(weight="per_tensor", observer="entropy"),
}


def _quantize(model: nn.Module, config, batch) -> nn.Module:
    return quantize_(model.eval(), config, None if config.activation.dynamic else [batch])


@torch.no_grad()
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.float32, 2**-20), (torch.float16, 2**-11), (torch.bfloat16, 2**-8)]
)
def test_a_layer_computes_its_definition(config, bias, dtype, rounding) -> None:
    model = nn.Sequential(nn.Linear(24, 10, bias=bias)).to(dtype)
    model[0].weight[3] = 0
    x = torch.randn(3, 5, 24, dtype=dtype)
    x[1, 2] = 0
    weight = model[0].weight.detach().clone()
    layer = _quantize(model, config, x)[0]
    assert not list(layer.parameters()) if not bias else [name for name, _ in layer.named_parameters()] == ["bias"]
    assert layer.weight_int8[3].eq(0).all()
    torch.testing.assert_close(layer.weight, weight, rtol=0, atol=float(layer.weight_scale.max()) * 0.51 + 2**-7)
    scale = numerics.dynamic_scale(x, layer.activation) if layer.input_scale is None else layer.input_scale
    y, expected = model(x), expected_linear(x, layer, scale)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), expected, rtol=1.01 * rounding, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("config", [dynamic_int8(), static_int8()], ids=["dynamic", "static"])
def test_a_vision_transformer(config) -> None:
    model, images = vit()
    reference = model(images)
    same = _quantize(model, config, images)
    assert same is model
    assert len(quantized(model)) == 9
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    assert numerics.sqnr_db(reference, model(images)) > 20
    assert not conversion.fallbacks


@torch.no_grad()
@pytest.mark.parametrize("config", [dynamic_int8(), static_int8()], ids=["dynamic", "static"])
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_models_are_fused_and_agree_with_eager(config) -> None:
    model, images = vit()
    eager = _quantize(model, config, images)(images)
    report = qframework.explain(model, (images,))
    assert report.lowered == report.total == 9
    operators = {layer.name: layer.operator for layer in report.layers}
    int8_out = ", int8 out" if not config.activation.dynamic else ""
    assert operators["blocks.0.mlp.fc1"] == f"qframework::int8_linear (gelu{int8_out})"
    assert operators["blocks.0.mlp.fc2"] == operators["blocks.0.attn.proj"] == "qframework::int8_linear (residual)"
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(images), eager)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="qframework", fullgraph=True)(images)
    float_model, _ = vit()
    data = None if config.activation.dynamic else [images]
    exported = torch.compile(qframework.quantize(float_model, images, config, data, skip=()), backend="qframework")
    assert numerics.sqnr_db(exported(images), compiled) > 60  # the same operators; eager rounds between them
    assert numerics.sqnr_db(eager, compiled) > 25


class Dispatched(TorchDispatchMode):
    """Sees all operators, so none is passed by."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.gpu
@pytest.mark.parametrize("config", [dynamic_int8(), static_int8()], ids=["dynamic", "static"])
def test_repeated_calls_without_the_dispatcher_are_equal(config) -> None:
    model, images = vit()
    model, images = model.half().cuda(), images.half().cuda()
    _quantize(model, config, images)
    with Dispatched():
        expected = [model(images * i) for i in range(6)]
    for i in range(6):
        assert torch.equal(model(images * i), expected[i]), i
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    assert all(layer._direct._known for layer in layers)
    graph, still = torch.cuda.CUDAGraph(), images.clone()
    with torch.cuda.graph(graph):
        captured = model(still)
    still.copy_(images * 3)
    graph.replay()
    assert torch.equal(captured, expected[3])
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.equal(model(images * 5), expected[5])


@torch.no_grad()
@pytest.mark.usefixtures("fresh_dynamo")
def test_layers_that_read_one_tensor_share_its_dynamic_quantization() -> None:
    class Projections(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, x, write):
            q = self.q(x)
            k = self.k(x)
            if write:
                x.mul_(2)
            return q, k, self.v(x)

    model = quantize_(Projections(), dynamic_int8())
    graphs = []

    def keep(gm, example_inputs):
        from qframework.backend.compile import lower
        from qframework.backend.options import BackendOptions

        lower(gm, example_inputs, BackendOptions())
        graphs.append(gm)
        return gm.forward

    for write, shared in ((False, 1), (True, 2)):
        x = torch.randn(4, 16)
        wanted = model(x.clone(), write)
        got = torch.compile(model, backend=keep)(x.clone(), write)
        assert all(map(torch.equal, got, wanted))
        found = [n for n in graphs[-1].graph.nodes if n.target is torch.ops.qframework.dynamic_quantize.default]
        assert len(found) == shared


@torch.no_grad()
@pytest.mark.parametrize("config", [dynamic_int8(), static_int8()], ids=["dynamic", "static"])
def test_bert_with_padding(config) -> None:
    model, batch = bert()
    mask = batch["attention_mask"].bool()
    reference = model(**batch).last_hidden_state
    quantize_(model, config, None if config.activation.dynamic else [(batch, torch.zeros(2))])
    assert len(quantized(model)) == 13
    assert numerics.sqnr_db(reference[mask], model(**batch).last_hidden_state[mask]) > 20


@torch.no_grad()
@pytest.mark.parametrize("config", [dynamic_int8(), static_int8()], ids=["dynamic", "static"])
def test_gpt2_with_conv1d_and_a_tied_head(config, caplog) -> None:
    model, batch = gpt2()
    embedding, reference = model.transformer.wte.weight, model(**batch).logits
    quantize_(model, config, None if config.activation.dynamic else [batch])
    assert len(quantized(model)) == 8
    assert model.lm_head.weight is embedding
    assert "layer 'lm_head' stays in float: its weight is shared with 'transformer.wte'" in caplog.text
    assert numerics.sqnr_db(reference, model(**batch).logits) > 20
    text = model.generate(**batch, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert text.shape == (2, 12)


def test_symbolic_traces_call_quantized_layers() -> None:
    """As torchvision's and timm's feature extraction trace a model."""
    model, x = quantize_(nn.Sequential(MLP()), dynamic_int8()), torch.randn(4, 16)
    traced = torch.fx.symbolic_trace(model)
    called = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert called == ["0.fc1", "0.fc2", "0.head"]
    with torch.no_grad():
        assert torch.equal(traced(x), model(x))


def test_a_model_is_quantized_once() -> None:
    model = quantize_(MLP(), dynamic_int8())
    with pytest.raises(UnsupportedError, match=r"got none in a MLP\. 3 are quantized already"):
        quantize_(model, dynamic_int8())


@torch.no_grad()
def test_the_fast_path_of_an_encoder_layer_is_left() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 5, 16)
    reference = model(x)
    quantize_(model, dynamic_int8())
    assert quantized(model) == {f"layers.{n}.linear{m}" for n in (0, 1) for m in (1, 2)}
    calls = []
    model.layers[0].linear1.register_forward_hook(lambda *_: calls.append(1))
    assert numerics.sqnr_db(reference, model(x)) > 30
    assert calls


@torch.no_grad()
@pytest.mark.parametrize("config", [dynamic_int8(), static_int8()], ids=["dynamic", "static"])
def test_an_encoder_takes_padding_without_nested_tensors(config) -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    model, x = nn.ModuleDict({"text": encoder}).eval(), torch.randn(2, 5, 16)
    model.forward = encoder.forward
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    reference = encoder(x, src_key_padding_mask=padding)
    data = None if config.activation.dynamic else [{"src": x, "src_key_padding_mask": padding}]
    quantize_(model, config, data)
    real = ~padding  # PyTorch's nested tensors pad their result by zeros
    assert numerics.sqnr_db(reference[real], encoder(x, src_key_padding_mask=padding)[real]) > 30


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
        return self.fc(x if mask is None else x * mask)


@pytest.mark.parametrize(
    ("others", "names"),
    [
        ((torch.ones(4, 16, dtype=torch.bool),), "'mask' keep"),
        ((torch.ones(4, 16, dtype=torch.int64), torch.ones(4)), "'mask', 'scale' keep"),
        ((torch.arange(4),), None),  # classes
        ((None,), None),
    ],
)
def test_inputs_that_calibration_leaves_out_of_a_tuple_are_logged(others, names: str | None, caplog) -> None:
    model_inputs._warn_once.cache_clear()
    quantize_(Masked().eval(), static_int8(), [(torch.randn(4, 16), *others)] * 2)
    found = [each.getMessage() for each in caplog.records if "forward of Masked requires 1" in each.getMessage()]
    assert len(found) == (names is not None), found
    assert names is None or names in found[0]


@torch.no_grad()
@pytest.mark.parametrize("config", [dynamic_int8(), static_int8()], ids=["dynamic", "static"])
def test_a_model_on_meta_computes_shapes(config) -> None:
    with torch.device("meta"):
        model = quantize_(MLP().eval(), config)
    out = model(torch.empty(3, 16, device="meta"))
    assert (out.shape, out.dtype, out.device.type) == ((3, 4), torch.float32, "meta")


@torch.no_grad()
@pytest.mark.parametrize("config", [dynamic_int8(), static_int8()], ids=["dynamic", "static"])
def test_a_layer_used_twice_and_layers_with_one_weight(config) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
            self.again, self.b.weight = self.a, self.a.weight

        def forward(self, x):
            return self.b(self.again(self.a(x)))

    model, x = Twice(), torch.randn(4, 16)
    reference = model(x)
    _quantize(model, config, x)
    assert model.again is model.a
    assert model.b.weight_int8 is model.a.weight_int8
    assert numerics.sqnr_db(reference, model(x)) > 25
    if model.a.input_scale is not None:  # it saw both inputs
        assert float(model.a.input_scale) * 127.001 >= float(x.abs().max())


@torch.no_grad()
@pytest.mark.parametrize("config", [dynamic_int8(), static_int8()], ids=["dynamic", "static"])
def test_safetensors_and_a_model_on_meta(config, tmp_path) -> None:
    x = torch.randn(4, 16)
    model = _quantize(MLP(), config, x)
    save_file(model.state_dict(), tmp_path / "mlp.safetensors")
    with torch.device("meta"):
        empty = MLP()
    quantize_(empty.eval(), config)
    assert all(tensor.is_meta for tensor in empty.state_dict().values())
    empty.load_state_dict(load_file(tmp_path / "mlp.safetensors"), assign=True)
    assert torch.equal(empty(x), model(x))
    other = _quantize(MLP(), config, 5 * x)
    assert not torch.equal(other(x), model(x))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))


@torch.no_grad()
@pytest.mark.parametrize("assign", [True, False])
def test_float_weights_are_quantized_when_they_are_loaded(assign) -> None:
    (model, batch), (fresh, _) = gpt2(), gpt2()
    state = model.state_dict()
    quantize_(fresh, dynamic_int8(weight="per_tensor"))
    for tensor in fresh.state_dict().values():
        tensor.zero_()
    fresh.load_state_dict(state, assign=assign)
    assert "transformer.h.0.attn.c_attn.weight" in state
    wanted = quantize_(model, dynamic_int8(weight="per_tensor"))
    assert torch.equal(fresh(**batch).logits, wanted(**batch).logits)


@torch.no_grad()
@pytest.mark.parametrize("config", [dynamic_int8(), static_int8()], ids=["dynamic", "static"])
def test_copies_and_other_dtypes(config) -> None:
    x = torch.randn(4, 16)
    model = _quantize(MLP(), config, x)
    copied = copy.deepcopy(model)
    for tensor in copied.state_dict().values():
        tensor.zero_()
    y = model(x)
    assert y.abs().sum() > 0
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert half.fc1.weight_scale.dtype == torch.float32
    assert half.fc1.weight_int8.dtype == torch.int8
    assert half.fc1.weight.dtype == half(x.bfloat16()).dtype == half.fc1.bias.dtype == torch.bfloat16
    assert numerics.sqnr_db(y, half(x.bfloat16())) > 25
    assert copy.deepcopy(model).to("meta").fc1.weight.is_meta
    emptied = copy.deepcopy(model).to("meta").to_empty(device="cpu")
    emptied.load_state_dict(model.state_dict())
    assert torch.equal(emptied(x), y)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16


@torch.no_grad()
def test_exported_and_saved(tmp_path) -> None:
    x = torch.randn(4, 16)
    model = _quantize(MLP(), static_int8(), x)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    qframework.save(program, tmp_path / "mlp.pt2", (x,))
    loaded = qframework.load(tmp_path / "mlp.pt2")
    assert torch.equal(loaded(x[:3]), model(x[:3]))
    assert qframework.explain(loaded, x).lowered == 3


@torch.no_grad()
def test_data_parallel_inference(tmp_path) -> None:
    x = torch.randn(4, 16)
    model = quantize_(MLP(), dynamic_int8())
    reference = model(x)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        replicated = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
        assert torch.equal(replicated(x), reference)
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(model.fc1, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert torch.equal(model(x), reference)
    finally:
        torch.distributed.destroy_process_group()


def _nan():
    model = MLP().eval()
    with torch.no_grad():
        model.fc2.weight[0, 0] = float("nan")
    return model


def _without_bias():
    return nn.Sequential(nn.Linear(16, 4, bias=False)).eval()


X = torch.randn(4, 16)


@pytest.mark.parametrize(
    ("model", "config", "data", "options", "message"),
    [
        (lambda: "mlp", dynamic_int8(), None, {}, r"quantize_: model must be an nn.Module, got 'mlp'"),
        (lambda: torch.compile(MLP()), dynamic_int8(), None, {}, r"model must not be compiled"),
        (MLP, "dynamic_int8", None, {}, r"config must be a LinearConfig such as dynamic_int8\(\)"),
        (MLP, static_attention(), None, {}, r"config must be a LinearConfig"),
        (lambda: MLP().eval(), qattn_paper(), [X], {}, r"must have output='consumer', got 'always'"),
        (lambda: MLP().eval(), static_int8(symmetric=False), [X], {}, r"must have a symmetric activation"),
        (MLP, dynamic_int8(), [X], {}, r"calibration_data must be None for a dynamic configuration"),
        (MLP, static_int8(), [X], {}, r"model must be in eval mode"),
        (lambda: MLP().eval(), static_int8(), None, {}, r"calibration_data must hold batches .*, got None"),
        (lambda: MLP().eval(), static_int8(), [], {}, r"data must hold at least one batch, got none"),
        (
            lambda: MLP().eval(),
            static_int8(),
            [X * float("inf")],
            {},
            r"batch 0: the activation of layer 'fc1'",
        ),
        (_without_bias, static_int8(), [torch.zeros(4, 16)], {}, r"none of the 1 layers saw one, '0' among them"),
        (lambda: MLP().eval(), static_int8(), [X.double()], {}, r"layer 'fc1': its input must be float32, float16 or"),
        (lambda: MLP().eval(), static_int8("per_token"), [X, X[:3]], {}, r"layer 'fc1': .*same positions .*\(4,\) and"),
        (lambda: MLP().eval(), static_int8(), [{"y": X}], {}, r"the batch must match MLP.forward"),
        (lambda: MLP().eval().to("meta"), static_int8(), [X], {}, r"calibration_data must be None for a model on meta"),
        (MLP, dynamic_int8(), None, {"filter_fn": "fc1"}, r"filter_fn must be None or a function"),
        (MLP, dynamic_int8(), None, {"filter_fn": lambda *_: False}, r"model must hold a linear layer that filter_fn"),
        (lambda: nn.Linear(4, 4), dynamic_int8(), None, {}, r"Wrap it in nn.Sequential"),
        (_nan, dynamic_int8(), None, {}, r"layer 'fc2': the weight must be finite"),
    ],
)
def test_wrong_arguments(model, config, data, options, message) -> None:
    with pytest.raises(QFrameworkError, match=message) as error:
        quantize_(model(), config, data, **options)
    assert isinstance(error.value, UnsupportedError | CalibrationError | QFrameworkError)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(("config", "data"), [(dynamic_int8(), None), (static_int8(), [X])])
def test_traces_behind_layers_with_gradients(config, data) -> None:
    """A trace holds operators alone, so that it can be saved."""
    model = quantize_(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)).eval(), config, data)
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(model, X), file)
    file.seek(0)
    assert torch.equal(torch.jit.load(file)(X), model(X))


@pytest.mark.parametrize("config", [WeightConfig(), WeightConfig(observer="mse"), WeightConfig("per_tensor")])
def test_a_weight_in_parts_is_the_weight_at_once(config: WeightConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(40, 23).t()  # as Conv1D holds it
    weight[3] = 0
    scale = WeightObserver("fc", config).current_scale(weight)
    monkeypatch.setattr("qframework.conversion.linear_module._AT_ONCE", 80)
    quantized, scales = quantized_weight(weight, "fc", config)
    torch.testing.assert_close(scales, scale, rtol=0, atol=0)
    torch.testing.assert_close(quantized, numerics.quantize(weight, scale.unsqueeze(-1)), rtol=0, atol=0)
    weight[22, 0] = torch.nan
    with pytest.raises(CalibrationError, match="layer 'fc': the weight must be finite"):
        quantized_weight(weight, "fc", config)
