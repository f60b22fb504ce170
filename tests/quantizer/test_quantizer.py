"""quantizer.py and annotate_linear.py: rules, names, sharing, errors, and the resulting graphs."""

import copy
import json
import warnings

import pytest
import torch
from quantizer_models import (
    DEQUANTIZE,
    DEQUANTIZE_CHANNEL,
    LINEAR,
    OUR_DEQUANTIZE,
    OUR_DYNAMIC_QUANTIZE,
    OUR_QUANTIZE,
    QUANTIZE,
    Attention,
    Mlp,
    Net,
    count,
    exported,
    linears,
    quantized,
    quantized_layers,
    tiny_vit,
)
from torch import nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from qframework import explain
from qframework.errors import CalibrationError, UnsupportedError
from qframework.numerics import quantize_weight, sqnr_db
from qframework.quantizer import (
    ActivationConfig,
    LinearConfig,
    QFrameworkQuantizer,
    WeightConfig,
    calibrate,
    dynamic_int8,
    qattn_paper,
    static_int8,
)
from qframework.quantizer.annotate_linear import LinearAnnotation, annotated

BLOCK = {f"blocks.{i}.{layer}" for i in range(2) for layer in
         ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.fc1", "mlp.fc2")}  # fmt: skip
ALL = BLOCK | {"head"}
STRICT = pytest.mark.parametrize("strict", [False, True], ids=["nonstrict", "strict"])


def is_head(node):
    return "head" in str(node.args[1])


def everything(node):
    return True


@pytest.fixture
def x():
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def exported_net():
    return {strict: exported(Net(), torch.randn(2, 5, 8), strict=strict) for strict in (False, True)}


@STRICT
@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (lambda q: q.set_global(static_int8()), ALL),
        (lambda q: q.set_global(static_int8()).set_global(None), set()),
        (lambda q: q.set_global(static_int8()).set_module_name("head", None), BLOCK),
        (lambda q: q.set_module_name("head", None).set_global(static_int8()), BLOCK),
        (lambda q: q.set_module_name("blocks.0", static_int8()), {n for n in BLOCK if n.startswith("blocks.0")}),
        (
            lambda q: q.set_module_name("blocks.*.attn", static_int8()).set_module_name("blocks.1.attn.q_proj", None),
            {n for n in BLOCK if "attn" in n} - {"blocks.1.attn.q_proj"},
        ),
        (lambda q: q.set_module_name("*.fc1", static_int8()), {"blocks.0.mlp.fc1", "blocks.1.mlp.fc1"}),
        (lambda q: q.set_module_name("blocks.[1]", static_int8()), {n for n in BLOCK if n.startswith("blocks.1")}),
        (lambda q: q.set_module_name("blocks", static_int8()).set_module_name("blocks.0", None).set_module_name(
            "blocks.0.mlp", static_int8()), {n for n in BLOCK if n.startswith("blocks.1")} | {
            "blocks.0.mlp.fc1", "blocks.0.mlp.fc2"}),
        # the later of two names wins, even the shorter
        (lambda q: q.set_module_name("blocks.0.mlp", static_int8()).set_module_name("blocks", None), set()),
        (lambda q: q.set_module_type(Mlp, static_int8()), {n for n in BLOCK if "mlp" in n}),
        (lambda q: q.set_module_type(nn.Linear, static_int8()), ALL),
        (lambda q: q.set_module_type(nn.Module, static_int8()).set_module_type(Attention, None),
         {n for n in ALL if "attn" not in n}),
        (lambda q: q.set_filter(is_head, static_int8()), {"head"}),
        # name > filter > type > global, whatever the order of the calls
        (lambda q: q.set_module_name("head", static_int8()).set_filter(everything, None).set_module_type(
            nn.Linear, static_int8()).set_global(static_int8()), {"head"}),
        (lambda q: q.set_filter(is_head, static_int8()).set_module_type(nn.Linear, None).set_global(static_int8()),
         {"head"}),
        (lambda q: q.set_module_type(Mlp, static_int8()).set_global(None), {n for n in BLOCK if "mlp" in n}),
    ],
)  # fmt: skip
def test_rules_select(exported_net, rules, expected, strict):
    model = copy.deepcopy(exported_net[strict])
    rules(QFrameworkQuantizer()).annotate(model)
    assert {annotation.layer for _, annotation in annotated(model, LinearAnnotation)} == expected


@STRICT
def test_selected_layers_are_converted(net, x, strict):
    quantizer = QFrameworkQuantizer().set_global(static_int8()).set_module_name("blocks.1", None)
    model = quantized(net, quantizer, x, strict=strict)
    expected = {name for name in ALL if not name.startswith("blocks.1")}
    assert quantized_layers(model) == expected
    assert count(model)[DEQUANTIZE_CHANNEL] == len(expected)


def test_prefix_ends_at_a_dot(x):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))
    converted = quantized(model, QFrameworkQuantizer().set_module_name("1", static_int8()), x)
    assert quantized_layers(converted) == {"1"}


def test_one_model_several_configurations(net, x):
    quantizer = (
        QFrameworkQuantizer()
        .set_global(static_int8())
        .set_module_name("blocks.0.mlp", dynamic_int8())
        .set_module_name("blocks.1.mlp", static_int8("per_token", weight="per_tensor"))
    )
    nodes = count(quantized(net, quantizer, x))
    assert nodes[OUR_DYNAMIC_QUANTIZE] == 2
    assert nodes[OUR_QUANTIZE] == 2
    assert nodes[OUR_DEQUANTIZE] == 4
    assert nodes[QUANTIZE] == 3  # one for the three projections of each block, one for the head
    assert nodes[DEQUANTIZE_CHANNEL] == 11 - 2


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (lambda q: q.set_module_name("blocks.0.mpl", None), ["'blocks.0.mpl'", "Close: ", "blocks.0.mlp"]),
        (lambda q: q.set_module_name("decoder.*", None), ["'decoder.*'", "head", "blocks"]),
        (lambda q: q.set_module_type(nn.Conv2d, None), ["torch.nn.modules.conv.Conv2d", "torch.nn.modules.linear"]),
        (lambda q: q, ["must have rules, got none", "set_global"]),
    ],
)
def test_rules_that_match_nothing(exported_net, rules, words):
    with pytest.raises(UnsupportedError) as error:
        prepare_pt2e(copy.deepcopy(exported_net[False]), rules(QFrameworkQuantizer()))
    for word in words:
        assert word in str(error.value)


def test_names_of_modules_without_linears_are_known(x):
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    quantizer = QFrameworkQuantizer().set_global(static_int8()).set_module_name("0", None)
    assert quantized_layers(quantized(model, quantizer, x)) == {"1"}


def test_model_without_linears_warns():
    model = exported(nn.Sequential(nn.ReLU()), torch.randn(2, 3))
    with pytest.warns(UserWarning, match="found no aten.linear"):
        prepare_pt2e(model, QFrameworkQuantizer().set_global(static_int8()))


def test_computed_weight_stays_float(x):
    class Computed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return nn.functional.linear(self.linear(x), self.weight.t())

    model = quantized(Computed(), QFrameworkQuantizer().set_global(static_int8()), x)
    assert [node.args[0].target == DEQUANTIZE for node in linears(model)] == [True, False]


@STRICT
def test_parameters_used_by_their_owner(x, strict):
    """nn.MultiheadAttention uses out_proj's parameters without calling out_proj."""

    class SelfAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
            self.scale = nn.Parameter(torch.eye(8))

        def forward(self, x):
            return nn.functional.linear(self.attn(x, x, x, need_weights=False)[0], self.scale)

    quantizer = (
        QFrameworkQuantizer()
        .set_global(None)
        .set_module_name("attn.out_proj", static_int8())
        .set_module_name("scale", static_int8())
    )
    assert count(quantized(SelfAttention(), quantizer, x, strict=strict))[DEQUANTIZE_CHANNEL] == 2


@pytest.mark.parametrize(
    ("config", "quantize"),
    [(static_int8(), QUANTIZE), (static_int8("per_token"), OUR_QUANTIZE), (dynamic_int8(), OUR_DYNAMIC_QUANTIZE)],
)
def test_projections_of_one_tensor_share_one_quantize(x, config, quantize):
    model = quantized(Attention(), QFrameworkQuantizer().set_global(config), x)
    assert count(model)[quantize] == 1
    assert len(linears(model)) == 3


def test_different_configurations_do_not_share(x):
    """torchao's implicit sharing would join these: dtype and range are equal."""
    quantizer = (
        QFrameworkQuantizer()
        .set_module_name("q_proj", static_int8())
        .set_module_name("k_proj", static_int8("per_token"))
        .set_module_name("v_proj", static_int8(observer="percentile", percentile=50.0))
    )
    model = quantized(Attention(), quantizer, x)
    nodes = count(model)
    assert (nodes[QUANTIZE], nodes[OUR_QUANTIZE]) == (2, 1)
    scales = {n.args[1] for n in model.graph.nodes if n.target == QUANTIZE}
    assert len(scales) == 2


@pytest.mark.parametrize("granularities", [("per_channel", "per_channel"), ("per_channel", "per_tensor")])
def test_tied_weights(x, granularities):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    first, second = (static_int8(weight=granularity) for granularity in granularities)
    quantizer = QFrameworkQuantizer().set_module_name("0", first).set_module_name("1", second)
    converted = quantized(model, quantizer, x)
    assert sqnr_db(model(x), converted(x)) > 25
    int8 = {name for name, value in converted.state_dict().items() if value.dtype == torch.int8}
    assert len(int8) == len(set(granularities))


def test_weight_is_stored_as_the_numerics_say(x):
    model = nn.Linear(8, 6)
    converted = quantized(model, QFrameworkQuantizer().set_global(static_int8()), x)
    int8, scale = quantize_weight(model.weight.detach())
    state = converted.state_dict()
    assert torch.equal(state["_frozen_param0"], int8)
    [stored] = [value for name, value in state.items() if "_weight_scale_" in name]
    assert torch.equal(stored, scale)
    assert "weight" not in state


def test_float_weights_are_freed_inside_modules_too(net, x):
    state = quantized(net, QFrameworkQuantizer().set_global(static_int8()), x).state_dict()
    assert [value.dtype for value in state.values() if value.dim() == 2] == [torch.int8] * 11


@pytest.mark.parametrize("weight", ["per_channel", "per_tensor"])
@pytest.mark.parametrize("observer", ["minmax", "mse"])
def test_zero_weights_give_the_bias_and_no_warning(weight, observer, caplog):
    """The initial state of many adapters."""
    model, x = nn.Linear(4, 3), torch.randn(2, 4)
    nn.init.zeros_(model.weight)
    config = LinearConfig(weight=WeightConfig(weight, observer))
    converted = quantized(model, QFrameworkQuantizer().set_global(config), x)
    assert torch.equal(converted(x), model(x))
    assert [layer.lowered for layer in explain(converted, x).layers] == [True]
    assert not caplog.records


def test_mse_weights_are_used():
    # 400 000 uniform weights and one 3 times as large: clipping it to t costs (3 - t)^2, and the rounding of the others
    # 400 000 (t / 127)^2 / 12 = 2 t^2: together least at t = 1.
    model, x = nn.Linear(400, 1000), torch.randn(2, 400)
    with torch.no_grad():
        model.weight.uniform_(-1, 1)[0, 0] = 3.0
    config = LinearConfig(weight=WeightConfig("per_tensor", "mse"))
    converted = quantized(model, QFrameworkQuantizer().set_global(config), x)
    [scale] = [n.args[1] for n in converted.graph.nodes if n.target == DEQUANTIZE and n.args[0].op == "get_attr"]
    assert 0.95 < scale * 127 < 1.1


def test_residual_sums_stay_float_by_default(net, x):
    model = quantized(net, QFrameworkQuantizer().set_global(static_int8()), x)
    # block: projections share one, fc1 one, fc2 one after the GELU; head one
    assert count(model)[QUANTIZE] == 2 * 3 + 1
    for node in linears(model):
        assert all(user.target != QUANTIZE for user in node.users)


def test_paper_quantizes_every_output(net, x):
    model = quantized(net, QFrameworkQuantizer().set_global(qattn_paper()), x)
    for node in linears(model):
        assert [user.target for user in node.users] == [QUANTIZE]
    assert count(model)[QUANTIZE] == 2 * 3 + 1 + 11


def test_output_read_by_a_linear_is_quantized_once(x):
    model = quantized(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), QFrameworkQuantizer().set_global(qattn_paper()), x
    )
    assert count(model)[QUANTIZE] == 3


def test_quantize_after_dropout_in_eval(x):
    model = quantized(Mlp(), QFrameworkQuantizer().set_global(static_int8()), x)
    assert quantized_layers(model) == {"fc1", "fc2"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "config",
    [static_int8(), static_int8("per_token"), dynamic_int8(), qattn_paper(), qattn_paper(activation="per_token")],
)
def test_dtypes(net, x, dtype, config):
    model, x = net.to(dtype), x.to(dtype)
    converted = quantized(model, QFrameworkQuantizer().set_global(config), x)
    y = converted(x)
    assert y.dtype == dtype
    # 11 layers with rounding errors of 1/254 of each tensor's maximum; a wrong scale or dtype costs 20 dB
    assert sqnr_db(model(x), y) > 22


@pytest.mark.parametrize("config", [static_int8(), qattn_paper()])
def test_chained_observers_keep_half_precision(config):
    """An output observer followed by an input observer: torchao's own conversion would dequantize to float32."""
    other = static_int8(observer="percentile", percentile=99.0)
    quantizer = QFrameworkQuantizer().set_module_name("0", config).set_module_name("1", other)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).half()
    x = torch.randn(2, 8).half()
    assert quantized(model, quantizer, x)(x).dtype == torch.float16


@STRICT
def test_vit(strict):
    model, x = tiny_vit(), torch.randn(4, 3, 32, 32)
    quantizer = QFrameworkQuantizer().set_global(static_int8()).set_module_name("head", None)
    converted = quantized(model, quantizer, x, strict=strict, dynamic_batch=True)
    layers = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    assert quantized_layers(converted) == {f"blocks.{i}.{layer}" for i in range(2) for layer in layers}
    more = torch.randn(7, 3, 32, 32)
    assert sqnr_db(model(more), converted(more)) > 25


def test_vit_static_per_token_needs_no_fixed_batch():
    model, x = tiny_vit(), torch.randn(4, 3, 32, 32)
    quantizer = QFrameworkQuantizer().set_global(static_int8("per_token")).set_module_name("head", None)
    converted = quantized(model, quantizer, x, dynamic_batch=True)
    scales = [converted.get_buffer(n.args[1].target) for n in converted.graph.nodes if n.target == OUR_QUANTIZE]
    assert [scale.shape for scale in scales] == [(17, 1)] * 8
    assert sqnr_db(model(x), converted(x)) > 25


def test_channels_last_activation_has_a_scale_for_each_pixel():
    """SAM's encoder keeps (B, H, W, C)."""
    torch.manual_seed(0)
    model, x = Mlp(), torch.randn(3, 4, 6, 8) * torch.rand(4, 6, 1) * 10
    quantizer = QFrameworkQuantizer().set_global(static_int8("per_token"))
    converted = quantized(model, quantizer, x, dynamic_batch=True)
    scales = [converted.get_buffer(n.args[1].target) for n in converted.graph.nodes if n.target == OUR_QUANTIZE]
    assert [scale.shape for scale in scales] == [(4, 6, 1)] * 2
    assert torch.equal(scales[0], x.abs().amax(dim=(0, 3)).unsqueeze(-1) / 127)
    # per pixel beats per tensor where pixels differ in magnitude
    per_tensor = quantized(model, QFrameworkQuantizer().set_global(static_int8()), x)
    small = slice(None), *divmod(int(x.abs().amax(dim=(0, 3)).argmin()), 6)
    errors = [(m(x) - model(x))[small].square().sum() for m in (converted, per_tensor)]
    assert errors[0] < errors[1] / 10


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            static_int8("per_token"),
            ["'head'", "static per-token", "dimension 0 (batch)", "set_module_name('head', None)"],
        ),
        (qattn_paper(activation="per_token"), ["'head'"]),
    ],
)
def test_per_token_scales_of_a_dynamic_batch_are_refused(config, words):
    model = nn.Sequential()
    model.add_module("head", nn.Linear(8, 3))
    with pytest.raises(UnsupportedError) as error:
        prepare_pt2e(exported(model, torch.randn(2, 8), dynamic_batch=True), QFrameworkQuantizer().set_global(config))
    for word in words:
        assert word in str(error.value)


def test_per_token_scales_of_dynamic_positions_are_refused(net, x):
    shapes = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")},)
    model = torch.export.export(net, (x,), dynamic_shapes=shapes).module()
    with pytest.raises(UnsupportedError, match=r"'blocks.0.attn.q_proj'.*dimension 1 \(position\)"):
        prepare_pt2e(copy.deepcopy(model), QFrameworkQuantizer().set_global(static_int8("per_token")))
    prepare_pt2e(model, QFrameworkQuantizer().set_global(dynamic_int8("per_token")))


def test_refuses_float64(net, x):
    quantizer = QFrameworkQuantizer().set_global(static_int8())
    with pytest.raises(
        UnsupportedError, match=r"'blocks.0.attn.q_proj'.*float32, float16 or bfloat16, got torch.float64"
    ):
        prepare_pt2e(exported(net.double(), x.double()), quantizer)


def test_validate_finds_what_changed_after_annotation(net, x):
    quantizer, model = QFrameworkQuantizer().set_global(static_int8()), exported(net, x)
    quantizer.annotate(model)
    quantizer.validate(model)
    node = linears(model)[3]
    node.args[0].meta["val"] = node.args[0].meta["val"].double()
    with pytest.raises(UnsupportedError, match=r"'blocks.0.mlp.fc1'.*float64"):
        quantizer.validate(model)


def test_convert_without_calibration(net, x):
    prepared = prepare_pt2e(exported(net, x), QFrameworkQuantizer().set_global(static_int8()))
    with pytest.raises(CalibrationError, match=r"'blocks.0.attn.q_proj'.*never observed\. Run calibrate"):
        convert_pt2e(prepared)


def test_dynamic_needs_no_calibration(net, x):
    prepared = prepare_pt2e(exported(net, x), QFrameworkQuantizer().set_global(dynamic_int8()))
    assert sqnr_db(net(x), convert_pt2e(prepared)(x)) > 25


@pytest.mark.parametrize("config", [static_int8(), dynamic_int8(weight="per_tensor")])
def test_nan_weight(net, x, config):
    with torch.no_grad():
        net.head.weight[0, 0] = float("nan")
    prepared = prepare_pt2e(exported(net, x), QFrameworkQuantizer().set_global(config))
    with pytest.raises(CalibrationError, match="'head': the weight must be finite"):
        convert_pt2e(prepared) if config.activation.dynamic else calibrate(prepared, [x])


def test_scale_sees_a_weight_changed_after_calibration(x):
    prepared = prepare_pt2e(exported(nn.Linear(8, 4, bias=False), x), QFrameworkQuantizer().set_global(static_int8()))
    calibrate(prepared, [x])
    with torch.no_grad():
        prepared.weight.mul_(100)
    weight = prepared.weight.detach().clone()
    assert sqnr_db(x @ weight.T, convert_pt2e(prepared)(x)) > 25


def test_prepared_model_deep_copies(net, x):
    prepared = prepare_pt2e(exported(net, x), QFrameworkQuantizer().set_global(static_int8()))
    calibrate(prepared, [x])
    other = copy.deepcopy(prepared)
    expected = convert_pt2e(prepared)(x)
    assert torch.equal(convert_pt2e(other)(x), expected)


def test_converted_model_exports_again(net, x):
    converted = quantized(net, QFrameworkQuantizer().set_global(static_int8("per_token")), x)
    again = torch.export.export(converted, (x,)).module()
    assert torch.equal(again(x), converted(x))
    assert count(again)[OUR_QUANTIZE] == count(converted)[OUR_QUANTIZE]


def test_no_warnings_from_our_observers(net, x):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*observer.*")
        quantized(net, QFrameworkQuantizer().set_global(static_int8()), x)


def test_rules_to_dict():
    config = static_int8()
    quantizer = QFrameworkQuantizer().set_global(config).set_module_name("head", None)
    quantizer.set_module_type(nn.Linear, config).set_filter(is_head, None)
    described = json.loads(json.dumps(quantizer.to_dict()))
    assert [(rule["kind"], rule["selector"]) for rule in described["rules"]] == [
        ("global", None),
        ("module_name", "head"),
        ("module_type", "torch.nn.modules.linear.Linear"),
        ("filter", f"{__name__}.is_head"),
    ]
    assert LinearConfig.from_dict(described["rules"][0]["config"]) == config
    assert described["rules"][1]["config"] is None


def test_activation_default_is_the_preset():
    assert LinearConfig() == static_int8()
    assert LinearConfig(ActivationConfig("per_token", dynamic=True)) == dynamic_int8()


def test_linear_target_is_what_exports_produce(net, x):
    assert count(exported(net, x))[LINEAR] == 11


def test_a_layer_whose_sums_may_overflow_is_refused():
    model, x = nn.Sequential(nn.Linear(131_072, 2), nn.Linear(2, 2)), torch.ones(1, 131_072)
    message = r"layer '0': in_features must be at most 131071, .*, got 131072\. .* set_module_name\('0', None\)"
    for config in (static_int8(), dynamic_int8()):
        with pytest.raises(UnsupportedError, match=message):
            prepare_pt2e(exported(model, x), QFrameworkQuantizer().set_global(config))
        prepare_pt2e(exported(model, x), QFrameworkQuantizer().set_global(config).set_module_name("0", None))
